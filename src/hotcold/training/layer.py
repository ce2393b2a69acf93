"""Trains the predictor of one layer: chooses its rank, its factors and its thresholds, and measures it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import GGUFFile
from hotcold.kernels import open_backend
from hotcold.kernels.backend import Floats, PredictorTensors
from hotcold.kernels.numpy_ffn import ReferenceExperts, ReferenceFFN
from hotcold.kernels.numpy_matrix import ReferenceMatrix
from hotcold.model.config import Config
from hotcold.model.weights import ffn_tensors
from hotcold.sparse.expert_fitting import Inputs, Routed, factors, fit_experts, judged_parts, scores_of
from hotcold.sparse.fitting import Fit, FitOptions, Fitted, bound_for, fit_layer, ranks
from hotcold.sparse.predictor import PredictorError
from hotcold.training.examples import Examples
from hotcold.training.options import TrainOptions
from hotcold.training.predictor import Learned, train

_CHECKED = 8  # one window in this many is not learned but used for checks
_SVD_TOKENS = 8192  # most tokens for the SVD, whose neurons are all in memory


class Texts(NamedTuple):
    """A layer's inputs for three parts of the text."""

    fit_to: Inputs  #: for training
    check: Inputs  #: sets thresholds, ends the training and decides on the rank
    held_out: Inputs  #: judges the result


def parted(windows: list[Any]) -> tuple[list[Any], list[Any]]:
    """Windows to check with, and windows to learn: at least one of each, if there are two."""
    every = min(_CHECKED, len(windows))
    learned = [window for number, window in enumerate(windows) if number % every != every - 1]
    return windows[every - 1 :: every], learned


@dataclass(frozen=True)
class TrainedLayer:
    best: Fitted
    tried: list[Fit]  #: of all ranks that were trained, the best first
    svd: Fitted  #: the best predictor of `svd` on the same text, for comparison


@dataclass(frozen=True)
class _Attempt:
    fitted: Fitted
    marked: float  #: on the check part, as is the next
    active: float


def train_layer(
    file: GGUFFile,
    config: Config,
    layer: int,
    options: FitOptions,
    training: TrainOptions,
    texts: Texts,
    folder: Path,
) -> TrainedLayer:
    """Trains predictors of several ranks; the smallest sufficient rank is the best.

    A rank is sufficient if it reaches ``options.target`` of the active neurons' contribution on the check
    part while it marks at most ``training.max_marked`` times as many neurons as are active. If no rank is
    sufficient, the predictor that marks the fewest is the best. ``folder`` gets the states of the training,
    from which a later call continues.

    PredictorError: none is small enough. UserError: an input is not finite, or see
    :func:`~hotcold.training.predictor.train`. OSError: the folder cannot be written."""
    assert options.target is not None
    if experts := config.experts_of(layer):
        config = replace(config, experts=experts)
    reference = open_backend("reference")
    weights = reference.ffn_weights(ffn_tensors(file, config, reference, layer))
    assert isinstance(weights, ReferenceFFN | ReferenceExperts)
    parts = weights.some if isinstance(weights, ReferenceExperts) else [weights]
    neurons, most_bytes = sum(part.neurons for part in parts), options.max_share * weights.nbytes
    sizes = ranks(neurons, config.dim, most_bytes, options.stored_type)
    if not sizes:
        limit = f"at most {options.max_share:.0%} of the FFN's {weights.nbytes} bytes"
        fix = "raise `max_share`, or use a smaller `type`"
        raise PredictorError(f"layer {layer}: no predictor fits in {limit}: {fix}")
    every = -(-len(texts.fit_to["normed"]) // _SVD_TOKENS)
    sample = {name: values[::every] for name, values in texts.fit_to.items()}
    fit = fit_experts if config.experts else fit_layer
    method = replace(options, method="svd")
    svd = fit(file, config, layer, method, fit_to=sample, held_out=texts.held_out)[0]
    files = [folder / f"layer-{layer:03}.{name}" for name in ("fit", "check")]
    try:
        examples = Examples.collect(parts, texts.fit_to, files[0])
        check = Examples.collect(parts, texts.check, files[1])
        first, second = factors(parts, sample["normed"], sizes[-1])
        judge = _Judge(
            parts, config, options, training, texts, Routed.from_parts(parts, texts.held_out), weights.nbytes
        )

        def attempt(rank: int) -> _Attempt:
            state = folder / f"layer-{layer:03}.rank-{rank}.state"
            learned = train(first[:rank], second[:, :rank], options, training, examples, check, state)
            return judge.attempt(learned, examples, check)

        begin = first_size(sizes, examples.rates(), config.dim)
        best, predictors = search(sizes, begin, training.max_marked, attempt)
    finally:
        examples = check = None  # type: ignore[assignment]  # Windows deletes no file that is mapped
        for path in files:
            path.unlink(missing_ok=True)
    rest = [predictor.fitted.fit for predictor in predictors if predictor is not best]
    rest.sort(key=lambda fit: fit.read_ratio)
    return TrainedLayer(best.fitted, [best.fitted.fit, *rest], svd)


def first_size(sizes: list[int], rates: npt.NDArray[np.float64], dim: int) -> int:
    """The index of the rank to try first, from a layer's sparsity and skew.

    PowerInfer (arXiv 2312.12456, section 5.1) starts from the sparsity, and makes a predictor smaller if few
    neurons have most of the activity. The mean entropy of a neuron's activity, in bits, measures both: it is
    1 if every neuron is active for half of the tokens, and 0 if each is active always or never. The rank is
    this share of ``dim``, rounded to the nearest of ``sizes``."""
    p = np.clip(rates, 1e-9, 1 - 1e-9)
    bits = float(-(p * np.log2(p) + (1 - p) * np.log2(1 - p)).mean())
    return int(np.argmin([abs(rank - bits * dim) for rank in sizes]))


def search(
    sizes: list[int], at: int, max_marked: float, attempt: Callable[[int], _Attempt]
) -> tuple[_Attempt, list[_Attempt]]:
    """Shrinks from ``sizes[at]`` while ranks suffice, or grows until one does; returns the best, and all."""

    def suffices(predictor: _Attempt) -> bool:
        return predictor.marked <= max_marked * predictor.active

    predictors = [attempt(sizes[at])]
    step = -1 if suffices(predictors[0]) else 1
    while 0 <= at + step < len(sizes) and suffices(predictors[-1]) == (step < 0):
        at += step
        predictors.append(attempt(sizes[at]))
    if sufficient := [predictor for predictor in predictors if suffices(predictor)]:
        return min(sufficient, key=lambda predictor: predictor.fitted.fit.rank), predictors
    return min(predictors, key=lambda predictor: predictor.marked), predictors


@dataclass(frozen=True)
class _Judge:
    """Gives trained factors their block type and thresholds, and measures them as the engine does."""

    parts: list[ReferenceFFN]
    config: Config
    options: FitOptions
    training: TrainOptions
    texts: Texts
    unseen: Routed
    ffn_bytes: int

    def attempt(self, learned: Learned, examples: Examples, check: Examples) -> _Attempt:
        type = self.options.stored_type or "F32"
        experts = self.config.experts
        tensors = PredictorTensors(
            first=quantise(learned.first, type),
            second=quantise(learned.second, type),
            threshold=np.zeros(len(learned.bias), np.float32),
            relu=self.training.relu,
            experts=experts.count if experts else 1,
            chosen=experts.chosen if experts else 1,
        )
        biases = np.split(learned.bias, tensors.ends[:-1])
        bounds, marked = self._thresholds(tensors, biases, examples, check)
        tensors = replace(tensors, threshold=np.concatenate(bounds))
        scores = self._scores(tensors, self.texts.held_out["normed"], self.unseen.rows)
        marked_neurons = [part >= bound for part, bound in zip(scores, bounds, strict=True)]
        size = len(self.texts.held_out["normed"]), self.ffn_bytes
        fit = judged_parts(tensors, self.parts, marked_neurons, self.unseen, *size)
        active = sum(np.count_nonzero(adds) for adds in check.adds) / max(1, check.pairs)
        return _Attempt(Fitted(tensors, fit), marked, active)

    def _thresholds(
        self, tensors: PredictorTensors, biases: list[Floats], examples: Examples, check: Examples
    ) -> tuple[list[Floats], float]:
        """Each expert's thresholds: a bound for the whole layer, set on the check part, minus the biases.

        If no token chose an expert, all of its neurons are candidates."""
        assert self.options.target is not None
        scores = self._scores(tensors, check.x, check.rows)
        pairs = [
            ((of_expert + bias)[adds > 0], adds[adds > 0])
            for of_expert, bias, adds in zip(scores, biases, check.adds, strict=True)
        ]
        values, weights = (np.concatenate(parts).astype(np.float64) for parts in zip(*pairs, strict=True))
        least = min(float(bound_for(values, weights, self.options.target)), 1e30)
        bounds = []
        for bias, of_expert in zip(biases, examples.rows, strict=True):
            bound = np.float32(least) - bias
            bound -= np.float32(1e-5) * (np.abs(bound) + 1)  # keeps the neuron at the bound
            bounds.append(bound if len(of_expert) else np.full(len(bias), -1e38, np.float32))
        named = sum(int((of_expert >= bound).sum()) for of_expert, bound in zip(scores, bounds, strict=True))
        return bounds, named / max(1, check.pairs)

    def _scores(
        self, tensors: PredictorTensors, x: Floats, rows: list[npt.NDArray[np.int64]]
    ) -> list[Floats]:
        hidden = ReferenceMatrix(tensors.first).dot(np.ascontiguousarray(x))
        if tensors.relu:
            hidden = np.maximum(hidden, 0)
        return scores_of(tensors, hidden, rows)
