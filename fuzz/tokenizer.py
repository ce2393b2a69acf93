"""Fuzz target: any text comes back from a good vocabulary, and a broken one is refused in one line or works.

An input is the number of a vocabulary, the number of changes to its metadata, these changes, and a text.
"""

from __future__ import annotations

import struct
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tokenizers import models

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import vocabularies
from support.vocabularies import CONTROL, USER_DEFINED, as_read

from hotcold.tokenizer.bpe import IGNORES_MERGES, PRE_TOKENIZERS
from hotcold.tokenizer.tokenizer import Tokenizer, TokenizerError

CORPUS = "tokenizer"  #: folder of the seeds in tests/corpus

SPECIAL = [("<|im_end|>", CONTROL), ("<x>", USER_DEFINED), ("  ", USER_DEFINED)]
WORDS = "ab Ġab 12 123 Ġ12 ĊĊ ĠĠĠĠ 's 'll Ã© <|end|> <|im_end|> ðŁ¦Ļ"
KINDS = sorted({(cuts, kind in IGNORES_MERGES): kind for kind, cuts in PRE_TOKENIZERS.items()}.values())
GOOD = [
    {key: value.tolist() if hasattr(value, "tolist") else value for key, value in metadata.items()}
    for metadata in (
        *(vocabularies.bpe(kind, WORDS, SPECIAL) for kind in KINDS),
        vocabularies.spm(SPECIAL), vocabularies.spm(add_space_prefix=False),
        vocabularies.unigram(), vocabularies.unigram(with_bytes=True),
    )
]  # fmt: skip
KEYS = sorted({key for metadata in GOOD for key in metadata}) + [
    "tokenizer.ggml." + name for name in (
        "precompiled_charsmap", "remove_extra_whitespaces", "add_space_prefix", "add_bos_token",
        "add_eos_token",
    )
]  # fmt: skip
#: The library's models keep the words that they saw, and a part of that when they are gone.
_WITHOUT_CACHE = partial(models.BPE, cache_capacity=0)


def read(metadata: dict[str, Any]) -> Tokenizer:
    with mock.patch.object(models, "BPE", _WITHOUT_CACHE):
        return Tokenizer.from_metadata(as_read(metadata))


TOKENIZERS = [read(metadata) for metadata in GOOD]
WORTH_A_TRY = [
    None, True, False, "", "llama", "gpt2", "t5", "default", "falcon", "a b", "<|end|>", "ab", "Ġ", [],
    [[1], [2, 3]], [1, "a"], 1 << 70, float("nan"), float("inf"), -1, 0, 256, ["a b"], ["a  b"],
    ["ab", "a b c"], "\u2581", "<0x00>",
]  # fmt: skip


def one_input(data: bytes) -> bool:
    """True if the vocabulary was accepted; raises unless it is accepted or refused properly."""
    head = data[:2].ljust(2, b"\0")
    number, changes, data = head[0] % len(GOOD), head[1] % 8 if head[1] < 128 else 0, data[2:]
    if not changes:
        check(TOKENIZERS[number], text_of(data), exact=number < len(GOOD) - 2)
        return True
    metadata: dict[str, Any] = dict(GOOD[number])
    for _ in range(changes):
        key = KEYS[(data[0] if data else 0) % len(KEYS)]
        metadata[key], data = changed(metadata.get(key), data[1:])
    try:
        tokenizer = read(metadata)
    except TokenizerError as error:
        assert str(error).isprintable() and len(str(error)) < 1500, str(error)
        return False
    check(tokenizer, text_of(data), exact=False)
    return True


def text_of(data: bytes) -> str:
    return data.decode(errors="replace")


def changed(value: Any, data: bytes) -> tuple[Any, bytes]:
    """Another value for a key, and the rest of the input."""
    how, at, number = struct.unpack("<BHb", data[:4].ljust(4, b"\0"))
    rest = data[4:]
    if how & 1 and isinstance(value, list) and value:
        value, at = list(value), at % len(value)
        if how & 2:
            value[at] = value[number % len(value)] if how & 4 else WORTH_A_TRY[number % len(WORTH_A_TRY)]
        elif how & 4:
            value[at] = float(number) if how & 8 else number
        elif how & 8:
            value[at] = text_of(rest[: number & 15])
        else:
            value = value[:at]
        return value, rest
    if how & 2:
        return number, rest
    if how & 4:
        return list(rest[: at % 2048]), rest[at % 2048 :]
    if how & 8:
        return text_of(rest[: at % 32]), rest[at % 32 :]
    return WORTH_A_TRY[number % len(WORTH_A_TRY)], rest


def check(tokenizer: Tokenizer, text: str, *, exact: bool) -> None:
    """Encodes and decodes; ``exact`` where the text comes back and never becomes a control token."""
    for parse_special in (False, True):
        try:
            ids = tokenizer.encode(text, parse_special=parse_special)
        except ValueError as error:
            assert not exact and " no token" in str(error) and str(error).isprintable(), str(error)
            continue
        assert all(0 <= id < tokenizer.vocab_size for id in ids)
        decoded = tokenizer.decode(ids)
        stream = tokenizer.stream_decoder()
        assert "".join(map(stream.push, ids)) + stream.flush() == decoded
        if exact and not parse_special:
            assert decoded in (text, text.replace("\u2581", " ")), (text, decoded)
    if exact:
        plain = tokenizer.encode(text, add_bos=False)
        assert not {tokenizer.bos_id, *tokenizer.stop_ids} & set(plain)
