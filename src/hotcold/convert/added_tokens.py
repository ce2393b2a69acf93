"""Writes the flags of a checkpoint's added tokens as keys: how they treat the text around them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.sentencepiece_model import Piece
from hotcold.convert.tokenizer_json import SPACED
from hotcold.tokenizer.added_tokens import PREFIX, TokenFlags, implied_flags
from hotcold.tokenizer.spm import SPACE
from hotcold.tokenizer.vocabulary import TokenType

_SEARCHED_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
_RSTRIP = f"{PREFIX}rstrip"


def flags_metadata(
    checkpoint: Checkpoint, tokens: list[Piece], metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """The keys with flags. ``metadata`` has the file's other keys: if they imply flags that the checkpoint
    denies, an empty list says so."""
    entries = [*_entries(checkpoint)]
    named = {name: _ids(entries, tokens, name) for name in ("lstrip", "rstrip", "single_word", "normalized")}
    prefix = metadata.get("tokenizer.ggml.add_space_prefix") is True
    if not named["normalized"] or not _spells_first(checkpoint, prefix=prefix):
        named["normalized"] = frozenset()
    keys = TokenFlags(**named).metadata()
    special = [id for id, token in enumerate(tokens) if token.type in _SEARCHED_TYPES]
    if (
        entries
        and not keys
        and implied_flags(metadata, [token.text for token in tokens], special) != TokenFlags()
    ):
        keys[_RSTRIP] = np.array([], np.int32)
    return keys


def _entries(checkpoint: Checkpoint) -> Iterable[tuple[Any, Mapping[str, Any]]]:
    """Ids of added tokens and their settings, from the first file that has them."""
    decoder = checkpoint.settings("tokenizer_config.json").section("added_tokens_decoder").values
    added = None if decoder else checkpoint.settings("tokenizer.json").get("added_tokens")
    for id, entry in decoder.items():
        if re.fullmatch("[0-9]{1,9}", id) and isinstance(entry, Mapping):
            yield int(id), entry
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, Mapping):
            yield entry.get("id"), entry


def _ids(entries: Iterable[tuple[Any, Mapping[str, Any]]], tokens: list[Piece], flag: str) -> frozenset[int]:
    """Ids of the tokens with a flag that the vocabulary has."""
    return frozenset(
        id
        for id, entry in entries
        if entry.get(flag) is True
        and type(id) is int
        and 0 <= id < len(tokens)
        and isinstance(text := entry.get("content"), str)
        and tokens[id].text in (text, text.replace(SPACE, " "))
        and tokens[id].type in _SEARCHED_TYPES
    )


def _spells_first(checkpoint: Checkpoint, *, prefix: bool) -> bool:
    """True if some tokens are searched for after normalisation, which puts spaces before texts (``prefix``)
    and respells them. Only then the flag ``normalized`` matters."""
    normalizer = checkpoint.settings("tokenizer.json").get("normalizer")
    steps = [normalizer] if isinstance(normalizer, Mapping) else []
    inner = steps[0].get("normalizers") if steps else None
    steps += inner if isinstance(inner, list) else []
    return ({"type": "Prepend", "prepend": SPACE} if prefix else SPACED) in steps
