"""Small vocabularies as GGUF metadata, one for each kind of tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hotcold.tokenizer.vocabulary import TokenType

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = (
    TokenType.NORMAL, TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNUSED,
    TokenType.BYTE,
)  # fmt: skip

Entry = tuple[str, float, TokenType]
Special = Sequence[tuple[str, TokenType]]

#: GPT-2's alphabet: how byte-level vocabularies spell the bytes 0 to 255
ALPHABET = "".join(
    chr(byte) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174
    else chr(256 + byte if byte <= 32 else byte + 162 if byte <= 160 else 323)
    for byte in range(256)
)  # fmt: skip


def keyed(entries: Sequence[Entry], defaults: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Metadata of these tokens; ``keys`` overrule the defaults, and None leaves a key out."""
    tokens, scores, types = zip(*entries, strict=True)
    found = {"tokens": list(tokens), "scores": list(scores), "token_type": list(map(int, types))}
    found |= defaults | keys
    return as_read({f"tokenizer.ggml.{name}": value for name, value in found.items() if value is not None})


def as_read(metadata: dict[str, Any]) -> dict[str, Any]:
    """Lists of numbers as the arrays that the GGUF reader makes of them."""
    return {
        key: np.array(value)
        if isinstance(value, list) and value and all(isinstance(n, int | float) for n in value)
        else value
        for key, value in metadata.items()
    }


def spm(special: Special = (), **keys: Any) -> dict[str, Any]:
    """``<unk> <s> </s>``, all bytes, a few letters and merges, then ``special``."""
    entries = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    entries += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    entries += [(letter, -10.0, NORMAL) for letter in SPACE + "abc<s>/"]
    entries += [("ab", -1.0, NORMAL), (SPACE + "a", -2.0, NORMAL), ("<s", 0.0, NORMAL), ("</", 0.0, NORMAL)]
    entries += [(text, 0.0, type) for text, type in special]
    ids = {"model": "llama", "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return keyed(entries, ids, keys)


def bpe(
    pre: str | None, words: str, special: Special = (), absent: bytes = b"", **keys: Any
) -> dict[str, Any]:
    """All bytes but the ``absent``, ``<|end|>`` (BOS and EOS; without these token 256), ``words`` with merges
    that build them from left to right, then ``special``."""
    entries = [(letter, 0.0, NORMAL) for byte, letter in enumerate(ALPHABET) if byte not in absent]
    end = len(entries)
    entries.append(("<|end|>", 0.0, CONTROL))
    merges: dict[str, None] = {}
    for word in words.split():
        for n in range(2, len(word) + 1):
            merges.setdefault(f"{word[: n - 1]} {word[n - 1]}")
    entries += [(merge.replace(" ", ""), 0.0, NORMAL) for merge in merges]
    entries += [(text, 0.0, type) for text, type in special]
    ids = {"model": "gpt2", "pre": pre, "bos_token_id": end, "eos_token_id": end, "merges": list(merges)}
    return keyed(entries, ids | {"scores": None}, keys)


def unigram(*, with_bytes: bool = False, **keys: Any) -> dict[str, Any]:
    entries = [("<pad>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<unk>", 0.0, UNKNOWN)]
    entries += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256) if with_bytes]
    pieces = {SPACE: -3.0, "a": -4.0, "b": -4.5, "ab": -5.0, SPACE + "a": -3.5, "ba": -6.0, "abab": -9.0}
    entries += [(text, score, NORMAL) for text, score in pieces.items()]
    return keyed(entries, {"model": "t5", "eos_token_id": 1, "unknown_token_id": 2}, keys)
