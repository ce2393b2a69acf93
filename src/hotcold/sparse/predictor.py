"""Predictors that a model file carries: PowerInfer's, two low-rank factors per layer with a ReLU between.

In the file they are ``blk.N.fc1.weight`` (R, D) and ``blk.N.fc2.weight`` (N, R); R may differ by layer. A
neuron is a candidate when its score is at least ``powerinfer.sparse_threshold``. Their input is the residual
stream before the FFN's norm.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable

import numpy as np

from hotcold.formats.blocks import BlockTypeError, Tensor, block_type
from hotcold.formats.gguf import GGUFFile
from hotcold.kernels.backend import Backend, PredictorTensors, PredictorWeights
from hotcold.model.config import Config

THRESHOLD_KEY = "powerinfer.sparse_threshold"
MAX_RANK = 1 << 16

_CHUNK = 1 << 20  # weights checked at a time


class PredictorError(ValueError):
    """Predictor tensors that are incomplete, or do not fit the model."""


def predictor_names(file: GGUFFile) -> frozenset[str]:
    """Names of the tensors that predictors are read from; empty when the file has none."""
    return frozenset(
        name
        for name in file.tensors
        if name.startswith("blk.") and name.endswith((".fc1.weight", ".fc2.weight"))
    )


def check_predictors(file: GGUFFile, config: Config) -> int:
    """Checks threshold, names, shapes and types of all layers' predictors; reads no tensor.

    Returns:
        Bytes of all of them.

    Raises:
        PredictorError: a layer has none, a shape does not fit, or the threshold is not a number.
    """
    _threshold(file)
    missing = [i for i in range(config.layers) if any(name not in file.tensors for name in _names(i))]
    if len(missing) == config.layers:
        raise PredictorError("this file has no predictor (blk.N.fc1, blk.N.fc2): use --sparsity exact")
    if missing:
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise PredictorError(f"predictor of layer {listed} is missing: fc1 and fc2 of all layers are needed")
    for i, neurons in enumerate(config.neurons):
        first, second = (file.tensors[name] for name in _names(i))
        rank = first.shape[0]
        if first.shape != (rank, config.dim) or not 1 <= rank <= MAX_RANK:
            raise PredictorError(
                f"tensor {first.name} has shape {first.shape}: (rank, {config.dim}) is needed, "
                f"rank 1 to {MAX_RANK}"
            )
        if second.shape != (neurons, rank):
            raise PredictorError(
                f"tensor {second.name} has shape {second.shape}: {(neurons, rank)} is needed"
            )
        for info in (first, second):
            try:
                block_type(info.type)
            except BlockTypeError as error:
                raise PredictorError(f"tensor {info.name}: {error}") from None
    return sum(file.tensors[name].nbytes for i in range(config.layers) for name in _names(i))


def read_predictor(file: GGUFFile, config: Config, layer: int) -> PredictorTensors:
    """One layer's predictor, as it is in the file.

    Raises:
        PredictorError: a weight is not finite; see also :func:`check_predictors`, which goes first.
    """
    first, second = (_finite(file.load(name), name) for name in _names(layer))
    threshold = np.full(config.neurons[layer], _threshold(file), np.float32)
    return PredictorTensors(first, second, threshold, relu=True)


def load_predictors(
    file: GGUFFile, config: Config, backend: Backend, progress: Callable[[int], None] | None = None
) -> list[PredictorWeights]:
    """All layers' predictors in a backend.

    Args:
        progress: called with the bytes read after each layer.

    Raises:
        PredictorError: see :func:`check_predictors`.
    """
    check_predictors(file, config)
    loaded: list[PredictorWeights] = []
    for i in range(config.layers):
        tensors = read_predictor(file, config, i)
        loaded.append(backend.predictor_weights(tensors))
        if progress is not None:
            progress(tensors.first.nbytes + tensors.second.nbytes)
    return loaded


def _names(layer: int) -> tuple[str, str]:
    return f"blk.{layer}.fc1.weight", f"blk.{layer}.fc2.weight"


def _threshold(file: GGUFFile) -> float:
    value = file.metadata.get(THRESHOLD_KEY, 0.0)
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise PredictorError(f"{THRESHOLD_KEY} is {value!r}: a finite number is needed")
    return float(value)


def _finite(tensor: Tensor, name: str) -> Tensor:
    """Refuses NaN and infinity: a NaN score would leave a neuron out without a word."""
    rows = max(1, _CHUNK // tensor.shape[1])
    for start in range(0, tensor.shape[0], rows):
        data = tensor.data[start : start + rows]
        if not np.isfinite(Tensor(tensor.type, (len(data), tensor.shape[1]), data).dequantise()).all():
            raise PredictorError(f"tensor {name} holds values that are not finite: the file is damaged")
    return tensor
