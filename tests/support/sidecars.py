"""Predictors beside a model that name all neurons or none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hotcold.demo import model_path
from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.backend import PredictorTensors
from hotcold.sparse.predictor import write_sidecar


def with_sidecar(
    folder: Path,
    pays: list[bool],
    bound: float = -1e30,
    rank: int = 32,
    tensors: Callable[[int, int, int], PredictorTensors] | None = None,
) -> Path:
    """A copy of the built-in model with a sidecar that names all neurons if 0 reaches the bound, or none; or
    with the predictors that ``tensors`` makes of neurons, dim and rank."""
    path = folder / "model.gguf"
    shutil.copy(model_path(), path)
    with open_gguf(path) as file:
        shapes = [file.tensors[f"blk.{i}.ffn_up.weight"].shape for i in range(6)]
        fingerprint = file.fingerprint()
    layers = [
        tensors(n, d, rank) if tensors else PredictorTensors(
            quantise(np.zeros((rank, d)), "Q8_0"), quantise(np.zeros((n, rank)), "Q8_0"),
            np.full(n, bound, np.float32), relu=False,
        )
        for n, d in shapes
    ]  # fmt: skip
    write_sidecar(folder / "model.predictor.gguf", fingerprint, layers, {"input": "normed", "pays": pays})
    return path
