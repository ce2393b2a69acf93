"""The ops of latent attention's heads, and experts by groups: against brute force, and bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.op_truth import plain_batch, random_rows, random_tensor, rng, weights_of

from hotcold.formats.blocks import BLOCK_TYPES, quantise
from hotcold.kernels import open_backend
from hotcold.kernels.backend import Backend, Batch, BatchLimits, ExpertGroups, Floats, RouterCall
from hotcold.kernels.gpu import StepShape
from hotcold.kernels.numpy_matrix import quantise_input
from hotcold.kernels.processor import scratch_bytes

#: heads, rows of each, columns, and values of a head of x
SHAPES = ((1, 5, 32, 32), (3, 40, 64, 96), (4, 10, 16, 24), (2, 100, 128, 130), (2, 7, 12, 12))


def filled(backend: Backend, rows: int, values: Floats) -> Any:
    buffer = backend.zeros((rows, *values.shape[1:]))
    buffer[:] = np.nan
    buffer[: len(values)] = values
    return buffer


@pytest.mark.parametrize(("type", "columns"), [("Q8_0", 64), ("F32", 12)])
def test_scratch_of_inputs_of_heads_is_counted(type: str, columns: int) -> None:
    heads, limits = 6, BatchLimits(40, 1, 1, 1)
    ops: Any = open_backend("cpu", threads=1)
    x, out = ops.zeros((40, heads, columns)), ops.zeros((40, heads, 5))
    matrix = ops.matrix(random_tensor(rng("scratch"), type, heads * 5, columns))
    program = ops.record(lambda: ops.linear_heads(x, matrix, Batch(limits), out))
    own = [part.native.scratch_bytes for part in getattr(program, "parts", [program])]
    kinds = (BLOCK_TYPES["Q8_0"],) * 3
    shape = StepShape(
        limits=limits, dim=1, heads=heads, kv_heads=1, head_dim=1, neurons=1, hot=None, types=kinds,
        gated=True, down_layout="by_output", activation="silu", rank=0, head_columns=(columns,),
    )  # fmt: skip
    assert max(own) <= scratch_bytes(shape) < max(own) + 64
    assert scratch_bytes(replace(shape, head_columns=())) < max(own)


def test_each_head_has_its_factors(cpu_backend: Backend) -> None:
    """Rows of types that are opened may have factors."""
    heads, each, columns, n = 3, 5, 64, 2
    tensor = random_tensor(rng("factors"), "NVFP4", heads * each, columns)
    tensor = replace(tensor, factors=rng("factor").uniform(0.5, 2, heads * each).astype(np.float32))
    x = random_rows(rng("x", heads), n * heads, columns).reshape(n, heads, columns)
    batch = plain_batch(cpu_backend, n, 0)
    out = cpu_backend.zeros((batch.limits.tokens, heads, each))
    cpu_backend.linear_heads(
        filled(cpu_backend, batch.limits.tokens, x), cpu_backend.matrix(tensor), batch, out
    )
    codes, scales = quantise_input(x)
    weights = tensor.dequantise().reshape(heads, each, columns).astype(np.float64)
    expected = np.einsum("hij,thj->thi", weights, (codes * scales).reshape(x.shape))
    np.testing.assert_allclose(out[:n], expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("type", ["F32", "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_head_has_its_rows(cpu_backend: Backend, shape: tuple[int, int, int, int], type: str) -> None:
    heads, each, columns, width = shape
    if type in ("Q8_0", "Q4_0") and columns % 32:
        pytest.skip("no whole blocks")
    tensor = random_tensor(rng("heads", type), type, heads * each, columns)
    matrix, weights = cpu_backend.matrix(tensor), weights_of(tensor).reshape(heads, each, columns)
    alone: Floats | None = None
    for decode, prompt in ((1, 0), (3, 2), (0, 1), (0, 19), (16, 40)):
        n = decode + prompt
        x = random_rows(rng("x", heads), n * heads, width).reshape(n, heads, width)
        batch = plain_batch(cpu_backend, decode, prompt)
        out = cpu_backend.zeros((batch.limits.tokens, heads, each))
        cpu_backend.linear_heads(filled(cpu_backend, batch.limits.tokens, x), matrix, batch, out)
        read = np.ascontiguousarray(x[..., width - columns :])
        if tensor.type.weights > 1:
            codes, scales = quantise_input(read)
            read = (codes * scales).reshape(read.shape)
        expected = np.einsum("hij,thj->thi", weights, read.astype(np.float64))
        np.testing.assert_allclose(out[:n], expected, atol=2e-5 * np.abs(expected).max())
        assert not out[n:].any()
        first = np.array(out[:1])
        alone = first if alone is None else alone
        if cpu_backend.name == "cpu":
            np.testing.assert_array_equal(first, alone)


def test_values_of_heads_are_joined(cpu_backend: Backend) -> None:
    batch = plain_batch(cpu_backend, 2, 3)
    x, y = (random_rows(rng("join", n), 5 * 3, n).reshape(5, 3, n) for n in (8, 5))
    rows = batch.limits.tokens
    out = cpu_backend.zeros((rows, 3, 13))
    cpu_backend.join_heads(filled(cpu_backend, rows, x), filled(cpu_backend, rows, y), batch, out)
    np.testing.assert_array_equal(out[:5], np.concatenate([x, y], -1))
    assert not out[5:].any()


def test_what_does_not_fit_is_refused(cpu_backend: Backend) -> None:
    batch = plain_batch(cpu_backend, 1)
    matrix = cpu_backend.matrix(random_tensor(rng(), "F32", 12, 8))
    biased = cpu_backend.matrix(random_tensor(rng(), "F32", 12, 8), np.ones(12, np.float32))

    def out_buffer(*shape: int) -> Any:
        return cpu_backend.zeros((batch.limits.tokens, *shape))

    cpu_backend.linear_heads(out_buffer(3, 8), matrix, batch, out_buffer(3, 4))
    for weights, x, out in (
        (biased, out_buffer(3, 8), out_buffer(3, 4)),
        (matrix, out_buffer(3, 7), out_buffer(3, 4)),
        (matrix, out_buffer(2, 8), out_buffer(3, 4)),
        (matrix, out_buffer(3, 8), out_buffer(3, 5)),
        (matrix, out_buffer(3, 8)[:0], out_buffer(3, 4)),
        (matrix, out_buffer(3, 8), out_buffer(3, 4)[:0]),
    ):
        with pytest.raises(ValueError):
            cpu_backend.linear_heads(x, weights, batch, out)
    with pytest.raises(ValueError):
        cpu_backend.join_heads(out_buffer(3, 2), out_buffer(3, 4), batch, out_buffer(3, 7))
    with pytest.raises(ValueError):
        cpu_backend.join_heads(out_buffer(3, 2), out_buffer(2, 4), batch, out_buffer(3, 6))


GROUPS = (ExpertGroups(4, 2), ExpertGroups(8, 3, 1), ExpertGroups(8, 8), ExpertGroups(16, 4, 2))


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_experts_of_the_best_groups(
    cpu_backend: Backend, groups: ExpertGroups, biased: bool, score: str
) -> None:
    """Brute force: the ranks of groups by sorting, then the best ranks in the chosen groups."""
    experts, n, k = 32, 11, 4
    weights = random_rows(rng("groups", experts), experts, experts)
    bias = random_rows(rng("bias"), 1, experts)[0] if biased else None
    batch = plain_batch(cpu_backend, 4, n - 4)
    rows = batch.limits.tokens
    x = random_rows(rng("rows"), n, experts)
    ids, factors = cpu_backend.zeros((rows, k), np.int32), cpu_backend.zeros((rows, k))
    options: dict[str, Any] = {} if bias is None else {"selection_bias": bias}
    matrix = cpu_backend.matrix(quantise(weights, "F32"))
    cpu_backend.router(
        RouterCall(
            filled(cpu_backend, rows, x),
            matrix,
            batch,
            ids,
            factors,
            k=k,
            score=score,
            normalise=False,
            scale=1.0,
            groups=groups,
            **options,
        )
    )
    logits = x.astype(np.float64) @ weights.T.astype(np.float64)
    scores = 1 / (1 + np.exp(-logits))
    if score == "softmax":
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
    size = experts // groups.count
    for t in range(n):
        ranks = scores[t] + (0 if bias is None else bias)
        of = [sum(sorted(ranks[g * size : (g + 1) * size])[-groups.best :]) for g in range(groups.count)]
        used = sorted(range(groups.count), key=lambda g: -of[g])[: groups.used]
        allowed = sorted((e for e in range(experts) if e // size in used), key=lambda e: -ranks[e])
        assert ids[t].tolist() == sorted(allowed[:k])
        np.testing.assert_allclose(factors[t], scores[t][ids[t]], rtol=2e-5)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (ExpertGroups(5, 2), "32 experts in 5 groups: a divisor"),
        (ExpertGroups(4, 5), "5 of 4 groups"),
        (ExpertGroups(16, 1), "1 of 16 groups of experts: they must hold the 4"),
        (ExpertGroups(4, 2, 3), "the best 3 experts of a group"),
    ],
    ids=str,
)
def test_groups_that_do_not_fit_are_refused(cpu_backend: Backend, groups: ExpertGroups, message: str) -> None:
    batch = plain_batch(cpu_backend, 1)
    rows = batch.limits.tokens
    matrix = cpu_backend.matrix(random_tensor(rng(), "F32", 32, 8))
    ids, factors = cpu_backend.zeros((rows, 4), np.int32), cpu_backend.zeros((rows, 4))
    with pytest.raises(ValueError, match=message):
        cpu_backend.router(RouterCall(
            cpu_backend.zeros((rows, 8)), matrix, batch, ids, factors, k=4, score="sigmoid", normalise=True,
            scale=1.0, groups=groups,
        ))  # fmt: skip
