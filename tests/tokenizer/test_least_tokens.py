"""The lower bound of a text's tokens: it never exceeds what encoding makes, and is not far below it."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.llama_cpp_vectors import vocabulary
from support.vocabularies import CONTROL, NORMAL, SPACE, USER_DEFINED, bpe, keyed, spm, unigram

from hotcold.formats.gguf import open_gguf
from hotcold.tokenizer.least_tokens import _PART
from hotcold.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.long  # no instruction set or backend changes it

HEIDI = Path(__file__).parent.parent / "data" / "heidi.txt"
SPECIAL = [("<x>", CONTROL), (SPACE * 12, USER_DEFINED), ("  ", USER_DEFINED), ("字" * 9, NORMAL)]


def _flags(metadata: dict[str, Any], **flags: str) -> dict[str, Any]:
    """The vocabulary with tokens that take the white space beside them."""
    names = metadata["tokenizer.ggml.tokens"]
    ids = {flag: np.array([names.index(name)], np.int32) for flag, name in flags.items()}
    return metadata | {f"hotcold.tokenizer.{flag}": array for flag, array in ids.items()}


def _gemma4() -> dict[str, Any]:
    entries = spm(SPECIAL)
    return entries | {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": ["a b", f"{SPACE} a"]}


def _rwkv() -> dict[str, Any]:
    pieces = [*(f"\\x{byte:02x}" for byte in range(256) if byte not in b"qz"), "abcabc", SPACE * 3, "   "]
    entries = [("<s>", 0.0, CONTROL), *((piece, 0.0, NORMAL) for piece in pieces)]
    return keyed(entries, {"model": "rwkv", "scores": None}, {})


#: Each kind of vocabulary, with all bytes and without some.
VOCABULARIES = {
    "spm": lambda: spm(SPECIAL),
    "spm, unknown": lambda: _without_bytes(0),
    "spm, left out": lambda: _without_bytes(None),
    "spm, flags": lambda: _flags(spm(SPECIAL), lstrip="<x>"),
    "spm, normalized": lambda: _flags(spm([("<x>", USER_DEFINED)]), normalized="<x>"),
    "bpe": lambda: bpe("qwen2", "ab aaaaaaaa ĠĠĠĠ Ġab âĸģâĸģâĸģ ģâĸ", SPECIAL),
    "bpe, left out": lambda: bpe("gpt-2", "bcbc", SPECIAL, absent="a \u2581é".encode()),
    "bpe, no U+2581": lambda: bpe("gpt-2", "ab ĠĠĠĠ", absent="\u2581".encode()),
    "bpe, flags": lambda: _flags(bpe("gpt-2", "ab", SPECIAL), rstrip="<x>"),
    "gemma4": _gemma4,
    "rwkv, left out": _rwkv,
    "unigram": unigram,
    "unigram, bytes": lambda: unigram(with_bytes=True),
}
PIECES = ["a", "b", "ab", "a" * 9, " ", " " * 13, SPACE, SPACE * 13, "\n\t \u3000", "<x>", "<s>", "</s>"]
PIECES += ["字" * 10, "é", "\0", "q", "abcabc", "🦙", "\u0096", "<0x0A>"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=40
)


def _without_bytes(unknown: int | None) -> dict[str, Any]:
    entries = [("<unk>", 0.0, NORMAL), ("<x>", 0.0, CONTROL), ("xy", 0.0, NORMAL)]
    entries += [(letter, -10.0, NORMAL) for letter in SPACE + "abc"] + [("ab", -1.0, NORMAL)]
    return keyed(entries, {"model": "llama", "unknown_token_id": unknown, "add_bos_token": False}, {})


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer.from_metadata(VOCABULARIES[kind]())


def check(tokenizer: Tokenizer, text: str) -> None:
    least = tokenizer.least_tokens(text)
    for parse_special in (False, True):
        ids = tokenizer.encode(text, add_bos=False, parse_special=parse_special)
        assert least <= len(ids), (repr(text), least, len(ids))


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_no_text_has_fewer_tokens(kind: str) -> None:
    @given(TEXTS, st.integers(1, 30))
    @settings(max_examples=60)
    def of_any(text: str, times: int) -> None:
        check(tokenizer(kind), text * times)

    of_any()


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_no_token_weighs_more_than_one(kind: str) -> None:
    """The texts with the fewest tokens for their length are made of one long token each."""
    known = tokenizer(kind)
    for id in range(known.vocab_size):
        text = known.piece(id).decode(errors="ignore")
        check(known, text * 7)
        check(known, text.replace(SPACE, " ") * 7)


@pytest.mark.parametrize("kind", ["llama-spm", "gpt-2", "falcon"])
def test_published_vocabularies(kind: str) -> None:
    known, draw = Tokenizer.from_metadata(vocabulary(kind)), random.Random(1)
    longest = sorted(range(known.vocab_size), key=lambda id: len(known.piece(id)))[-300:]
    for _ in range(200):
        check(known, "".join(known.piece(id).decode(errors="ignore") for id in draw.choices(longest, k=9)))
    text = HEIDI.read_text(encoding="utf-8")
    check(known, text)
    # The length of the longest token alone gives a lower bound.
    assert known.least_tokens(text) > 1.5 * len(text) / max(len(known.piece(id)) for id in longest)


def test_the_built_in_vocabulary() -> None:
    from hotcold.demo import model_path

    with open_gguf(model_path()) as file:
        known = Tokenizer.from_metadata(file.metadata)
    text = HEIDI.read_text(encoding="utf-8")
    assert len(known.encode(text)) / 3 < known.least_tokens(text) <= len(known.encode(text))


def test_a_long_text_is_counted_in_parts_without_a_seam() -> None:
    known = tokenizer("bpe")
    for text in ("é" * (_PART + 1), "a" * (2 * _PART), "x" * (_PART - 1) + SPACE * 2 + "🦙"):
        check(known, text)
        assert known.least_tokens(text * 3) in range(
            3 * known.least_tokens(text), 3 * known.least_tokens(text) + 3
        )


def test_text_that_can_be_lost_has_no_tokens_at_least() -> None:
    assert tokenizer("unigram").least_tokens("a" * 1000) == 0
    assert tokenizer("spm, left out").least_tokens("é" * 1000 + "x" * 1000) == 0
    assert tokenizer("spm, left out").least_tokens("ab" * 1000) > 0
    assert tokenizer("bpe, flags").least_tokens(" \n\u3000" * 1000) == 0
    assert (
        tokenizer("bpe, left out").least_tokens("a \u2581é" * 1000)
        == 0
        < tokenizer("bpe, left out").least_tokens("bc" * 1000)
    )
