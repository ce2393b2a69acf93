"""The FFN op with gates that others computed before: against float64 brute force, and bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.op_truth import (
    FFNKind,
    buffers,
    ffn,
    ffn_rows,
    gate_and_up,
    plain_batch,
    random_ffn,
    rng,
    to_bits,
    to_words,
)

from hotcold.formats.blocks import BLOCK_TYPES
from hotcold.kernels.backend import Backend, FFNCall, FFNStats, is_dense

TYPES = (("F32",) * 3, ("Q4_0", "Q8_0", "Q4_0"), ("F16", "Q5_1", "Q5_1"), ("Q4_K", "Q4_K", "Q6_K"))


def run(backend: Backend, weights: Any, x: Any, gates: Any, step: tuple[int, int], **options: Any) -> Any:
    """Returns the result, the active neurons, and the counts."""
    batch, words = plain_batch(backend, *step), weights.words
    given = [buffers(backend, batch, each) for each in (x, gates)]
    out, active = backend.zeros(given[0].shape), backend.zeros((batch.limits.tokens, words), np.uint64)
    out[:], stats = 7, FFNStats(backend.zeros((1, 5), np.int64))
    backend.ffn(FFNCall(given[0], weights, batch, out, gates=given[1], active=active, stats=stats, **options))
    assert (out[len(x) :] == 7).all()
    return np.array(out[: len(x)]), active[: step[0]], stats.counts[0].tolist()


@pytest.mark.parametrize("types", TYPES, ids=lambda types: " ".join(dict.fromkeys(types)))
@pytest.mark.parametrize("layout", ["by_neuron", "by_output"])
def test_against_an_ffn_with_these_gates(backend: Backend, layout: str, types: tuple[str, str, str]) -> None:
    large = max(BLOCK_TYPES[type].weights for type in types) > 32
    for n, d in ((512, 256),) if large else ((416, 64), (96, 96)):
        random = rng("given gates", types, n)
        tensors = random_ffn(random, (n, d), types, FFNKind("relu", biases=True), layout)
        own = replace(tensors, gate=None, gate_bias=None)
        weights = backend.ffn_weights(own)
        dense = is_dense(layout, own.down.type, "relu")
        for skip, masked, step in (
            (True, False, (1, 0)), (False, False, (3, 0)), (True, False, (16, 0)), (True, False, (0, 33)),
            (True, True, (3, 5)), (True, True, (2, 0)),
        ):  # fmt: skip
            decode = step[0]
            x = ffn_rows(random, sum(step), tensors)
            candidates = np.ones((len(x), n), np.bool_)
            if masked:
                candidates[:decode] = random.random((decode, n)) < 0.3
            truth, gates = ffn(x, tensors, candidates), gate_and_up(x, tensors)[0].astype(np.float32)
            mask = backend.zeros((plain_batch(backend, *step).limits.tokens, weights.words), np.uint64)
            mask[:decode] = to_words(candidates[:decode])
            options = {"skip": skip, "mask": mask if masked else None}
            out, active, counts = run(backend, weights, x, gates, step, **options)
            truth.out.check(out, (n, d, skip, masked, step))
            added = truth.coefficients[:decode] != 0
            np.testing.assert_array_equal(to_bits(active, n), added)
            if step[1]:
                continue
            read = (candidates & truth.active_gates if skip else candidates)[:decode].any(axis=0).sum()
            assert counts[:2] == [n if dense else read, 0]
            assert counts[3] == (added if skip else candidates[:decode]).sum()


@pytest.mark.parametrize("layout", ["by_neuron", "by_output"])
def test_a_row_has_the_same_bits_in_any_step_and_with_skips(
    open_exact: Callable[..., Backend], layout: str
) -> None:
    backend, random = open_exact(), rng("bits of given gates")
    tensors = random_ffn(random, (416, 64), ("Q4_0",) * 3, FFNKind("relu", gated=False), layout)
    weights, x = backend.ffn_weights(tensors), random.standard_normal((9, 64)).astype(np.float32)
    gates = random.standard_normal((9, 416)).astype(np.float32) - np.float32(1)
    all_rows = run(backend, weights, x, gates, (9, 0), skip=True)[0]
    for step, skip in (((9, 0), False), ((0, 9), True), ((0, 9), False), ((4, 5), True)):
        np.testing.assert_array_equal(run(backend, weights, x, gates, step, skip=skip)[0], all_rows)
    alone = [run(backend, weights, x[i : i + 1], gates[i : i + 1], (1, 0), skip=True)[0] for i in range(9)]
    np.testing.assert_array_equal(np.vstack(alone), all_rows)


def test_weights_with_a_gate_are_refused(backend: Backend) -> None:
    random = rng("refused")
    weights = backend.ffn_weights(random_ffn(random, (64, 32), ("F32",) * 3, FFNKind("relu"), "by_neuron"))
    x, gates = np.zeros((1, 32), np.float32), np.zeros((1, 64), np.float32)
    with pytest.raises(ValueError, match="gates computed before: weights without a gate, and no experts"):
        run(backend, weights, x, gates, (1, 0), skip=True)
