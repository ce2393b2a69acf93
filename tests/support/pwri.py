"""Writes PowerInfer's own kind of file from an ordinary GGUF file of a ReLU or dReLU model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotcold.demo import model_path
from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf, write_gguf

#: PowerInfer hard-wires the activation by architecture.
_ARCHITECTURES = {"relu": "llama", "drelu": "bamboo"}

_Floats = npt.NDArray[np.float32]


def write_pwri(
    path: Path,
    source: Path,
    predictor: Mapping[int, tuple[_Floats, _Floats]],
    threshold: float | None = 0.0,
    *,
    predictor_type: str = "F16",
) -> None:
    """Writes ``source``, whose down lies by neuron, as a ``PWRI`` file with a predictor.

    ``ffn_down`` becomes ``ffn_down_t``; ``fc1``/``fc2`` are added; no key of Hotcold's own is left.

    Args:
        predictor: layer -> ``fc1 (R, D)``, ``fc2 (N, R)``. A layer may be left out, to make a broken file.
        threshold: ``powerinfer.sparse_threshold``; None leaves the key out, which means 0.
    """
    with open_gguf(source) as file:
        metadata = dict(file.metadata)
        assert metadata.pop("hotcold.ffn.down_layout") == "by_neuron"
        old = metadata["general.architecture"]
        new = _ARCHITECTURES[metadata.pop("hotcold.ffn.activation")]
        metadata = {key.replace(f"{old}.", f"{new}.", 1): value for key, value in metadata.items()}
        metadata["general.architecture"] = new
        assert not any(key.startswith("hotcold.") for key in metadata), "PowerInfer has no such key"
        if threshold is not None:
            metadata["powerinfer.sparse_threshold"] = np.float32(threshold)
        tensors = {name.replace(".ffn_down.", ".ffn_down_t."): file.load(name) for name in file.tensors}
    for layer, (first, second) in predictor.items():
        tensors[f"blk.{layer}.fc1.weight"] = quantise(first, predictor_type)
        tensors[f"blk.{layer}.fc2.weight"] = quantise(second, predictor_type)
    write_gguf(path, metadata, tensors, magic="PWRI")


def built_in_pwri(path: Path, threshold: float) -> Path:
    """The built-in model as PowerInfer's file, with a predictor that scores every neuron 0."""
    with open_gguf(model_path()) as file:
        shapes = [file.tensors[f"blk.{i}.ffn_up.weight"].shape for i in range(6)]
    factors = {
        i: (np.zeros((32, d), np.float32), np.zeros((n, 32), np.float32)) for i, (n, d) in enumerate(shapes)
    }
    write_pwri(path, model_path(), factors, threshold)
    return path
