"""One folder of a Hugging Face checkpoint: its JSON files and the tensors of its safetensors files."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.formats.files import printable, shown

Array: TypeAlias = npt.NDArray[Any]
Rearrange: TypeAlias = Callable[[Array], Array]

_V = TypeVar("_V")

MAX_JSON = 64 << 20
LOADABLE = ("F32", "F16", "BF16")  #: dtypes of the safetensors format that can be converted


class ConvertError(UserError):
    """A checkpoint that cannot be converted, or options that do not fit it."""


@dataclass(frozen=True)
class Settings:
    """A JSON object whose values are checked as they are read; errors name file, key and value."""

    path: Path
    values: Mapping[str, Any]

    def __contains__(self, key: str) -> bool:
        """Whether the key has a value; ``null`` counts as absent."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._typed(key, default, int, "an integer from 1 to 2^31 - 1")
        if not 1 <= value < 1 << 31:
            raise self.error(key, "an integer from 1 to 2^31 - 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value: Any = self.values[key] if key in self else default
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.error(key, "a finite number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        return self._typed(key, default, bool, "true or false")

    def text(self, key: str, default: str | None = None) -> str:
        return self._typed(key, default, str, "a string")

    def section(self, key: str) -> "Settings":
        return Settings(self.path, self._typed(key, {}, dict, "an object"))

    def token(self, key: str) -> int | None:
        """A token id; of a list the first one counts, and -1 means that there is none."""
        value = self.values.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if value in (None, -1):
            return None
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise self.error(key, "a token id")
        return value

    def error(self, key: str, needed: str) -> ConvertError:
        seen = f"is {shown(self.values[key])}" if key in self else "is missing"
        return ConvertError(f"{self.path}: {key} {seen}: {needed} is needed")

    def _typed(self, key: str, default: _V | None, kind: type[_V], needed: str) -> _V:
        value = self.values[key] if key in self else default
        if type(value) is not kind:
            raise self.error(key, needed)
        return value


def read_settings(path: Path) -> Settings:
    """Reads a JSON object of at most :data:`MAX_JSON` bytes; :class:`ConvertError` when it is not one."""
    if path.stat().st_size > MAX_JSON:
        raise ConvertError(f"{path} is larger than {MAX_JSON >> 20} MiB: too large for a configuration")
    try:
        values = json.loads(path.read_bytes())
    except RecursionError:
        raise ConvertError(f"{path}: the JSON is nested too deeply") from None
    except ValueError as error:
        raise ConvertError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConvertError(f"{path} holds a JSON {type(values).__name__}: an object is needed")
    return Settings(path, values)


@dataclass(frozen=True)
class Checkpoint:
    """A folder that was opened: its ``config.json``, and the open safetensors file of each tensor."""

    folder: Path
    config: Settings
    files: dict[str, Any]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.files[name].get_slice(name).get_shape())

    def load(self, name: str, rearrange: Rearrange = lambda values: values) -> Array:
        """Reads one tensor: float32, float16 or bfloat16, as it is stored; ConvertError for others."""
        dtype = self.files[name].get_slice(name).get_dtype()
        if dtype not in LOADABLE:
            raise ConvertError(f"tensor {name!r} is {dtype}: only {', '.join(LOADABLE)} can be converted")
        return rearrange(self.files[name].get_tensor(name))

    def settings(self, name: str) -> Settings:
        path = self.folder / name
        return read_settings(path) if path.is_file() else Settings(path, {})


def open_checkpoint(folder: Path) -> Checkpoint:
    if not folder.is_dir():
        raise ConvertError(f"{folder} is not a folder: a Hugging Face checkpoint folder is needed")
    if not (folder / "config.json").is_file():
        raise ConvertError(f"{folder} has no config.json: a Hugging Face checkpoint folder is needed")
    return Checkpoint(folder, read_settings(folder / "config.json"), _open_tensors(folder))


def open_safetensors(path: Path) -> Any:
    """The file as the safetensors library opens it, which reads and checks the header alone."""
    try:
        import ml_dtypes  # noqa: F401  (gives NumPy the type bfloat16)
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ConvertError(f"{error}: conversion needs pip install 'hotcold[convert]'") from None
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ConvertError(f"{path} is not a whole safetensors file: {printable(str(error))}") from None


def _open_tensors(folder: Path) -> dict[str, Any]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        file = open_safetensors(single)
        return dict.fromkeys(file.keys(), file)
    if not index.is_file():
        others = [f"; {path.name} is a pickle, which is never read" for path in folder.glob("*.bin")]
        found = f"{min(others)}: save the model as safetensors" if others else ""
        raise ConvertError(f"{folder} has neither {single.name} nor {index.name}{found}")
    return _open_shards(folder, read_settings(index))


def _open_shards(folder: Path, index: Settings) -> dict[str, Any]:
    shards: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for name, shard in index.section("weight_map").values.items():
        # A shard is a plain name beside the index: a path could lead anywhere.
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or Path(shard).name != shard:
            seen = f"{shown(name)} is in {shown(shard)}"
            raise ConvertError(f"{index.path}: {seen}: a .safetensors file name is needed")
        listed = f"which {index.path.name} lists"
        if shard not in shards:
            if not (folder / shard).is_file():
                raise ConvertError(f"{folder} has no {shard}, {listed}: download it as well")
            shards[shard] = open_safetensors(folder / shard)
        if name not in shards[shard].keys():  # noqa: SIM118  (no dict)
            raise ConvertError(f"{folder / shard} has no tensor {shown(name)}, {listed} in it")
        tensors[name] = shards[shard]
    if not tensors:
        raise index.error("weight_map", "an object of tensor names and files")
    return tensors
