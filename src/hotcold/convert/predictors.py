"""Predictors as PowerInfer publishes them: a folder with ``model_N.pt`` for each layer, and ``config.json``.

A file holds the two matrices of a layer's predictor, ``fc1.weight`` ``[R, D]`` and ``fc2.weight`` ``[N, R]``;
R may differ by layer. Nothing in it is executed."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.settings import ConvertError, Settings, read_settings
from hotcold.convert.source import Source, loaded
from hotcold.convert.tensor_files import open_torch_file

MAX_RANK = 1 << 16
_FILE = re.compile(r"model_(\d{1,9})\.pt")


def predictor_metadata(folder: Path) -> dict[str, Any]:
    """The threshold that a score must reach: ``sparse_threshold``, 0 where the folder does not say."""
    settings = _settings(folder)
    if "sparse_threshold" not in settings:
        return {}
    value = settings.values["sparse_threshold"]
    if type(value) not in (int, float) or not abs(value) < 1e6:
        raise settings.error("sparse_threshold", "a finite number")
    return {"powerinfer.sparse_threshold": np.float32(value)}


def predictor_sources(folder: Path, checkpoint: Checkpoint, sizes: Mapping[str, int]) -> list[Source]:
    """Of every layer; ConvertError: a layer's file is missing, is not as above, or there is one too many."""
    if "E" in sizes:
        raise ConvertError(f"{folder}: predictors of experts are not published in this form: leave them out")
    found: list[Source] = []
    for layer in range(sizes["L"]):
        path = folder / f"model_{layer}.pt"
        if not path.is_file():
            layers = f"the model has {sizes['L']} layers"
            raise ConvertError(f"{folder} has no {path.name}, the predictor of layer {layer}: {layers}")
        found += _of_layer(path, layer, checkpoint, sizes)
    numbers = [int(match[1]) for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))]
    if max(numbers) >= sizes["L"]:
        seen = f"{folder} has model_{max(numbers)}.pt, but the model has {sizes['L']} layers"
        raise ConvertError(f"{seen}: these are predictors of another model")
    return found


def _of_layer(path: Path, layer: int, checkpoint: Checkpoint, sizes: Mapping[str, int]) -> list[Source]:
    file = Checkpoint(path, checkpoint.config, open_torch_file(path))
    if set(file.files) != {"fc1.weight", "fc2.weight"}:
        raise ConvertError(f"{path} has {len(file.files)} tensors: fc1.weight and fc2.weight are needed")
    shape = file.shape("fc1.weight")
    rank = shape[0] if shape else 0
    if not 1 <= rank <= MAX_RANK:
        raise ConvertError(f"{path}: fc1.weight has {rank} rows: 1 to {MAX_RANK} are possible")
    needed = {"fc1": (rank, sizes["D"]), "fc2": (sizes["N"], rank)}
    return [
        loaded(file, f"blk.{layer}.{part}.weight", [f"{part}.weight"], shape)
        for part, shape in needed.items()
    ]


def _settings(folder: Path) -> Settings:
    if not folder.is_dir():
        raise ConvertError(
            f"{folder} is not a folder: predictors are a folder of model_0.pt, model_1.pt, ..."
        )
    path = folder / "config.json"
    return read_settings(path) if path.is_file() else Settings(path, {})
