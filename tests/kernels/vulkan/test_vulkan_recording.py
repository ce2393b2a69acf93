"""Dispatches that do the work of two: the bits are those of the ops one by one, as the model has them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.mirrored_backend import MirroredBackend
from support.op_truth import Row, make_batch, page_count, random_rows, random_tensor, rng
from support.vulkan.model import OrderedReference

from hotcold.kernels.backend import PAGE, AttentionCall, Norm, RopeTable, Rows
from hotcold.kernels.vulkan.backend import VulkanBackend
from hotcold.kernels.vulkan.recording import Recording

Array = np.ndarray[Any, Any]
#: Makes the arrays of a program on a backend: the ops, and the arrays that they write.
Program = Callable[[Any], tuple[Callable[[], None], list[Array]]]


def dispatches_of(vulkan: VulkanBackend, program: Program) -> int:
    """Checks that a recorded program gives the model's bits; returns its dispatches."""
    model = OrderedReference()
    ops, expected = program(model)
    ops()
    mirrored = MirroredBackend(vulkan)
    ops, actual = program(mirrored)
    recorded: Any = mirrored.record(ops)
    recorded.run()
    for got, wanted in zip(actual, expected, strict=True):
        words = [each.view(f"u{each.itemsize}") for each in (got, wanted)]
        nan = np.isnan(got) & np.isnan(wanted)
        np.testing.assert_array_equal(*(np.where(nan, 0, each) for each in words))
    count: int = recorded._inner.counts.dispatches
    return count


def normed(
    width: int, type: str, *, rows: Rows = Rows.TOKENS, read: Rows | None = None, heads: int = 1, **of: Any
) -> Program:
    """A norm, and a product of its rows."""

    def program(backend: Any) -> tuple[Callable[[], None], list[Array]]:
        random = rng("norm and product", width, type)
        batch = make_batch(backend, [Row(t) for t in range(3)], [Row(3), Row(4)], logits=[0, 2])
        x = random_rows(random, batch.limits.tokens, heads, width // heads) * 3 + 1
        x[1] *= 1e15
        x[2, 0, 1] = np.nan
        weight, bias = random_rows(random, 2, width // heads)
        norm = Norm(weight, bias if of.get("centre") else None, 1e-5, **of)
        out, y = np.zeros_like(x), np.zeros((batch.limits.tokens, 40), np.float32)
        matrix = backend.matrix(random_tensor(random, type, 40, width))

        def ops() -> None:
            backend.norm(x, norm, batch, out, rows)
            backend.linear(out, [matrix], batch, [y], rows=rows if read is None else read)

        return ops, [out, y]

    return program


@pytest.mark.parametrize("rows", [Rows.TOKENS, Rows.LOGITS])
@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("width", [96, 1056, 4352])
def test_a_norm_quantises_the_rows_that_a_product_reads(
    vulkan: VulkanBackend, width: int, centre: bool, rows: Rows
) -> None:
    program = normed(width, "Q4_0", rows=rows, centre=centre)
    assert dispatches_of(vulkan, program) == 2


@pytest.mark.parametrize(
    ("program", "dispatches"),
    [
        (normed(256, "F16"), 2),  # nothing is quantised
        (normed(256, "Q8_0", read=Rows.LOGITS), 3),  # other rows
        (normed(256, "Q8_0", heads=4), 3),  # parts of rows
        (normed(40 * 256 + 32, "Q8_0"), 3),  # more values than registers
    ],
)
def test_other_norms_do_not_quantise(vulkan: VulkanBackend, program: Program, dispatches: int) -> None:
    assert dispatches_of(vulkan, program) == dispatches


@pytest.mark.parametrize(
    ("head_dim", "more_rows", "dispatches"),
    [(64, 0, 3), (96, 0, 3), (128, 0, 3), (40, 0, 4), (64, 12, 4)],
)
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_quantises_the_rows_that_a_product_reads(
    vulkan: VulkanBackend, head_dim: int, more_rows: int, dispatches: int, sinks: bool
) -> None:
    """Heads of whole blocks, and few rows: for more, codes would overlap the partial results. Rows with one
    split and with three."""

    def program(backend: Any) -> tuple[Callable[[], None], list[Array]]:
        random = rng("attention and product", head_dim)
        prompt = [Row(t, 2) for t in range(255, 257 + more_rows)]
        batch = make_batch(backend, [Row(3, 0), Row(600, 1)], prompt)
        caches = [np.zeros((page_count(batch), 2, PAGE, head_dim), np.float16) for _ in range(2)]
        for cache in caches:
            cache[:] = random_rows(random, *cache.shape)
        tokens = batch.limits.tokens
        q = random_rows(random, tokens, 4, head_dim)
        out, y = np.zeros_like(q), np.zeros((tokens, 40), np.float32)
        matrix = backend.matrix(random_tensor(random, "Q8_0", 40, 4 * head_dim))
        scores = np.array([1, -np.inf, 20, -1], np.float32) if sinks else None

        def ops() -> None:
            backend.attention(AttentionCall(q, *caches, batch, out, head_dim**-0.5, sinks=scores))
            backend.linear(out, [matrix], batch, [y])

        return ops, [out, y]

    assert dispatches_of(vulkan, program) == dispatches


def capped(
    type: str, *, rows: Rows = Rows.LOGITS, accumulate: bool = False, caps: int = 1, other: bool = False
) -> Program:
    """A product, and caps of its rows."""

    def program(backend: Any) -> tuple[Callable[[], None], list[Array]]:
        random = rng("product and cap", type)
        batch = make_batch(backend, [Row(t) for t in range(3)], [Row(3), Row(4)], logits=[2, 0])
        x, y, z = (random_rows(random, batch.limits.tokens, width) * 3 for width in (256, 150, 150))
        matrix = backend.matrix(random_tensor(random, type, 150, 256))

        def ops() -> None:
            backend.linear(x, [matrix], batch, [y], rows=rows, accumulate=accumulate)
            for _ in range(caps):
                backend.softcap(z if other else y, batch, 0.7)

        return ops, [y, z]

    return program


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("type", "dispatches"), [("F16", 0), ("Q8_0", 1)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_products_cap_the_logits_that_they_make(
    vulkan: Any, monkeypatch: pytest.MonkeyPatch, type: str, dispatches: int, accumulate: bool, parts: int
) -> None:
    """In parts, too, between which a new submit may begin."""
    tensor_bytes = 150 * 256 * (2 if type == "F16" else 34 / 32)
    info = SimpleNamespace(name="a device", max_range=int(tensor_bytes * 70 / 150), max_allocation=1 << 30)
    if parts > 1:
        monkeypatch.setattr(vulkan, "info", info)
        monkeypatch.setattr(Recording, "MOST_WORK", 1)
    assert dispatches_of(vulkan, capped(type, accumulate=accumulate)) == dispatches + parts


@pytest.mark.parametrize(
    ("program", "dispatches"),
    [
        (capped("F16", caps=2), 2),
        (capped("F16", other=True), 2),
        (capped("F16", rows=Rows.TOKENS), 2),
    ],
)
def test_other_caps_are_dispatches(vulkan: VulkanBackend, program: Program, dispatches: int) -> None:
    assert dispatches_of(vulkan, program) == dispatches


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize(("rotary", "interleaved"), [(64, False), (64, True), (20, False)])
def test_stores_rotate_keys_and_queries(
    vulkan: VulkanBackend, rotary: int, interleaved: bool, dtype: str
) -> None:
    program = rotated(rotary, interleaved, dtype, ["q", "k"])
    assert dispatches_of(vulkan, program) == 1


@pytest.mark.parametrize(
    ("turned", "dispatches"),
    [(["k"], 1), (["q"], 2), (["k", "q"], 3), (["k", "k"], 2), (["other q", "k"], 2), (["same"], 2)],
)
def test_stores_rotate_only_what_was_rotated_just_before(
    vulkan: VulkanBackend, turned: list[str], dispatches: int
) -> None:
    """By the same angles. Keys that are also values are rotated first."""
    assert dispatches_of(vulkan, rotated(64, False, "float16", turned)) == dispatches


def rotated(rotary: int, interleaved: bool, dtype: str, turned: list[str]) -> Program:
    """Ropes of these buffers, and a store."""

    def program(backend: Any) -> tuple[Callable[[], None], list[Array]]:
        random = rng("ropes and stores", rotary)
        batch = make_batch(backend, [Row(3, 0), Row(49, 1)], [Row(31, 2), Row(32, 2)])
        tokens, heads = batch.limits.tokens, {"q": 6, "k": 2, "other q": 6, "same": 2}
        rows = {name: random_rows(random, tokens, count, 64) for name, count in heads.items()}
        v = random_rows(random, tokens, 2, 64)
        values = {"uint8": 68}.get(dtype, 64)
        caches = [np.zeros((page_count(batch), 2, PAGE, values), dtype) for _ in range(2)]
        angles = random_rows(random, 4, 50, rotary // 2)
        tables = [RopeTable(*angles[i : i + 2], interleaved) for i in (0, 2)]

        def ops() -> None:
            for name in turned:
                backend.rope(rows[name], tables[name.startswith("other")], batch)
            if turned == ["same"]:
                backend.store_kv(rows["same"], rows["same"], batch, *caches)
            else:
                backend.store_kv(rows["k"], v, batch, *caches)

        return ops, [*rows.values(), *caches]

    return program
