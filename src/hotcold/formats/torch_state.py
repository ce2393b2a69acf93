"""The tensors of a state dict that ``torch.save`` wrote. Its pickle is followed, never executed.

Such a file is a zip (``torch_entries``) of ``NAME/data.pkl``, a pickle, and ``NAME/data/KEY``, the numbers of
one storage each, little-endian. Of the pickle's machine only what builds strings, numbers, tuples, lists and
dicts is here; the few functions that a state dict names stand for what they make; any other is refused. No
size is believed: entries lie inside the file, and a tensor inside its entry."""

import math
import pickletools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.formats.files import RegularFile, naming
from hotcold.formats.torch_entries import TorchFileError, read_archive
from hotcold.values import shown

MAX_ENTRIES = 1 << 18
MAX_PICKLE = 64 << 20  #: bytes
MAX_DIMENSIONS, MAX_SIZE = 16, 1 << 48  #: of a tensor; its sizes multiplied, those of 0 left out

#: PyTorch's storage -> the name that safetensors has for the type, and the type of the bytes
_STORAGES = {
    "torch FloatStorage": ("F32", "<f4"),
    "torch HalfStorage": ("F16", "<f2"),
    "torch BFloat16Storage": ("BF16", "<u2"),
    "torch DoubleStorage": ("F64", "<f8"),
    "torch LongStorage": ("I64", "<i8"),
    "torch IntStorage": ("I32", "<i4"),
    "torch BoolStorage": ("BOOL", "<u1"),
    "torch ByteStorage": ("U8", "<u1"),
}
_TYPES = {name: np.dtype(code) for name, code in _STORAGES.values()}
_REBUILD, _PARAMETER = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"
_FUNCTIONS = (_REBUILD, _PARAMETER, "collections OrderedDict")


@dataclass(frozen=True)
class _Global:
    name: str


class _Mark:
    pass


@dataclass(frozen=True)
class _Storage:
    """A class of its own, so that nothing else of a pickle can pass for one."""

    dtype: str
    key: str


@dataclass(frozen=True)
class StoredArray:
    """One tensor of the file. ``dtype`` is safetensors' name; bfloat16 is read as its 16 bits."""

    dtype: str
    shape: tuple[int, ...]
    key: str  #: of its storage
    offset: int  #: and strides: in values
    strides: tuple[int, ...]


class TorchState:
    """An open file and its tensors by name; TorchFileError in one line for anything but a dict of tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with naming(path, TorchFileError):
            self._file = RegularFile(path)
            pickle, self._data = read_archive(self._file, MAX_ENTRIES, MAX_PICKLE)
            self.tensors = _state_dict(_follow(pickle))
            for each, tensor in self.tensors.items():
                self._check(each, tensor)

    def read(self, name: str) -> npt.NDArray[Any]:
        tensor = self.tensors[name]
        kind, (at, _) = _TYPES[tensor.dtype], self._data[tensor.key]
        values = np.empty(_reach(tensor), kind)
        with naming(self.path, TorchFileError):
            self._file.read_into(values.view(np.uint8).data, at + tensor.offset * kind.itemsize)
        # Along a size of 1 nobody steps: whatever the file says there need not fit into 64 bits.
        sizes = zip(tensor.shape, tensor.strides, strict=True)
        steps = [stride * kind.itemsize if n > 1 and len(values) else 0 for n, stride in sizes]
        view = np.lib.stride_tricks.as_strided(values, tensor.shape, steps, writeable=False)
        return np.asarray(view, order="C")

    def _check(self, name: str, tensor: StoredArray) -> None:
        held = self._data.get(tensor.key, (0, 0))[1] // _TYPES[tensor.dtype].itemsize
        if not 0 <= tensor.offset <= tensor.offset + _reach(tensor) <= held:
            seen = f"tensor {shown(name)} reaches to element {tensor.offset + _reach(tensor)}"
            raise TorchFileError(f"{seen}: its storage has {held}")
        if (size := math.prod(tensor.shape)) > held:
            raise TorchFileError(f"tensor {shown(name)} has {size} elements: its storage has {held}")


def _reach(tensor: StoredArray) -> int:
    """Values from a tensor's first to its last in the storage."""
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


class _Machine:
    """The stack of a pickle's machine, and what was put aside for later."""

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
            raise TorchFileError(f"its pickle has the global {shown(value)}: only a dict of tensors is read")
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
            raise ValueError("it calls what is no function")

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(values) % 2:
            raise ValueError("items for what is no dict")
        # Before they are hashed: of tuples in tuples that would end the process, or take forever.
        if any(type(key) is not str for key in values[::2]):
            raise ValueError("a key that is no text")
        target.update(zip(values[::2], values[1::2], strict=True))

    def append(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("items for what is no list")
        self.stack[-1].extend(values)

    def find_storage(self) -> None:
        """A storage is a tuple: the word, its class, its key, the device and how many values it has."""
        (id,) = self.pop()
        match id:
            case ("storage", _Global(name), str(key), _, int()) if name in _STORAGES:
                self.push(_Storage(_STORAGES[name][0], key))
            case _:
                raise ValueError("a storage is described in another way")


def _follow(pickle: bytes) -> Any:
    """What the pickle describes; TorchFileError for an opcode or a global that no state dict needs."""
    machine = _Machine()
    # Of escapes in strings, which Python will refuse: the opcodes that have them are refused here.
    with warnings.catch_warnings(action="ignore"):
        return _run(machine, pickle)


def _run(machine: _Machine, pickle: bytes) -> Any:
    try:
        for op, value, _ in pickletools.genops(pickle):
            step = _STEPS.get(op.name)
            if step is None:
                raise TorchFileError(f"its pickle has the opcode {op.name}: only a dict of tensors is read")
            step(machine, value)
        (result,) = machine.stack
    except TorchFileError:
        raise
    except (ValueError, IndexError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise TorchFileError(f"its pickle is damaged: {shown(str(error))}") from None
    return result


def _array(storage: Any, offset: Any, shape: Any, strides: Any) -> StoredArray:
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor of what is no storage")
    if type(shape) is not tuple or type(strides) is not tuple or len(shape) != len(strides):
        raise ValueError("a tensor's shape")
    if any(type(n) is not int or not 0 <= n < 1 << 62 for n in (offset, *shape, *strides)):
        raise ValueError("a tensor's shape")
    if len(shape) > MAX_DIMENSIONS or math.prod(n or 1 for n in shape) > MAX_SIZE:
        raise ValueError("a tensor's shape")
    return StoredArray(storage.dtype, shape, storage.key, offset, strides)


def _constant(machine: _Machine, value: Any) -> None:
    machine.push(value)


def _always(value: Callable[[], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.push(value())


def _remember(machine: _Machine, key: Any) -> None:
    machine.memo[len(machine.memo) if key is None else key] = machine.stack[-1]


def _global_from_stack(machine: _Machine, _: Any) -> None:
    module, name = machine.pop(2)
    if type(module) is not str or type(name) is not str:
        raise ValueError("a global whose name is no text")
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
    # What a module notes of itself (``_metadata``) is no part of a dict.
    "BUILD": lambda machine, _: machine.pop(1).clear(),
}
