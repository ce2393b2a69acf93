"""The tokenizer of a checkpoint folder as GGUF's ``tokenizer.*`` metadata."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.convert.checkpoint import Checkpoint, ConvertError, Settings
from hotcold.convert.sentencepiece_model import Piece, read_sentencepiece_model
from hotcold.convert.tokenizer_json import added_tokens, adds, bpe_metadata
from hotcold.formats.files import shown
from hotcold.model.vocabulary import TokenType

MAX_TEMPLATE = 1 << 20
_ADDED_SCORE = -1000.0  # llama.cpp's score of tokens that were added after training
_PAD_SCORE = -10000.0
_ORDER = ("model", "pre", "tokens", "scores", "token_type", "merges") + tuple(
    f"{name}_token_id" for name in ("unknown", "bos", "eos", "padding")
)


def vocabulary_metadata(checkpoint: Checkpoint, vocab_size: int) -> dict[str, Any]:
    """``tokenizer.*`` keys for ``vocab_size`` tokens, from ``tokenizer.model`` or ``tokenizer.json``.

    Added tokens come from the JSON files beside it; ids that nobody names become unused ``[PADn]`` tokens, as
    in llama.cpp's files. ConvertError: a file is missing, not valid, or does not fit ``vocab_size``.
    """
    settings = checkpoint.settings("tokenizer_config.json")
    tokens = [Piece(f"[PAD{id}]", _PAD_SCORE, TokenType.UNUSED) for id in range(vocab_size)]
    if (checkpoint.folder / "tokenizer.model").is_file():
        keys = _from_sentencepiece(checkpoint, settings, tokens)
    elif (checkpoint.folder / "tokenizer.json").is_file():
        keys = _from_json(checkpoint, settings, tokens)
    else:
        raise ConvertError(f"{checkpoint.folder} has neither tokenizer.model nor tokenizer.json")
    for name in ("bos", "eos", "padding"):
        # config.json overrules the tokenizer, since fine-tuning may have moved BOS and EOS.
        key = {"padding": "pad_token_id"}.get(name, f"{name}_token_id")
        configured = checkpoint.config.token(key)
        if configured is not None and configured >= vocab_size:
            raise checkpoint.config.error(key, f"a token id below {vocab_size}")
        if configured is not None:
            keys[f"{name}_token_id"] = configured
    for name in ("add_bos_token", "add_eos_token"):
        keys[name] = settings.flag(name, keys[name])
    keys["tokens"] = [token.text for token in tokens]
    keys["token_type"] = np.array([token.type for token in tokens], np.int32)
    # One order whatever the source: the same checkpoint gives the same bytes.
    names = [*_ORDER, *sorted(keys.keys() - set(_ORDER))]
    metadata = {f"tokenizer.ggml.{name}": keys[name] for name in names if keys.get(name) is not None}
    template = settings.values.get("chat_template")
    if isinstance(template, str) and template:
        if len(template) > MAX_TEMPLATE:
            raise ConvertError(f"{settings.path}: chat_template has {len(template)} characters: too long")
        metadata["tokenizer.chat_template"] = template
    return metadata


def _from_sentencepiece(checkpoint: Checkpoint, settings: Settings, tokens: list[Piece]) -> dict[str, Any]:
    path = checkpoint.folder / "tokenizer.model"
    model = read_sentencepiece_model(path)
    if model.algorithm != "BPE":
        raise ConvertError(f"{path} is a SentencePiece {model.algorithm} model: only BPE is supported")
    trained = len(model.pieces)
    _check_size(path, trained, len(tokens))
    tokens[:trained] = model.pieces
    extra = checkpoint.settings("added_tokens.json")
    _add(tokens, extra, [(id, {"content": text}) for text, id in extra.values.items()], trained)
    decoder = settings.section("added_tokens_decoder").values.items()
    entries = [(int(id) if re.fullmatch("[0-9]{1,9}", id) else id, entry) for id, entry in decoder]
    _add(tokens, settings, entries, trained)
    return {
        "model": "llama",
        "pre": "default",
        **{f"{name}_token_id": id for name, id in model.ids.items()},
        "scores": np.array([token.score for token in tokens], np.float32),
        "add_bos_token": True,
        "add_eos_token": False,
        "add_space_prefix": model.add_space_prefix,
        "remove_extra_whitespaces": model.remove_extra_whitespaces or None,
    }


def _from_json(checkpoint: Checkpoint, settings: Settings, tokens: list[Piece]) -> dict[str, Any]:
    tokenizer = checkpoint.settings("tokenizer.json")
    keys, trained = bpe_metadata(tokenizer)
    _check_size(tokenizer.path, max(trained, default=0) + 1, len(tokens))
    for id, token in trained.items():
        tokens[id] = Piece(token, 0.0, TokenType.NORMAL)
    _add(tokens, tokenizer, added_tokens(tokenizer), 0)
    ids = {piece.text: id for id, piece in enumerate(tokens)}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        special = settings.values.get(f"{key}_token")
        text = special.get("content") if isinstance(special, dict) else special
        keys[f"{name}_token_id"] = ids.get(text) if isinstance(text, str) else None
        if name != "padding":
            place = 0 if name == "bos" else -1
            keys[f"add_{name}_token"] = isinstance(text, str) and adds(tokenizer, text, place)
    return keys


def _check_size(path: Path, trained: int, size: int) -> None:
    if trained > size:
        raise ConvertError(f"{path} has {trained} pieces, but config.json says vocab_size {size}")


def _add(tokens: list[Piece], source: Settings, entries: list[tuple[Any, Any]], trained: int) -> None:
    """Names tokens that were added after training; what a model says of its own stands."""
    for id, entry in entries:
        known = entry if isinstance(entry, dict) else {}
        text = known.get("content")
        if not isinstance(text, str) or type(id) is not int or not 0 <= id < len(tokens):
            needed = f"a text and an id below {len(tokens)} are needed"
            raise ConvertError(f"{source.path}: added token {shown(text)} with id {shown(id)}: {needed}")
        if id >= trained:
            special = known.get("special") is True
            tokens[id] = Piece(text, _ADDED_SCORE, TokenType.CONTROL if special else TokenType.USER_DEFINED)
