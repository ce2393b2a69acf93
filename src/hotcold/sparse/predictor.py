"""Reads predictors from files: PowerInfer's inside a model file, fitted ones in a sidecar (docs/formats.md).

PowerInfer's are ``blk.N.fc1.weight`` (R, D) and ``blk.N.fc2.weight`` (N, R), with a ReLU between and one
threshold; they read the residual stream before the FFN's norm. A sidecar states its predictors' input, and
has a threshold per neuron. R may differ by layer."""

import math
import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.errors import UserError
from hotcold.formats.blocks import BlockTypeError, Tensor, block_type, quantise
from hotcold.formats.files import naming
from hotcold.formats.gguf import GGUFFile, TensorInfo, open_gguf, write_gguf
from hotcold.kernels.backend import Backend, PredictorTensors, PredictorWeights
from hotcold.model.config import Config
from hotcold.model.devices import Devices
from hotcold.sparse.ffn import PREDICTOR_INPUTS
from hotcold.sparse.measurement import Measurement
from hotcold.values import printable, shown

THRESHOLD_KEY = "powerinfer.sparse_threshold"
SIDECAR_TYPE = "predictor"  #: a sidecar's ``general.type``
MAX_RANK = 1 << 16

_KEY = "hotcold.predictor."
_PARTS = ("first", "second", "threshold")


class PredictorError(UserError):
    """Raised for predictors that are incomplete, damaged, or another model's."""


@dataclass(frozen=True)
class PredictorFacts:
    path: Path
    input: str  #: the predictors' input, one of ``PREDICTOR_INPUTS``
    relu: bool  #: true if there is a ReLU between the factors
    params: tuple[int, ...]  #: by layer, the number of weights in both factors
    nbytes: int
    candidates: tuple[float, ...] = ()  #: by layer, the share of candidate neurons; empty if not stated
    measured: Measurement | None = None  #: cost and gain, by which ``auto`` decides; None: not measured


def is_sidecar(file: GGUFFile) -> bool:
    return file.says("general.type", SIDECAR_TYPE)


def find_predictors(model: GGUFFile, named: Path | None = None) -> Path | None:
    """The file with a model's predictors: the named one, ``x.predictor.gguf`` in the folder of ``x.gguf``, or
    the model file."""
    beside = model.path.with_suffix(".predictor.gguf")
    default = beside if beside.exists() else model.path if predictor_names(model) else None
    return named or default


def predictor_names(file: GGUFFile) -> frozenset[str]:
    """Names of PowerInfer's predictor tensors; empty if the file has none."""
    return frozenset(name for name in file.tensors if re.fullmatch(r"blk\..*\.fc[12]\.weight", name))


def check_predictors(file: GGUFFile, config: Config, fingerprint: str | None = None) -> PredictorFacts:
    """Checks metadata, names, shapes and types of all layers' predictors; reads no tensor.

    ``file`` is a sidecar, or the model itself, for which ``fingerprint``, the model's, may be None.
    PredictorError: they are another model's, a layer has none, or a shape, type or value does not fit."""
    with naming(file.path, PredictorError):
        if fingerprint is not None:
            _check_owner(file, fingerprint)
        reads, relu = _facts(file)
        _threshold(file)
        infos = _layer_infos(file, config)
        for layer, (neurons, parts) in enumerate(zip(config.neurons, infos, strict=True)):
            if neurons:
                width = config.ffn_width(layer) if reads == "normed" else config.dim
                _check_layer(parts, width, neurons)
        return PredictorFacts(
            path=file.path,
            input=reads,
            relu=relu,
            params=tuple(sum(math.prod(each.shape) for each in parts[:2]) for parts in infos),
            nbytes=sum(each.nbytes for parts in infos for each in parts),
            candidates=_candidates(file, config),
            measured=_measured(file),
        )


def _check_owner(file: GGUFFile, fingerprint: str) -> None:
    stored = file.metadata.get(_KEY + "model_fingerprint") if is_sidecar(file) else file.fingerprint()
    if not isinstance(stored, str) or stored != fingerprint:
        owner = f"the model with fingerprint {shown(stored)}, not to this one ('{fingerprint}')"
        raise PredictorError(
            f"belongs to {owner}: run hotcold fit-predictor for this model, or use `sparsity=exact`"
        )


def _facts(file: GGUFFile) -> tuple[str, bool]:
    """``input`` and ``relu`` of PredictorFacts. PowerInfer's files state neither."""
    if not is_sidecar(file):
        return "residual", True
    reads, relu = (file.metadata.get(_KEY + key) for key in ("input", "relu"))
    if not isinstance(reads, str) or reads not in PREDICTOR_INPUTS or not isinstance(relu, bool):
        needed = f"{' or '.join(PREDICTOR_INPUTS)} and a truth value"
        got = printable(f"{reads!r} and {relu!r}")
        raise PredictorError(f"{_KEY}input and relu are {got}: {needed} are needed")
    return reads, relu


def _measured(file: GGUFFile) -> Measurement | None:
    """The measurement that a sidecar stores. PowerInfer's files have none."""
    if not is_sidecar(file):
        return None
    keys = {key.removeprefix(_KEY): value for key, value in file.metadata.items() if key.startswith(_KEY)}
    try:
        return Measurement.read(keys)
    except ValueError as error:
        raise PredictorError(f"{_KEY}{error}") from None


def _candidates(file: GGUFFile, config: Config) -> tuple[float, ...]:
    """Shares that a sidecar states for predictions of speed; empty if they are invalid."""
    shares = np.asarray(file.metadata.get(_KEY + "candidates", ()))
    if (
        shares.shape != (config.layers,)
        or shares.dtype.kind != "f"
        or not ((shares >= 0) & (shares <= 1)).all()
    ):
        return ()
    return tuple(float(share) for share in shares)


def _layer_infos(file: GGUFFile, config: Config) -> list[list[TensorInfo]]:
    """Both factors of each layer, and thresholds if the file has them; empty for layers without an FFN."""
    needed = [i for i, neurons in enumerate(config.neurons) if neurons]
    missing = [i for i in needed if any(name not in file.tensors for name in _names(file, i))]
    if len(missing) == len(needed):
        raise PredictorError("this file has no predictor (blk.N.fc1, blk.N.fc2): use `sparsity=exact`")
    if missing:
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise PredictorError(f"predictor of layer {listed} is missing: both factors of all are needed")
    return [
        [file.tensors[name] for name in _names(file, i)] if neurons else []
        for i, neurons in enumerate(config.neurons)
    ]


def _check_layer(parts: Sequence[TensorInfo], dim: int, neurons: int) -> None:
    first, rank = parts[0], parts[0].shape[0]
    if first.shape != (rank, dim) or not 1 <= rank <= MAX_RANK:
        needed = f"(rank, {dim}) is needed, rank 1 to {MAX_RANK}"
        raise PredictorError(f"tensor {first.name} has shape {first.shape}: {needed}")
    for info, shape in zip(parts, ((rank, dim), (neurons, rank), (neurons,)), strict=False):
        if info.shape != shape:
            raise PredictorError(f"tensor {info.name} has shape {info.shape}: {shape} is needed")
        try:
            block_type(info.type)
        except BlockTypeError as error:
            raise PredictorError(f"tensor {info.name}: {error}") from None


def read_predictor(file: GGUFFile, config: Config, layer: int) -> PredictorTensors:
    """One layer's predictor, after :func:`check_predictors`; PredictorError if a weight is not finite."""
    first, second, *thresholds = (_finite(file.load(name), name) for name in _names(file, layer))
    of_layer = config.experts_of(layer)
    experts, chosen = (of_layer.count, of_layer.chosen) if of_layer else (1, 1)
    relu, threshold = True, np.full(config.neurons[layer], _threshold(file), np.float32)
    if thresholds:
        relu, threshold = bool(file.metadata[_KEY + "relu"]), thresholds[0].dequantise()
    return PredictorTensors(first, second, threshold, relu, experts=experts, chosen=chosen)


def write_sidecar(
    path: Path, fingerprint: str, layers: Sequence[PredictorTensors | None], facts: Mapping[str, Any]
) -> None:
    """Writes the predictors of all layers for the model with this fingerprint; None: a layer without an FFN.
    ``facts`` are the keys ``hotcold.predictor.*``: ``input``, the keys of a :class:`Measurement`, the
    version, and figures for users."""
    relu = next(predictor.relu for predictor in layers if predictor is not None)
    keys = {"model_fingerprint": fingerprint, "relu": relu, **facts}
    tensors: dict[str, Tensor] = {}
    for i, predictor in enumerate(layers):
        if predictor is None:
            continue
        parts = (predictor.first, predictor.second, quantise(predictor.threshold, "F32"))
        tensors |= {f"blk.{i}.predictor.{part}": tensor for part, tensor in zip(_PARTS, parts, strict=True)}
    metadata = {"general.type": SIDECAR_TYPE} | {_KEY + key: value for key, value in keys.items()}
    write_gguf(path, metadata, tensors)


def write_measured(sidecar: Path, output: Path, measured: Measurement) -> None:
    """Writes a copy of a sidecar with this measurement."""
    with open_gguf(sidecar) as file:
        keys = {_KEY + key: value for key, value in measured.metadata().items()}
        tensors = {name: file.load(name) for name in file.tensors}
        write_gguf(output, file.stored_metadata() | keys, tensors)


def load_predictors(
    file: GGUFFile, config: Config, backend: Backend | Devices, fingerprint: str | None = None
) -> list[PredictorWeights | None]:
    """Loads the predictors of all layers into a backend, None for layers without an FFN; arguments and errors
    as in :func:`check_predictors`."""
    check_predictors(file, config, fingerprint)
    devices = Devices.from_backend(backend, config.layers)
    return [
        devices.predictor_weights(i, read_predictor(file, config, i)) if neurons else None
        for i, neurons in enumerate(config.neurons)
    ]


def _names(file: GGUFFile, layer: int) -> tuple[str, ...]:
    if is_sidecar(file):
        return tuple(f"blk.{layer}.predictor.{part}" for part in _PARTS)
    return f"blk.{layer}.fc1.weight", f"blk.{layer}.fc2.weight"


def _threshold(file: GGUFFile) -> float:
    value = file.metadata.get(THRESHOLD_KEY, 0.0)
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise PredictorError(f"{THRESHOLD_KEY} is {value!r}: a finite number is needed")
    return float(value)


def _finite(tensor: Tensor, name: str) -> Tensor:
    """Refuses NaN and infinity: a NaN score would silently leave a neuron out."""
    if not tensor.is_finite():
        raise PredictorError(f"tensor {name} holds values that are not finite: the file is damaged")
    return tensor
