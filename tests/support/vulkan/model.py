"""The ``vulkan`` backend's numerics as NumPy: every op adds and multiplies in the order of its shaders.

Its results are those of any device whose arithmetic is that of IEEE 754, bit for bit. docs/design/gpu.md says
in words what is computed here."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.ordered_dot import OrderedMatrix, quantise
from support.ordered_ffn import exponential, hyperbolic_tangent, ordered_ffn, sigmoid
from support.ordered_states import OrderedStates

from hotcold.formats.stored import AnyTensor
from hotcold.kernels import checks
from hotcold.kernels.backend import (
    PAGE,
    SPLIT,
    AttentionCall,
    Batch,
    FFNTensors,
    Floats,
    Matrix,
    Norm,
    PredictorTensors,
    RouterCall,
    Rows,
)
from hotcold.kernels.numpy_ffn import ReferenceExperts, ReferenceFFN, ReferencePredictor
from hotcold.kernels.reference import ReferenceBackend, _in_groups, _positions

f32 = np.float32
THREADS = 256  #: of a group: a norm's sums, and the slots of a split
GROUP = 64  #: positions in one sum of values


def tree(values: Floats) -> Floats:
    """The sum of 256 values ``[..., 256]``: the upper half is added to the lower one, and so on."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def strided_sum(x: Floats) -> Floats:
    """``[..., n]``: thread i of 256 adds values i, i + 256, ...; then the tree."""
    n = x.shape[-1]
    padded = np.zeros((*x.shape[:-1], -(-n // THREADS) * THREADS), f32)
    padded[..., :n] = x  # what is missing counts as +0, which changes no sum
    sums = np.zeros((*x.shape[:-1], THREADS), f32)
    for start in range(0, padded.shape[-1], THREADS):
        sums = sums + padded[..., start : start + THREADS]
    return tree(sums)


def in_sequence(values: Floats) -> Floats:
    """``[..., n]`` from +0 on, ascending."""
    total = np.zeros(values.shape[:-1], f32)
    for i in range(values.shape[-1]):
        total = total + values[..., i]
    return total


class OrderedReference(OrderedStates, ReferenceBackend):
    """Refuses what is wrong less carefully than the reference: it is given what is right."""

    name = "ordered"

    def matrix(self, tensor: AnyTensor, bias: Floats | None = None) -> Matrix:
        return OrderedMatrix(tensor.load(), bias)

    def ffn_weights(self, tensors: FFNTensors) -> ReferenceFFN | ReferenceExperts:
        checks.check_ffn(tensors)
        return ordered_ffn(tensors)

    def predictor_weights(self, tensors: PredictorTensors) -> ReferencePredictor:
        checks.check_predictor(tensors)
        first, second = OrderedMatrix(tensors.first), OrderedMatrix(tensors.second)
        return ReferencePredictor(
            first, second, tensors.threshold, tensors.relu, tensors.ends, tensors.chosen
        )

    def linear_heads(self, x: Any, weights: Any, batch: Batch, out: Any) -> None:
        w, n, (heads, each) = checks.own_weights(weights, OrderedMatrix), batch.n_tokens, out.shape[1:]
        for h in range(heads):
            own = OrderedMatrix(w.tensor.take_rows(slice(h * each, (h + 1) * each)))
            out[:n, h] = own.dot(np.ascontiguousarray(x[:n, h, -w.shape[1] :]))

    def softcap(self, logits: Any, batch: Batch, cap: float) -> None:
        checks.check_softcap(cap)
        rows = logits[: batch.n_logits]
        rows[:] = hyperbolic_tangent(rows / f32(cap)) * f32(cap)

    def norm(self, x: Any, norm: Norm, batch: Batch, out: Any, rows: Rows = Rows.TOKENS) -> None:
        count = batch.n_logits if rows == Rows.LOGITS else batch.n_tokens
        values = x[:count]
        weight = norm.weight
        if weight is not None and weight.ndim == 2:
            values, out = (each.reshape(len(each), *weight.shape) for each in (values, out))
        elif weight is not None and weight.size != x.shape[-1]:  # of all heads of a row
            values, out = values.reshape(count, -1), out.reshape(len(out), -1)
        n = f32(values.shape[-1])
        if norm.centre:
            values = values - (strided_sum(values) / n)[..., None]
        variance = strided_sum(values * values) / n
        normed = values / np.sqrt(variance + f32(norm.eps))[..., None]
        normed = normed if weight is None else normed * weight
        out[:count] = normed if norm.bias is None else normed + norm.bias

    def store_kv(self, k: Any, v: Any, batch: Batch, k_cache: Any, v_cache: Any) -> None:
        slots = batch.slots[: batch.n_tokens]
        for new, cache in ((k, k_cache), (v, v_cache)):
            rows = new[: batch.n_tokens]
            with np.errstate(over="ignore", invalid="ignore"):
                if cache.dtype == np.uint8:
                    codes, scales = quantise(rows)
                    halves = scales[..., None].astype("<f2").view(np.uint8)
                    blocks = np.concatenate([halves, codes.astype(np.int8).view(np.uint8)], axis=-1)
                    rows = blocks.reshape(*rows.shape[:-1], -1)
                cache[slots // PAGE, :, slots % PAGE] = rows

    def attention(self, call: AttentionCall) -> None:
        q, k_cache, v_cache, batch, window = call.q, call.k_cache, call.v_cache, call.batch, call.window
        checks.check_attention(call, q, call.sinks)
        group = q.shape[1] // k_cache.shape[1]
        for t in range(batch.n_tokens):
            length = int(batch.positions[t]) + 1
            begin = max(0, length - window) if window else 0
            begin = (length - 1) // window * window if window and call.chunked else begin
            pages = batch.pages[batch.sequence[t], : -(-length // PAGE)]
            k, v = (_positions(cache[pages], length).repeat(group, axis=0) for cache in (k_cache, v_cache))
            splits = [
                split_of(
                    q[t], k, v, range(max(begin, at), min(at + SPLIT, length)), f32(call.scale), call.softcap
                )
                for at in range(begin // SPLIT * SPLIT, length, SPLIT)
            ]
            call.out[t] = merged(splits, call.sinks)

    def router(self, call: RouterCall) -> None:
        n, selection_bias, groups = call.batch.n_tokens, call.selection_bias, call.groups
        with np.errstate(over="ignore", invalid="ignore"):
            logits = checks.own_weights(call.weights, OrderedMatrix).dot(call.x[:n])
            checks.check_router(call, logits.shape[1], selection_bias, call.expert_scale)
            if call.score == "sigmoid":
                scores = sigmoid(logits)
            else:
                terms = exponential(logits - logits.max(axis=-1, keepdims=True))
                scores = terms / in_sequence(terms)[:, None]
            ranks = logits if selection_bias is None else scores + selection_bias
            if groups is not None and groups.used < groups.count:
                by_scores = scores if selection_bias is None else ranks
                ranks = _in_groups(by_scores, by_scores, groups)
            best = np.argsort(-ranks, axis=-1, kind="stable")[:, : call.k]  # NaN comes last
            call.ids[:n] = np.sort(best, axis=-1)
            picked = np.take_along_axis(scores, call.ids[:n].astype(np.int64), axis=-1)
            if call.normalise:
                picked = picked / np.maximum(in_sequence(picked), f32(1e-20))[:, None]
            call.factors[:n] = picked * f32(call.scale)
            if call.expert_scale is not None:
                call.factors[:n] *= call.expert_scale[call.ids[:n]]


#: Results of each head: the largest score, the sum of exponentials, and the sum of values ``[H, head_dim]``.
Split = tuple[Floats, Floats, Floats]


def split_of(
    q: Floats, k: Floats, v: Floats, positions: range, scale: np.float32, softcap: float | None
) -> Split:
    """q ``[H, head_dim]``, k and v ``[H, positions, head_dim]``; ``positions`` are positions of one split."""
    own, first = slice(positions.start, positions.stop), positions.start // SPLIT * SPLIT
    dots = np.zeros((len(q), len(positions)), f32)
    for d in range(q.shape[1]):
        dots = dots + q[:, d, None] * k[:, own, d]
    scores = scale * dots
    if softcap is not None:
        scores = f32(softcap) * hyperbolic_tangent(scores / f32(softcap))
    largest = scores.max(axis=-1)
    p = np.zeros((len(q), SPLIT), f32)
    p[:, positions.start - first : positions.stop - first] = exponential(scores - largest[:, None])
    sums = np.zeros((len(q), SPLIT // GROUP, v.shape[-1]), f32)
    for position in positions:
        slot = position - first
        sums[:, slot // GROUP] = sums[:, slot // GROUP] + p[:, slot, None] * v[:, position]
    return largest, tree(p), ((sums[:, 0] + sums[:, 1]) + sums[:, 2]) + sums[:, 3]


def merged(splits: list[Split], sinks: Floats | None) -> Floats:
    largest = np.max([split[0] for split in splits], axis=0)
    if sinks is not None:
        largest = np.maximum(largest, sinks)
    total = np.zeros(len(largest), f32)
    out = np.zeros_like(splits[0][2])
    for m, summed, values in splits:
        factor = exponential(m - largest)
        total = total + factor * summed
        out = out + factor[:, None] * values
    if sinks is not None:
        total = total + exponential(sinks - largest)
    return out / total[:, None]
