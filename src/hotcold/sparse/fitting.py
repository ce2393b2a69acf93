"""Fits predictors without training: a whitened truncated SVD of each layer's gate, thresholds set on text.

With ``C = L L^T`` the covariance of a layer's inputs, cutting ``gate @ L`` to its R leading singular vectors
minimises the mean square error of gates (SVD-LLM, arXiv 2403.07378). Each neuron counts in units of its
gate's standard deviation. Under dReLU a neuron needs both gate and up, so the SVD is of their sum.

Everything is computed as in the reference backend, with the factors in their block type, and measured on text
that was not used for fitting. Shapes use T tokens, D model width, N neurons, R rank."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.formats.blocks import block_type, quantise
from hotcold.formats.gguf import GGUFFile
from hotcold.kernels import open_backend
from hotcold.kernels.backend import Floats, PredictorTensors
from hotcold.kernels.numpy_ffn import Bools, ReferenceFFN, ReferencePredictor
from hotcold.model.config import Config
from hotcold.model.weights import ffn_tensors
from hotcold.sparse.predictor import PredictorError, read_predictor
from hotcold.version import __version__

#: method -> the input of predictors
INPUTS = {"svd": "normed", "train": "normed", "trained": "residual"}
RANK_STEP = 32  #: ranks are whole blocks

_LADDER = (1, 0.75, 0.5, 0.375, 0.25, 0.125)  # ranks to try, as parts of the largest
_NEWTON_STEPS = 8  # steps of the logistic regressions
_PRIOR = 0.1  # prior of the regressions, which keeps slopes finite
_NEURONS_TOGETHER = 128  # neurons per regression pass, so that temporaries stay in the cache
_CHECKED = 8  # one token in this many sets the bound of thresholds and is not used for fitting
_SLACK = 2  # factor of the allowed misses, on held-out text
_RIDGE = 1e-4  # part of the mean variance that is added to C, for directions that the text lacks


@dataclass(frozen=True)
class FitOptions:
    #: or ``train``, which improves the factors by gradients (``hotcold.training``), or ``trained``,
    #: PowerInfer's predictors in the model file
    method: str = "svd"
    recall: float | None = None  #: share of active neurons to find; None: 0.99, or the trained thresholds'
    weighted: bool = False  #: recall counts |h| times the norm of the down row instead of neurons
    type: str | None = None  #: block type of the factors; None: Q4_0, or the type of trained factors
    max_share: float = 0.15  #: limit of bytes, as a part of the layer's FFN

    def __post_init__(self) -> None:
        for name, value in (("recall", self.recall), ("max_share", self.max_share)):
            if value is not None and not 0 < value <= 1:
                raise UserError(f"`{name}` is {value}: above 0 and at most 1 is needed")
        quantise(np.zeros(256), self.stored_type or "F16")  # refuses types that cannot be written

    @property
    def target(self) -> float | None:
        """The recall for which thresholds are set; None keeps trained thresholds."""
        return 0.99 if self.recall is None and self.method != "trained" else self.recall

    @property
    def stored_type(self) -> str | None:
        """The block type of the factors; None keeps trained factors unchanged."""
        return "Q4_0" if self.type is None and self.method != "trained" else self.type

    def order(self, fit: "Fit") -> tuple[bool, float]:
        """A sort key for a layer's predictors: first predictors with at most twice the allowed misses on
        held-out text; among these, the predictor that reads least."""
        missed = 1 - (fit.weighted_recall if self.weighted else fit.recall)
        return self.target is not None and missed > _SLACK * (1 - self.target), fit.read_ratio

    def facts(self, fits: Sequence["Fit"]) -> dict[str, Any]:
        """The facts that a file keeps about its predictors."""
        facts: dict[str, Any] = {"version": __version__, "method": self.method, "weighted": self.weighted}
        facts["input"] = INPUTS[self.method]
        if self.target is not None:
            facts["target"] = self.target
        for name in ("candidates", "recall", "weighted_recall", "read_ratio"):
            facts[name] = [getattr(fit, name) for fit in fits]
        return facts


@dataclass(frozen=True)
class Fit:
    """The quality of a layer's predictor on held-out text. A neuron is active if its coefficient h is not
    0."""

    rank: int
    nbytes: int
    size_ratio: float  #: its bytes over those of the layer's FFN
    candidates: float  #: mean share of neurons that are candidates
    active: float  #: mean share of neurons that are active
    recall: float  #: share of active neurons that are candidates
    weighted_recall: float  #: the recall with neurons weighted by |h| times the norm of their down row
    read_ratio: float  #: bytes of predictor and rows that a token reads, relative to `exact`


class Fitted(NamedTuple):
    tensors: PredictorTensors
    fit: Fit


@dataclass(frozen=True)
class Activity:
    """The activity of a layer's neurons for the tokens of a text; all ``[T, N]``."""

    fires: Bools  #: the gate fires
    active: Bools  #: the coefficient h is not 0
    weight: Floats  #: |h| times the norm of the down row

    @classmethod
    def from_ffn(cls, ffn: ReferenceFFN, normed: Floats) -> "Activity":
        fires, h = ffn.coefficients(normed)
        norms = np.linalg.norm(ffn.down.values, axis=1 if ffn.down_layout == "by_neuron" else 0)
        return cls(fires, h != 0, np.abs(h) * norms)


def fit_layer(
    file: GGUFFile,
    config: Config,
    layer: int,
    options: FitOptions,
    *,
    fit_to: Mapping[str, Floats],
    held_out: Mapping[str, Floats],
) -> list[Fitted]:
    """Fits predictors of several ranks; :meth:`FitOptions.order` sorts them, the best first.

    ``fit_to`` and ``held_out`` are the layer's inputs for the two texts: ``normed``, and ``residual`` if
    predictors read it, ``[T, D]``. PredictorError: none is small enough, or the file has none."""
    reference = open_backend("reference")
    ffn = reference.ffn_weights(ffn_tensors(file, config, reference, layer))
    assert isinstance(ffn, ReferenceFFN)  # without experts
    most_bytes = options.max_share * ffn.nbytes
    x = fit_to[INPUTS[options.method]]
    fitted = None if options.method == "trained" else len(x) - len(x) // _CHECKED
    activity = Activity.from_ffn(ffn, fit_to["normed"])
    held_out_activity = Activity.from_ffn(ffn, held_out["normed"])
    if options.method == "trained":
        unfitted = iter([read_predictor(file, config, layer)])
    else:
        unfitted = _truncations(ffn, x[:fitted], most_bytes, options.stored_type)
    fits = []
    for tensors in (stored(each, options.stored_type) for each in unfitted):
        predictor = reference.predictor_weights(tensors)
        assert isinstance(predictor, ReferencePredictor)
        if predictor.nbytes > most_bytes:
            continue
        if options.target is not None:
            weight = activity.weight if options.weighted else None
            threshold = thresholds(predictor.scores(x), activity.active, options.target, weight, fitted)
            tensors = replace(tensors, threshold=threshold)
        candidates = predictor.scores(held_out[INPUTS[options.method]]) >= tensors.threshold
        fit = _judged(predictor, ffn, candidates, held_out_activity)
        fits.append(Fitted(tensors, fit))
    if not fits:
        bound = f"at most {options.max_share:.0%} of the FFN's {ffn.nbytes} bytes"
        fix = "raise `max_share`, or use a smaller `type`"
        raise PredictorError(f"layer {layer}: no predictor fits in {bound}: {fix}")
    return sorted(fits, key=lambda each: options.order(each.fit))


def stored(tensors: PredictorTensors, type: str | None) -> PredictorTensors:
    """The predictor with its factors in the block type ``type``; None keeps them unchanged."""
    if type is None:
        return tensors
    first, second = (quantise(factor.dequantise(), type) for factor in (tensors.first, tensors.second))
    return replace(tensors, first=first, second=second)


def thresholds(
    scores: Floats, active: Bools, recall: float, weight: Floats | None = None, fitted: int | None = None
) -> Floats:
    """Thresholds ``[N]`` that ``recall`` of the active pairs of token and neuron reach, and few other pairs.

    A logistic regression gives each neuron's log-odds of being active as ``slope * score + odds``; one bound
    on them serves the whole layer. Rare neurons need no special rule, since only two numbers are fitted. All
    are ``[T, N]``; ``weight`` is the weight of a pair, and a neuron's mean multiplies its odds. With
    ``fitted``, the regressions use only this number of first tokens, and the others set the bound, since a
    predictor finds more on the text that it was fitted to."""
    learned, others = slice(fitted), slice(fitted, None)
    if not active[others].any():
        others = slice(None)
    mean = scores[learned].mean(0)
    spread = scores[learned].std(0) + np.float32(1e-9)
    z = (scores - mean) / spread
    slope, odds = log_odds(z[learned], active[learned])
    if weight is not None and active[learned].any():
        count = active[learned].sum(0)
        odds += np.log((weight[learned].sum(0) + weight[learned][active[learned]].mean()) / (count + 1))
    chosen = active[others]
    weights = np.ones(int(chosen.sum())) if weight is None else weight[others][chosen].astype(np.float64)
    least = bound_for((slope * z + odds)[others][chosen], weights, recall)
    limits = np.clip((least - odds) / slope * spread + mean, -1e38, 1e38)
    lower = limits - 1e-5 * (np.abs(limits) + spread)  # keeps the neuron at the bound
    return np.asarray(lower, np.float32)


def bound_for(
    values: npt.NDArray[np.floating], weights: npt.NDArray[np.floating], recall: float
) -> np.floating | float:
    """The largest bound that values with ``recall`` of the total weight reach, or infinity."""
    order = np.argsort(values)
    missed = np.searchsorted(np.cumsum(weights[order]), (1 - recall) * weights.sum(), side="right")
    return values[order[missed]] if missed < len(order) else np.inf


def log_odds(z: Floats, active: Bools) -> npt.NDArray[np.float64]:
    """Slopes and odds at 0, ``[2, N]``, of each neuron's logistic regression on scores ``[T, N]`` of mean 0
    and deviation 1."""
    blocks = [slice(at, at + _NEURONS_TOGETHER) for at in range(0, z.shape[1], _NEURONS_TOGETHER)]
    return np.hstack([_log_odds(z[:, block], active[:, block]) for block in blocks])


def _log_odds(z: Floats, active: Bools) -> npt.NDArray[np.float64]:
    """Fits the regressions of some neurons, by Newton's method."""
    count = active.sum(0)
    slope = np.ones(len(count))
    odds = np.log((count + 1) / (len(z) - count + 1))
    for _ in range(_NEWTON_STEPS):
        p = 1 / (1 + np.exp(-np.clip(z * np.float32(slope) + np.float32(odds), -30, 30)))
        curve = p * (1 - p)
        error = active - p
        # The Hessian [[a, b], [b, c]] and the gradient (u, v) of the log-likelihood with the prior.
        a = (curve * z * z).sum(0) + _PRIOR
        b = (curve * z).sum(0)
        c = curve.sum(0) + _PRIOR
        u = (error * z).sum(0) - _PRIOR * slope
        v = error.sum(0)
        step = np.stack([c * u - b * v, a * v - b * u]) / (a * c - b * b)
        step *= np.minimum(1, (slope + 0.5) / (np.abs(step[0]) + 1e-9))  # separable neurons never converge
        slope = np.maximum(slope + step[0], 1e-3)
        odds = odds + step[1]
    return np.stack([slope, odds])


def _truncations(
    ffn: ReferenceFFN, x: Floats, most_bytes: float, type: str | None
) -> Iterator[PredictorTensors]:
    """The SVD cut to several ranks, in F32; each fits into ``most_bytes`` as ``type``."""
    neurons, dim = ffn.up.shape
    root = root_of(x)
    target = cut_to(ffn, root)
    vectors = np.linalg.eigh(target.T @ target)[1][:, ::-1]
    first = np.linalg.solve(root.T, vectors).T
    second = target @ vectors
    for rank in ranks(neurons, dim, most_bytes, type):
        yield PredictorTensors(
            first=quantise(first[:rank], "F32"),
            second=quantise(second[:, :rank], "F32"),
            threshold=np.zeros(neurons, np.float32),
            relu=False,
        )


def root_of(x: Floats) -> npt.NDArray[np.float64]:
    """The factor L ``(D, D)`` of the covariance of inputs ``[T, D]``."""
    covariance = np.cov(x, rowvar=False)
    dim = len(covariance)
    ridge = _RIDGE * covariance.trace() / dim + 1e-12
    return np.linalg.cholesky(covariance + ridge * np.eye(dim))


def cut_to(ffn: ReferenceFFN, root: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The matrix ``(N, D)`` for the SVD: an FFN's gates, each in units of its standard deviation."""
    parts = [ffn.gate or ffn.up]
    if ffn.activation == "drelu":
        parts.append(ffn.up)
    target = np.zeros(ffn.up.shape)
    for part in parts:
        rows = part.values @ root  # their lengths are the standard deviations
        target += rows / (np.linalg.norm(rows, axis=1, keepdims=True) + 1e-12)
    return target


def ranks(neurons: int, dim: int, most_bytes: float, type: str | None) -> list[int]:
    """Ranks to try, ascending: parts of the largest that fits; empty if the smallest does not fit."""
    block = block_type(type or "F32")
    step_bytes = RANK_STEP * block.row_bytes(dim) + neurons * block.row_bytes(RANK_STEP)
    threshold_bytes = 4 * neurons
    steps = min(dim // RANK_STEP, int((most_bytes - threshold_bytes) / step_bytes))
    if steps < 1:
        return []
    return sorted({RANK_STEP * max(1, round(part * steps)) for part in _LADDER})


def _judged(
    predictor: ReferencePredictor,
    ffn: ReferenceFFN,
    candidates: Bools,
    truth: Activity,
) -> Fit:
    """The cost and recall of ``candidates`` ``[T, N]`` on the text of ``truth``."""
    found = candidates & truth.active
    recall = float(found.sum() / max(1, truth.active.sum()))
    weighted_recall = float((truth.weight * found).sum() / (truth.weight.sum() or 1))
    everyone = np.ones_like(candidates)
    predicted_bytes = len(candidates) * predictor.nbytes
    predicted_bytes += rows_read(ffn, candidates, candidates & truth.fires, found)
    read_ratio = float(predicted_bytes / rows_read(ffn, everyone, truth.fires, truth.active))
    return Fit(
        rank=predictor.first.shape[0],
        nbytes=predictor.nbytes,
        size_ratio=predictor.nbytes / ffn.nbytes,
        candidates=float(candidates.mean()),
        active=float(truth.active.mean()),
        recall=recall,
        weighted_recall=weighted_recall,
        read_ratio=read_ratio,
    )


def rows_read(ffn: ReferenceFFN, gates: Bools, ups: Bools, downs: Bools) -> int:
    """Bytes of rows that all tokens read; without a gate, up is read instead."""
    gate, up, down, scales = ffn.row_bytes
    if ffn.gate is None:
        gate, up = up, 0
    runs = downs.reshape(len(downs), ffn.runs, -1).any(axis=-1).sum() if ffn.runs else 0
    return int(gates.sum() * gate + ups.sum() * up + downs.sum() * down + runs * scales)
