"""Reads SentencePiece's ``tokenizer.model``, a protobuf message, with the schema of its package.

Unknown fields are ignored, as in SentencePiece; the values of known ones are checked here."""

import math
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from hotcold.convert.settings import ConvertError
from hotcold.tokenizer.vocabulary import TokenType
from hotcold.values import printable

MAX_FILE = 64 << 20
MAX_PIECES = 1 << 21
MAX_PIECE_BYTES = 4096


class Piece(NamedTuple):
    text: str
    score: float
    type: TokenType


class SentencePieceModel(NamedTuple):
    """The vocabulary in order of ids, and settings of encoding; an id is None if the file's is negative."""

    pieces: list[Piece]
    algorithm: str
    ids: dict[str, int | None]  #: ids of unknown, bos, eos and padding
    add_space_prefix: bool
    remove_extra_whitespaces: bool
    charsmap: bytes  #: table of replacements, unchanged


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    if path.stat().st_size > MAX_FILE:
        raise ConvertError(f"{path} is not a SentencePiece model: it is larger than {MAX_FILE >> 20} MiB")
    try:
        from google.protobuf.message import DecodeError

        schema = import_module("sentencepiece.sentencepiece_model_pb2")
    except Exception as error:  # missing, or protobuf is too old for SentencePiece's code
        fix = "conversion needs pip install -U protobuf '.[convert]' in Hotcold's source folder"
        raise ConvertError(f"{printable(str(error))}: {fix}") from None
    try:
        return _model(schema.ModelProto.FromString(path.read_bytes()))
    except (ValueError, DecodeError) as error:  # protobuf in pure Python raises this for bad UTF-8
        raise ConvertError(f"{path} is not a usable SentencePiece model: {printable(str(error))}") from None


def _model(proto: Any) -> SentencePieceModel:
    trainer, normaliser, size = proto.trainer_spec, proto.normalizer_spec, len(proto.pieces)
    if not 0 < size <= MAX_PIECES:
        raise ConvertError(f"it holds {size or 'no'} pieces: 1 to {MAX_PIECES} are possible")
    ids: dict[str, int | None] = {}
    for name, key in (("unknown", "unk_id"), ("bos", "bos_id"), ("eos", "eos_id"), ("padding", "pad_id")):
        if (id := getattr(trainer, key)) >= size:
            raise ConvertError(f"{name}_id is {id}: there are {size} pieces")
        ids[name] = id if id >= 0 else None
    pieces = [_piece(piece, index) for index, piece in enumerate(proto.pieces)]
    algorithm = trainer.ModelType.Name(trainer.model_type)
    spaces = normaliser.add_dummy_prefix, normaliser.remove_extra_whitespaces
    return SentencePieceModel(pieces, algorithm, ids, *spaces, normaliser.precompiled_charsmap)


def _piece(piece: Any, index: int) -> Piece:
    text = piece.piece
    if isinstance(text, bytes):  # protobuf returns bad UTF-8 as bytes
        raise ConvertError(f"piece {index} is not UTF-8: {text[:40]!r}")
    if not 0 < (n := len(text.encode())) <= MAX_PIECE_BYTES:
        raise ConvertError(f"piece {index} has {n} bytes: 1 to {MAX_PIECE_BYTES} are possible")
    if not math.isfinite(piece.score):
        raise ConvertError(f"piece {index} has the score {piece.score}")
    return Piece(text, piece.score, TokenType(piece.type))
