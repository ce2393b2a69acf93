"""Norms and the small ops on Vulkan: a row's bits in every batch, and what is refused. That they are the bits
which the numerics prescribe is for test_vulkan_table.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.mirrored_backend import MirroredBackend
from support.op_truth import Row, make_batch, plain_batch, random_rows, random_tensor, rng
from support.vulkan.model import OrderedReference

from hotcold.kernels.backend import Norm, RouterCall, Rows
from hotcold.kernels.reference import ReferenceBackend
from hotcold.kernels.vulkan.backend import VulkanBackend
from tests.kernels import test_router


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("width", [1, 255, 257, 1100])
def test_a_norm_is_the_same_in_any_batch(vulkan: Any, width: int, centre: bool) -> None:
    """The bits of the model, and the reference's values."""
    x, weight = 3 + random_rows(rng("x"), 20, width), random_rows(rng("weight"), width)
    backend, norm = (
        MirroredBackend(vulkan),
        Norm(weight, weight[::-1].copy() if centre else None, 1e-6, centre),
    )
    expected, truth = x.copy(), x.copy()
    whole = make_batch(backend, [], [Row(t) for t in range(20)], spare=0)
    OrderedReference().norm(x, norm, whole, expected)
    ReferenceBackend().norm(x, norm, whole, truth)
    np.testing.assert_allclose(expected, truth, atol=1e-5 * np.abs(truth).max())
    for decode, prompt in ((16, 4), (0, 20), (3, 4), (1, 0)):
        batch = plain_batch(backend, decode, prompt)
        out = np.full((batch.limits.tokens, width), 7, np.float32)
        rows = decode + prompt
        backend.norm(np.resize(x, out.shape), norm, batch, out)
        np.testing.assert_array_equal(out[:rows].view(np.uint32), expected[:rows].view(np.uint32))
        assert (out[rows:] == 7).all()


def test_rows_of_logits(vulkan: Any) -> None:
    """More of them than rows of the step; gathered, then normalised."""
    backend = MirroredBackend(vulkan)
    batch = make_batch(backend, [Row(0), Row(1)], logits=[1, 0, 1, 1, 0, 0, 1])
    x, weight = random_rows(rng("x"), batch.limits.tokens, 300), random_rows(rng("weight"), 300)
    out = np.full((batch.limits.logits, 300), 7, np.float32)
    norm = Norm(weight, None, 1e-5)

    def head() -> None:
        backend.gather(x, batch, out)
        backend.norm(out, norm, batch, out, Rows.LOGITS)

    program = backend.record(head, 2)
    expected = x.copy()
    OrderedReference().norm(x, norm, batch, expected)
    for n in (7, 3, 0):
        batch.counts[2], out[:] = n, 7
        program.run()
        np.testing.assert_array_equal(out[:n], expected[batch.logits_rows[:n]])
        assert (out[n:] == 7).all()
    batch.counts[2], batch.logits_rows[1] = 2, 2
    with pytest.raises(ValueError, match="logits row 2 is out of range; allowed: 0 to 1"):
        program.run()


def test_add_goes_beyond_no_row(vulkan: Any) -> None:
    backend = MirroredBackend(vulkan)
    for decode, prompt in ((1, 0), (5, 14)):
        batch = plain_batch(backend, decode, prompt)
        x, y = random_rows(rng("add"), 2, batch.limits.tokens, 2, 300)
        total, n = x.copy(), decode + prompt
        backend.add(total, y, batch)
        np.testing.assert_array_equal(total[:n], x[:n] + y[:n])
        np.testing.assert_array_equal(total[n:], x[n:])


def test_ops_write_to_host_memory_which_is_read_without_a_copy(vulkan: VulkanBackend) -> None:
    """Logits are there: a read after a step needs no submit."""
    values = random_rows(rng("host"), 3, 50)
    batch, allocated = plain_batch(vulkan, 3), vulkan.allocated_bytes
    rows = vulkan.zeros((batch.limits.tokens, 50), on_host=True)
    assert vulkan.allocated_bytes == allocated
    assert not vulkan.read(rows).any()
    vulkan.write(rows, values[1:], 1)
    vulkan.add(rows, rows, batch, scale=2)
    np.testing.assert_array_equal(vulkan.read(rows, 1, 3), 3 * values[1:])
    assert np.shares_memory(vulkan.read(rows), vulkan.read(rows, 1, 2))
    copied = vulkan.zeros((4, 50))
    vulkan.copy(vulkan, rows, copied, 3)
    np.testing.assert_array_equal(vulkan.read(copied, 1, 3), 3 * values[1:])


def test_top_k_is_the_reference(vulkan: VulkanBackend) -> None:
    values = np.round(random_rows(rng("top_k"), 3, 1003), 2)
    values[1, :4] = np.nan, np.inf, -np.inf, np.nan
    logits = vulkan.zeros(values.shape)
    vulkan.write(logits, values)
    bias = np.array([5, 1002], np.int32), np.array([9, -9], np.float32)
    allowed = rng("allowed").integers(0, 2**64, 16, np.uint64)
    for row in (0, 1, 2):
        for k in (1, 40, 1003, 5000):
            for args in ((), (bias,), (None, allowed), (bias, allowed)):
                ids, top = vulkan.top_k(logits, row, k, *args)
                expected = ReferenceBackend().top_k(values, row, k, *args)
                assert ids.tolist() == expected[0].tolist()
                np.testing.assert_array_equal(top, expected[1])


class Routed(NamedTuple):
    experts: int
    k: int
    score: str
    normalise: bool
    biased: bool  #: the logits, and the choice


@pytest.mark.parametrize(
    "kind",
    [
        Routed(1, 1, "sigmoid", False, False),
        Routed(37, 3, "softmax", True, False),
        Routed(256, 8, "sigmoid", True, True),
        Routed(1024, 32, "softmax", False, True),
    ],
)
def test_a_row_goes_to_the_same_experts_in_any_batch(vulkan: Any, kind: Routed) -> None:
    """NaN among its logits, too; and with the factors of the model, bit for bit."""
    backend, n = MirroredBackend(vulkan), 20
    tensor = random_tensor(rng(kind), "Q8_0", kind.experts, 64, scale=0.3)
    bias, more = random_rows(rng("bias", kind), 2, kind.experts)
    x = random_rows(rng("x", kind), n, 64)
    x[3, 40] = np.nan
    options: dict[str, Any] = {"k": kind.k, "score": kind.score, "normalise": kind.normalise, "scale": 2.5}
    if kind.biased:
        options |= {"selection_bias": more, "expert_scale": more[::-1].copy()}

    def route(backend: Any, decode: int, prompt: int) -> tuple[Any, Any]:
        batch = plain_batch(backend, decode, prompt)
        rows = batch.limits.tokens
        ids, factors = np.full((rows, kind.k), -7, np.int32), np.full((rows, kind.k), 7, np.float32)
        matrix = backend.matrix(tensor, bias if kind.biased else None)
        backend.router(RouterCall(np.resize(x, (rows, 64)), matrix, batch, ids, factors, **options))
        assert (ids[decode + prompt :] == -7).all() and (factors[decode + prompt :] == 7).all()
        return ids[: decode + prompt], factors[: decode + prompt]

    expected = route(OrderedReference(), 16, 4)
    for decode, prompt in ((1, 0), (16, 4), (0, n), (3, 5)):
        for found, right in zip(route(backend, decode, prompt), expected, strict=True):
            np.testing.assert_array_equal(found, right[: decode + prompt])


@pytest.mark.parametrize(
    "check",
    [
        test_router.test_ties_go_to_the_lower_id,
        test_router.test_logits_rank_where_scores_have_become_equal,
        test_router.test_nan_ranks_last,
        test_router.test_the_selection_bias_chooses_and_does_not_weigh,
        test_router.test_scores_of_nothing_give_no_nan,
    ],
)
def test_choices_are_those_of_every_backend(vulkan: Any, check: Callable[[Any], None]) -> None:
    check(MirroredBackend(vulkan))


def test_wrong_routers_are_refused(vulkan: VulkanBackend) -> None:
    batch, x, matrix = (
        plain_batch(vulkan, 1),
        vulkan.zeros((4, 4)),
        vulkan.matrix(random_tensor(rng(), "F32", 8, 4)),
    )
    right = {"k": 2, "score": "softmax", "normalise": True, "scale": 1.0}
    ids, factors = vulkan.zeros((4, 2), np.int32), vulkan.zeros((4, 2))
    wrong: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
        ({"k": 9}, ValueError, "router k 9 of 8 experts: 1 to 8 are allowed"),
        ({"k": 3}, ValueError, "ids: expected at least 4 rows of 3, got 4 rows of 2"),
        ({"score": "relu"}, ValueError, "router score 'relu': choose from softmax, sigmoid"),
        ({"selection_bias": vulkan.zeros((9,))}, ValueError, r"bias of shape \(9,\): \(8,\) is needed"),
        ({"expert_scale": vulkan.zeros((9,))}, ValueError, r"scale of shape \(9,\): \(8,\) is needed"),
        ({"selection_bias": ids}, TypeError, "selection bias is int32: float32 is needed"),
    )
    for change, error, message in wrong:
        with pytest.raises(error, match=message):
            vulkan.router(RouterCall(x, matrix, batch, ids, factors, **(right | change)))
    with pytest.raises(TypeError, match="ids is float32: int32 is needed"):
        vulkan.router(
            RouterCall(x, matrix, batch, factors, factors, k=2, score="softmax", normalise=True, scale=1.0)
        )


def test_what_does_not_fit_is_refused(vulkan: VulkanBackend) -> None:
    batch, x = plain_batch(vulkan, 1), vulkan.zeros((4, 8))  # 4 rows, 2 of logits
    weight, long, few = vulkan.zeros((8,)), vulkan.zeros((9,)), vulkan.zeros((1, 8))
    norm, none = Norm(weight, None, 1e-5), np.zeros(0, np.uint64)
    refused = (
        (lambda: vulkan.norm(x, Norm(long, None, 1e-5), batch, x), r"norm weight of shape \(9,\): \(8,\)"),
        (lambda: vulkan.norm(x, Norm(weight, long, 1e-5), batch, x), r"norm bias of shape \(9,\): \(8,\)"),
        (lambda: vulkan.norm(weight, norm, batch, x), r"x of shape \(8,\): rows of at least one value"),
        (lambda: vulkan.norm(x, norm, batch, few), "out: expected at least 4 rows of 8, got 1"),
        (lambda: vulkan.norm(x, norm, batch, few, Rows.LOGITS), "out: expected at least 2 rows of 8, got 1"),
        (lambda: vulkan.add(x, vulkan.zeros((4, 9)), batch), "y: expected at least 4 rows of 8, got 4 rows"),
        (lambda: vulkan.gather(x, batch, few), "out: expected at least 2 rows of 8, got 1"),
        (lambda: vulkan.top_k(x, 4, 1), "row 4 of logits that have 4"),
        (lambda: vulkan.top_k(x, 0, 0), "k is 0: at least 1 is needed"),
        (lambda: vulkan.top_k(x, 0, 1, None, none), "top_k: allowed: expected at least 1"),
    )
    for run, message in refused:
        with pytest.raises(ValueError, match=message):
            run()
    half = vulkan.zeros((8,), np.float16)
    with pytest.raises(TypeError, match="norm weight is float16: float32 is needed"):
        vulkan.norm(x, Norm(half, None, 1e-5), batch, x)
    with pytest.raises(TypeError, match=r"logits are float16 of shape \(8,\): float32 \[R, V\] is needed"):
        vulkan.top_k(half, 0, 1)
