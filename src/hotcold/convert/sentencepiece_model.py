"""Reads SentencePiece's ``tokenizer.model``: a small, bounded reader of the protobuf wire format.

Only the fields that GGUF's ``llama`` tokenizer needs are decoded (``sentencepiece_model.proto`` of the
SentencePiece project gives their numbers); all others are checked for length and skipped.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

MAX_FILE = 64 << 20
MAX_PIECES = 1 << 21
MAX_PIECE_BYTES = 4096

#: Varints and fixed-width values come as unsigned integers, everything else as bytes.
_Field: TypeAlias = tuple[int, int | bytes]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class SentencePieceError(ValueError):
    """A file that is not a SentencePiece model, or is one that Hotcold cannot use."""


class PieceType(enum.IntEnum):
    """What a piece stands for; GGUF's ``tokenizer.ggml.token_type`` has the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Algorithm(enum.IntEnum):
    """How text is cut into pieces."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    type: PieceType


@dataclass
class SentencePieceModel:
    """The vocabulary in id order and what encoding needs; ids are None where the file says -1."""

    pieces: list[Piece] = field(default_factory=list)
    algorithm: Algorithm = Algorithm.UNIGRAM
    unknown_id: int | None = 0
    bos_id: int | None = 1
    eos_id: int | None = 2
    pad_id: int | None = None
    add_space_prefix: bool = True
    remove_extra_whitespaces: bool = True


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """Reads a ``tokenizer.model`` file.

    Raises:
        SentencePieceError: what is wrong with the file, in one line.
        OSError: it cannot be read.
    """
    if path.stat().st_size > MAX_FILE:
        raise SentencePieceError(
            f"{path} is larger than {MAX_FILE >> 20} MiB: too large for a SentencePiece model"
        )
    try:
        return _parse_model(path.read_bytes())
    except SentencePieceError as error:
        raise SentencePieceError(f"{path} is not a usable SentencePiece model: {error}") from None


def _parse_model(data: bytes) -> SentencePieceModel:
    model = SentencePieceModel()
    for number, value in _fields(data):
        if number == 1:  # repeated SentencePiece pieces
            if len(model.pieces) == MAX_PIECES:
                raise SentencePieceError(f"more than {MAX_PIECES} pieces")
            model.pieces.append(_parse_piece(_message(value), len(model.pieces)))
        elif number == 2:
            _parse_trainer(_message(value), model)
        elif number == 3:
            _parse_normalizer(_message(value), model)
    if not model.pieces:
        raise SentencePieceError("it holds no pieces")
    for what in ("unknown_id", "bos_id", "eos_id", "pad_id"):
        id = getattr(model, what)
        if id is not None and id >= len(model.pieces):
            raise SentencePieceError(f"{what} is {id}: there are {len(model.pieces)} pieces")
    return model


def _parse_piece(data: bytes, index: int) -> Piece:
    text, score, type = b"", 0.0, int(PieceType.NORMAL)
    for number, value in _fields(data):
        if number == 1:
            text = _message(value)
        elif number == 2:
            score = struct.unpack("<f", _integer(value).to_bytes(8, "little")[:4])[0]
        elif number == 3:
            type = _integer(value)
    if not 0 < len(text) <= MAX_PIECE_BYTES:
        raise SentencePieceError(f"piece {index} has {len(text)} bytes: 1 to {MAX_PIECE_BYTES} are possible")
    if not math.isfinite(score):
        raise SentencePieceError(f"piece {index} has the score {score}")
    if type not in PieceType.__members__.values():
        raise SentencePieceError(
            f"piece {index} has the unknown type {type}: 1 to {max(PieceType)} are known"
        )
    try:
        return Piece(text.decode(), score, PieceType(type))
    except UnicodeDecodeError:
        raise SentencePieceError(f"piece {index} is not UTF-8: {text[:40]!r}") from None


def _parse_trainer(data: bytes, model: SentencePieceModel) -> None:
    for number, value in _fields(data):
        if number == 3:
            algorithm = _integer(value)
            if algorithm not in Algorithm.__members__.values():
                raise SentencePieceError(
                    f"model type {algorithm} is unknown: 1 to {max(Algorithm)} are known"
                )
            model.algorithm = Algorithm(algorithm)
        elif number == 40:
            model.unknown_id = _id(value)
        elif number == 41:
            model.bos_id = _id(value)
        elif number == 42:
            model.eos_id = _id(value)
        elif number == 43:
            model.pad_id = _id(value)


def _parse_normalizer(data: bytes, model: SentencePieceModel) -> None:
    for number, value in _fields(data):
        if number == 3:
            model.add_space_prefix = bool(_integer(value))
        elif number == 4:
            model.remove_extra_whitespaces = bool(_integer(value))


def _id(value: int | bytes) -> int | None:
    """An int32 in a varint; a negative one (two's complement) means that the model has no such token."""
    id = _integer(value)
    return None if id >= 1 << 63 else id


def _integer(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise SentencePieceError("a number is stored as bytes")
    return value


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise SentencePieceError("text or a message is stored as a number")
    return value


def _fields(data: bytes) -> Iterator[_Field]:
    """The fields of one message, in file order; protobuf's rules for lengths are enforced."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire == _BYTES:
            length, position = _varint(data, position)
        elif wire in (_FIXED32, _FIXED64):
            length = 4 if wire == _FIXED32 else 8
        else:
            raise SentencePieceError(f"wire type {wire} at byte {position} is not known")
        if length > len(data) - position:
            raise SentencePieceError(
                f"field {number} claims {length} bytes where {len(data) - position} remain"
            )
        chunk = data[position : position + length]
        position += length
        yield number, chunk if wire == _BYTES else int.from_bytes(chunk, "little")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise SentencePieceError("it ends in the middle of a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & ((1 << 64) - 1), position
    raise SentencePieceError(f"a number of more than 10 bytes at byte {position}")
