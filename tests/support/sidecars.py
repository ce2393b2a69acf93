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
from hotcold.sparse.measurement import Measurement
from hotcold.sparse.predictor import write_sidecar

#: A measurement that lets ``auto`` use predictors.
PASSING = Measurement(
    tokens=4096,
    kl_mean=1e-4,
    ppl_ratio=1.0002,
    ppl_ratio_low=0.9996,
    ppl_ratio_high=1.0008,
    speed_ratio=1.3,
    speed_low=1.2,
    speed_high=1.4,
)


def with_sidecar(
    folder: Path,
    bound: float = -1e30,
    rank: int = 32,
    tensors: Callable[[int, int, int], PredictorTensors] | None = None,
    measured: Measurement | None = PASSING,
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
    facts = {"input": "normed"} | (measured.metadata() if measured else {})
    write_sidecar(folder / "model.predictor.gguf", fingerprint, layers, facts)
    return path
