"""Activations, and sums of down rows, in the order of the ``vulkan`` backend (see ordered_dot.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from support.ordered_dot import OrderedMatrix

from hotcold.kernels.backend import FFNTensors, Floats
from hotcold.kernels.numpy_ffn import Bools, ReferenceExperts, ReferenceFFN, ffn_weights

f32 = np.float32
ONE, TWO, HALF = f32(1), f32(2), f32(0.5)

_TAYLOR = tuple(f32(1) / f32(n) for n in (720, 120, 24, 6)) + (HALF, ONE)
_TAIL = tuple(
    f32(c)
    for c in (
        0.0348133482, -0.152753532, 0.19728601, -0.0456975065, 0.124455482, 0.101271093, 0.120776556,
        0.11984843,
    )
)  # fmt: skip


def _polynomial(coefficients: tuple[np.float32, ...], x: Floats) -> Floats:
    value = np.full_like(x, coefficients[0])
    for each in coefficients[1:]:
        value = value * x + each
    return value


def _exponential_parts(x: Floats) -> tuple[Floats, Floats]:
    """2^n, and (exp(r) - 1) of the rest r; csrc/ops/activation.h has the formulas."""
    clamped = np.minimum(f32(88), np.maximum(f32(-87), x))
    n = np.rint(clamped * f32(1.44269504))
    r = n * f32(-0.693145752) + clamped
    r = n * f32(-1.42860677e-6) + r
    scale = np.ldexp(ONE, np.nan_to_num(n).astype(np.int32)).astype(f32)
    return scale, _polynomial(_TAYLOR, r) * r


def exponential(x: Floats) -> Floats:
    scale, less = _exponential_parts(np.asarray(x, f32))
    result: Floats = (less + ONE) * scale
    return result


def hyperbolic_tangent(x: Floats) -> Floats:
    scale, less = _exponential_parts(x + x)
    m = scale * less + (scale - ONE)
    result: Floats = m / (m + TWO)
    return result


def sigmoid(x: Floats) -> Floats:
    result: Floats = ONE / (ONE + exponential(f32(0) - x))
    return result


def _normal_tail(a: Floats) -> Floats:
    t = ONE / (f32(0.300520382) * a + ONE)
    return (_polynomial(_TAIL, t) * t) * exponential((a * a) * f32(-0.5))


def activate(activation: str, g: Floats) -> Floats:
    """Computes the smooth activations, all but ``swiglu_oai``."""
    if activation == "silu":
        return g / (ONE + exponential(f32(0) - g))
    if activation == "gelu":
        u = (f32(-1.59576912) * g) * (f32(0.044715) * (g * g) + ONE)
        return g / (ONE + exponential(u))
    a = np.minimum(f32(16), np.abs(g))
    return np.maximum(f32(0), g) - a * _normal_tail(a)


@dataclass(frozen=True)
class OrderedFFN(ReferenceFFN):
    chosen: int = 1

    def coefficients(
        self, x: Floats, gates: Floats | None = None, math: str = "same", decode: int = 0
    ) -> tuple[Bools, Floats]:
        with np.errstate(over="ignore", invalid="ignore"):
            if self.activation in ("relu", "drelu", "relu2"):
                return super().coefficients(x, gates)  # products alone
            gate = (self.gate or self.up).dot(x)
            active_gates = np.ones(gate.shape, np.bool_)
            up = None if self.gate is None else self.up.dot(x)
            if self.activation == "swiglu_oai":
                assert up is not None
                g, u = np.minimum(self.limit, gate), np.maximum(-self.limit, np.minimum(self.limit, up))
                return active_gates, (g / (ONE + exponential(-self.alpha * g))) * (u + ONE)
            value = activate(self.activation, gate)
            return active_gates, value if up is None else value * up

    def down_sum(self, coefficients: Floats, math: str = "same", decode: int = 0) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):
            if self.dense:
                y = self.down.dot(coefficients)
            else:
                down = self.down.values if self.down_layout == "by_neuron" else self.down.values.T
                y = leaf_sums(np.ascontiguousarray(down), coefficients, -(-64 // self.chosen))
            return y if self.down_bias is None else y + self.down_bias


def leaf_sums(down: Floats, coefficients: Floats, most: int) -> Floats:
    """Rows of ``down`` ``[N, D]`` times ``[T, N]``, summed by leaves and in a tree over them."""
    neurons, words = len(down), -(-len(down) // 64)
    count = min(max(words // 2, 1), most)
    edges = np.array([min(words * r // count * 64, neurons) for r in range(count + 1)])
    sums = np.zeros((len(coefficients), count, down.shape[1]), f32)
    for i in range(int(np.diff(edges).max())):
        there = edges[:-1] + i < edges[1:]
        own = edges[:-1][there] + i
        factors = coefficients[:, own, None]
        sums[:, there] = sums[:, there] + np.where(factors != 0, factors * down[own], f32(0))
    while sums.shape[1] > 1:
        pairs = sums.shape[1] // 2 * 2
        sums = np.concatenate([sums[:, :pairs:2] + sums[:, 1:pairs:2], sums[:, pairs:]], axis=1)
    return sums[:, 0]


def ordered_ffn(tensors: FFNTensors) -> ReferenceFFN | ReferenceExperts:
    """As :func:`hotcold.kernels.numpy_ffn.ffn_weights`."""
    found = ffn_weights(tensors)
    if isinstance(found, ReferenceFFN):
        return _ordered(found, tensors.chosen)
    parts = tuple(part and _ordered(part, tensors.chosen) for part in found.parts)
    return ReferenceExperts(parts, found.down_bias, found.chosen)


def _ordered(ffn: ReferenceFFN, chosen: int) -> OrderedFFN:
    gate, up, down = (m and OrderedMatrix(m.tensor, m.bias) for m in (ffn.gate, ffn.up, ffn.down))
    assert up and down
    return OrderedFFN(
        gate,
        up,
        down,
        ffn.down_layout,
        ffn.activation,
        ffn.threshold,
        ffn.limit,
        ffn.alpha,
        ffn.down_bias,
        chosen=chosen,
    )
