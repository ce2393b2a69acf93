"""Bounded reader of safetensors files: one JSON header, then raw little-endian arrays.

The header comes from strangers, so its length is checked against the file before it is read, every offset
before it is used, and all sizes are Python integers.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hotcold.formats.files import RegularFile, naming, printable

Array: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float32]

#: Bytes of one value of every dtype of the format.
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
#: Dtypes whose values can be loaded, and the arrays they are loaded into (BF16 as its bits).
LOADABLE: dict[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}

MAX_HEADER = 32 << 20
MAX_DIMENSIONS = 8
MAX_NAME = 1024


class SafetensorsError(ValueError):
    """A file that is not valid safetensors, or holds what Hotcold does not read."""


@dataclass(frozen=True)
class SafetensorsInfo:
    """One tensor: ``dtype`` by the format's name, ``shape`` outermost first, ``offset`` in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SafetensorsFile:
    """An opened file: ``tensors`` in file order, ``metadata`` as its writer left it, ``size`` in bytes."""

    path: Path
    size: int
    metadata: dict[str, str]
    tensors: dict[str, SafetensorsInfo]
    _file: RegularFile

    def load(self, name: str) -> Array:
        """Reads one tensor: float32, float16, or for BF16 its bits as uint16 (see :func:`as_float32`).

        ``KeyError``: no such tensor. ``SafetensorsError``: not a dtype of these, or the file has changed.
        """
        info = self.tensors[name]
        with naming(self.path, SafetensorsError):
            if info.dtype not in LOADABLE:
                choices = ", ".join(LOADABLE)
                raise SafetensorsError(f"tensor {name!r} is {info.dtype}: only {choices} can be converted")
            values = np.empty(info.shape, LOADABLE[info.dtype])
            self._file.read_into(values.reshape(-1).view(np.uint8).data, info.offset)
        return values


def as_float32(values: Array) -> Floats:
    """What :meth:`SafetensorsFile.load` gave, as float32; exact. uint16 means bfloat16 bits."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def open_safetensors(path: str | os.PathLike[str]) -> SafetensorsFile:
    """Opens a file and checks its header; ``SafetensorsError`` says in one line what is wrong with it."""
    path = Path(path)
    with naming(path, SafetensorsError):
        file = RegularFile(path)
        header, start = _read_header(file)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise SafetensorsError("__metadata__ must be an object of strings")
        tensors = [_tensor(name, entry, start) for name, entry in header.items()]
        tensors.sort(key=lambda info: (info.offset, info.nbytes))
        _check_layout(tensors, start, file.size)
        return SafetensorsFile(path, file.size, metadata, {info.name: info for info in tensors}, file)


def _read_header(file: RegularFile) -> tuple[dict[str, Any], int]:
    if file.size < 10:
        raise SafetensorsError(f"has {file.size} bytes: too short for a safetensors file")
    length, most = int.from_bytes(file.read(0, 8), "little"), min(file.size - 8, MAX_HEADER)
    if not 2 <= length <= most:
        raise SafetensorsError(
            f"header length {length}: 2 to {most} is possible in {file.size} bytes (a safetensors file?)"
        )
    text = file.read(8, length)
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise SafetensorsError("the header's JSON is nested too deeply: 3 levels are needed") from None
    except ValueError as error:  # bad UTF-8, bad JSON, duplicate keys, numbers of thousands of digits
        raise SafetensorsError(f"the header is not valid: {_clip(error)}") from None
    if not isinstance(header, dict):
        raise SafetensorsError(f"the header is a JSON {type(header).__name__}: an object is needed")
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"duplicate key {_clip(key)!r}")
        result[key] = value
    return result


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _tensor(name: str, entry: Any, start: int) -> SafetensorsInfo:
    where = f"tensor {_clip(name)!r}"
    if not 0 < len(name) <= MAX_NAME:
        raise SafetensorsError(f"{where}: a name has 1 to {MAX_NAME} characters, not {len(name)}")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise SafetensorsError(f"{where}: exactly dtype, shape and data_offsets are needed")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise SafetensorsError(f"{where}: unknown dtype {_clip(dtype)!r}: known are {', '.join(DTYPE_BYTES)}")
    if not _counts(shape) or len(shape) > MAX_DIMENSIONS:
        needed = f"at most {MAX_DIMENSIONS} integers from 0 to 2^63 are needed"
        raise SafetensorsError(f"{where}: shape {_clip(shape)}: {needed}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        needed = "[begin, end], 0 <= begin <= end, is needed"
        raise SafetensorsError(f"{where}: data_offsets {_clip(offsets)}: {needed}")
    nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise SafetensorsError(
            f"{where}: {dtype} of shape {_clip(shape)} has {_clip(nbytes)} bytes, "
            f"but data_offsets span {_clip(offsets[1] - offsets[0])}"
        )
    return SafetensorsInfo(name, dtype, tuple(shape), start + offsets[0], nbytes)


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_layout(tensors: list[SafetensorsInfo], start: int, size: int) -> None:
    """The format allows neither holes nor overlaps: the tensors tile the file's data exactly."""
    end = start
    for info in tensors:
        if info.offset != end:
            kind = "overlaps its neighbour" if info.offset < end else "leaves a hole before it"
            raise SafetensorsError(
                f"tensor {_clip(info.name)!r} begins at offset {_clip(info.offset - start)} "
                f"and {kind}, which ends at {_clip(end - start)}"
            )
        end += info.nbytes
    if end != size:
        raise SafetensorsError(
            f"the tensors end at byte {_clip(end)}, the file at {size}: it is cut short or has bytes to spare"
        )


def _clip(value: object) -> str:
    return printable(str(value), 100)
