"""GGUF metadata: keys, names and typed values, read within bounds and written back.

Files are untrusted. Every length is checked against the remaining bytes before anything is allocated, in
Python integers, which do not wrap. The limits below are far above real files and bound time and memory."""

import contextlib
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.values import printable

MAX_HEADER = 128 << 20  #: bytes before the tensor data
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = 65535  # the specification's
MAX_NAME_BYTES = 64  # the specification's
MAX_STRING_BYTES = 16 << 20
MAX_TEMPLATE_BYTES = 1 << 20  #: limit of a chat template, which is compiled later
MAX_STRINGS = 1 << 21  #: limit in all arrays of a file; the largest vocabularies have 0.8 million
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

_WINDOW = 1 << 20  # bytes read at a time
_LARGEST_F32 = float(np.finfo(np.float32).max)
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class GGUFError(UserError):
    """Raised for a file that cannot be read as GGUF, or content that cannot be written as one. One line."""


class MissingFileError(GGUFError, FileNotFoundError):
    """Raised for a model's file that does not exist. The message names a similar file, or a model of the
    hub."""


#: The types of values; GGUF's number for a type is its position.
TYPES = (
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "bool", "string", "array",
    "uint64", "int64", "float64",
)  # fmt: skip
UINT32, BOOL, STRING, ARRAY = (TYPES.index(name) for name in ("uint32", "bool", "string", "array"))
DTYPES: dict[int, np.dtype[Any]] = {
    kind: np.dtype(name).newbyteorder("<") for kind, name in enumerate(TYPES) if kind not in (STRING, ARRAY)
}


@dataclass(frozen=True)
class StoredValue:
    """A metadata value as a file stores it: GGUF's number of its type, and its bytes. It can be written again
    unchanged, also if its text is not UTF-8."""

    kind: int
    data: bytes


class Cursor:
    """Reads the header of a file of ``size`` bytes; ``read(offset, n)`` returns exactly ``n`` or raises."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read = read
        self._size = size
        self._window = b""
        self._start = 0  # offset of the window in the file
        self._strings_left = MAX_STRINGS
        self.position = 0

    @property
    def remaining(self) -> int:
        return self._size - self.position

    def take(self, n: int, label: str) -> bytes:
        """The next ``n`` bytes; ``label`` names them in the error."""
        if n > self.remaining:
            need = f"{n} bytes needed at offset {self.position}, {self.remaining} remain"
            raise GGUFError(f"the file ends inside {label}: {need}; the file is cut short or damaged")
        if self.position + n > MAX_HEADER:
            raise GGUFError(f"{label} reaches beyond {MAX_HEADER >> 20} MiB, the most a header may take")
        at = self.position - self._start
        if at + n > len(self._window):
            self._window = self._read(self.position, min(max(n, _WINDOW), self.remaining))
            self._start, at = self.position, 0
        self.position += n
        return self._window[at : at + n]

    def u32(self, label: str) -> int:
        return int(_U32.unpack(self.take(4, label))[0])

    def u64(self, label: str) -> int:
        return int(_U64.unpack(self.take(8, label))[0])

    def count(self, label: str, item_bytes: int, most: int) -> int:
        """A 64-bit count of items of at least ``item_bytes`` each, checked against the file and ``most``."""
        n = self.u64(f"the number of {label}")
        if n > most or n * item_bytes > self.remaining:
            fit = f"the {self.remaining} bytes that remain hold at most {self.remaining // item_bytes}"
            raise GGUFError(
                f"{n} {label} declared: at most {most} are allowed and {fit}; the file is damaged"
            )
        return n

    def string(self, label: str, most: int = MAX_STRING_BYTES, errors: str = "strict") -> str:
        """The next string; ``errors`` says how to decode bytes that are not UTF-8, as in
        :meth:`bytes.decode`."""
        n = self.u64(f"the length of {label}")
        if n > most:
            raise GGUFError(f"{label} is {n} bytes long: at most {most} are allowed")
        data = self.take(n, label)
        try:
            return data.decode(errors=errors)
        except UnicodeDecodeError as error:
            byte = f"byte 0x{data[error.start]:02x} at {error.start}"
            raise GGUFError(f"{label} is not UTF-8: {byte}") from None

    def strings(self, n: int, label: str, errors: str) -> list[str]:
        """The next ``n`` strings; fast, because a vocabulary has hundreds of thousands."""
        self._strings_left -= n
        if self._strings_left < 0:
            raise GGUFError(f"{label} brings the strings in arrays to more than {MAX_STRINGS}: too many")
        result: list[str] = []
        length, tried = _U64.unpack_from, -1
        while len(result) < n:
            # Checks, and moves the window.
            result.append(self.string(f"item {len(result)} of {label}", errors=errors))
            window, at = self._window, self.position - self._start
            if tried != self._start:  # once a window, otherwise bad strings would take quadratic time
                plain, at = _plain_strings(window, at, n - len(result))
                result += plain
                tried = self._start
            with contextlib.suppress(struct.error, UnicodeDecodeError):  # the check above reports the fault
                while len(result) < n and (stop := at + 8 + length(window, at)[0]) <= len(window):
                    result.append(window[at + 8 : stop].decode())
                    at = stop
            self.position = self._start + at
        return result


def _plain_strings(window: bytes, start: int, most: int) -> tuple[list[str], int]:
    """Up to ``most`` leading plain strings from ``start`` on, and their end. Reads them all at once, in a
    fifth of the time of one by one.

    A length below 256 is a byte and seven zeros, which are rare elsewhere. Such a place counts as a string's
    length only if the string before it ends there."""
    size = len(window) - start
    words = np.ndarray(max(0, size - 7), "<u8", window, start, (1,))  # 8 bytes from every position
    places = np.flatnonzero(words < 256)
    if not len(places) or places[0]:
        return [], start
    ends = places + 8 + words[places].astype(np.intp)
    apart = np.flatnonzero(places[1:] != ends[:-1])
    n = min(most, int(apart[0]) + 1 if len(apart) else len(places))
    n -= int(n > 0 and ends[n - 1] > size)  # the last one may reach into the next window
    if not n:
        return [], start
    end = int(ends[n - 1])
    data = bytearray(window[start : start + end])
    np.frombuffer(data, np.uint8)[places[:n]] = 0
    if data.count(0) != 8 * n:
        return [], start
    try:
        return data.decode().split("\0" * 8)[1:], start + end
    except UnicodeDecodeError:
        return [], start


def read_value(cursor: Cursor, key: str) -> tuple[int, Any]:
    """The type and the value of one key: a Python number or ``str``, ``list[str]`` or a flat NumPy array.

    Text need not be UTF-8. In text that is only shown, other bytes become U+FFFD. In a vocabulary's lists
    they become lone surrogates, which ``surrogateescape`` turns back into the bytes."""
    label = _value_of(key)
    kind = _value_type(cursor, f"the type of the {label}", label)
    if kind == STRING:
        template = key.startswith("tokenizer.chat_template")
        return kind, cursor.string(label, MAX_TEMPLATE_BYTES if template else MAX_STRING_BYTES, "replace")
    if kind != ARRAY:
        return kind, _numbers(cursor, kind, 1, label)[0].item()
    item = _value_type(cursor, f"the item type of the {label}", label)
    if item == ARRAY:
        raise GGUFError(f"{label} is an array of arrays: only flat arrays are allowed")
    if item == STRING:
        errors = "surrogateescape" if key.startswith("tokenizer.ggml.") else "replace"
        return kind, cursor.strings(cursor.count(f"strings in the {label}", 8, MAX_STRINGS), label, errors)
    width = DTYPES[item].itemsize
    n = cursor.count(f"numbers in the {label}", width, MAX_HEADER // width)
    return kind, _numbers(cursor, item, n, label)


def _value_of(key: str) -> str:
    return f"value of '{printable(key, 80)}'"


def _value_type(cursor: Cursor, number: str, label: str) -> int:
    kind = cursor.u32(number)
    if kind >= len(TYPES):
        raise GGUFError(f"{label} has type {kind}: allowed are 0 to {len(TYPES) - 1}")
    return kind


def _numbers(cursor: Cursor, kind: int, n: int, label: str) -> npt.NDArray[Any]:
    data = bytearray(cursor.take(n * DTYPES[kind].itemsize, label))  # a copy, and writable
    if kind == BOOL and n and max(data) > 1:
        raise GGUFError(f"{label} holds the truth value {max(data)}: allowed are 0 and 1")
    return np.frombuffer(data, DTYPES[kind])


def check_key(key: str) -> None:
    if not (key.isascii() and key.isprintable() and 1 <= len(key) <= MAX_KEY_BYTES):
        needed = f"1 to {MAX_KEY_BYTES} printable ASCII characters are needed"
        raise GGUFError(f"key '{printable(key, 80)}': {needed}")


def check_name(name: str) -> None:
    plain = name.isascii() and name.isprintable() and not set(name) & set(" /\\")
    if not plain or not 1 <= len(name) <= MAX_NAME_BYTES:
        allowed = f"1 to {MAX_NAME_BYTES} printable ASCII characters without space, / and \\ are allowed"
        raise GGUFError(f"tensor name '{printable(name, 80)}': {allowed}")


def check_alignment(kind: int, value: Any) -> int:
    """Checks ``general.alignment``: a power of two from 8 to 1 MiB, stored as uint32."""
    if kind != UINT32:
        raise GGUFError(f"general.alignment is stored as {TYPES[kind]}: uint32 is needed")
    number = int(value)
    if not 8 <= number <= MAX_ALIGNMENT or number & (number - 1):
        raise GGUFError(f"general.alignment is {number}: a power of two from 8 to {MAX_ALIGNMENT} is needed")
    return number


# --- writing ---


def encode_string(text: str, label: str) -> bytes:
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        raise GGUFError(f"{label} holds half of a surrogate pair, which UTF-8 cannot encode") from None
    return _U64.pack(len(data)) + data


def encode_value(key: str, value: Any) -> tuple[int, bytes]:
    """The type of a metadata value and its bytes, without the four bytes of the type.

    A :class:`StoredValue` is written as it was read. NumPy scalars and arrays keep their type:
    ``np.uint64(5)`` is explicit. Python's ``int`` becomes the first of uint32, int32, uint64 and int64 that
    holds it; in a list int32, int64 or uint64. ``float`` becomes float32. Empty lists hold strings."""
    label = _value_of(key)
    if isinstance(value, StoredValue):
        return value.kind, value.data
    if isinstance(value, str):
        return STRING, encode_string(value, label)
    if isinstance(value, (list, tuple, np.ndarray)):
        return ARRAY, _encode_array(value, label)
    if isinstance(value, (bool, int, float)) and not isinstance(value, np.generic):
        value = _typed([value], label, (np.uint32, np.int32, np.uint64, np.int64))[0]
    if not isinstance(value, np.generic):
        raise GGUFError(f"{label} is a {type(value).__name__}: a number, text or a flat list is needed")
    return _stored(np.asarray(value), label)


def _encode_array(values: list[Any] | tuple[Any, ...] | npt.NDArray[Any], label: str) -> bytes:
    if not isinstance(values, np.ndarray):
        if all(isinstance(value, str) for value in values):
            items = (encode_string(value, f"item {i} of {label}") for i, value in enumerate(values))
            return _U32.pack(STRING) + _U64.pack(len(values)) + b"".join(items)
        values = _typed(list(values), label, (np.int32, np.int64, np.uint64))
    if values.ndim != 1:
        raise GGUFError(f"{label} has {values.ndim} dimensions: only flat arrays are allowed")
    kind, data = _stored(values, label)
    return _U32.pack(kind) + _U64.pack(len(values)) + data


def _typed(values: list[Any], label: str, integers: tuple[type[np.integer[Any]], ...]) -> npt.NDArray[Any]:
    """Plain Python numbers as an array of the first NumPy type that fits."""
    if all(isinstance(value, bool) for value in values):
        return np.array(values, np.bool_)
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in values):
        names = ", ".join(sorted({type(value).__name__ for value in values}))
        raise GGUFError(f"{label} holds {names}: numbers, texts or truth values, one kind, are needed")
    least, most = min(values), max(values)
    if all(isinstance(value, int) for value in values):
        for dtype in integers:
            if np.iinfo(dtype).min <= least and most <= np.iinfo(dtype).max:
                return np.array(values, dtype)
        span = printable(f"{least:#x} to {most:#x}", 80)
        raise GGUFError(f"{label} holds integers from {span}: no type of 64 bits covers them")
    for value in values:
        if _LARGEST_F32 < abs(value) < math.inf:
            got = printable(hex(value) if isinstance(value, int) else repr(value), 80)
            raise GGUFError(f"{label} holds {got}, too large for float32: give it as numpy.float64")
    return np.array(values, np.float32)


def _stored(values: npt.NDArray[Any], label: str) -> tuple[int, bytes]:
    for kind, dtype in DTYPES.items():
        if values.dtype.newbyteorder("<") == dtype:
            return kind, values.astype(dtype).tobytes()
    allowed = "bool, (u)int8 to (u)int64, float32 and float64"
    raise GGUFError(f"{label} has NumPy type {values.dtype}: allowed are {allowed}")
