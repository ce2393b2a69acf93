"""Predictors in PowerInfer's form: they read the residual stream before the FFN's norm, and have a ReLU
between their factors and one threshold for all neurons of a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.predictors import predictor_metadata, predictor_sources
from hotcold.convert.settings import Settings
from hotcold.formats.blocks import Floats, Tensor, block_type, quantise
from hotcold.formats.files import naming
from hotcold.formats.gguf import GGUFFile, open_gguf
from hotcold.kernels.backend import PredictorTensors
from hotcold.model.config import Config
from hotcold.model.weights import input_norms
from hotcold.quantize.rewriting import QuantizeError
from hotcold.sparse.predictor import THRESHOLD_KEY, check_predictors, is_sidecar, read_predictor

#: Block types that PowerInfer's programs compute; others silently give NaN or wrong results there.
COMPUTED = ("F16", "Q4_0")

_DIRECTIONS = 256  # most directions for measuring the length of the residual stream
_SEED = 20260101  # the same file gives the same bytes


@dataclass(frozen=True)
class OneThreshold:
    """The factors of each layer, and the threshold of all layers."""

    layers: Sequence[tuple[Tensor, Tensor]]  #: ``(R, D)`` and ``(N, R)``
    threshold: float
    note: str = ""  #: for the user


def from_folder(folder: Path, config: Config) -> OneThreshold:
    """The predictors that PowerInfer publishes as ``model_0.pt``, ..., in F16. ConvertError: a file is
    missing or superfluous, or a shape is another model's."""
    sizes = {"L": config.layers, "D": config.dim, "N": config.neurons[0]}
    if config.experts:
        sizes["E"] = config.experts.count
    sources = predictor_sources(folder, Checkpoint(folder, Settings(folder, {}), {}), sizes)
    tensors = [quantise(np.asarray(each.load(), np.float32), "F16") for each in sources]
    threshold = predictor_metadata(folder).get(THRESHOLD_KEY, 0.0)
    return OneThreshold([*zip(tensors[::2], tensors[1::2], strict=True)], float(threshold))


def from_sidecar(path: Path, model: GGUFFile, config: Config) -> OneThreshold:
    """The predictors of a sidecar of the model. QuantizeError: this form cannot express them; PredictorError:
    they are another model's, incomplete or damaged."""
    with open_gguf(path) as file, naming(path, QuantizeError):
        if not is_sidecar(file):
            raise QuantizeError("is not a predictor file: hotcold fit-predictor makes one")
        facts = check_predictors(file, config, model.fingerprint())
        layers = [read_predictor(file, config, i) for i in range(config.layers)]
        if facts.input == "residual":
            return _of_residual(layers)
        if config.family.norm != "rms":
            raise QuantizeError(
                f"its predictors read the output of {config.architecture}'s LayerNorm, which PowerInfer "
                "does not have"
            )
        blocks = [f"blk.{i}." for i in range(config.layers)]
        names = [f"{blk}{input_norms(config, blk, model.tensors)[1]}.weight" for blk in blocks]
        norms = [model.load(name).dequantise().reshape(-1) for name in names]
        folded = [_before_the_norm(each, norm) for each, norm in zip(layers, norms, strict=True)]
    ranks = f"{max(first.shape[0] for first, _ in folded)}"
    note = "the predictors read the FFN's input after its norm, PowerInfer's read it before: its length is"
    return OneThreshold(folded, 0.0, f"{note} estimated by rows of their own (rank {ranks} at most)")


def _of_residual(layers: Sequence[PredictorTensors]) -> OneThreshold:
    """Unchanged predictors if all thresholds are equal; else rows scaled to a threshold of 1 or -1."""
    if not all(layer.relu for layer in layers):
        raise QuantizeError("its predictors have no ReLU between their factors, which PowerInfer needs")
    thresholds = np.concatenate([layer.threshold for layer in layers])
    if (thresholds == thresholds[0]).all():
        matrices = [(_computed(layer.first), _computed(layer.second)) for layer in layers]
        return OneThreshold(matrices, float(thresholds[0]))
    if not ((thresholds > 0).all() or (thresholds < 0).all()):
        got = f"its predictors have thresholds between {thresholds.min():g} and {thresholds.max():g}"
        raise QuantizeError(f"{got}: PowerInfer has one threshold, and scaling cannot change signs")
    scaled = [
        (
            _computed(layer.first),
            quantise(layer.second.dequantise() / np.abs(layer.threshold)[:, None], "F16"),
        )
        for layer in layers
    ]
    return OneThreshold(
        scaled, float(np.sign(thresholds[0])), "the rows of predictors were scaled to one threshold, in F16"
    )


def _computed(tensor: Tensor) -> Tensor:
    return tensor if tensor.type.name in COMPUTED else quantise(tensor.dequantise(), "F16")


def _before_the_norm(layer: PredictorTensors, norm: Floats) -> tuple[Tensor, Tensor]:
    """Factors in F16 that read x instead of ``norm * x / rms(x)``, with the threshold 0.

    ``score(norm * x / rms) >= t`` is ``score(norm * x) - t * rms >= 0``, since a ReLU keeps a positive
    factor. rms(x) is approximately a sum of ReLUs, too: for K random directions u, orthonormal in D
    dimensions, the mean of ``|u x|`` is ``sqrt(2 / pi) * rms(x)``, within ``sqrt((pi - 3) / 2 / K)`` of it on
    average if K is D. Thresholds are lowered by this error, which marks more neurons, not fewer."""
    first, second = layer.first.dequantise() * norm, layer.second.dequantise()
    if not layer.relu:
        first, second = np.concatenate([first, -first]), np.hstack([second, -second])
    count = min(len(norm), _DIRECTIONS)
    random = np.random.default_rng(_SEED).standard_normal((len(norm), count))
    directions = np.linalg.qr(random)[0].T.astype(np.float32)
    margin = np.sqrt((np.pi / 2 - 1) / count)
    lowered = layer.threshold - margin * np.abs(layer.threshold)
    weights = np.float32(np.sqrt(np.pi / 2) / count) * lowered[:, None].astype(np.float32)
    first = np.concatenate([first, directions, -directions])
    second = np.hstack([second, np.repeat(-weights, 2 * count, axis=1)])
    return quantise(np.ascontiguousarray(first), "F16"), quantise(np.ascontiguousarray(second), "F16")


def check_computed(names: Sequence[str], file: GGUFFile) -> None:
    """Raises QuantizeError if PowerInfer's programs do not compute the type of one of these tensors."""
    for name in names:
        info = file.tensors[name]
        if block_type(info.type).name not in COMPUTED:
            fix = "make one of these types first, with hotcold quantize"
            raise QuantizeError(f"tensor {name} is {info.type.name}: PowerInfer computes F16 and Q4_0: {fix}")
