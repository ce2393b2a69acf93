"""Trains the predictor of one layer: chooses its rank, its factors and its thresholds, and measures it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import block_type, quantise
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
    sizes = _sizes(parts, config, options, weights.nbytes)
    if not sizes:
        limit = f"at most {options.max_share:.0%} of the FFN's {weights.nbytes} bytes"
        fix = "raise `max_share`, or use a smaller `type`"
        raise PredictorError(f"layer {layer}: no predictor fits in {limit}: {fix}")
    sample = {name: _evenly(values, _SVD_TOKENS) for name, values in texts.fit_to.items()}
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
            assert options.target is not None
            state = folder / f"layer-{layer:03}.rank-{rank}.state"
            learned = train(
                first[:rank],
                second[:, :rank],
                training,
                target=options.target,
                type=options.stored_type,
                examples=examples,
                check=check,
                state=state,
            )
            return judge.attempt(learned, examples, check)

        best, tried = search(
            sizes, first_size(sizes, examples.rates(), config.dim), training.max_marked, attempt
        )
    finally:
        examples = check = None  # type: ignore[assignment]  # Windows deletes no file that is mapped
        for each in files:
            each.unlink(missing_ok=True)
    rest = sorted((each.fitted.fit for each in tried if each is not best), key=lambda fit: fit.read_ratio)
    return TrainedLayer(best.fitted, [best.fitted.fit, *rest], svd)


def _evenly(values: npt.NDArray[Any], n: int) -> npt.NDArray[Any]:
    return values[:: -(-len(values) // n)]


def _sizes(parts: list[ReferenceFFN], config: Config, options: FitOptions, ffn_bytes: int) -> list[int]:
    """Ranks to choose from, ascending."""
    neurons, most = sum(part.neurons for part in parts), options.max_share * ffn_bytes
    type = block_type(options.stored_type or "F32")
    sizes = ranks(neurons, config.dim, most, options.stored_type)
    used = [rank * type.row_bytes(config.dim) + neurons * (type.row_bytes(rank) + 4) for rank in sizes]
    return [rank for rank, nbytes in zip(sizes, used, strict=True) if nbytes <= most]


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

    def holds(one: _Attempt) -> bool:
        return one.marked <= max_marked * one.active

    tried = [attempt(sizes[at])]
    step = -1 if holds(tried[0]) else 1
    while 0 <= at + step < len(sizes) and holds(tried[-1]) == (step < 0):
        at += step
        tried.append(attempt(sizes[at]))
    holding = [each for each in tried if holds(each)]
    if holding:
        return min(holding, key=lambda each: each.fitted.fit.rank), tried
    return min(tried, key=lambda each: each.marked), tried


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
        named = [each >= own for each, own in zip(scores, bounds, strict=True)]
        size = len(self.texts.held_out["normed"]), self.ffn_bytes
        fit = judged_parts(tensors, self.parts, named, self.unseen, *size)
        active = sum(np.count_nonzero(each) for each in check.adds) / max(1, check.pairs)
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
        values, weights = (np.concatenate(each).astype(np.float64) for each in zip(*pairs, strict=True))
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
