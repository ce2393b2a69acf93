"""Opens the folder of a Hugging Face checkpoint: its JSON files, and its tensors by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from hotcold.convert.settings import ConvertError, Settings, read_settings
from hotcold.convert.tensor_files import Array, Stored, open_tensors

Rearrange: TypeAlias = Callable[[Array], Array]

LOADABLE = ("F32", "F16", "BF16")  #: dtypes of the safetensors format that can be converted


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder: its ``config.json``, and the place of each tensor."""

    folder: Path
    config: Settings
    files: dict[str, Stored]

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self.files[name]
        return stored.file.shape(stored.name)

    def load(self, name: str, rearrange: Rearrange = lambda values: values) -> Array:
        """Reads one tensor as it is stored: float32, float16 or bfloat16; ConvertError for others."""
        return rearrange(self._read(name, LOADABLE))

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors have the same type, shape and bytes."""
        if self.shape(name) != self.shape(other):
            return False
        first, second = (np.ascontiguousarray(self.load(each)) for each in (name, other))
        return first.dtype == second.dtype and np.array_equal(first.view(np.uint8), second.view(np.uint8))

    def load_bytes(self, name: str) -> Array:
        """Reads one tensor of uint8."""
        return self._read(name, ("U8",))

    def _read(self, name: str, allowed: Sequence[str]) -> Array:
        stored = self.files[name]
        if (dtype := stored.file.dtype(stored.name)) not in allowed:
            raise ConvertError(f"tensor {name!r} is {dtype}: only {', '.join(allowed)} can be converted")
        return stored.file.read(stored.name)

    def settings(self, name: str) -> Settings:
        path = self.folder / name
        return read_settings(path) if path.is_file() else Settings(path, {})

    def renamed(self, prefixes: Mapping[str, str], ignored: Sequence[str]) -> "Checkpoint":
        """The checkpoint with other prefixes of names, and without the tensors whose names have an ignored
        prefix."""
        files: dict[str, Stored] = {}
        for name, stored in self.files.items():
            if not name.startswith(tuple(ignored)):
                prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
                files[prefixes.get(prefix, "") + name.removeprefix(prefix)] = stored
        return replace(self, files=files)


def open_checkpoint(folder: Path) -> Checkpoint:
    if not folder.is_dir():
        raise ConvertError(f"{folder} is not a folder: a Hugging Face checkpoint folder is needed")
    if not (folder / "config.json").is_file():
        raise ConvertError(f"{folder} has no config.json: a Hugging Face checkpoint folder is needed")
    return Checkpoint(folder, read_settings(folder / "config.json"), open_tensors(folder))
