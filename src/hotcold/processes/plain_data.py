"""Dataclasses as values that JSON has, and back; and messages of them between processes.

A field's type determines its values, so both sides must have the same version: they are one program. Fields
with their default value are left out. Numbers that JSON lacks are sent as text: ``inf``, ``-inf``, ``nan``.

A message is two lengths (unsigned, 4 bytes, little-endian), JSON in UTF-8, and then token ids as 32-bit
integers. A long prompt's ids as text would take milliseconds in which no other thread could run."""

import base64
import json
import math
import struct
import sys
import types
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
#: Data that ``json`` reads and writes.
Plain: TypeAlias = Any
Convert: TypeAlias = Callable[[Any], Any]

MOST_BYTES = 256 << 20  #: limit of a message
HEADER = struct.Struct("<II")
ID_BYTES = 4

_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


class PlainDataError(ValueError):
    """Raised for values of a wrong type, or for a message that is too long. It is a defect of Hotcold."""


def to_plain(value: object) -> Plain:
    """Converts a dataclass to a JSON object."""
    kind: Any = type(value)
    return _converters(kind)[0](value)


def from_plain(kind: type[T], plain: Plain) -> T:
    """Converts the result of :func:`to_plain` back to an object. Raises PlainDataError if the data describes
    no such object; errors of the class itself are not changed."""
    any_kind: Any = kind
    value: T = _converters(any_kind)[1](plain)
    return value


def pack(plain: Plain, ids: Sequence[int] = (), *, long: bool = False) -> bytes:
    """Returns a message. A ``long`` one is encoded in a slower way that lets other threads run meanwhile.
    Raises PlainDataError above :data:`MOST_BYTES`, or for ids of more than 32 bits."""
    try:
        text = ("".join(_JSON.iterencode(plain)) if long else _JSON.encode(plain)).encode()
    except ValueError as error:
        raise PlainDataError(str(error)) from None
    try:
        numbers = ids if isinstance(ids, array) and ids.itemsize == ID_BYTES else array("i", ids)
    except (OverflowError, TypeError) as error:
        raise PlainDataError(f"token ids of 32 bits are needed: {error}") from None
    if HEADER.size + len(text) + ID_BYTES * len(numbers) > MOST_BYTES:
        raise PlainDataError(f"a message of more than {MOST_BYTES >> 20} MiB")
    return b"".join((HEADER.pack(len(text), ID_BYTES * len(numbers)), text, _little(numbers).tobytes()))


def lengths(header: bytes) -> tuple[int, int]:
    """Returns the bytes of JSON and of ids after a header. Raises PlainDataError for invalid lengths."""
    text, ids = HEADER.unpack(header)
    if HEADER.size + text + ids > MOST_BYTES or ids % ID_BYTES:
        raise PlainDataError(f"a message of {text} and {ids} bytes: at most {MOST_BYTES} are allowed")
    return text, ids


def unpack(text: bytes | memoryview, ids: bytes | memoryview) -> tuple[Plain, "array[int]"]:
    """Returns the arguments of :func:`pack`, from the two parts after the header."""
    numbers = array("i")
    numbers.frombytes(ids)
    try:
        return json.loads(bytes(text), parse_constant=_refuse), _little(numbers)
    except (ValueError, RecursionError) as error:
        raise PlainDataError(f"a message that is not JSON: {error}") from None


class Unpacker:
    """Divides a stream of bytes into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def push(self, data: bytes) -> Iterator[tuple[Plain, "array[int]"]]:
        """Yields the messages that are now complete. Errors are those of :func:`unpack` and
        :func:`lengths`."""
        self._bytes += data
        while len(self._bytes) >= HEADER.size:
            n_text, n_ids = lengths(bytes(self._bytes[: HEADER.size]))
            start, end = HEADER.size + n_text, HEADER.size + n_text + n_ids
            if len(self._bytes) < end:
                return
            text, ids = bytes(self._bytes[HEADER.size : start]), bytes(self._bytes[start:end])
            del self._bytes[:end]
            yield unpack(text, ids)


def _refuse(name: str) -> None:
    raise PlainDataError(f"{name} is not a number of JSON")


def _little(numbers: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        numbers = array("i", numbers)
        numbers.byteswap()
    return numbers


@cache
def _converters(kind: Any) -> tuple[Convert, Convert]:
    """Returns two functions: from a value of this type to JSON's values, and back."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return _same, _same
    if kind in (int, str, bool, type(None)):
        return _same, _exactly(kind)
    if kind is float:
        return _float_to, _float_from
    if kind is bytes:
        return (lambda value: base64.b64encode(value).decode()), _bytes_from
    if origin is Literal:
        return _same, _one_of(arguments)
    if origin in (Union, types.UnionType):
        return _optional(arguments)
    if is_dataclass(kind):
        return _dataclass(kind)
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _named_tuple(kind)
    if origin is tuple and arguments[1:] != (...,):
        return _row(tuple, [_converters(each) for each in arguments])
    if origin in (tuple, list, Sequence):
        return _list(tuple if origin is tuple else list, _converters(arguments[0]))
    if origin in (dict, Mapping):
        return _mapping(*map(_converters, arguments))
    raise TypeError(f"{kind} has no plain form")


def _same(value: Any) -> Any:
    return value


def _exactly(kind: type) -> Convert:
    def back(plain: Plain) -> Any:
        if type(plain) is not kind:
            raise PlainDataError(f"{plain!r:.40} is not {kind.__name__}")
        return plain

    return back


def _one_of(allowed: Sequence[Any]) -> Convert:
    def back(plain: Plain) -> Any:
        if plain not in allowed:
            raise PlainDataError(f"{plain!r:.40} is not one of {allowed}")
        return plain

    return back


def _float_to(value: float) -> Plain:
    return float(value) if math.isfinite(value) else str(float(value))


def _float_from(plain: Plain) -> float:
    if type(plain) in (float, int) or plain in ("inf", "-inf", "nan"):
        return float(plain)
    raise PlainDataError(f"{plain!r:.40} is not a float")


def _bytes_from(plain: Plain) -> bytes:
    try:
        return base64.b64decode(plain, validate=True)
    except (TypeError, ValueError):
        raise PlainDataError(f"{plain!r:.40} is not base64") from None


def _optional(arguments: tuple[Any, ...]) -> tuple[Convert, Convert]:
    kinds = [each for each in arguments if each is not type(None)]
    if len(kinds) != 1 or len(kinds) == len(arguments):
        raise TypeError(f"{arguments} has no plain form: only X | None is allowed")
    to, back = _converters(kinds[0])
    return (
        lambda value: None if value is None else to(value),
        lambda plain: None if plain is None else back(plain),
    )


def _list(make: Callable[[Any], Any], entry: tuple[Convert, Convert]) -> tuple[Convert, Convert]:
    to, back = entry

    def from_list(plain: Plain) -> Any:
        if not isinstance(plain, list):
            raise PlainDataError(f"{plain!r:.40} is not a list")
        return make(map(back, plain))

    return (list if to is _same else lambda value: [to(each) for each in value]), from_list


def _row(make: Callable[[Any], Any], entries: Sequence[tuple[Convert, Convert]]) -> tuple[Convert, Convert]:
    """Converts a sequence in which each entry has its own type."""

    def to_row(value: Sequence[Any]) -> Plain:
        return [to(each) for (to, _), each in zip(entries, value, strict=True)]

    def from_row(plain: Plain) -> Any:
        if not isinstance(plain, list) or len(plain) != len(entries):
            raise PlainDataError(f"{plain!r:.40} is not a list of {len(entries)}")
        return make(back(each) for (_, back), each in zip(entries, plain, strict=True))

    return to_row, from_row


def _named_tuple(kind: Any) -> tuple[Convert, Convert]:
    hints = get_type_hints(kind)
    return _row(lambda values: kind(*values), [_converters(hints[name]) for name in kind._fields])


def _mapping(key: tuple[Convert, Convert], entry: tuple[Convert, Convert]) -> tuple[Convert, Convert]:
    """Converts a mapping to a list of pairs, since keys of JSON objects can only be texts."""
    to, back = _list(dict, _row(tuple, [key, entry]))
    return (lambda value: to(value.items())), back


def _dataclass(kind: Any) -> tuple[Convert, Convert]:
    hints = get_type_hints(kind)
    init_fields = [each for each in fields(kind) if each.init]
    to = [(each.name, _default(each), _converters(hints[each.name])[0]) for each in init_fields]
    back = {each.name: _converters(hints[each.name])[1] for each in init_fields}

    def to_object(value: Any) -> Plain:
        plain = {}
        for name, default, convert in to:
            field = getattr(value, name)
            if default is MISSING or type(field) is not type(default) or field != default:
                plain[name] = convert(field)
        return plain

    def from_object(plain: Plain) -> Any:
        if not isinstance(plain, dict) or not plain.keys() <= back.keys():
            raise PlainDataError(f"{plain!r:.40} is not {kind.__name__}")
        try:
            return kind(**{name: back[name](each) for name, each in plain.items()})
        except TypeError as error:  # for missing fields
            raise PlainDataError(f"{kind.__name__}: {error}") from None

    return to_object, from_object


def _default(field: Any) -> Any:
    """Returns a field's default; MISSING also for a default that a factory makes, which is always written."""
    return field.default
