"""Tokens to text: whole characters, and stop strings however tokens cut them, against a plain search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotcold.demo import model_path
from hotcold.engine.text import TextStream, _Prefix, stop_strings
from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf
from hotcold.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.long  # no backend computes here


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with open_gguf(model_path()) as file:
        return Tokenizer.from_metadata(file.metadata)


class Pieces(Tokenizer):
    """A vocabulary of these bytes, without special tokens."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.vocab_size = len(pieces)
        self._space_prefix = False
        self._fences = self._silent = set()
        self._pieces = pieces

    def piece(self, id: int) -> bytes:
        return self._pieces[id]


def ended(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """By brute force: the text before the stop string that is complete first (the longest), and that."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def streamed(pieces: Sequence[bytes], stops: Sequence[str]) -> tuple[list[str], str | None, int]:
    """The text shown after each token and at the end, the stop string, and how many tokens were taken."""
    stream = TextStream(Pieces(pieces), (), stops)
    shown = []
    for id in range(len(pieces)):
        shown.append(stream.push(id))
        if stream.stop is not None:
            break
    taken = len(shown)
    return [*shown, stream.finish()], stream.stop, taken


@given(
    st.lists(st.text("abé€\n", max_size=4), max_size=12),
    st.lists(st.text("abé€\n", min_size=1, max_size=5), max_size=4),
)
@example(["aaba", "ab"], ["aabab"])
@example(["aaabaaa"], ["aabaaa"])
@example(["abab", "abc"], ["ababc", "b"])
@example(["a", "b"], ["ab", "b"])
@example(["aab"], ["aab", "ab"])
def test_where_a_text_ends(texts: list[str], stops: list[str]) -> None:
    shown, stop, taken = streamed([text.encode() for text in texts], stops)
    expected, by = ended("".join(texts), stops)
    assert ("".join(shown), stop) == (expected, by)
    if by is None:
        assert taken == len(texts)
    else:
        assert len("".join(texts[: taken - 1])) < len(expected) + len(by) <= len("".join(texts[:taken]))
    # What is held back could become a stop string, and all of it is needed for that.
    for n in range(1, taken + (by is None)):
        so_far, shown_so_far = "".join(texts[:n]), "".join(shown[:n])
        assert so_far.startswith(shown_so_far)
        starts = [at for stop in stops for at in range(len(so_far)) if stop.startswith(so_far[at:])]
        assert len(shown_so_far) == min([*starts, len(so_far)])


@given(st.text("ab", max_size=24), st.text("ab", min_size=1, max_size=7))
def test_strings_that_repeat_themselves(text: str, stop: str) -> None:
    shown, found, _ = streamed([character.encode() for character in text], [stop])
    assert ("".join(shown), found) == ended(text, [stop])


@given(st.binary(max_size=12), st.lists(st.integers(1, 3), min_size=12, max_size=12))
def test_never_half_a_character(data: bytes, lengths: list[int]) -> None:
    """However bytes are cut, broken ones too; and a replacement character can be a stop string."""
    pieces = []
    for length in lengths:
        pieces.append(data[:length])
        data = data[length:]
    whole = b"".join(pieces).decode(errors="replace")
    assert "".join(streamed(pieces, ())[0]) == whole
    shown, stop, _ = streamed(pieces, ["�"])
    assert ("".join(shown), stop) == ended(whole, ["�"])


def test_a_continuation_of_a_prompt(tokenizer: Tokenizer) -> None:
    prompt, ids = tokenizer.encode("Once upon"), tokenizer.encode("a time there", add_bos=False)
    text = TextStream(tokenizer, prompt)
    assert "".join(map(text.push, ids)) + text.finish() == " a time there"
    fresh = TextStream(tokenizer)
    assert "".join(map(fresh.push, ids)) == "a time there"


def test_nothing_follows_a_stop_string() -> None:
    stream = TextStream(Pieces([b"one", b" two", b" three"]), (), ["tw"])
    assert (stream.push(0), stream.push(1), stream.finish(), stream.stop) == ("one", " ", "", "tw")
    with pytest.raises(ValueError, match="token 2 comes after the stop string 'tw'"):
        stream.push(2)


def test_the_end_gives_what_was_held_back_once() -> None:
    stream = TextStream(Pieces([b"a tw", b"\xe2\x82"]), (), ["two"])
    assert (stream.push(0), stream.push(1)) == ("a ", "")
    assert (stream.finish(), stream.finish(), stream.stop) == ("tw�", "", None)
    stream = TextStream(Pieces([b"a tw"]), (), ["two"])
    assert (stream.push(0), stream.finish(), stream.finish()) == ("a ", "tw", "")


def test_stop_strings_of_every_form() -> None:
    assert stop_strings(None) == stop_strings([]) == ()
    assert stop_strings("a") == stop_strings(["a"]) == ("a",)
    assert len(stop_strings([str(i) for i in range(256)])) == 256 and stop_strings("x" * 1024)
    for wrong, message in (
        ("", "stop holds a string of 0: strings of 1 to 1024 characters are needed"),
        (["a", ""], "stop holds a string of 0"),
        (["x" * 1025], "stop holds a string of 1025"),
        ([3], "stop holds 3: strings"),
        (["a"] * 257, "stop has 257 strings: at most 256 are allowed"),
    ):
        with pytest.raises(UserError, match=message):
            stop_strings(wrong)  # type: ignore[arg-type]


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=200), st.text("aé€𝄞", min_size=1))
def test_of_a_long_prompt_the_end_is_enough(prompt: list[bytes], text: str) -> None:
    """The continuation may begin within a character of the prompt."""
    data = text.encode()
    pieces = [*prompt, data[:1], data[1:]]
    whole = Pieces(pieces).stream_decoder()
    for id in range(len(prompt) + 1):
        whole.push(id)
    stream = TextStream(Pieces(pieces), range(len(prompt) + 1))
    assert stream.push(len(prompt) + 1) + stream.finish() == whole.push(len(prompt) + 1) + whole.flush()


def test_control_tokens_are_shown_where_somebody_asks(tokenizer: Tokenizer) -> None:
    hello, eos = tokenizer.encode("Hello", add_bos=False), 2
    for shown, text in (((), "HelloHello"), ([eos], "Hello</s>Hello"), ([1], "HelloHello")):
        stream = TextStream(tokenizer, (), (), shown)
        assert "".join(stream.push(id) for id in [*hello, eos, *hello]) + stream.finish() == text
    assert tokenizer.decode([*hello, eos, *hello]) == "HelloHello"
    stream = TextStream(tokenizer, (), ["o<"], [eos])
    assert "".join(stream.push(id) for id in [*hello, eos]) == "Hell" and stream.stop == "o<"


def test_long_stop_strings_cost_what_was_matched() -> None:
    """Not what they are long: a stream is made between two steps of the engine."""
    looks = 0

    class Counted(str):
        def __getitem__(self, key: Any) -> str:
            nonlocal looks
            found = super().__getitem__(key)
            looks += len(found)
            return found

    stops = [Counted("ab" * 511 + "!" + chr(200 + i)) for i in range(16)]
    stream = TextStream(Pieces([b"ab", b"x"]), (), stops)
    assert looks == len(stops)  # at the first characters
    for _ in range(20):
        assert stream.push(0) == ""
    assert stream.push(1) == "ab" * 20 + "x"
    assert 0 < looks < 16 * 41 * 6


def test_hundreds_of_stop_strings_cost_what_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each character is compared with those stop strings alone that begin with it, or have begun."""
    compared: list[str] = []
    push = _Prefix.push

    def counted(prefix: _Prefix, character: str) -> bool:
        compared.append(prefix.text)
        return push(prefix, character)

    monkeypatch.setattr(_Prefix, "push", counted)
    stops = [chr(0x4E00 + i) + "ab" for i in range(254)] + ["xyz", "yy"]
    stream = TextStream(Pieces([b"no", b"x", b"y", b"q"]), (), stops)
    assert stream.push(0) == "no" and not compared
    assert [stream.push(1), stream.push(2), stream.push(3)] == ["", "", "xyq"]
    assert compared == ["xyz", "xyz", "yy", "xyz", "yy"]
