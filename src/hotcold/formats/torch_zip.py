"""A vector from a file of ``torch.save``, and nothing else: its pickle is read, never executed.

Such a file is a zip of entries that are not compressed: ``NAME/data.pkl``, which describes the tensor, and
``NAME/data/KEY`` with its numbers, little-endian. The pickle must have exactly the opcodes of one tensor of
one dimension, bare or alone in a list or dict. No size is believed: entries lie inside the file, numbers
inside their entry."""

import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.formats.files import RegularFile, naming
from hotcold.formats.torch_entries import TorchFileError as TorchFileError
from hotcold.formats.torch_entries import read_archive
from hotcold.values import shown

MAX_ENTRIES = 1024
MAX_PICKLE = 1 << 16  #: bytes; a tensor's has some 300
MAX_VECTOR = 256 << 20  #: bytes

_TYPES = {
    "Float": "<f4", "Double": "<f8", "Half": "<f2", "Long": "<i8", "Int": "<i4", "Short": "<i2",
    "Char": "<i1", "Byte": "<u1",
}  # fmt: skip
_STORAGES = {f"torch {name}Storage": np.dtype(code) for name, code in _TYPES.items()}
_REBUILD, _HOOKS = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"
_UNSEEN = ("PROTO", "BINPUT", "LONG_BINPUT")  # the version, and marks that nothing here refers to
_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1")
#: rebuild(("storage", its class, key, device, length) as an id, offset, (size,), (stride,), False, hooks())
_VECTOR = (
    "GLOBAL MARK MARK BINUNICODE GLOBAL BINUNICODE BINUNICODE NUMBER TUPLE BINPERSID NUMBER NUMBER TUPLE1 "
    "NUMBER TUPLE1 NEWFALSE GLOBAL EMPTY_TUPLE REDUCE TUPLE REDUCE"
)
_PLAIN = (
    f"{_VECTOR} STOP", f"EMPTY_LIST {_VECTOR} APPEND STOP", f"EMPTY_DICT BINUNICODE {_VECTOR} SETITEM STOP"
)  # fmt: skip


def read_vector(path: Path) -> npt.NDArray[Any]:
    """The tensor's numbers ``[N]``, in their type; TorchFileError in one line for anything else."""
    with naming(path, TorchFileError):
        file = RegularFile(path)
        pickle, storages = read_archive(file, MAX_ENTRIES, MAX_PICKLE)
        dtype, key, length, offset, size, stride = _parse(pickle)
        at, nbytes = storages.get(key, (0, 0))
        held = min(length, nbytes // dtype.itemsize)
        if not 0 <= offset <= offset + size <= held:
            raise TorchFileError(
                f"its tensor has elements {shown(offset)} to {shown(offset + size)}: the storage has {held}"
            )
        if stride != 1 or not 0 < size * dtype.itemsize <= MAX_VECTOR:
            seen = f"its tensor has {size} elements at stride {shown(stride)}"
            raise TorchFileError(f"{seen}: 1 to {MAX_VECTOR // dtype.itemsize} at stride 1 are allowed")
        return np.frombuffer(file.read(at + offset * dtype.itemsize, size * dtype.itemsize), dtype)


def _parse(pickle: bytes) -> tuple[np.dtype[Any], str, int, int, int, int]:
    """Element type, key and length of the storage; the tensor's offset in it, size and stride."""
    try:
        read: list[tuple[str, Any]] = [(op.name, value) for op, value, _ in pickletools.genops(pickle)]
    except ValueError as error:
        raise TorchFileError(f"its pickle is damaged: {shown(str(error))}") from None
    read = [("NUMBER" if name in _NUMBERS else name, value) for name, value in read if name not in _UNSEEN]
    for name, value in read:
        if name == "GLOBAL" and value not in (_REBUILD, _HOOKS, *_STORAGES):
            raise TorchFileError(f"its pickle has the global {shown(value)}: only a plain vector is read")
        if name not in " ".join(_PLAIN).split():
            raise TorchFileError(f"its pickle has the opcode {name}: only a plain vector is read")
    names = [name for name, _ in read]
    v = [value for _, value in read[names.index("GLOBAL") if "GLOBAL" in names else 0 :]]
    plain = " ".join(names) in _PLAIN and (v[0], v[3], v[16]) == (_REBUILD, "storage", _HOOKS)
    if not plain or v[4] not in _STORAGES:
        raise TorchFileError("its pickle is not of one vector, bare or alone in a list or dict")
    return _STORAGES[v[4]], v[5], v[7], v[10], v[11], v[13]
