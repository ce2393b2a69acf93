"""Fits predictors without training: a whitened truncated SVD of each layer's gate, thresholds set on text.

With ``C = L L^T`` the covariance of a layer's inputs, cutting ``gate @ L`` to its R leading singular vectors
makes the least mean square error of gates (SVD-LLM, arXiv 2403.07378). Each neuron counts in units of its
gate's standard deviation. Under dReLU a neuron needs both gate and up, and their sum is what is cut.

All is computed as the reference backend does, with the factors as they are stored, and judged by text that
was not fitted to. Shapes use T tokens, D model dim, N neurons, R rank."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import block_type, quantise
from hotcold.formats.gguf import GGUFFile
from hotcold.kernels.backend import Floats, PredictorTensors
from hotcold.kernels.reference import _FFN as ReferenceFFN
from hotcold.kernels.reference import Bools, ReferenceBackend
from hotcold.kernels.reference import _Predictor as ReferencePredictor
from hotcold.model.config import Config
from hotcold.model.weights import ffn_tensors
from hotcold.sparse.predictor import PredictorError, read_predictor

INPUTS = {"svd": "normed", "trained": "residual"}  #: by method, what predictors read
RANK_STEP = 32  #: ranks are whole blocks

_LADDER = (1, 0.75, 0.5, 0.375, 0.25, 0.125)  # ranks that are tried, as parts of the largest
_NEWTON_STEPS, _PRIOR = 8, 0.1  # of the logistic regressions; the prior keeps slopes finite
_NEURONS = 128  # regressed together, so that temporaries stay in the cache
_RIDGE = 1e-4  # of the mean variance, added to C for directions that the text never took
_GAIN = 0.95  # prediction pays where it reads less than this part of what `exact` reads
_SLACK = 2  # and misses at most this many times what it may: other text costs a little


@dataclass
class FitOptions:
    method: str = "svd"  #: or ``trained``: PowerInfer's, from the model's own file
    recall: float | None = None  #: of the active neurons; None: 0.99, or what trained thresholds give
    weighted: bool = False  #: recall counts |h| times the norm of the down row instead of neurons
    type: str | None = None  #: block type of the factors; None: Q4_0, or that of the trained ones
    share: float = 0.15  #: the most bytes, as a part of the layer's FFN

    def __post_init__(self) -> None:
        if self.method == "svd":
            self.recall, self.type = 0.99 if self.recall is None else self.recall, self.type or "Q4_0"
        for name, value in (("recall", self.recall), ("max-share", self.share)):
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"--{name} is {value}: above 0 and at most 1 is needed")
        quantise(np.zeros(256), self.type or "F16")  # refuses what cannot be written


@dataclass(frozen=True)
class Fit:
    """What a layer's predictor does on held-out text. A neuron is active when its coefficient h is not 0."""

    rank: int
    nbytes: int
    share: float  #: of the bytes of the layer's FFN
    marked: float  #: mean share of neurons that are candidates
    active: float  #: mean share of neurons that are active
    recall: float  #: share of the active ones that are candidates
    weighted_recall: float  #: the same, each counted by |h| times the norm of its down row
    read: float  #: bytes of predictor and rows that a token reads, as a part of what `exact` reads
    pays: bool


Truth: TypeAlias = tuple[Bools, Bools, Floats]
#: Predictors of one layer; the first reads the fewest bytes.
Ladder: TypeAlias = list[tuple[PredictorTensors, Fit]]


def fit_layer(
    file: GGUFFile, config: Config, layer: int, texts: Sequence[Mapping[str, Floats]], options: FitOptions
) -> Ladder:
    """Predictors of several ranks. ValueError: none is small enough, or the file has none.

    ``texts`` are the layer's inputs, ``normed`` (and ``residual``, if predictors read it) ``[T, D]``, for the
    text to fit to and for the one held out."""
    reference = ReferenceBackend()
    ffn = reference.ffn_weights(ffn_tensors(file, config, reference, layer))
    x, held_out = (text[INPUTS[options.method]] for text in texts)
    (_, active, weight), judge = (_truth(ffn, text["normed"]) for text in texts)
    ladder, most = [], options.share * ffn.nbytes
    trained = options.method == "trained"
    for tensors in [read_predictor(file, config, layer)] if trained else _cut(ffn, x, most, options.type):
        if options.type is not None:
            first, second = (quantise(f.dequantise(), options.type) for f in (tensors.first, tensors.second))
            tensors = replace(tensors, first=first, second=second)
        predictor = reference.predictor_weights(tensors)
        if options.recall is not None:
            counts = weight if options.weighted else None
            found = thresholds(predictor.scores(x), active, options.recall, counts)
            tensors = replace(tensors, threshold=found)
        if predictor.nbytes <= most:
            marked = predictor.scores(held_out) >= tensors.threshold
            ladder.append((tensors, _judged(predictor, ffn, marked, judge, options)))
    if not ladder:
        bound = f"at most {options.share:.0%} of the FFN's {ffn.nbytes} bytes"
        fix = "raise --max-share, or take a smaller --type"
        raise PredictorError(f"layer {layer}: no predictor takes {bound}: {fix}")
    return sorted(ladder, key=lambda each: each[1].read)


def thresholds(scores: Floats, active: Bools, recall: float, weight: Floats | None = None) -> Floats:
    """Thresholds ``[N]`` that ``recall`` of the active pairs of token and neuron reach, and few others.

    A logistic regression gives each neuron's log-odds of being active as ``slope * score + odds``; one bound
    on them serves the whole layer. Rare neurons, with two numbers to learn, need no rule of their own. All
    are ``[T, N]``; ``weight`` is how much a pair counts, and a neuron's mean multiplies its odds."""
    count, mean, spread = active.sum(0), scores.mean(0), scores.std(0) + np.float32(1e-9)
    z = (scores - mean) / spread
    blocks = (slice(start, start + _NEURONS) for start in range(0, len(mean), _NEURONS))
    slope, odds = np.hstack([_log_odds(z[:, block], active[:, block]) for block in blocks])
    weights = np.ones(int(count.sum())) if weight is None else weight[active].astype(np.float64)
    if weight is not None and len(weights):
        odds += np.log((weight.sum(0) + weights.mean()) / (count + 1))
    reached = (slope * z + odds)[active]
    order = np.argsort(reached)
    missed = np.searchsorted(np.cumsum(weights[order]), (1 - recall) * weights.sum(), side="right")
    bound = reached[order[missed]] if missed < len(order) else np.inf
    limits = np.clip((bound - odds) / slope * spread + mean, -1e38, 1e38)
    lower = limits - 1e-5 * (np.abs(limits) + spread)  # keeps the one at the bound
    return np.asarray(lower, np.float32)


def _log_odds(z: Floats, active: Bools) -> npt.NDArray[np.float64]:
    """Slopes and odds at 0 of each neuron's logistic regression, ``[2, N]``, by Newton's method."""
    count = active.sum(0)
    slope, odds = np.ones(len(count)), np.log((count + 1) / (len(z) - count + 1))
    for _ in range(_NEWTON_STEPS):
        p = 1 / (1 + np.exp(-np.clip(z * np.float32(slope) + np.float32(odds), -30, 30)))
        curve, error = p * (1 - p), active - p
        a, b, c = (curve * z * z).sum(0) + _PRIOR, (curve * z).sum(0), curve.sum(0) + _PRIOR
        u, v = (error * z).sum(0) - _PRIOR * slope, error.sum(0)
        step = np.stack([c * u - b * v, a * v - b * u]) / (a * c - b * b)
        step *= np.minimum(1, (slope + 0.5) / (np.abs(step[0]) + 1e-9))  # neurons that separate have no end
        slope, odds = np.maximum(slope + step[0], 1e-3), odds + step[1]
    return np.stack([slope, odds])


def _truth(ffn: ReferenceFFN, normed: Floats) -> Truth:
    """Whose gate fires, who is active, and |h| times the norm of the down row; ``[T, N]`` each."""
    fires, h = ffn.coefficients(normed)
    norms = np.linalg.norm(ffn.down.values, axis=1 if ffn.down_layout == "by_neuron" else 0)
    return fires, h != 0, np.abs(h) * norms


def _cut(ffn: ReferenceFFN, x: Floats, most: float, type: str | None) -> Iterator[PredictorTensors]:
    """The SVD cut to several ranks, in F32, none of which takes more than ``most`` bytes as ``type``."""
    (neurons, dim), kind = ffn.up.shape, block_type(type or "F32")
    step_bytes = RANK_STEP * kind.row_bytes(dim) + neurons * kind.row_bytes(RANK_STEP)
    largest = min(dim // RANK_STEP, int((most - 4 * neurons) / step_bytes))
    covariance = np.cov(x, rowvar=False)
    root = np.linalg.cholesky(covariance + (_RIDGE * covariance.trace() / dim + 1e-12) * np.eye(dim))
    target = np.zeros(ffn.up.shape)
    for gate in (ffn.gate or ffn.up, *([ffn.up] if ffn.activation == "drelu" else [])):
        rows = gate.values @ root  # their lengths are the standard deviations
        target += rows / (np.linalg.norm(rows, axis=1, keepdims=True) + 1e-12)
    vectors = np.linalg.eigh(target.T @ target)[1][:, ::-1]
    first, second = np.linalg.solve(root.T, vectors).T, target @ vectors
    for rank in sorted({RANK_STEP * max(1, round(part * largest)) for part in _LADDER if largest > 0}):
        factors = quantise(first[:rank], "F32"), quantise(second[:, :rank], "F32")
        yield PredictorTensors(*factors, np.zeros(neurons, np.float32), relu=False)


def _judged(
    predictor: ReferencePredictor, ffn: ReferenceFFN, marked: Bools, truth: Truth, options: FitOptions
) -> Fit:
    fires, active, weight = truth
    gate, up, down, scales = ffn.row_bytes if ffn.gate else (ffn.row_bytes[1], 0, *ffn.row_bytes[2:])

    def down_bytes(added: Bools) -> int:
        runs = added.reshape(len(added), ffn.runs, -1).any(axis=-1).sum() if ffn.runs else 0
        return int(added.sum() * down + runs * scales)

    hit = marked & active
    rows = marked.sum() * gate + (marked & fires).sum() * up + down_bytes(hit)
    exact = marked.size * gate + fires.sum() * up + down_bytes(active)
    recall, weighted = hit.sum() / max(1, active.sum()), (weight * hit).sum() / (weight.sum() or 1)
    read = (rows + predictor.nbytes * len(marked)) / exact
    lost, nbytes = 1 - (weighted if options.weighted else recall), predictor.nbytes
    return Fit(
        predictor.first.shape[0], nbytes, nbytes / ffn.nbytes, float(marked.mean()), float(active.mean()),
        float(recall), float(weighted), float(read),
        pays=bool(read < _GAIN and (options.recall is None or lost <= _SLACK * (1 - options.recall))),
    )  # fmt: skip
