"""Small checkpoint folders for tests: copies of the golden ones, changed in one point each."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hotcold.convert.tensor_files import open_safetensors

DATA = Path(__file__).parent.parent / "data"

#: The vocabulary of all golden checkpoints that have no file for it.
TINY_TOKENIZER = DATA / "tiny_tokenizer.model"

DTYPES = {
    "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16, "I64": "<i8", "U8": "u1",
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}

Arrays = Mapping[str, npt.NDArray[Any]]


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    """A file of this header (an object to be encoded, or the raw JSON bytes) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write_safetensors(path: Path, arrays: Arrays) -> None:
    """A safetensors file of arrays of :data:`DTYPES`."""
    header, data = {}, b""
    for name, values in arrays.items():
        raw = np.ascontiguousarray(values).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": _NAMES[values.dtype], "shape": list(values.shape), "data_offsets": offsets}
        data += raw
    path.write_bytes(safetensors_bytes(header, data))


def copy_checkpoint(folder: Path, name: str = "tiny-llama") -> Path:
    """Copies one of the golden checkpoints, with its vocabulary, to a folder of its name."""
    copy = folder / name
    shutil.copytree(DATA / name, copy)
    if name != "tiny-rwkv7":  # which has a vocabulary of its own
        shutil.copy(TINY_TOKENIZER, copy / "tokenizer.model")
    return copy


_UNCHANGED = tempfile.TemporaryDirectory(prefix="hotcold-checkpoints-")


@cache
def golden_checkpoint(name: str) -> Path:
    """Returns a copy of a golden checkpoint that all tests of this process share, and none changes."""
    return copy_checkpoint(Path(_UNCHANGED.name), name)


def change_config(checkpoint: Path, **changes: Any) -> None:
    """Sets keys of config.json; ``...`` removes one."""
    path = checkpoint / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def tensors_of(checkpoint: Path) -> dict[str, npt.NDArray[Any]]:
    file = open_safetensors(checkpoint / "model.safetensors")
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no dict)


def change_tensors(checkpoint: Path, **changes: Any) -> None:
    """Replaces tensors; double underscores stand for dots, and ``...`` removes one."""
    arrays = tensors_of(checkpoint) | {name.replace("__", "."): values for name, values in changes.items()}
    kept = {name: values for name, values in arrays.items() if values is not ...}
    write_safetensors(checkpoint / "model.safetensors", kept)


def shard(checkpoint: Path, shards: int = 3) -> None:
    """Spreads model.safetensors over several files with an index."""
    arrays = tensors_of(checkpoint)
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {tensor: names[i % shards] for i, tensor in enumerate(arrays)}
    for file in names:
        write_safetensors(checkpoint / file, {t: v for t, v in arrays.items() if weight_map[t] == file})
    index = {"metadata": {"total_size": sum(v.nbytes for v in arrays.values())}, "weight_map": weight_map}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    (checkpoint / "model.safetensors").unlink()
