"""Activations over their whole range, as the FFN op gives them, against Python's own functions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from support.op_truth import plain_batch

from hotcold.formats.blocks import quantise
from hotcold.kernels.backend import Backend, FFNCall, FFNTensors

LIMIT, ALPHA = 7.0, 1.702


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def swiglu_oai(gate: float, up: float) -> float:
    gate, up = min(gate, LIMIT), max(-LIMIT, min(up, LIMIT))
    return gate * sigmoid(ALPHA * gate) * (up + 1)


SMOOTH: dict[str, Callable[[float, float], float]] = {
    "silu": lambda gate, up: gate * sigmoid(gate) * up,
    "gelu": lambda gate, up: (
        gate * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    ),
    "gelu_erf": lambda gate, up: gate * 0.5 * math.erfc(-gate / math.sqrt(2)) * up,
    "swiglu_oai": swiglu_oai,
}


def coefficients(
    backend: Backend, activation: str, gates: np.ndarray, ups: np.ndarray, *, decode: bool
) -> np.ndarray:
    """The FFN of unit weights: neuron i has ``gates[i]`` and ``ups[i]``, and output i is its coefficient."""
    n = len(gates)
    gate, up = np.zeros((n, n), np.float32), np.zeros((n, n), np.float32)
    gate[:, 0], up[:, 0] = gates, ups
    down = quantise(np.eye(n, dtype=np.float32), "F32")
    tensors = FFNTensors(quantise(gate, "F32"), quantise(up, "F32"), down, "by_neuron", activation)
    batch = plain_batch(backend, int(decode), int(not decode))
    x, out = (backend.zeros((batch.limits.tokens, n)) for _ in range(2))
    x[0, 0] = 1
    backend.ffn(FFNCall(x, backend.ffn_weights(tensors), batch, out, skip=False))
    return np.array(out[0])


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("activation", SMOOTH)
def test_smooth_activations(backend: Backend, activation: str, decode: bool) -> None:
    """To 3e-6 of the value, and finite far beyond what a model has. In float32, 1 + tanh loses what is below
    1e-7 of gate * up, here up to 100."""
    gates = np.concatenate([np.linspace(-12, 12, 385), [0, 1e-4, -1e-4, 30, -30, 300, -300, 1e30, -1e30]])
    gates = gates.astype(np.float32)
    ups = np.resize(np.array([1, -0.5, 9, -9, 2.25], np.float32), len(gates))
    expected = np.array([SMOOTH[activation](float(g), float(u)) for g, u in zip(gates, ups, strict=True)])
    actual = coefficients(backend, activation, gates, ups, decode=decode)
    np.testing.assert_allclose(actual[:-2], expected[:-2], rtol=3e-6, atol=3e-6)
    np.testing.assert_allclose(actual[-2], expected[-2], rtol=3e-6)
    assert abs(actual[-1]) < 1e-6
