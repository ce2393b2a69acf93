"""The tokenizer against llama.cpp's vectors, SentencePiece itself, and the rule spelled out."""

from __future__ import annotations

import io
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.llama_cpp_vectors import vectors, vocabulary
from support.vocabularies import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, USER_DEFINED
from support.vocabularies import spm as metadata

from hotcold.tokenizer.tokenizer import Tokenizer, TokenizerError

FABLE = Path(__file__).parent.parent / "data" / "fable-7m"

#: any Unicode text; lone surrogates are no characters
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
#: text in which pairs merge often and special tokens are nearly spelled
WORDY = st.lists(
    st.sampled_from(
        [" ", "  ", "the", "token", "iser", "12", "\n", "\t", "<s>", "</s>", "<0x41>", "é", "字", "🦙", "\0"]
    ),
    max_size=40,
).map("".join)  # fmt: skip


def texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.piece(id).decode(errors="replace") for id in ids]


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.from_metadata(metadata())


@pytest.fixture(scope="module")
def llama() -> Tokenizer:
    return Tokenizer.from_metadata(vocabulary("llama-spm"))


# --- against others -------------------------------------------------------------------------------


def test_llama_cpps_vectors(llama: Tokenizer) -> None:
    for text, ids in vectors("llama-spm"):
        assert llama.encode(text, add_bos=False) == ids, repr(text)
        assert llama.decode(ids) == text


def test_any_text_comes_back(llama: Tokenizer) -> None:
    @given(TEXT | WORDY)
    def check(text: str) -> None:
        # SentencePiece spells a space as U+2581, so the two cannot be told apart afterwards.
        assert llama.decode(llama.encode(text)) == text.replace(SPACE, " ")

    check()


def from_sentencepiece(processor: Any, **keys: Any) -> Tokenizer:
    """The same vocabulary, read through SentencePiece's own interface."""
    size = processor.get_piece_size()

    def kind(id: int) -> int:
        if processor.is_unknown(id):
            return UNKNOWN
        if processor.is_control(id):
            return CONTROL
        return BYTE if processor.is_byte(id) else NORMAL

    types = [kind(id) for id in range(size)]
    found = {
        "model": "llama",
        "tokens": [processor.id_to_piece(id) for id in range(size)],
        "scores": np.array([processor.get_score(id) for id in range(size)], np.float32),
        "token_type": np.array(types, np.int32),
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
        "unknown_token_id": processor.unk_id(),
    } | keys
    return Tokenizer.from_metadata({f"tokenizer.ggml.{name}": value for name, value in found.items()})


def test_agrees_with_sentencepiece() -> None:
    """This is the vocabulary of the built-in model."""
    assert_agrees_with_sentencepiece(FABLE / "tokenizer.model")


def test_agrees_with_sentencepiece_on_llamas_vocabulary(test_data: Path) -> None:
    assert_agrees_with_sentencepiece(test_data / "tokenizers" / "llama2_tokenizer.model")


def assert_agrees_with_sentencepiece(path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = from_sentencepiece(processor)

    @given(TEXT | WORDY)
    @settings(max_examples=300)
    def check(text: str) -> None:
        assert tokenizer.encode(text, add_bos=False) == processor.encode(text), repr(text)

    check()
    for text, _ in vectors("llama-spm"):
        assert tokenizer.encode(text, add_bos=False) == processor.encode(text), repr(text)


@pytest.mark.parametrize("across_words", [False, True])
@pytest.mark.parametrize("space_prefix", [False, True])
def test_agrees_with_a_sentencepiece_vocabulary_trained_here(across_words: bool, space_prefix: bool) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    model, draw = io.BytesIO(), random.Random(1)
    sentences = ["".join(draw.choices("ab  cdé字", k=30)) for _ in range(200)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_by_whitespace=not across_words,
        add_dummy_prefix=space_prefix,
        num_threads=1,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    tokenizer = from_sentencepiece(processor, add_space_prefix=space_prefix)
    if across_words:
        assert any(SPACE in processor.id_to_piece(id)[1:].lstrip(SPACE) for id in range(400))

    @given(st.text("ab cdé字x", max_size=60))
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_bos=False)
        assert ids == processor.encode(text)
        assert tokenizer.decode(ids) == text

    check()


def merged_slowly(text: str, scores: dict[str, float]) -> list[str]:
    """The textbook rule: again and again the best pair of neighbours, the leftmost of equals."""
    symbols = list(text)
    while True:
        pairs = [(scores.get(a + b), i) for i, (a, b) in enumerate(pairwise(symbols))]
        best = max(((score, -i) for score, i in pairs if score is not None), default=None)
        if best is None:
            return symbols
        i = -best[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@given(
    st.dictionaries(st.text("abc", min_size=2, max_size=6), st.integers(-3, 0), max_size=25),
    st.text("abc", max_size=90),
)
@settings(max_examples=400)
# Here a queued pair outlives its left symbol, and its right one grows into a token of the same score.
@example({"abba": 0, "aabbabb": -1, "bba": -2, "bb": 0, "bbabb": 0, "aabba": -1}, "aabbabb")
def test_merges_the_best_pair_first_and_the_leftmost_of_equals(scores: dict[str, int], text: str) -> None:
    tokens = ["<unk>", "a", "b", "c", *scores]
    tokenizer = Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": np.array([0.0, -9.0, -9.0, -9.0, *scores.values()], np.float32),
            "tokenizer.ggml.add_space_prefix": False,
            "tokenizer.ggml.unknown_token_id": 0,
        }
    )
    assert texts(tokenizer, tokenizer.encode(text)) == merged_slowly(text, dict(scores.items()))


def test_a_large_text_without_a_word_boundary(tiny: Tokenizer) -> None:
    # Quadratic merging would not come back from this one.
    text = "ab" * 200_000
    ids = tiny.encode(text, add_bos=False)
    assert len(ids) == 200_001 and tiny.decode(ids) == text


# --- special tokens -------------------------------------------------------------------------------


def test_text_never_becomes_a_control_token(tiny: Tokenizer) -> None:
    # Merges could spell it: "<s" and ">" are tokens, and "<s>" has the best score of all.
    for text in ("<s>", "</s>", "a<s>b", "<unk>", "<0x41>"):
        ids = tiny.encode(text, add_bos=False)
        assert not {0, 1, 2, 3 + 0x41} & set(ids)
        assert tiny.decode(ids) == text


def test_special_tokens_when_they_are_asked_for(tiny: Tokenizer) -> None:
    ids = tiny.encode("a</s>b<s><s>", add_bos=False, parse_special=True)
    assert texts(tiny, ids) == [" a", "</s>", " ", "b", "<s>", "<s>"]
    assert tiny.decode(ids) == "ab"
    # Byte tokens have no name that text could use.
    assert 3 + 0x41 not in tiny.encode("<0x41>", parse_special=True)


def test_user_defined_tokens_always_match_and_the_longest_first() -> None:
    special = [("ab", USER_DEFINED), ("<x>", USER_DEFINED), ("bca", USER_DEFINED)]
    tokenizer = Tokenizer.from_metadata(metadata(special))
    ids = tokenizer.encode("abca <x>c", add_bos=False)
    assert texts(tokenizer, ids) == [" a", "bca", " ", " ", "<x>", " ", "c"]
    assert tokenizer.decode(ids) == "abca <x>c"


@given(st.text("ab <>x/s\n", max_size=30), st.booleans())
def test_text_with_user_defined_tokens_comes_back(text: str, prefix: bool) -> None:
    tokenizer = Tokenizer.from_metadata(
        metadata([("<x>", USER_DEFINED), ("  ", USER_DEFINED)], add_space_prefix=prefix)
    )
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_ids_are_control_tokens_whatever_the_file_calls_them() -> None:
    special = [("<eot>", NORMAL), ("<|im_end|>", USER_DEFINED)]
    eot = len(metadata()["tokenizer.ggml.tokens"])
    tokenizer = Tokenizer.from_metadata(metadata(special, eot_token_id=eot))
    assert tokenizer.stop_ids == {2, eot, eot + 1}
    assert not {eot, eot + 1} & set(tokenizer.encode("<eot><|im_end|>"))


def test_bos_and_eos() -> None:
    plain = Tokenizer.from_metadata(metadata(add_bos_token=False))
    assert plain.encode("a") == plain.encode("a", add_bos=False)
    both = Tokenizer.from_metadata(metadata(add_eos_token=True))
    body = plain.encode("a")
    assert both.encode("a") == [1, *body, 2]
    assert both.encode("a", add_bos=True) == [1, *body]
    assert both.encode("a", add_bos=False) == body
    assert (both.encode(""), plain.encode("")) == ([1, 2], [])


def test_ids_that_the_file_leaves_out_follow_its_token_types() -> None:
    missing = {"bos_token_id": None, "eos_token_id": None, "unknown_token_id": None}
    tokenizer = Tokenizer.from_metadata(metadata(**missing))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, True)
    types = [int(NORMAL)] * len(metadata()["tokenizer.ggml.tokens"])
    without = Tokenizer.from_metadata(metadata(token_type=types, **missing))
    assert (without.bos_id, without.eos_id, without.add_bos) == (None, None, False)
    assert without.stop_ids == {2}  # by its name
    with pytest.raises(ValueError, match="no BOS token"):
        without.encode("a", add_bos=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bos", 271), ("eos", -1), ("eos", 271), ("unknown", 2**32 - 1), ("eot", 1 << 40), ("eom", 271),
        ("padding", 2**32 - 1), ("seperator", 300), ("fim_pad", 2**32 - 1),
    ],
)  # fmt: skip
def test_an_id_that_no_token_has_counts_as_none(key: str, value: int) -> None:
    tokenizer = Tokenizer.from_metadata(metadata(**{f"{key}_token_id": value}))
    without = Tokenizer.from_metadata(metadata(**{f"{key}_token_id": None}))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (1, 2, {2})
    assert tokenizer.encode("ab é") == without.encode("ab é")
    note_begin = f"tokenizer.ggml.{key}_token_id is {value}: the 271 tokens have the ids 0 to 270"
    assert [note for note in tokenizer.notes if note.startswith(note_begin)]
    assert not [note for note in without.notes if "ids 0 to" in note]


def test_no_bos_is_added_whose_id_no_token_has() -> None:
    types = [int(NORMAL)] * 271
    tokenizer = Tokenizer.from_metadata(metadata(bos_token_id=271, token_type=types, add_bos_token=True))
    assert tokenizer.encode("a") == tokenizer.encode("a", add_bos=False)
    assert "no BOS is added to texts, since the id in the file is not a token" in tokenizer.notes


STATED = {"add_bos_token": True, "add_eos_token": False}


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        (
            {"eos_token_id": None},
            "does not say which token ends a text: token 2, </s>, does, as in llama.cpp",
        ),
        (
            {"token_type": None, "eos_token_id": 2},
            "has no tokenizer.ggml.token_type: special tokens are recognised by their names",
        ),
        ({"add_bos_token": None}, "whether texts begin with BOS (tokenizer.ggml.add_bos_token): they do"),
        ({"add_bos_token": None, "bos_token_id": None, "token_type": [1] * 271}, None),
        ({}, None),
    ],
)
def test_what_is_guessed_is_said(keys: dict[str, Any], note: str | None) -> None:
    notes = Tokenizer.from_metadata(metadata(**STATED | keys)).notes
    assert (note is None and notes == ()) or (note is not None and len(notes) == 1 and note in notes[0])


def test_a_vocabulary_without_an_end_is_said() -> None:
    keys = metadata(eos_token_id=None, token_type=[1] * 271, add_bos_token=False)
    keys["tokenizer.ggml.tokens"][2] = "<end>"
    tokenizer = Tokenizer.from_metadata(keys)
    assert tokenizer.stop_ids == frozenset()
    assert tokenizer.notes == ("no token of the vocabulary ends a text: answers end at their length limit",)


def test_tokens_that_are_no_utf_8() -> None:
    """As the GGUF reader gives them: text never becomes one, and what they stand for are the file's bytes."""
    half, name = b"\xe5\xad".decode(errors="surrogateescape"), b"<\xff>".decode(errors="surrogateescape")
    tokenizer = Tokenizer.from_metadata(
        metadata([(half, NORMAL), (name, CONTROL), (f"{name}!", USER_DEFINED)])
    )
    assert [tokenizer.piece(id) for id in (271, 272, 273)] == [b"\xe5\xad", b"<\xff>", b"<\xff>!"]
    assert tokenizer.control_names[272] == "<\ufffd>"
    assert tokenizer.decode([271, 3 + 0x97]) == "字" and tokenizer.decode([273]) == "<\ufffd>!"
    assert not {271, 272, 273} & set(tokenizer.encode("字 <\ufffd>!", parse_special=True))


# --- bytes and characters -------------------------------------------------------------------------


def test_characters_without_a_token_become_bytes_then_unknown_then_nothing() -> None:
    tokenizer = Tokenizer.from_metadata(metadata(add_space_prefix=False))
    assert tokenizer.encode("é\0", add_bos=False) == [3 + 0xC3, 3 + 0xA9, 3]
    few = {"model": "llama", "tokens": ["<unk>", "a"], "scores": np.zeros(2), "add_space_prefix": False}
    unknown = Tokenizer.from_metadata(
        {f"tokenizer.ggml.{k}": v for k, v in (few | {"unknown_token_id": 0}).items()}
    )
    assert unknown.encode("aé") == [1, 0, 0]
    strict = Tokenizer.from_metadata({f"tokenizer.ggml.{k}": v for k, v in few.items()})
    assert strict.encode("aéa\x04") == [1, 1]
    assert strict.left_out(["aéa\x04"]) == "U+0004, U+00E9"
    many = "".join(map(chr, range(0x4E00, 0x4E0B)))
    assert strict.left_out([many, "a"]).endswith("U+4E07 and 3 more")
    assert not unknown.left_out(["é"]) and not tokenizer.left_out(["é\0"])


def test_a_token_without_tokens_for_its_characters_is_not_left_out() -> None:
    keys = {
        "model": "llama",
        "tokens": ["<unk>", "xy", "a"],
        "scores": np.zeros(3),
        "add_space_prefix": False,
    }
    tokenizer = Tokenizer.from_metadata({f"tokenizer.ggml.{k}": v for k, v in keys.items()})
    assert tokenizer.encode("axya") == [2, 1, 2] and not tokenizer.left_out(["axya"])
    assert tokenizer.encode("axa") == [2, 2] and tokenizer.left_out(["axa"]) == "U+0078"


@pytest.mark.parametrize("text", ["\ud800", "ok \udcff", "\udc00\ud800"])
def test_a_lone_surrogate_is_refused(tiny: Tokenizer, text: str) -> None:
    with pytest.raises(ValueError, match=r"lone surrogate, U\+D[8C][0F][0F], at character"):
        tiny.encode(text)


@given(st.lists(st.integers(0, 258 + 12), max_size=40))
def test_a_stream_is_what_decode_gives(ids: list[int]) -> None:
    tokenizer = Tokenizer.from_metadata(metadata())
    stream = tokenizer.stream_decoder()
    pieces = [stream.push(id) for id in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)


def test_a_stream_never_has_half_a_character(llama: Tokenizer) -> None:
    @given(TEXT)
    def check(text: str) -> None:
        stream, shown = llama.stream_decoder(), ""
        for id in llama.encode(text):
            shown += stream.push(id)
            assert text.replace(SPACE, " ").startswith(shown)
        assert stream.flush() == ""

    check()


def test_a_continuation_keeps_its_first_space(tiny: Tokenizer) -> None:
    space_a = tiny.encode("a", add_bos=False)[0]
    stream = tiny.stream_decoder()
    assert [stream.push(id) for id in (1, space_a, space_a)] == ["", "a", " a"]


def test_bytes_that_are_no_character_are_replaced(tiny: Tokenizer) -> None:
    assert tiny.decode([3 + 0xF0, 3 + 0x9F, 3 + 0x41]) == "\ufffdA"
    stream = tiny.stream_decoder()
    assert (stream.push(3 + 0xF0), stream.flush()) == ("", "\ufffd")


@pytest.mark.parametrize("id", [-1, 271, 1 << 70])
def test_an_id_out_of_range_is_refused(tiny: Tokenizer, id: int) -> None:
    assert tiny.vocab_size == 271
    for use in (tiny.piece, lambda id: tiny.decode([1, id]), tiny.stream_decoder().push):
        with pytest.raises(ValueError, match=f"token id {id} .* allowed are 0 to 270"):
            use(id)


# --- broken vocabularies --------------------------------------------------------------------------

BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, r"no tokenizer\.ggml\.model: supported are llama"),
    ({"model": "plamo2"}, r"model 'plamo2': supported are llama"),
    ({"model": 7}, r"model 7: supported"),
    ({"model": "x" * 5000}, r"model 'x{30,60}\.\.\.: supported"),
    ({"tokens": None}, r"no tokenizer\.ggml\.tokens"),
    ({"tokens": []}, r"or 0 of them"),
    ({"tokens": "abc"}, r"tokens is 'abc': a flat array"),
    ({"tokens": np.arange(4)}, r"tokens\[0\] is .*: only strings"),
    ({"scores": None}, r"no tokenizer\.ggml\.scores"),
    ({"scores": [0.0]}, r"scores has 1 entries for 271 tokens"),
    ({"scores": ["a"] * 271}, r"only numbers"),
    ({"scores": [float("nan")] * 271}, r"scores\[0\] is not a number"),
    ({"scores": 1.5}, r"scores is 1\.5: a flat array"),
    ({"scores": np.zeros((1, 271))}, r"a flat array"),
    ({"token_type": [1] * 270}, r"token_type has 270 entries for 271 tokens"),
    ({"token_type": [1] * 270 + [9]}, r"token_type\[270\] is 9: allowed are 0 to 6"),
    ({"token_type": [-1] * 271}, r"token_type\[0\] is -1"),
    ({"token_type": [1.0] * 271}, r"only integers"),
    ({"token_type": [6] * 271}, r"tokens\[0\] is '<unk>' of type byte: allowed are <0x00> to <0xFF>"),
    ({"bos_token_id": "1"}, r"bos_token_id is '1': a token id"),
    ({"bos_token_id": True}, r"bos_token_id is True: a token id"),
    ({"bos_token_id": None, "token_type": [1] * 271, "add_bos_token": True}, r"needs .*bos_token_id"),
    ({"add_bos_token": 1}, r"add_bos_token is 1: true and false"),
    ({"add_space_prefix": "no"}, r"add_space_prefix is 'no': true and false"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "message"), BROKEN)
def test_a_broken_vocabulary_is_refused_in_one_line(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_metadata(metadata(**keys))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@given(st.dictionaries(
    st.sampled_from(["model", "tokens", "scores", "token_type", "bos_token_id", "add_bos_token"]),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers() | st.text())
    | st.lists(st.integers(-2, 9), min_size=271, max_size=271),
))  # fmt: skip
def test_any_other_value_is_refused_or_works(keys: dict[str, Any]) -> None:
    try:
        tokenizer = Tokenizer.from_metadata(metadata(**keys))
    except TokenizerError as error:
        assert "\n" not in str(error)
        return
    tokenizer.encode("ab c")
