"""Long texts: the same tokens as by the plain rules, and other threads run meanwhile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.vocabularies import CONTROL, USER_DEFINED, bpe, spm, unigram
from tokenizers import Regex, pre_tokenizers

from hotcold.tokenizer import library
from hotcold.tokenizer import spm as spm_module
from hotcold.tokenizer.added_tokens import SPACES, AddedTokens, TokenFlags
from hotcold.tokenizer.bpe import PRE_TOKENIZERS, pre_tokenizer
from hotcold.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.long  # no instruction set or backend changes it


@pytest.mark.parametrize("part", [1, 2, 5])
def test_sentencepiece_works_in_parts_without_a_seam(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = spm([("bab", USER_DEFINED), ("ca", USER_DEFINED)])
    whole, parted = Tokenizer.from_metadata(metadata), Tokenizer.from_metadata(metadata)

    @given(st.text("abc \u00e9", max_size=120))
    @settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def check(text: str) -> None:
        ids = whole.encode(text)
        with monkeypatch.context() as patch:
            patch.setattr(spm_module, "_PART", part)
            patch.setattr(spm_module, "_CACHED_LENGTH", 0)
            assert parted.encode(text) == ids

    check()


@pytest.fixture
def no_switching() -> Iterator[None]:
    """A thread that waits for Python's lock gets it only where another one gives it up."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("no_switching")
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_library_lets_other_threads_run(kind: str) -> None:
    tokenizer = Tokenizer.from_metadata(bpe("gpt-2", "ab") if kind == "bpe" else unigram())
    encode = tokenizer._algorithm.encode_ordinary
    text = "ab a " * 20_000
    begin, ran = threading.Event(), threading.Event()

    def other() -> None:
        begin.wait()
        ran.set()

    thread = threading.Thread(target=other)
    thread.start()
    begin.set()
    for _ in range(100):
        encode(text)
        if ran.is_set():
            break
    assert ran.is_set()
    thread.join()


def test_short_and_long_texts_have_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_metadata(bpe("qwen2", "ab Ġab aa"))
    texts = ["ab" * n + " é\n" for n in (0, 7, library._LONG // 2, library._LONG)]
    found = [tokenizer.encode(text) for text in texts]
    monkeypatch.setattr(library, "_LONG", sys.maxsize)
    assert [tokenizer.encode(text) for text in texts] == found


#: Expressions with quadratic time for some texts, which were replaced by others.
SLOW = {
    "superbpe": ("1234567\u00b2\u00bd\u0663\u2167 a", [r"\p{N}+", r"(?=(\d{3})+(?!\d))"]),
    "deepseek-llm": (
        " \t\n\r\u00a0\u2028\x0b1a\u00e9!\u3002\u5b57",
        [r"\s+$" if cut == r"(?<!\s)\s+$" else cut for cut in PRE_TOKENIZERS["deepseek-llm"]],
    ),
}


@pytest.mark.parametrize("kind", SLOW)
def test_words_are_cut_as_by_the_slow_expressions(kind: str) -> None:
    alphabet, cuts = SLOW[kind]
    assert tuple(cuts) != PRE_TOKENIZERS[kind]
    slow = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts])
    quick = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(cut), "isolated") for cut in PRE_TOKENIZERS[kind]]
    )

    @given(st.text(alphabet, max_size=40))
    @settings(max_examples=400)
    def check(text: str) -> None:
        assert quick.pre_tokenize_str(text) == slow.pre_tokenize_str(text)

    check()


AWKWARD = {
    "spaces": " " * 40_000 + "1",
    "tabs": "\t " * 20_000 + "\U0001f600",
    "digits": "1" * 40_000,
    "letters": "a" * 40_000,
    "quotes": "'" * 40_000,
    "lines": "\r\n " * 12_000 + "x",
    "marks": "\u0301" * 40_000,
    "numbers": "1\u00b2" * 20_000,
}


@pytest.mark.parametrize("kind", [*{cuts: kind for kind, cuts in PRE_TOKENIZERS.items()}.values()])
def test_no_text_takes_the_square_of_its_length(kind: str) -> None:
    """It would take more than ten seconds each."""
    for text in AWKWARD.values():
        words = pre_tokenizer(kind).pre_tokenize_str(text)
        assert words[-1][1][1] == len(text)


def cut_plainly(text: str, tokens: AddedTokens, before: str, after: str) -> list[str | int]:
    """The textbook rule: each name in turn is cut out of the strings that are left."""
    spans: list[tuple[int, int] | int] = [(0, len(text))]
    for name, id in tokens.names:
        flags, cut = tokens.flags, list[tuple[int, int] | int]()
        for span in spans:
            if isinstance(span, int):
                cut.append(span)
                continue
            (start, end), at = span, span[0]
            while (left := text.find(name, at, end)) >= 0:
                at = left + len(name)
                sides = [
                    (before + text)[left - 1 + len(before)] if before or left else "",
                    (text + after)[at:][:1],
                ]
                if id in flags.single_word and any(
                    side and (side.isalnum() or side == "_") for side in sides
                ):
                    continue
                spaces = SPACES.replace(" ", "") if id in flags.normalized else SPACES
                while id in flags.lstrip and left > start and text[left - 1] in spaces:
                    left -= 1
                while id in flags.rstrip and at < end and text[at] in spaces:
                    at += 1
                cut += [(start, left), id]
                start = at
            cut.append((start, end))
        spans = cut
    parts = [span if isinstance(span, int) else text[slice(*span)] for span in spans]
    return [part for part in parts if part != ""]


IDS = st.frozensets(st.integers(0, 7))


@given(
    st.lists(st.text("ab <\n", min_size=1, max_size=4), min_size=1, max_size=8, unique=True),
    st.builds(TokenFlags, IDS, IDS, IDS, IDS),
    st.text("ab <\n", max_size=40),
    st.sampled_from(["", "a", " "]),
    st.sampled_from(["", "b", "<"]),
)
@settings(max_examples=300)
def test_tokens_that_overlap_are_cut_in_their_order(
    names: list[str], flags: TokenFlags, text: str, before: str, after: str
) -> None:
    tokens = AddedTokens([(name, id) for id, name in enumerate(names)], flags)
    assert tokens.cut(text, before, after) == cut_plainly(text, tokens, before, after)


def test_many_names_among_many_tokens_take_no_product_of_time() -> None:
    names = [f"<unused{n:05}>" for n in range(1500)]
    tokens = AddedTokens([("<b>", 1500), *((name, id) for id, name in enumerate(names))], TokenFlags())
    assert tokens.cut("<b>" * 100_000 + "".join(names)) == [1500] * 100_000 + [*range(1500)]


def test_control_tokens_in_a_long_text() -> None:
    tokenizer = Tokenizer.from_metadata(bpe("gpt-2", "ab", [("<x>", CONTROL)]))
    x = tokenizer.encode("<x>", parse_special=True)
    assert tokenizer.encode("ab<x>" * 30_000, parse_special=True) == [257, *x] * 30_000
