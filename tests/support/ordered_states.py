"""Ops that keep a state, in the order of the ``vulkan`` backend (see vulkan/model.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.ordered_ffn import activate, exponential, sigmoid

from hotcold.kernels.backend import Batch, DeltaCall, Floats, ScanCall
from hotcold.kernels.reference_states import sequences_of

f32 = np.float32
KEY_PARTS = 4  #: of a column of a gated delta's state
NORM_LANES = 16  #: sums of squares of a key
SCAN_PARTS = 8  #: of a row of a scan's state

_SERIES = tuple(f32(1 / n) for n in (15, 13, 11, 9, 7, 5, 3, 1))


def softplus(x: Floats) -> Floats:
    m = exponential(f32(0) - np.abs(x))
    s = m / (m + f32(2))
    square, p = s * s, np.full_like(x, _SERIES[0])
    for each in _SERIES[1:]:
        p = p * square + each
    result: Floats = (s + s) * p + np.where(x > 0, x, f32(0))
    return result


def shrink(x: Floats) -> Floats:
    return np.where(x < f32(-87), f32(0), exponential(x))


def parts_sum(values: Floats, parts: int, interleaved: bool) -> Floats:
    """The sum of ``[..., n]``: each part from +0 in order, then the parts in order. A part is a run of
    neighbours, or values at a constant distance."""
    n = values.shape[-1]
    held = -(-n // parts)
    padded = np.zeros((*values.shape[:-1], held * parts), f32)
    padded[..., :n] = values  # what is missing counts as +0, which changes no sum
    shape = (held, parts) if interleaved else (parts, held)
    cut = padded.reshape(*values.shape[:-1], *shape)
    if not interleaved:
        cut = np.swapaxes(cut, -1, -2)
    sums = np.zeros((*values.shape[:-1], parts), f32)
    for i in range(held):
        sums = sums + cut[..., i, :]
    total = sums[..., 0]
    for part in range(1, parts):
        total = total + sums[..., part]
    return total


class OrderedStates:
    def short_conv(
        self,
        x: Any,
        weight: Any,
        bias: Any,
        batch: Batch,
        state: Any,
        out: Any,
        *,
        activation: str,
    ) -> None:
        taps = weight.shape[1]
        for each in sequences_of(batch, len(state)):
            columns = np.concatenate([each.load(state), x[each.rows.start : each.rows.stop]])
            for i, row in enumerate(each.rows):
                total = np.zeros(len(weight), f32) if bias is None else bias
                for tap in range(taps):
                    total = total + weight[:, tap] * columns[i + tap]
                out[row] = activate("silu", total) if activation == "silu" else total
            each.keep(state, columns[len(each.rows) :])

    def gated_delta(self, call: DeltaCall) -> None:
        mixed, batch, state, keys, key_dim = call.mixed, call.batch, call.state, call.keys, call.key_dim
        heads, split = state.shape[1], keys * key_dim
        own = np.arange(heads) % keys if call.tiled else np.arange(heads) // (heads // keys)
        query_scale = f32(key_dim) ** f32(-0.5)
        for each in sequences_of(batch, len(state)):
            s = each.load(state)
            for row in each.rows:
                q, k = (mixed[row, at : at + split].reshape(keys, key_dim)[own] for at in (0, split))
                roots = [np.sqrt(parts_sum(v * v, NORM_LANES, True) + f32(call.eps)) for v in (q, k)]
                scale_q, scale_k = query_scale / roots[0], f32(1) / roots[1]
                v = mixed[row, 2 * split :].reshape(heads, -1)
                left = shrink(call.decay[row]).reshape(heads, -1)
                s = s * left[:, :, None]
                stored = parts_sum(np.swapaxes(s * k[:, :, None], 1, 2), KEY_PARTS, False)
                delta = (v - stored * scale_k[:, None]) * sigmoid(call.beta[row])[:, None] * scale_k[:, None]
                s = s + k[:, :, None] * delta[:, None, :]
                given = parts_sum(np.swapaxes(s * q[:, :, None], 1, 2), KEY_PARTS, False)
                call.out[row] = given * scale_q[:, None]
            each.keep(state, s)

    def decay(self, x: Any, bias: Any, factor: Any, batch: Batch, out: Any) -> None:
        n, values = batch.n_tokens, x.reshape(len(x), -1)
        factors = np.repeat(factor, bias.size // factor.size)
        out.reshape(len(out), -1)[:n] = factors * softplus(values[:n] + bias)

    def ssm_scan(self, call: ScanCall) -> None:
        mixed, batch, state, groups = call.mixed, call.batch, call.state, call.groups
        _, heads, width, size = state.shape
        split = heads * width
        for each in sequences_of(batch, len(state)):
            s = each.load(state)
            for row in each.rows:
                x = mixed[row, :split].reshape(heads, width)
                b, c = mixed[row, split:].reshape(2, groups, size).repeat(heads // groups, axis=1)
                step = softplus(call.dt[row] + call.dt_bias)
                left = s * shrink(step * call.a)[:, None, None]
                s = left + (step[:, None] * x)[:, :, None] * b[:, None, :]
                call.out[row] = parts_sum(s * c[:, None, :], SCAN_PARTS, True) + call.d[:, None] * x
            each.keep(state, s)

    def multiply(self, x: Any, gate: Any, batch: Batch, out: Any, *, activation: str) -> None:
        n = batch.n_tokens
        values, gates = (each.reshape(len(each), -1)[:n] for each in (x, gate))
        if activation == "silu":
            gates = activate("silu", gates)
        elif activation == "sigmoid":
            gates = sigmoid(gates)
        elif activation == "relu":
            gates = np.maximum(gates, np.float32(0))
        out.reshape(len(out), -1)[:n] = values * gates
