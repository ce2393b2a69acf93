"""Converts PowerInfer's predictors, from a folder or from tensors of the checkpoint.

A predictor is two matrices for each layer, ``fc1.weight`` ``[R, D]`` and ``fc2.weight`` ``[N, R]``; R may
differ by layer. A folder has ``model_N.pt``, which is read without executing its pickle, and ``config.json``.
The checkpoint of TurboSparse-Mistral has its own predictors (PowerInfer, pull request 212)."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.settings import ConvertError, Settings, read_settings
from hotcold.convert.source import Source, loaded
from hotcold.convert.tensor_files import open_torch_file

MAX_RANK = 1 << 16
_PARTS = ("fc1", "fc2")
_FILE = re.compile(r"model_(\d{1,9})\.pt")


def predictor_metadata(folder: Path) -> dict[str, Any]:
    """The key of the threshold that scores must reach: ``sparse_threshold``, or 0."""
    settings = _settings(folder)
    if "sparse_threshold" not in settings:
        return {}
    value = settings.values["sparse_threshold"]
    if type(value) not in (int, float) or not abs(value) < 1e6:
        raise settings.error("sparse_threshold", "a finite number")
    return {"powerinfer.sparse_threshold": np.float32(value)}


def predictor_sources(folder: Path, checkpoint: Checkpoint, sizes: Mapping[str, int]) -> list[Source]:
    """The predictors of all layers. ConvertError: a layer's file is missing, wrong or superfluous."""
    if "E" in sizes:
        raise ConvertError(f"{folder}: predictors of experts are not published in this form: leave them out")
    sources: list[Source] = []
    for layer in range(sizes["L"]):
        path = folder / f"model_{layer}.pt"
        if not path.is_file():
            layers = f"the model has {sizes['L']} layers"
            raise ConvertError(f"{folder} has no {path.name}, the predictor of layer {layer}: {layers}")
        sources += _of_layer(path, layer, checkpoint, sizes)
    numbers = [int(match[1]) for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))]
    if max(numbers) >= sizes["L"]:
        got = f"{folder} has model_{max(numbers)}.pt, but the model has {sizes['L']} layers"
        raise ConvertError(f"{got}: these are predictors of another model")
    return sources


def own_predictors(checkpoint: Checkpoint, name: str, sizes: Mapping[str, int]) -> list[Source]:
    """The predictors of all layers, from tensors of this ``name`` (a layer and a part complete it), or none.

    ConvertError: only some layers have one, or one is wrong."""
    layers = [[name.format(layer, part) for part in _PARTS] for layer in range(sizes["L"])]
    if not any(each in checkpoint.files for names in layers for each in names):
        return []
    return [source for i, names in enumerate(layers) for source in _sources(checkpoint, names, i, sizes)]


def _of_layer(path: Path, layer: int, checkpoint: Checkpoint, sizes: Mapping[str, int]) -> list[Source]:
    file = Checkpoint(path, checkpoint.config, open_torch_file(path))
    names = [f"{part}.weight" for part in _PARTS]
    if set(file.files) != {*names}:
        raise ConvertError(f"{path} has {len(file.files)} tensors: fc1.weight and fc2.weight are needed")
    return _sources(file, names, layer, sizes)


def _sources(
    checkpoint: Checkpoint, names: Sequence[str], layer: int, sizes: Mapping[str, int]
) -> list[Source]:
    """The two matrices of a layer; the first one decides the rank."""
    shape = checkpoint.shape(names[0]) if names[0] in checkpoint.files else (1,)
    rank = shape[0] if shape else 0
    if not 1 <= rank <= MAX_RANK:
        raise ConvertError(f"{checkpoint.folder}: {names[0]} has {rank} rows: 1 to {MAX_RANK} are possible")
    shapes = (rank, sizes["D"]), (sizes["N"], rank)
    return [
        loaded(checkpoint, f"blk.{layer}.{part}.weight", [name], needed)
        for part, name, needed in zip(_PARTS, names, shapes, strict=True)
    ]


def _settings(folder: Path) -> Settings:
    if not folder.is_dir():
        raise ConvertError(
            f"{folder} is not a folder: predictors are a folder of model_0.pt, model_1.pt, ..."
        )
    path = folder / "config.json"
    return read_settings(path) if path.is_file() else Settings(path, {})
