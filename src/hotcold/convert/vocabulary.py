"""The tokenizer of a checkpoint folder as GGUF's ``tokenizer.*`` metadata."""

from __future__ import annotations

from typing import Any

import numpy as np

from hotcold.convert.checkpoint import Checkpoint, ConvertError, Settings, clip
from hotcold.convert.sentencepiece_model import (
    Algorithm,
    Piece,
    PieceType,
    SentencePieceModel,
    read_sentencepiece_model,
)

MAX_TEMPLATE = 1 << 20
_ADDED_SCORE = -1000.0  # llama.cpp's score of tokens that were added after training
_PAD_SCORE = -10000.0


def vocabulary_metadata(checkpoint: Checkpoint, vocab_size: int) -> dict[str, Any]:
    """``tokenizer.*`` keys for ``vocab_size`` tokens, from ``tokenizer.model`` and the JSON files beside it.

    Ids beyond the trained pieces come from ``added_tokens.json`` and ``tokenizer_config.json``; those that
    nobody names become unused ``[PADn]`` tokens, as in llama.cpp's files.

    Raises:
        ConvertError, SentencePieceError: a file is missing, not valid, or does not fit ``vocab_size``.
    """
    path = checkpoint.folder / "tokenizer.model"
    if not path.is_file():
        other = checkpoint.folder / "tokenizer.json"
        found = " (tokenizer.json alone cannot be converted yet)" if other.is_file() else ""
        raise ConvertError(
            f"{checkpoint.folder} has no tokenizer.model{found}: a SentencePiece model is needed"
        )
    model = read_sentencepiece_model(path)
    if model.algorithm is not Algorithm.BPE:
        raise ConvertError(f"{path} is a SentencePiece {model.algorithm.name} model: only BPE is supported")
    if len(model.pieces) > vocab_size:
        raise ConvertError(
            f"{path} has {len(model.pieces)} pieces, but config.json says vocab_size {vocab_size}"
        )
    settings = checkpoint.settings("tokenizer_config.json")
    tokens = _all_tokens(checkpoint, settings, model, vocab_size)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token.text for token in tokens],
        "tokenizer.ggml.scores": np.array([token.score for token in tokens], np.float32),
        "tokenizer.ggml.token_type": np.array([token.type for token in tokens], np.int32),
    }
    metadata |= _special_ids(checkpoint.config, model, vocab_size)
    metadata["tokenizer.ggml.add_bos_token"] = settings.flag("add_bos_token", True)
    metadata["tokenizer.ggml.add_eos_token"] = settings.flag("add_eos_token", False)
    metadata["tokenizer.ggml.add_space_prefix"] = model.add_space_prefix
    if model.remove_extra_whitespaces:
        metadata["tokenizer.ggml.remove_extra_whitespaces"] = True
    template = settings.values.get("chat_template")
    if isinstance(template, str) and template:
        if len(template) > MAX_TEMPLATE:
            raise ConvertError(
                f"{settings.path}: chat_template has {len(template)} characters: at most {MAX_TEMPLATE}"
            )
        metadata["tokenizer.chat_template"] = template
    return metadata


def _all_tokens(
    checkpoint: Checkpoint, settings: Settings, model: SentencePieceModel, size: int
) -> list[Piece]:
    tokens = list(model.pieces)
    tokens += [Piece(f"[PAD{id}]", _PAD_SCORE, PieceType.UNUSED) for id in range(len(tokens), size)]
    added_tokens = checkpoint.settings("added_tokens.json")
    for text, id in added_tokens.values.items():
        _add(tokens, len(model.pieces), added_tokens, text, id, PieceType.USER_DEFINED)
    for key, entry in settings.section("added_tokens_decoder").values.items():
        known = entry if isinstance(entry, dict) else {}
        id = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else key
        kind = PieceType.CONTROL if known.get("special") is True else PieceType.USER_DEFINED
        _add(tokens, len(model.pieces), settings, known.get("content"), id, kind)
    return tokens


def _add(tokens: list[Piece], trained: int, settings: Settings, text: Any, id: Any, kind: PieceType) -> None:
    """Names one token; what the SentencePiece model says of its own pieces stands."""
    if (
        not isinstance(text, str)
        or isinstance(id, bool)
        or not isinstance(id, int)
        or not 0 <= id < len(tokens)
    ):
        raise ConvertError(
            f"{settings.path}: added token {clip(text)} with id {clip(id)}: "
            f"a text and an id below {len(tokens)} are needed"
        )
    if id >= trained:
        tokens[id] = Piece(text, _ADDED_SCORE, kind)


def _special_ids(config: Settings, model: SentencePieceModel, size: int) -> dict[str, int]:
    """config.json overrules the SentencePiece model, since fine-tuning may have moved BOS and EOS."""
    ids = {"unknown": model.unknown_id}
    for name, trained in (("bos", model.bos_id), ("eos", model.eos_id), ("padding", model.pad_id)):
        key = {"padding": "pad_token_id"}.get(name, f"{name}_token_id")
        configured = config.token(key)
        if configured is not None and configured >= size:
            raise config.error(key, f"a token id below {size}")
        ids[name] = trained if configured is None else configured
    return {f"tokenizer.ggml.{name}_token_id": id for name, id in ids.items() if id is not None}
