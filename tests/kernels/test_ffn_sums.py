"""The order in which the FFN op adds what neurons give: leaves by shape alone, summed in a binary tree."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.op_truth import plain_batch, random_rows, rng, to_words

from hotcold.formats.blocks import quantise
from hotcold.kernels.backend import Backend, FFNCall, FFNTensors, FFNWeights

OpenBackend = Callable[..., Backend]
Floats = np.ndarray

DIM = 5
#: enough for pieces of four leaves, of two and of one
THREADS = (1, 2, 3, 8)


def leaves_of(neurons: int, most: int = 64) -> list[range]:
    words = -(-neurons // 64)
    count = min(max(words // 2, 1), most)
    edges = [min(words * r // count * 64, neurons) for r in range(count + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def tree_sum(values: list[Floats]) -> Floats:
    """Neighbours are added, then neighbouring pairs, and so on; the last one without a neighbour goes up."""
    while len(values) > 1:
        odd = values[len(values) // 2 * 2 :]
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=False)] + odd
    return values[0]


def expected_sum(down: Floats, active: np.ndarray) -> Floats:
    """Sums the active rows of ``down``, ``[T, N]`` -> ``[T, D]``, each operation in float32."""
    out = []
    for row in active:
        leaves = []
        for leaf in leaves_of(len(down)):
            total = np.zeros(down.shape[1], np.float32)
            for neuron in leaf:
                if row[neuron]:
                    total = total + down[neuron]
            leaves.append(total)
        out.append(tree_sum(leaves))
    return np.array(out)


def layer(backend: Backend, down: Floats) -> FFNWeights:
    """Neurons whose coefficient is 1 for a token whose first value is 1."""
    up = np.zeros((len(down), DIM), np.float32)
    up[:, 0] = 1
    return backend.ffn_weights(
        FFNTensors(None, quantise(up, "F32"), quantise(down, "F32"), "by_neuron", "relu")
    )


def run(backend: Backend, weights: FFNWeights, active: np.ndarray) -> Floats:
    """As decode rows, whose masks name the active neurons."""
    batch = plain_batch(backend, len(active))
    rows = batch.limits.tokens
    x, out = backend.zeros((rows, DIM)), backend.zeros((rows, DIM))
    mask = backend.zeros((rows, -(-active.shape[1] // 64)), np.uint64)
    x[:, 0], mask[: len(active)] = 1, to_words(active)
    backend.ffn(FFNCall(x, weights, batch, out, skip=True, mask=mask))
    return out[: len(active)].copy()


def of_all_magnitudes(neurons: int, *key: object) -> Floats:
    """So that the order of additions shows in almost every sum."""
    random = rng("sums", neurons, *key)
    values = random_rows(random, neurons, DIM) * 2.0 ** random.integers(-12, 12, (neurons, 1))
    return values.astype(np.float32)


@pytest.mark.parametrize("neurons", [1, 64, 65, 128, 191, 192, 400, 64 * 13, 64 * 43 * 2 + 7, 64 * 140 + 1])
def test_leaves_are_summed_in_a_tree(open_exact: OpenBackend, neurons: int) -> None:
    """With gaps of every size between active neurons, whatever the threads; and the order does matter
    here."""
    down = of_all_magnitudes(neurons)
    random = rng("fires", neurons)
    active = random.random((4, neurons)) < np.array([[1.0], [0.5], [0.01], [0.5]])
    active[3, neurons // 5 : neurons // 2] = False
    expected = expected_sum(down, active)
    for threads in THREADS:
        backend = open_exact(threads)
        np.testing.assert_array_equal(run(backend, layer(backend, down), active), expected)
    if neurons > 1000:
        in_turn = np.add.accumulate(down)[-1]
        assert (in_turn != expected[0]).any()


@settings(max_examples=25, deadline=None)
@given(neurons=st.integers(1, 9000), rows=st.integers(1, 16), seed=st.integers(0, 1000))
def test_the_piece_of_work_changes_no_sum(
    open_every: list[Callable[[int], Backend]], neurons: int, rows: int, seed: int
) -> None:
    down = of_all_magnitudes(neurons, seed)
    active = rng("fires", neurons, seed).random((rows, neurons)) < 0.3
    for open_cpu in open_every:
        alone = [run(b := open_cpu(1), layer(b, down), active[t : t + 1])[0] for t in range(min(rows, 2))]
        for threads in THREADS:
            backend = open_cpu(threads)
            together = run(backend, layer(backend, down), active)
            np.testing.assert_array_equal(together[: len(alone)], alone)
            np.testing.assert_array_equal(together, run(open_cpu(1), layer(open_cpu(1), down), active))


@pytest.mark.parametrize("neurons", [64, 200, 64 * 13, 64 * 140 + 1])
def test_a_prompt_row_is_summed_as_a_decode_row(open_exact: OpenBackend, neurons: int) -> None:
    """With biases that leave whole leaves without any active neuron."""
    down = of_all_magnitudes(neurons)
    up = np.zeros((neurons, DIM), np.float32)
    up[:, :3] = rng("up").random((neurons, 3)) < 0.3
    up[neurons // 3 : neurons // 2] = 0
    tensors = FFNTensors(None, quantise(up, "F32"), quantise(down, "F32"), "by_neuron", "relu")
    rows = np.eye(4, DIM, dtype=np.float32)[np.arange(70) % 4]
    active = rows @ up.T > 0
    expected = expected_sum(down, active[:4])[np.arange(70) % 4]
    backend = open_exact()
    weights = backend.ffn_weights(tensors)
    for decode in (0, 16):
        batch = plain_batch(backend, decode, 70 - decode)
        x, out = backend.zeros((batch.limits.tokens, DIM)), backend.zeros((batch.limits.tokens, DIM))
        x[:70] = rows
        backend.ffn(FFNCall(x, weights, batch, out, skip=True))
        np.testing.assert_array_equal(out[:70], expected)
