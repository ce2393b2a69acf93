"""Opens a checkpoint's tensor files: safetensors, or PyTorch files, read without executing their pickle."""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hotcold.convert.settings import ConvertError, Settings, read_settings
from hotcold.extras import importing
from hotcold.formats.torch_file import TorchFileError, TorchState
from hotcold.values import printable, shown

Array: TypeAlias = npt.NDArray[Any]


class TensorFile(Protocol):
    """A file of named tensors; each is read when it is needed."""

    def names(self) -> Iterable[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str: ...  # safetensors' name
    def read(self, name: str) -> Array: ...


@dataclass(frozen=True)
class Stored:
    """A tensor's file, and its name in this file."""

    file: TensorFile
    name: str


class Safetensors:
    def __init__(self, path: Path) -> None:
        self._path, self._file = path, open_safetensors(path)

    def names(self) -> Iterable[str]:
        names: list[str] = self._file.keys()
        return names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return str(self._file.get_slice(name).get_dtype())

    def read(self, name: str) -> Array:
        """The values. Types of 8 bits that NumPy lacks are a memory map of uint8."""
        if self.dtype(name).startswith("F8_"):
            return np.memmap(self._path, np.uint8, "r", self._starts[name], self.shape(name))
        values: Array = self._file.get_tensor(name)
        return values

    @cached_property
    def _starts(self) -> dict[str, int]:
        """The offset of each tensor's bytes."""
        size, header = _header(self._path)
        return {name: size + header[name]["data_offsets"][0] for name in self.names()}


class _Torch:
    def __init__(self, path: Path) -> None:
        try:
            self._state = TorchState(path)
        except TorchFileError as error:
            raise ConvertError(str(error)) from None

    def names(self) -> Iterable[str]:
        return self._state.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._state.tensors[name].shape

    def dtype(self, name: str) -> str:
        return self._state.tensors[name].dtype

    def read(self, name: str) -> Array:
        with importing("convert", "conversion", ConvertError):
            import ml_dtypes
        values = self._state.read(name)
        return values.view(ml_dtypes.bfloat16) if self.dtype(name) == "BF16" else values


_Open: TypeAlias = Callable[[Path], TensorFile]
#: The file of a whole checkpoint, the index of a sharded one, and the class that opens it; the first counts.
_KINDS: tuple[tuple[str, str, _Open], ...] = (
    ("model.safetensors", "model.safetensors.index.json", Safetensors),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", _Torch),
)


WEIGHTS = tuple(name for single, index, _ in _KINDS for name in (single, index))


def open_tensors(folder: Path) -> dict[str, Stored]:
    """The file of each tensor; ConvertError: a file is missing, or damaged."""
    for single, index, open_file in _KINDS:
        if (folder / single).is_file():
            return stored_in(open_file(folder / single))
        if (folder / index).is_file():
            return _open_shards(folder, read_settings(folder / index), open_file, Path(single).suffix)
    wanted = " nor ".join(single for single, _, _ in _KINDS)
    raise ConvertError(f"{folder} has neither {wanted}, nor an index of either in shards: it has no weights")


def open_torch_file(path: Path) -> dict[str, Stored]:
    return stored_in(_Torch(path))


def stored_in(file: TensorFile) -> dict[str, Stored]:
    return {name: Stored(file, name) for name in file.names()}


def open_safetensors(path: Path) -> Any:
    """Opens the file with the safetensors library, which reads and checks only the header."""
    with importing("convert", "conversion", ConvertError):
        import ml_dtypes  # noqa: F401  (gives NumPy the type bfloat16)
        from safetensors import SafetensorError, safe_open
    try:
        file = safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ConvertError(f"{path} is not a whole safetensors file: {printable(str(error))}") from None
    _header(path)
    return file


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """The number of bytes before the tensors, and the header, which the library has checked. ConvertError: it
    names a tensor twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in pairs)
        if len(counts) < len(pairs):
            got = f"{path} has {shown(counts.most_common(1)[0][0])} twice in its header"
            raise ConvertError(f"{got}: which of the two counts is unknown; save or download it again")
        return dict(pairs)

    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return 8 + size, json.loads(file.read(size), object_pairs_hook=unique)


def _open_shards(folder: Path, index: Settings, open_file: _Open, suffix: str) -> dict[str, Stored]:
    shards: dict[str, TensorFile] = {}
    names: dict[str, set[str]] = {}
    tensors: dict[str, Stored] = {}
    for name, shard in index.section("weight_map").values.items():
        # A shard is a file name in the index's folder; a path could lead anywhere.
        if not isinstance(shard, str) or not shard.endswith(suffix) or Path(shard).name != shard:
            got = f"{shown(name)} is in {shown(shard)}"
            raise ConvertError(f"{index.path}: {got}: a {suffix} file name is needed")
        listed = f"which {index.path.name} lists"
        if shard not in shards:
            if not (folder / shard).is_file():
                raise ConvertError(f"{folder} has no {shard}, {listed}: download it as well")
            shards[shard] = open_file(folder / shard)
            names[shard] = set(shards[shard].names())
        if name not in names[shard]:
            raise ConvertError(f"{folder / shard} has no tensor {shown(name)}, {listed} in it")
        tensors[name] = Stored(shards[shard], name)
    if not tensors:
        raise index.error("weight_map", "an object of tensor names and files")
    return tensors
