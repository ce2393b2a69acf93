"""Reads ``tekken.json``, the vocabulary of Mistral Small 3.2 and Magistral, and returns it in the form of
``tokenizer.json``.

The file lists the trained tokens by rank; the model may have fewer. Ids of special tokens come first. Merges
are not in the file: they follow from the ranks, as in ``tiktoken.model``."""

import base64
import binascii
from pathlib import Path
from typing import Any

from hotcold.convert.settings import ConvertError, Settings, read_settings
from hotcold.convert.tiktoken_model import ranked_tokenizer
from hotcold.values import shown

#: Keys of tokenizer_config.json, which such folders may lack.
TEKKEN_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
_MAX_BYTES = 1024  # of a token


def read_tekken(path: Path, vocab_size: int) -> Settings:
    """Reads the file. ConvertError: it is damaged, or its special tokens differ from its own list."""
    file = read_settings(path)
    config = file.section("config")
    size, first = config.integer("default_vocab_size"), config.integer("default_num_special_tokens")
    if not first < size <= vocab_size:
        raise config.error("default_vocab_size", f"more than {first} and at most vocab_size {vocab_size}")
    first_text = {"SpecialToken": {"id": TEKKEN_NAMES["bos_token"]}}
    tokenizer = ranked_tokenizer(_ranks(file, size - first), [config.text("pattern")], first)
    tokenizer["model"]["ignore_merges"] = True  # a word that is a token needs no merges
    ends = {"single": [first_text, {"Sequence": {"id": "A"}}]}
    return Settings(path, tokenizer | {"added_tokens": _special(file, first), "post_processor": ends})


def _ranks(file: Settings, count: int) -> dict[bytes, int]:
    """The first ``count`` tokens by their bytes."""
    entries: Any = file.get("vocab")
    if not isinstance(entries, list) or len(entries) < count:
        raise ConvertError(f"{file.path}: vocab needs a list of {count} tokens and more")
    ranks: dict[bytes, int] = {}
    for rank, entry in enumerate(entries[:count]):
        try:
            token = base64.b64decode(entry["token_bytes"], validate=True)
        except (TypeError, KeyError, ValueError, binascii.Error):
            token = b""
        stated = entry.get("rank") if token else None
        if stated != rank or not token or len(token) > _MAX_BYTES or token in ranks:
            needed = f"a new token in base64 and the rank {rank} are needed"
            raise ConvertError(f"{file.path}: token {rank} of vocab is {shown(entry)}: {needed}")
        ranks[token] = rank
    return ranks


def _special(file: Settings, count: int) -> list[dict[str, Any]]:
    """The tokens before the trained ones; ids without a name are reserved."""
    listed: Any = file.get("special_tokens")
    if not isinstance(listed, list):
        raise file.error("special_tokens", "a list (files without one need the model's tokenizer.json)")
    tokens = [{"id": id, "content": f"<SPECIAL_{id}>", "special": True} for id in range(count)]
    for entry in listed:
        match entry:
            case {"rank": int(id), "token_str": str(text), **more} if 0 <= id < count:
                tokens[id] = {"id": id, "content": text, "special": more.get("is_control") is not False}
            case _:
                needed = f"a rank below {count} and a text are needed"
                raise ConvertError(f"{file.path}: special token {shown(entry)}: {needed}")
    return tokens
