"""Reads ``tiktoken.model``, the vocabulary of Kimi K2 and Kimi Linear, and returns it in the form of
``tokenizer.json``.

The file has a line for each token: its bytes in base64, and its rank, which is its id. Merges are not in the
file: merging a token's bytes by tokens of lower ranks leaves its two parts. The publishers cut a text into
words by code, which is not run: the name of their class tells the cut."""

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotcold.convert.settings import MAX_JSON, ConvertError, Settings
from hotcold.tokenizer.bpe import PRE_TOKENIZERS, spell_bytes
from hotcold.values import shown

#: Classes of publishers -> their kind of pre-tokenizer.
_CUTS = {"TikTokenTokenizer": "kimi-k2"}
_RESERVED = 256  # ids of special tokens, after the trained ones; the class makes names for unnamed ones
_MAX_BYTES = 256  # of a token


def read_tiktoken(path: Path, settings: Settings) -> Settings:
    """Reads the file; ``settings`` is ``tokenizer_config.json``. ConvertError: damage, or another class."""
    kind = settings.text("tokenizer_class", "")
    if kind not in _CUTS:
        raise settings.error("tokenizer_class", f"with tiktoken.model {' or '.join(_CUTS)}")
    ranks = _ranks(path)
    added = _special(settings, len(ranks))
    return Settings(path, ranked_tokenizer(ranks, PRE_TOKENIZERS[_CUTS[kind]]) | {"added_tokens": added})


def ranked_tokenizer(ranks: dict[bytes, int], expressions: Sequence[str], first: int = 0) -> dict[str, Any]:
    """The model and the pre-tokenizer of ``tokenizer.json`` for tokens by rank. Ids count from ``first`` on;
    ``expressions`` cut a text into words."""
    vocab = {spell_bytes(token): first + rank for token, rank in ranks.items()}
    merges = [
        [spell_bytes(part) for part in parts]
        for token, rank in ranks.items()
        if len(token) > 1 and len(parts := _parts(token, ranks, rank)) == 2
    ]
    cuts: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in expressions
    ]
    spelling = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return {
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, spelling]},
    }


def _ranks(path: Path) -> dict[bytes, int]:
    """The tokens by their bytes, in the order of their ranks, which are 0, 1, ..."""
    if path.stat().st_size > MAX_JSON:
        raise ConvertError(f"{path} is larger than {MAX_JSON >> 20} MiB: too large for a vocabulary")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines()):
        encoded, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            token = b""
        if rank != str(number).encode() or not token or len(token) > _MAX_BYTES or token in ranks:
            got = f"line {number + 1} is {shown(line.decode(errors='replace'))}"
            raise ConvertError(f"{path}: {got}: a new token in base64 and the rank {number} are needed")
        ranks[token] = number
    return ranks


def _parts(token: bytes, ranks: dict[bytes, int], rank: int) -> list[bytes]:
    """The parts of a token after all merges of lower ranks."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
        lowest = min(pairs)
        if lowest >= rank:
            break
        i = pairs.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def _special(settings: Settings, first: int) -> list[dict[str, Any]]:
    """The tokens after the trained ones."""
    named = settings.section("added_tokens_decoder").values
    tokens = []
    for id in range(first, first + _RESERVED):
        entry = named.get(str(id))
        text = entry.get("content") if isinstance(entry, dict) else f"<|reserved_token_{id}|>"
        tokens.append({"id": id, "content": text, "special": True})
    return tokens
