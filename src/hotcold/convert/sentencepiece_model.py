"""Reads SentencePiece's ``tokenizer.model``: a small, bounded reader of the protobuf wire format.

Only the fields that GGUF's ``llama`` tokenizer needs are decoded (``sentencepiece_model.proto`` of the
SentencePiece project gives their numbers); all others are checked for length and skipped.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import NamedTuple, TypeAlias

from hotcold.model.vocabulary import TokenType

MAX_FILE = 64 << 20
MAX_PIECES = 1 << 21
MAX_PIECE_BYTES = 4096
ALGORITHMS = {1: "UNIGRAM", 2: "BPE", 3: "WORD", 4: "CHAR"}

#: field number -> values in file order; varints and fixed-width values as unsigned integers
_Fields: TypeAlias = dict[int, list[int | bytes]]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class SentencePieceError(ValueError):
    """A file that is not a SentencePiece model, or is one that Hotcold cannot use."""


class Piece(NamedTuple):
    text: str
    score: float
    type: TokenType


class SentencePieceModel(NamedTuple):
    """The vocabulary in id order and what encoding needs; ids are None where the file says -1."""

    pieces: list[Piece]
    algorithm: str
    ids: dict[str, int | None]  #: of unknown, bos, eos and padding
    add_space_prefix: bool
    remove_extra_whitespaces: bool


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """Reads a ``tokenizer.model`` file.

    Raises:
        SentencePieceError: what is wrong with the file, in one line.
        OSError: it cannot be read.
    """
    if path.stat().st_size > MAX_FILE:
        raise SentencePieceError(f"{path} is no SentencePiece model: larger than {MAX_FILE >> 20} MiB")
    try:
        return _model(read_fields(path.read_bytes()))
    except SentencePieceError as error:
        raise SentencePieceError(f"{path} is not a usable SentencePiece model: {error}") from None


def _model(fields: _Fields) -> SentencePieceModel:
    raw = fields.get(1, [])
    if not 0 < len(raw) <= MAX_PIECES:
        raise SentencePieceError(f"it holds {len(raw) or 'no'} pieces: 1 to {MAX_PIECES} are possible")
    # A message that comes twice is one message: what the second says counts.
    trainer, normaliser = (read_fields(b"".join(map(_bytes, fields.get(number, [])))) for number in (2, 3))
    algorithm = _last(trainer, 3, 1)
    if algorithm not in ALGORITHMS:
        raise SentencePieceError(f"model type {algorithm} is unknown: 1 to {max(ALGORITHMS)} are known")
    ids: dict[str, int | None] = {}
    for number, (name, default) in enumerate((("unknown", 0), ("bos", 1), ("eos", 2), ("padding", -1)), 40):
        id = _last(trainer, number, default)
        ids[name] = None if id < 0 or id >= 1 << 63 else id  # negative in two's complement
        if id < 1 << 63 and id >= len(raw):
            raise SentencePieceError(f"{name}_id is {id}: there are {len(raw)} pieces")
    return SentencePieceModel(
        [_piece(read_fields(_bytes(piece)), index) for index, piece in enumerate(raw)],
        ALGORITHMS[algorithm],
        ids,
        add_space_prefix=bool(_last(normaliser, 3, 1)),
        remove_extra_whitespaces=bool(_last(normaliser, 4, 1)),
    )


def _piece(fields: _Fields, index: int) -> Piece:
    text = _bytes(fields.get(1, [b""])[-1])
    score = struct.unpack("<f", _last(fields, 2, 0).to_bytes(8, "little")[:4])[0]
    type = _last(fields, 3, TokenType.NORMAL)
    if not 0 < len(text) <= MAX_PIECE_BYTES:
        raise SentencePieceError(f"piece {index} has {len(text)} bytes: 1 to {MAX_PIECE_BYTES} are possible")
    if not math.isfinite(score):
        raise SentencePieceError(f"piece {index} has the score {score}")
    if not TokenType.NORMAL <= type <= TokenType.BYTE:
        raise SentencePieceError(f"piece {index} has the unknown type {type}: 1 to 6 are known")
    try:
        return Piece(text.decode(), score, TokenType(type))
    except UnicodeDecodeError:
        raise SentencePieceError(f"piece {index} is not UTF-8: {text[:40]!r}") from None


def _last(fields: _Fields, number: int, default: int) -> int:
    """The value of a field that is a number."""
    value = fields.get(number, [default])[-1]
    if isinstance(value, bytes):
        raise SentencePieceError("a number is stored as bytes")
    return value


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise SentencePieceError("text or a message is stored as a number")
    return value


def read_fields(data: bytes) -> _Fields:
    """The fields of one message; protobuf's rules for lengths are enforced."""
    fields: _Fields = {}
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        values = fields.setdefault(number, [])
        if wire == _VARINT:
            value, position = _varint(data, position)
            values.append(value)
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
        values.append(chunk if wire == _BYTES else int.from_bytes(chunk, "little"))
    return fields


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
