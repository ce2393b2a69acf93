"""Reads the tensors of a file that ``torch.save`` wrote: a state dict, or one vector. Its pickle is
interpreted, never executed.

Such a file is a zip of ``NAME/data.pkl``, a pickle, and ``NAME/data/KEY``, the little-endian numbers of one
storage each; no entry is compressed. This interpreter builds strings, numbers, tuples, lists and dicts only.
It knows the few functions that a state dict names and refuses any other. No size is trusted: entries must be
inside the file, and a tensor inside its entry."""

import math
import pickletools
import struct
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.formats.files import FileError, RegularFile, naming
from hotcold.values import shown

MAX_ENTRIES = 1 << 18
MAX_LISTING = 32 << 20  #: bytes of the zip's list of entries
MAX_PICKLE = 64 << 20  #: bytes
MAX_VECTOR = 256 << 20  #: bytes of the vector in a file of one vector
MAX_DIMENSIONS, MAX_SIZE = 16, 1 << 48  #: of a tensor; its sizes multiplied, those of 0 left out

#: PyTorch's storage -> safetensors' name of the type, and the type of the bytes
_STORAGES = {
    "torch FloatStorage": ("F32", "<f4"),
    "torch HalfStorage": ("F16", "<f2"),
    "torch BFloat16Storage": ("BF16", "<u2"),
    "torch DoubleStorage": ("F64", "<f8"),
    "torch LongStorage": ("I64", "<i8"),
    "torch IntStorage": ("I32", "<i4"),
    "torch ShortStorage": ("I16", "<i2"),
    "torch CharStorage": ("I8", "<i1"),
    "torch BoolStorage": ("BOOL", "<u1"),
    "torch ByteStorage": ("U8", "<u1"),
}
_TYPES = {name: np.dtype(code) for name, code in _STORAGES.values()}
_REBUILD, _PARAMETER = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"
_FUNCTIONS = (_REBUILD, _PARAMETER, "collections OrderedDict")
_LOCAL = struct.Struct("<4s22x2H")  # what precedes an entry: PKWARE's APPNOTE.TXT, section 4.3.7


class TorchFileError(UserError):
    """Raised for a file that ``torch.save`` does not write, or that is too large."""


@dataclass(frozen=True)
class _Global:
    name: str


class _Mark:
    pass


@dataclass(frozen=True)
class _Storage:
    """A storage. It has its own class, so that no other object of a pickle passes for one."""

    dtype: str
    key: str
    count: int  #: stated number of values


@dataclass(frozen=True)
class StoredArray:
    """One tensor of the file. ``dtype`` is safetensors' name; bfloat16 is read as its 16 bits."""

    dtype: str
    shape: tuple[int, ...]
    storage: _Storage
    offset: int  #: and strides: in values
    strides: tuple[int, ...]


class TorchState:
    """An open file and its tensors by name; TorchFileError in one line for anything but a dict of tensors.
    ``named`` makes such a dict from the pickle's object."""

    def __init__(self, path: Path, named: Callable[[Any], dict[str, StoredArray]] | None = None) -> None:
        self.path = path
        with naming(path, TorchFileError):
            self._file = RegularFile(path)
            pickle, self._data = _read_archive(self._file)
            self.tensors = (named or _state_dict)(_follow(pickle))
            for name, tensor in self.tensors.items():
                self._check(f"tensor {shown(name)}" if name else "its tensor", tensor)

    def read(self, name: str) -> npt.NDArray[Any]:
        tensor = self.tensors[name]
        kind, (at, _) = _TYPES[tensor.dtype], self._data.get(tensor.storage.key, (0, 0))
        values = np.empty(_reach(tensor), kind)
        with naming(self.path, TorchFileError):
            self._file.read_into(values.view(np.uint8).data, at + tensor.offset * kind.itemsize)
        # The stride of a dimension of size 1 is never used, and the file's may not fit into 64 bits.
        sizes = zip(tensor.shape, tensor.strides, strict=True)
        steps = [stride * kind.itemsize if n > 1 and len(values) else 0 for n, stride in sizes]
        view = np.lib.stride_tricks.as_strided(values, tensor.shape, steps, writeable=False)
        return np.asarray(view, order="C")

    def _check(self, label: str, tensor: StoredArray) -> None:
        held = self._data.get(tensor.storage.key, (0, 0))[1] // _TYPES[tensor.dtype].itemsize
        held = min(held, tensor.storage.count)
        if (end := tensor.offset + _reach(tensor)) > held:
            raise TorchFileError(f"{label} reaches to element {end}: its storage has {held}")
        if (size := math.prod(tensor.shape)) > held:
            raise TorchFileError(f"{label} has {size} elements: its storage has {held}")


def read_vector(path: Path) -> npt.NDArray[Any]:
    """The numbers ``[N]`` of a file with one vector, bare or alone in a list or dict, in their type;
    TorchFileError in one line for anything else."""
    return TorchState(path, _one_vector).read("")


class _Readable:
    """Limits the zip library's reads; TorchFileError: one read exceeds the limit of a listing."""

    def __init__(self, file: RegularFile) -> None:
        self._file = file
        self._at = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self._file.size)[whence]
        if at < 0:
            raise OSError("before the start of the file")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, n: int = -1) -> bytes:
        left = max(0, self._file.size - self._at)
        n = left if n < 0 else min(n, left)
        if n > MAX_LISTING:
            raise TorchFileError(f"its zip lists entries in {n} bytes: {MAX_LISTING} are allowed")
        data = self._file.read(self._at, n)
        self._at += n
        return data


def _read_archive(file: RegularFile) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The pickle, and the offset and the number of bytes of each storage, by its key."""
    entries = _entries(file)
    name = next((name for name in entries if name.endswith("/data.pkl")), "")
    at, nbytes = entries.get(name, (0, 0))
    if not 0 < nbytes <= MAX_PICKLE:
        raise TorchFileError(f"has {nbytes} bytes of data.pkl: 1 to {MAX_PICKLE} are allowed")
    folder = f"{name.removesuffix('.pkl')}/"
    storages = {key.removeprefix(folder): place for key, place in entries.items() if key.startswith(folder)}
    return file.read(at, nbytes), storages


def _entries(file: RegularFile) -> dict[str, tuple[int, int]]:
    """Returns the offset and the number of bytes of each entry, by its name."""
    try:
        with zipfile.ZipFile(_Readable(file)) as archive:
            listed = archive.infolist()
    except (TorchFileError, FileError):
        raise
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, OverflowError, struct.error):
        wanted = "torch.save of version 1.6 or later is needed"
        raise TorchFileError(f"is not a zip file, or is cut short: {wanted}") from None
    if len(listed) > MAX_ENTRIES:
        raise TorchFileError(f"its zip lists {len(listed)} entries: {MAX_ENTRIES} are allowed")
    entries = {}
    for entry in listed:
        if entry.compress_type or entry.flag_bits & 1:
            named = shown(entry.filename)
            raise TorchFileError(f"entry {named} is compressed or encrypted: torch.save does neither")
        at = entry.header_offset
        local = _LOCAL.unpack(file.read(at, _LOCAL.size)) if 0 <= at <= file.size - _LOCAL.size else [b""]
        data = at + _LOCAL.size + sum(local[1:])
        if local[0] != b"PK\3\4" or data + entry.file_size > file.size:
            named = shown(entry.filename)
            raise TorchFileError(f"entry {named} is damaged, or reaches past the end of the file")
        entries[entry.filename] = (data, entry.file_size)
    return entries


def _reach(tensor: StoredArray) -> int:
    """The number of values from a tensor's first to its last in the storage."""
    if 0 in tensor.shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True))


def _state_dict(made: Any) -> dict[str, StoredArray]:
    if not isinstance(made, dict) or not made:
        raise TorchFileError("its pickle is not of a dict of tensors")
    for name, value in made.items():
        if not isinstance(name, str) or not isinstance(value, StoredArray):
            raise TorchFileError(f"its pickle has {shown(name)}: only a dict of tensors is read")
    return made


def _one_vector(made: Any) -> dict[str, StoredArray]:
    held = list(made.values()) if isinstance(made, dict) else made if isinstance(made, list) else [made]
    match held:
        case [StoredArray(dtype="BF16" | "BOOL" as dtype)]:
            raise TorchFileError(f"its tensor is of type {dtype}: integers and float 16 to 64 are read")
        case [StoredArray(dtype=dtype, shape=(size,)) as vector]:
            if not 0 < size * (width := _TYPES[dtype].itemsize) <= MAX_VECTOR:
                allowed = f"1 to {MAX_VECTOR // width} are allowed"
                raise TorchFileError(f"its tensor has {size} elements: {allowed}")
            return {"": vector}
    raise TorchFileError("its pickle is not of one vector, bare or alone in a list or dict")


class _Machine:
    """The stack of a pickle's machine, and its memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self, n: int = 1) -> list[Any]:
        if n > len(self.stack):
            raise ValueError("too little on its stack")
        values = self.stack[len(self.stack) - n :]
        del self.stack[len(self.stack) - n :]
        return values

    def pop_to_mark(self) -> list[Any]:
        places = range(len(self.stack) - 1, -1, -1)
        at = next((i for i in places if isinstance(self.stack[i], _Mark)), None)
        if at is None:
            raise ValueError("no mark on its stack")
        values = self.stack[at + 1 :]
        del self.stack[at:]
        return values

    def name(self, value: str) -> None:
        if value not in (*_FUNCTIONS, *_STORAGES):
            raise TorchFileError(f"its pickle has the global {shown(value)}: only tensors are read")
        self.push(_Global(value))

    def call(self) -> None:
        function, arguments = self.pop(2)
        if function == _Global(_REBUILD):
            storage, offset, shape, strides, *_ = arguments
            self.push(_array(storage, offset, shape, strides))
        elif function == _Global(_PARAMETER):
            self.push(arguments[0])
        elif function == _Global("collections OrderedDict") and arguments == ():
            self.push({})
        else:
            raise ValueError("it calls a value that is not a function")

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(values) % 2:
            raise ValueError("items for a value that is not a dict")
        # Check before hashing: nested tuples could crash the process or take forever.
        if any(type(key) is not str for key in values[::2]):
            raise ValueError("a key that is not a text")
        target.update(zip(values[::2], values[1::2], strict=True))

    def append(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("items for a value that is not a list")
        self.stack[-1].extend(values)

    def find_storage(self) -> None:
        """Replaces a tuple ("storage", its class, its key, the device, its number of values) by a storage."""
        (id,) = self.pop()
        match id:
            case ("storage", _Global(name), str(key), _, int(count)) if name in _STORAGES:
                self.push(_Storage(_STORAGES[name][0], key, count))
            case _:
                raise ValueError("a storage is described in another way")


def _follow(pickle: bytes) -> Any:
    """Builds the pickle's object; TorchFileError for an opcode or a global that no state dict needs."""
    machine = _Machine()
    # Python warns of invalid escapes in strings; the opcodes with such strings are refused here.
    with warnings.catch_warnings(action="ignore"):
        return _run(machine, pickle)


def _run(machine: _Machine, pickle: bytes) -> Any:
    try:
        for op, value, _ in pickletools.genops(pickle):
            step = _STEPS.get(op.name)
            if step is None:
                raise TorchFileError(f"its pickle has the opcode {op.name}: only tensors are read")
            step(machine, value)
        (result,) = machine.stack
    except TorchFileError:
        raise
    except (ValueError, IndexError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise TorchFileError(f"its pickle is damaged: {shown(str(error))}") from None
    return result


def _array(storage: Any, offset: Any, shape: Any, strides: Any) -> StoredArray:
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor of a value that is not a storage")
    if type(shape) is not tuple or type(strides) is not tuple or len(shape) != len(strides):
        raise ValueError("a tensor's shape")
    if any(type(n) is not int or not 0 <= n < 1 << 62 for n in (offset, *shape, *strides)):
        raise ValueError("a tensor's shape")
    if len(shape) > MAX_DIMENSIONS or math.prod(n or 1 for n in shape) > MAX_SIZE:
        raise ValueError("a tensor's shape")
    return StoredArray(storage.dtype, shape, storage, offset, strides)


def _constant(machine: _Machine, value: Any) -> None:
    machine.push(value)


def _always(value: Callable[[], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.push(value())


def _remember(machine: _Machine, key: Any) -> None:
    machine.memo[len(machine.memo) if key is None else key] = machine.stack[-1]


def _global_from_stack(machine: _Machine, _: Any) -> None:
    module, name = machine.pop(2)
    if type(module) is not str or type(name) is not str:
        raise ValueError("a global whose name is not a text")
    machine.name(f"{module} {name}")


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(
        ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _constant
    ),
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, value: None),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _remember),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, key: machine.push(machine.memo[key])),
    "NONE": _always(lambda: None),
    "NEWTRUE": _always(lambda: True),
    "NEWFALSE": _always(lambda: False),
    "EMPTY_DICT": _always(dict),
    "EMPTY_LIST": _always(list),
    "EMPTY_TUPLE": _always(tuple),
    "MARK": _always(_Mark),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_to_mark())),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.pop(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.pop(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.pop(3))),
    "GLOBAL": lambda machine, name: machine.name(name),
    "STACK_GLOBAL": _global_from_stack,
    "BINPERSID": lambda machine, _: machine.find_storage(),
    "REDUCE": lambda machine, _: machine.call(),
    "SETITEM": lambda machine, _: machine.set_items(machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    "APPEND": lambda machine, _: machine.append(machine.pop(1)),
    "APPENDS": lambda machine, _: machine.append(machine.pop_to_mark()),
    # A module's ``_metadata`` is not part of the dict.
    "BUILD": lambda machine, _: machine.pop(1).clear(),
}
