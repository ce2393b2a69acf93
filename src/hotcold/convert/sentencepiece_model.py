"""Reads SentencePiece's ``tokenizer.model``: a small, bounded reader of the protobuf wire format.

Only the fields that GGUF's ``llama`` tokenizer needs are decoded (``sentencepiece_model.proto`` of the
SentencePiece project gives their numbers); all others are checked for length and skipped."""

import io
import math
import struct
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

from hotcold.convert.checkpoint import ConvertError
from hotcold.model.vocabulary import TokenType

MAX_FILE = 64 << 20
MAX_PIECES = 1 << 21
MAX_PIECE_BYTES = 4096
ALGORITHMS = {1: "UNIGRAM", 2: "BPE", 3: "WORD", 4: "CHAR"}

#: field number -> values in file order; varints and fixed-width values as unsigned integers
_Fields: TypeAlias = dict[int, list[int | bytes]]
_Value = TypeVar("_Value", int, bytes)

_VARINT, _BYTES, _FIXED = 0, 2, {1: 8, 5: 4}  # wire types; of those of one width the bytes


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
    """Reads a ``tokenizer.model`` file."""
    if path.stat().st_size > MAX_FILE:
        raise ConvertError(f"{path} is no SentencePiece model: larger than {MAX_FILE >> 20} MiB")
    try:
        return _model(read_fields(path.read_bytes()))
    except ConvertError as error:
        raise ConvertError(f"{path} is not a usable SentencePiece model: {error}") from None


def _model(fields: _Fields) -> SentencePieceModel:
    raw = _all(fields, 1, b"")
    if not 0 < len(raw) <= MAX_PIECES:
        raise ConvertError(f"it holds {len(raw) or 'no'} pieces: 1 to {MAX_PIECES} are possible")
    # A message that comes twice is one message: what the second says counts.
    trainer, normaliser = (read_fields(b"".join(_all(fields, number, b""))) for number in (2, 3))
    algorithm = _last(trainer, 3, 1)
    if algorithm not in ALGORITHMS:
        raise ConvertError(f"model type {algorithm} is unknown: 1 to {max(ALGORITHMS)} are known")
    ids: dict[str, int | None] = {}
    for number, (name, default) in enumerate((("unknown", 0), ("bos", 1), ("eos", 2), ("padding", -1)), 40):
        id = _last(trainer, number, default)
        ids[name] = None if id < 0 or id >= 1 << 63 else id  # negative in two's complement
        if len(raw) <= id < 1 << 63:
            raise ConvertError(f"{name}_id is {id}: there are {len(raw)} pieces")
    pieces = [_piece(read_fields(piece), index) for index, piece in enumerate(raw)]
    space_prefix, single_spaces = (bool(_last(normaliser, number, 1)) for number in (3, 4))
    return SentencePieceModel(pieces, ALGORITHMS[algorithm], ids, space_prefix, single_spaces)


def _piece(fields: _Fields, index: int) -> Piece:
    text, type = _last(fields, 1, b""), _last(fields, 3, int(TokenType.NORMAL))
    score = struct.unpack("<f", _last(fields, 2, 0).to_bytes(8, "little")[:4])[0]
    if not 0 < len(text) <= MAX_PIECE_BYTES:
        raise ConvertError(f"piece {index} has {len(text)} bytes: 1 to {MAX_PIECE_BYTES} are possible")
    if not math.isfinite(score):
        raise ConvertError(f"piece {index} has the score {score}")
    if not TokenType.NORMAL <= type <= TokenType.BYTE:
        raise ConvertError(f"piece {index} has the unknown type {type}: 1 to 6 are known")
    try:
        return Piece(text.decode(), score, TokenType(type))
    except UnicodeDecodeError:
        raise ConvertError(f"piece {index} is not UTF-8: {text[:40]!r}") from None


def _last(fields: _Fields, number: int, default: _Value) -> _Value:
    """A field's value; of several the last counts."""
    values = _all(fields, number, default)
    return values[-1] if values else default


def _all(fields: _Fields, number: int, like: _Value) -> list[_Value]:
    """All values of a field that is a number or bytes, as ``like`` is."""
    values = [value for value in fields.get(number, []) if isinstance(value, type(like))]
    if len(values) < len(fields.get(number, [])):
        kinds = ("a number", "bytes") if isinstance(like, int) else ("text or a message", "a number")
        raise ConvertError("{} is stored as {}".format(*kinds))
    return values


def read_fields(data: bytes) -> _Fields:
    """The fields of one message; protobuf's rules for lengths are enforced."""
    fields: _Fields = {}
    stream = io.BytesIO(data)
    while (position := stream.tell()) < len(data):
        number, wire = divmod(_varint(stream), 8)
        if wire not in (_VARINT, _BYTES, *_FIXED):
            raise ConvertError(f"wire type {wire} at byte {position} is not known")
        value: int | bytes = _FIXED.get(wire) or _varint(stream)
        if wire != _VARINT:
            length, rest = int(value), len(data) - stream.tell()
            if length > rest:
                raise ConvertError(f"field {number} claims {length} bytes where {rest} remain")
            chunk = stream.read(length)
            value = chunk if wire == _BYTES else int.from_bytes(chunk, "little")
        fields.setdefault(number, []).append(value)
    return fields


def _varint(stream: io.BytesIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        if not (byte := stream.read(1)):
            raise ConvertError("it ends in the middle of a number")
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value & ((1 << 64) - 1)
    raise ConvertError(f"a number of more than 10 bytes at byte {stream.tell()}")
