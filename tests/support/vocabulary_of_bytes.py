"""Grammars asked about texts, byte by byte, with the built-in model's vocabulary."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
from support.built_in import tokenizer

from hotcold.grammar.compiler import GrammarCompiler, GrammarVocabulary, Mask


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(GrammarVocabulary.from_tokenizer(tokenizer()))


@cache
def byte_ids() -> dict[bytes, int]:
    found = {tokenizer().piece(id): id for id in reversed(range(tokenizer().vocab_size))}
    return {bytes([byte]): found[bytes([byte])] for byte in range(256)}


def tokens_of(text: str | bytes) -> list[int]:
    encoded = text.encode() if isinstance(text, str) else text
    return [byte_ids()[bytes([byte])] for byte in encoded]


def ids_in(mask: Mask) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def matches(lark: str, text: str) -> bool:
    """True if a grammar allows a text as an answer from its first byte to its last."""
    matcher = compiler().compile(lark).copy()
    for token in tokens_of(text):
        if token not in ids_in(matcher.mask()) or not matcher.consume([token]):
            return False
    return matcher.complete()


def check(lark: str, right: list[str], wrong: list[str]) -> None:
    """A grammar allows all of the one, and none of the other."""
    assert [text for text in right if not matches(lark, text)] == []
    assert [text for text in wrong if matches(lark, text)] == []


def random_answer(lark: str, draw: random.Random, most: int = 400) -> str | None:
    """A random answer that a grammar allows; None where it found no end. It takes tokens that close something
    more often than chance would."""
    matcher = compiler().compile(lark).copy()
    closing = {tokens_of(char)[0] for char in '"]}'}
    output: list[int] = []
    for _ in range(most):
        allowed = ids_in(matcher.mask())
        if allowed & compiler().stops and draw.random() < 0.5:
            break
        allowed -= compiler().stops
        if not allowed:
            break
        near = sorted(allowed & closing)
        token = draw.choice(near if near and draw.random() < 0.4 else sorted(allowed))
        assert matcher.consume([token])
        output.append(token)
    else:
        return None
    assert matcher.complete()
    return b"".join(map(tokenizer().piece, output)).decode()
