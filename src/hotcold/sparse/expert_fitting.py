"""Fits predictors to a layer of experts, as fitting.py does to one without.

Experts share the first factor, so their gates are cut together; thresholds are set for each expert by itself,
on the tokens that chose it. Shapes use T tokens, D model dim, E experts, N neurons of each, R rank."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import Tensor, quantise
from hotcold.formats.gguf import GGUFFile
from hotcold.kernels.backend import Floats, PredictorTensors
from hotcold.kernels.reference import ReferenceBackend
from hotcold.kernels.reference_ffn import ReferenceExperts, ReferenceFFN
from hotcold.kernels.reference_matrix import ReferenceMatrix
from hotcold.model.config import Config
from hotcold.model.experts import Experts
from hotcold.model.weights import ffn_tensors
from hotcold.sparse.fitting import (
    Activity,
    Fit,
    FitOptions,
    Fitted,
    cut_to,
    pays,
    ranks,
    root_of,
    rows_read,
    stored,
    thresholds,
)
from hotcold.sparse.predictor import PredictorError

Inputs = Mapping[str, npt.NDArray[Any]]  #: ``normed`` ``[T, D]``, and ``ids`` ``[T, k]``, what tokens chose


@dataclass(frozen=True)
class _Routed:
    """A text's tokens, by the expert that they chose."""

    rows: list[npt.NDArray[np.int64]]
    activity: list[Activity]  #: of each expert, for its tokens

    @classmethod
    def of(cls, parts: list[ReferenceFFN], inputs: Inputs) -> "_Routed":
        rows = [np.flatnonzero((inputs["ids"] == e).any(axis=1)) for e in range(len(parts))]
        normed = inputs["normed"]
        return cls(rows, [Activity.of(p, normed[own]) for p, own in zip(parts, rows, strict=True)])


def fit_experts(
    file: GGUFFile, config: Config, layer: int, options: FitOptions, *, fit_to: Inputs, held_out: Inputs
) -> list[Fitted]:
    """As :func:`~hotcold.sparse.fitting.fit_layer`; by ``svd`` alone."""
    assert config.experts is not None and options.target is not None
    ffn = ReferenceBackend().ffn_weights(ffn_tensors(file, config, ReferenceBackend(), layer))
    assert isinstance(ffn, ReferenceExperts)
    parts = ffn.some
    seen, unseen = _Routed.of(parts, fit_to), _Routed.of(parts, held_out)
    most_bytes, found = options.max_share * ffn.nbytes, []
    for tensors in _truncations(parts, config.experts, fit_to["normed"], most_bytes, options.stored_type):
        hidden = ReferenceMatrix(tensors.first).dot(fit_to["normed"])
        scores = _scores(tensors, hidden, seen)
        own = [_thresholds(options, *each) for each in zip(scores, seen.activity, strict=True)]
        tensors = replace(tensors, threshold=np.concatenate(own))
        scores = _scores(tensors, ReferenceMatrix(tensors.first).dot(held_out["normed"]), unseen)
        candidates = [each >= bound for each, bound in zip(scores, own, strict=True)]
        sizes = len(held_out["normed"]), ffn.nbytes
        found.append(Fitted(tensors, _judged(tensors, parts, candidates, unseen, options, *sizes)))
    if not found:
        bound = f"at most {options.max_share:.0%} of the experts' {ffn.nbytes} bytes"
        fix = "raise `max_share`, or take a smaller `type`"
        raise PredictorError(f"layer {layer}: no predictor takes {bound}: {fix}")
    return sorted(found, key=lambda each: (not each.fit.pays, each.fit.read_ratio))


def _truncations(
    parts: list[ReferenceFFN], experts: Experts, x: Floats, most_bytes: float, type: str | None
) -> Iterator[PredictorTensors]:
    """The SVD of all gates together, cut to several ranks. One expert's rows are in memory at a time."""
    root = root_of(x)
    dim = len(root)
    gram = np.zeros((dim, dim))
    for part in parts:
        rows = cut_to(part, root)
        gram += rows.T @ rows
    vectors = np.linalg.eigh(gram)[1][:, ::-1]
    first = np.linalg.solve(root.T, vectors).T
    sizes = ranks(experts.count * experts.neurons, dim, most_bytes, type)
    most = max(sizes, default=0)
    second = [(cut_to(part, root) @ vectors[:, :most]).astype(np.float32) for part in parts if most]
    for rank in sizes:
        tensors = PredictorTensors(
            first=quantise(first[:rank], "F32"),
            second=quantise(np.concatenate([each[:, :rank] for each in second]), "F32"),
            threshold=np.zeros(experts.count * experts.neurons, np.float32),
            relu=False,
            experts=experts.count,
            chosen=experts.chosen,
        )
        tensors = stored(tensors, type)
        if tensors.first.nbytes + tensors.second.nbytes + tensors.threshold.nbytes <= most_bytes:
            yield tensors


def _scores(tensors: PredictorTensors, hidden: Floats, text: _Routed) -> list[Floats]:
    """Of each expert, for the tokens that chose it, ``[T_e, N]``."""
    found, begin = [], 0
    for end, rows in zip(tensors.ends, text.rows, strict=True):
        part: Tensor = tensors.second.take_rows(slice(begin, end))
        found.append(ReferenceMatrix(part).dot(hidden[rows]))
        begin = end
    return found


def _thresholds(options: FitOptions, scores: Floats, activity: Activity) -> Floats:
    """An expert that no token chose names all its neurons."""
    if not len(scores):
        return np.full(scores.shape[1], -1e38, np.float32)
    assert options.target is not None
    weight = activity.weight if options.weighted else None
    return thresholds(scores, activity.active, options.target, weight)


def _judged(
    tensors: PredictorTensors,
    parts: list[ReferenceFFN],
    candidates: list[npt.NDArray[np.bool_]],
    text: _Routed,
    options: FitOptions,
    tokens: int,
    ffn_bytes: int,
) -> Fit:
    """Shares are of the neurons of chosen experts."""
    first, rest = tensors.first.nbytes, tensors.second.nbytes + tensors.threshold.nbytes
    predicted = tokens * (first + rest * tensors.chosen // tensors.experts)
    exact = pairs = named = active = recalled = 0
    weight = weight_recalled = 0.0
    for part, marked, truth in zip(parts, candidates, text.activity, strict=True):
        found = marked & truth.active
        predicted += rows_read(part, marked, marked & truth.fires, found)
        exact += rows_read(part, np.ones_like(marked), truth.fires, truth.active)
        pairs, named = pairs + marked.size, named + int(marked.sum())
        active, recalled = active + int(truth.active.sum()), recalled + int(found.sum())
        weight += float(truth.weight.sum())
        weight_recalled += float((truth.weight * found).sum())
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
        pays=pays(options, read_ratio, recall, weighted_recall),
    )
