"""Fits predictors to a layer of experts, as fitting.py does to a layer without experts.

Experts share the first factor, so one SVD has the gates of all; each expert has its own thresholds, set on
the tokens that chose it. Shapes use T tokens, D model width, E experts, N neurons of each, R rank."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import Tensor, quantise
from hotcold.formats.gguf import GGUFFile
from hotcold.kernels import open_backend
from hotcold.kernels.backend import Floats, PredictorTensors
from hotcold.kernels.numpy_ffn import ReferenceExperts, ReferenceFFN
from hotcold.kernels.numpy_matrix import ReferenceMatrix
from hotcold.model.config import Config
from hotcold.model.ffn.experts import Experts
from hotcold.model.weights import ffn_tensors
from hotcold.sparse.fitting import (
    Activity,
    Fit,
    FitOptions,
    Fitted,
    cut_to,
    ranks,
    root_of,
    rows_read,
    stored,
    thresholds,
)
from hotcold.sparse.predictor import PredictorError

Inputs = Mapping[str, npt.NDArray[Any]]  #: ``normed`` ``[T, D]``, and ``ids`` ``[T, k]`` of experts


@dataclass(frozen=True)
class Routed:
    """The tokens of a text, grouped by their experts; without experts, all in one group."""

    rows: list[npt.NDArray[np.int64]]
    activity: list[Activity]  #: for each expert, over its tokens

    @classmethod
    def from_parts(cls, parts: list[ReferenceFFN], inputs: Inputs) -> "Routed":
        rows, normed = rows_by_expert(inputs, len(parts)), inputs["normed"]
        return cls(rows, [Activity.from_ffn(p, normed[own]) for p, own in zip(parts, rows, strict=True)])


def rows_by_expert(inputs: Inputs, experts: int) -> list[npt.NDArray[np.int64]]:
    """The tokens that chose each expert, ascending; without experts, all of them."""
    if "ids" not in inputs:
        return [np.arange(len(inputs["normed"]))]
    return [np.flatnonzero((inputs["ids"] == e).any(axis=1)) for e in range(experts)]


def fit_experts(
    file: GGUFFile, config: Config, layer: int, options: FitOptions, *, fit_to: Inputs, held_out: Inputs
) -> list[Fitted]:
    """Fits predictors as :func:`~hotcold.sparse.fitting.fit_layer` does, but only by ``svd``."""
    experts = config.experts_of(layer)
    assert experts is not None and options.target is not None
    reference = open_backend("reference")
    ffn = reference.ffn_weights(ffn_tensors(file, config, reference, layer))
    assert isinstance(ffn, ReferenceExperts)
    parts = ffn.some
    fitted_text, held_out_text = Routed.from_parts(parts, fit_to), Routed.from_parts(parts, held_out)
    most_bytes, fits = options.max_share * ffn.nbytes, []
    for tensors in _truncations(parts, experts, fit_to["normed"], most_bytes, options.stored_type):
        hidden = ReferenceMatrix(tensors.first).dot(fit_to["normed"])
        scores = scores_of(tensors, hidden, fitted_text.rows)
        bounds = [_thresholds(options, *each) for each in zip(scores, fitted_text.activity, strict=True)]
        tensors = replace(tensors, threshold=np.concatenate(bounds))
        scores = scores_of(
            tensors, ReferenceMatrix(tensors.first).dot(held_out["normed"]), held_out_text.rows
        )
        candidates = [each >= bound for each, bound in zip(scores, bounds, strict=True)]
        sizes = len(held_out["normed"]), ffn.nbytes
        fits.append(Fitted(tensors, judged_parts(tensors, parts, candidates, held_out_text, *sizes)))
    if not fits:
        bound = f"at most {options.max_share:.0%} of the experts' {ffn.nbytes} bytes"
        fix = "raise `max_share`, or use a smaller `type`"
        raise PredictorError(f"layer {layer}: no predictor fits in {bound}: {fix}")
    return sorted(fits, key=lambda each: options.order(each.fit))


def _truncations(
    parts: list[ReferenceFFN], experts: Experts, x: Floats, most_bytes: float, type: str | None
) -> Iterator[PredictorTensors]:
    """The SVD of the gates of all experts, cut to several ranks. Memory holds one expert's rows at a time."""
    sizes = ranks(experts.count * experts.neurons, x.shape[1], most_bytes, type)
    first, second = factors(parts, x, max(sizes, default=0))
    for rank in sizes:
        tensors = PredictorTensors(
            first=quantise(first[:rank], "F32"),
            second=quantise(second[:, :rank], "F32"),
            threshold=np.zeros(experts.count * experts.neurons, np.float32),
            relu=False,
            experts=experts.count,
            chosen=experts.chosen,
        )
        tensors = stored(tensors, type)
        if tensors.first.nbytes + tensors.second.nbytes + tensors.threshold.nbytes <= most_bytes:
            yield tensors


def factors(parts: list[ReferenceFFN], x: Floats, rank: int) -> tuple[Floats, Floats]:
    """The factors ``(rank, D)`` and ``(E * N, rank)`` of the SVD of all experts' gates, for inputs ``[T,
    D]``. A smaller rank has the first rows of the first, and the first columns of the second."""
    root = root_of(x)
    gram = np.zeros_like(root)
    for part in parts:
        rows = cut_to(part, root)
        gram += rows.T @ rows
    vectors = np.linalg.eigh(gram)[1][:, ::-1]
    first = np.linalg.solve(root.T, vectors).T[:rank].astype(np.float32)
    second = [(cut_to(part, root) @ vectors[:, :rank]).astype(np.float32) for part in parts]
    return first, np.concatenate(second)


def scores_of(
    tensors: PredictorTensors, hidden: Floats, rows_of: list[npt.NDArray[np.int64]]
) -> list[Floats]:
    """Scores ``[T_e, N]`` of each expert for its tokens, from the first factor's results ``[T, R]``."""
    scores, begin = [], 0
    for end, rows in zip(tensors.ends, rows_of, strict=True):
        part: Tensor = tensors.second.take_rows(slice(begin, end))
        scores.append(ReferenceMatrix(part).dot(hidden[rows]))
        begin = end
    return scores


def _thresholds(options: FitOptions, scores: Floats, activity: Activity) -> Floats:
    """Thresholds ``[N]`` of one expert; if no token chose it, all of its neurons are candidates."""
    if not len(scores):
        return np.full(scores.shape[1], -1e38, np.float32)
    assert options.target is not None
    weight = activity.weight if options.weighted else None
    return thresholds(scores, activity.active, options.target, weight)


def judged_parts(
    tensors: PredictorTensors,
    parts: list[ReferenceFFN],
    candidates: list[npt.NDArray[np.bool_]],
    text: Routed,
    tokens: int,
    ffn_bytes: int,
) -> Fit:
    """Measures a predictor; shares are of the neurons of chosen experts."""
    first, rest = tensors.first.nbytes, tensors.second.nbytes + tensors.threshold.nbytes
    predicted = tokens * (first + rest * tensors.chosen // tensors.experts)
    exact = pairs = named = active = recalled = 0
    weight = weight_recalled = 0.0
    for part, marked, truth in zip(parts, candidates, text.activity, strict=True):
        hits = marked & truth.active
        predicted += rows_read(part, marked, marked & truth.active_gates, hits)
        exact += rows_read(part, np.ones_like(marked), truth.active_gates, truth.active)
        pairs, named = pairs + marked.size, named + int(marked.sum())
        active, recalled = active + int(truth.active.sum()), recalled + int(hits.sum())
        weight += float(truth.weight.sum())
        weight_recalled += float((truth.weight * hits).sum())
    recall, weighted_recall = recalled / max(1, active), weight_recalled / (weight or 1)
    read_ratio = predicted / max(1, exact)
    return Fit(
        rank=tensors.first.shape[0],
        nbytes=first + rest,
        size_ratio=(first + rest) / ffn_bytes,
        candidates=named / max(1, pairs),
        active=active / max(1, pairs),
        recall=recall,
        weighted_recall=weighted_recall,
        read_ratio=read_ratio,
    )
