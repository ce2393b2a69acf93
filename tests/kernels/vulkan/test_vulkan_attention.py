"""Attention, its cache and rotary positions on Vulkan: a row's bits in every batch, and what is refused. That
they are the bits which the numerics prescribe is for test_vulkan_table.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.bits import same_bits
from support.mirrored_backend import MirroredBackend
from support.op_truth import (
    AttentionKind,
    Row,
    cache_shape,
    make_batch,
    page_count,
    plain_batch,
    random_cache,
    random_rows,
    rng,
)
from support.vulkan.model import OrderedReference

from hotcold.kernels.backend import PAGE, SPLIT, AttentionCall, Batch, BatchLimits, Floats, RopeTable
from hotcold.kernels.reference import ReferenceBackend
from hotcold.kernels.vulkan import attention
from hotcold.kernels.vulkan.backend import VulkanBackend
from hotcold.kernels.vulkan.recording import Cut, Dispatch, Recording
from hotcold.model.mixers.attention import CACHE_TYPES

pytestmark = pytest.mark.one_driver  # the op table looks at the second one

DECODE = [Row(n - 1, s) for s, n in enumerate((1, 2, 33, 255, 256, 257, 512, 700))]
#: More than 16 rows: those of a prompt then read keys together; some see other splits than their neighbours.
PROMPT = [Row(p, 8) for p in (*range(3), *range(248, 262), 511, 512, 513)] + [Row(p, 9) for p in range(4)]


def caches(backend: Any, batch: Any, type: str, kv_heads: int, head_dim: int) -> list[Any]:
    """Makes caches whose positions hold values that depend neither on a sequence's pages nor on other
    sequences."""
    shape = (kv_heads, PAGE, head_dim)
    pair = [backend.zeros(cache_shape((page_count(batch), *shape), type), CACHE_TYPES[type]) for _ in "kv"]
    for cache, name in zip(pair, "kv", strict=True):
        for sequence, pages in enumerate(batch.pages):
            own = random_cache(rng(name, sequence), ReferenceBackend(), (24, *shape), type)
            cache[pages] = own[: len(pages)]
    return pair


def attend(
    backend: Any,
    decode: Sequence[Row],
    prompt: Sequence[Row],
    heads: int,
    kv_heads: int,
    kind: AttentionKind,
    type: str = "f16",
    head_dim: int = 32,
) -> Floats:
    batch, rows = make_batch(backend, decode, prompt), [*decode, *prompt]
    q = np.full((batch.limits.tokens, heads, head_dim), np.nan, np.float32)
    for t, row in enumerate(rows):
        q[t] = 2 * random_rows(rng("q", row), heads, head_dim)
    out = np.full(q.shape, 7, np.float32)
    backend.attention(
        AttentionCall(q, *caches(backend, batch, type, kv_heads, head_dim), batch, out, 0.3, **kind._asdict())
    )
    assert (out[len(rows) :] == 7).all()
    return out[: len(rows)]


@pytest.mark.parametrize("heads", [2, 4, 6, 8])  # a kv head serves 1 to 4, so 4 to 1 prompt rows go together
@pytest.mark.parametrize("windowed", [False, True])
def test_a_row_is_the_same_in_any_batch_and_as_prompt(vulkan: Any, heads: int, windowed: bool) -> None:
    backend, kind = MirroredBackend(vulkan), AttentionKind(100, None, 5.0) if windowed else AttentionKind()
    rows = [*DECODE, *PROMPT]
    alone = np.vstack([attend(backend, [row], [], heads, 2, kind) for row in rows])
    same_bits(attend(backend, DECODE, PROMPT, heads, 2, kind), alone)
    same_bits(attend(backend, [], rows, heads, 2, kind), alone)
    for start, stop in pairwise((0, 1, 6, 22)):
        same_bits(attend(backend, [], rows[start:stop], heads, 2, kind), alone[start:stop])
    same_bits(attend(OrderedReference(), [], rows[-12:], heads, 2, kind), alone[-12:])


@pytest.mark.parametrize(
    ("type", "heads", "head_dim"),
    [("f16", 24, 16), ("f16", 3, 5), ("f16", 1, 1), ("f16", 2, 512), ("f32", 3, 7), ("q8_0", 5, 192)],
)
def test_any_width_and_number_of_heads(vulkan: Any, type: str, heads: int, head_dim: int) -> None:
    """Many that share a kv head, and rows of half words."""
    sinks = random_rows(rng("sinks"), heads)
    for rows in ([Row(300), Row(2, 1)], [Row(p) for p in range(250, 268)]):
        for kind in (AttentionKind(), AttentionKind(9, sinks, 2.0)):
            args = [], rows, heads, 1, kind, type, head_dim
            same_bits(attend(MirroredBackend(vulkan), *args), attend(OrderedReference(), *args))


@pytest.mark.parametrize(("type", "window"), [("f16", None), ("q8_0", 7), ("f32", 260)])
def test_what_a_row_does_not_see_may_be_anything(vulkan: Any, type: str, window: int | None) -> None:
    """Positions 5 and 270 are NaN: rows that share reads with rows that see them do not."""
    backend, ordered = MirroredBackend(vulkan), OrderedReference()
    rows = [Row(p) for p in (*range(24), *range(255, 290))]
    batch = make_batch(backend, [], rows)
    q = random_rows(rng("q"), batch.limits.tokens, 2, 32)
    clean = caches(backend, batch, type, 2, 32)
    spoilt = [cache.copy() for cache in clean]
    for cache in spoilt:
        for position in (5, 270):
            values = cache[batch.pages[0, position // PAGE], :, position % PAGE]
            values[:] = 0xFF if type == "q8_0" else np.nan
    outs = [np.zeros_like(q) for _ in range(2)]
    backend.attention(AttentionCall(q, *spoilt, batch, outs[0], 0.4, window=window))
    ordered.attention(AttentionCall(q, *clean, batch, outs[1], 0.4, window=window))
    for t, row in enumerate(rows):
        first = 0 if window is None else row.position - window + 1
        if any(first <= position <= row.position for position in (5, 270)):
            assert np.isnan(outs[0][t]).all()
        else:
            same_bits(outs[0][t], outs[1][t])


def test_many_splits(vulkan: Any) -> None:
    rows = [Row(20 * SPLIT + 3, 0)]
    backend, ordered = MirroredBackend(vulkan), OrderedReference()
    batch = make_batch(backend, rows)
    cache = [random_cache(rng(name), ordered, (page_count(batch), 1, PAGE, 8), "f16") for name in "kv"]
    q = random_rows(rng("q"), batch.limits.tokens, 2, 8)
    outs = [np.zeros_like(q) for _ in range(2)]
    for each, out in zip((backend, ordered), outs, strict=True):
        each.attention(AttentionCall(q, *cache, batch, out, 0.4))
    same_bits(outs[0], outs[1])


def test_rows_take_more_passes_where_scratch_is_short(vulkan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, kind = MirroredBackend(vulkan), AttentionKind(sinks=random_rows(rng("sinks"), 6))
    whole = attend(backend, DECODE, PROMPT, 6, 2, kind)
    monkeypatch.setattr(attention, "PASS_BYTES", 4 * 6 * 3 * 34 * 4 + 1)  # 4 rows of 6 heads and 3 splits
    same_bits(attend(backend, DECODE, PROMPT, 6, 2, kind), whole)
    monkeypatch.setattr(Recording, "MOST_WORK", 2 * 8 * 6 * 3 * SPLIT * 32)  # and a submit for two passes
    same_bits(attend(backend, DECODE, PROMPT, 6, 2, kind), whole)


@pytest.mark.parametrize("window", [None, 1, 300])
def test_scratch_is_what_is_said(vulkan: VulkanBackend, window: int | None) -> None:
    """A step of 272 rows and 64 splits takes passes of 8 MiB; a few rows need less."""
    limits = BatchLimits(272, 2, 64 * SPLIT // PAGE, 4)
    for rows, heads, kv_heads, head_dim, tile in (
        (272, 8, 1, 64, 1),
        (16, 8, 1, 64, 1),
        (2, 3, 1, 10, 1),
        (272, 40, 1, 128, 1),
        (272, 128, 4, 128, 1),  # a row's partial results are 4 MB
        (272, 128, 64, 128, 2),
        (16, 128, 64, 128, 1),
    ):
        q = vulkan.zeros((272, heads, head_dim))
        cache = vulkan.zeros((2, kv_heads, PAGE, head_dim), np.float16)
        recording = Recording(vulkan, Batch(limits), rows)
        attention.attention(recording, AttentionCall(q, cache, cache, recording.batch, q, 1.0, window=window))
        said = attention.attention_scratch_bytes(limits, rows, heads, kv_heads, head_dim, window)
        assert said == recording.scratch_bytes
        row_bytes = heads * {None: 64, 1: 1, 300: 3}[window] * (head_dim + 2) * 4
        assert said < max(attention.PASS_BYTES, tile * row_bytes) + 256
        dispatches = [step for step in recording.steps if isinstance(step, Dispatch)]
        in_a_pass = min(rows, said // row_bytes)
        assert len(dispatches) == 2 * -(-rows // in_a_pass)
        assert sum(step.groups[2] for step in dispatches[1::2]) == rows  # each is merged once


def test_long_prompts_are_cut_into_submits(vulkan: VulkanBackend) -> None:
    """512 rows that see 32,768 positions: 64 heads of 128 are 275 billion multiplications."""
    q = vulkan.zeros((512, 64, 128))
    cache = vulkan.zeros((2, 1, PAGE, 128), np.float16)
    recording = Recording(vulkan, Batch(BatchLimits(512, 1, 1024, 1)), 512)
    attention.attention(recording, AttentionCall(q, cache, cache, recording.batch, q, 1.0))
    cuts = [step for step in recording.steps if isinstance(step, Cut)]
    assert len(cuts) >= 274_877_906_944 // Recording.MOST_WORK


@pytest.mark.parametrize(
    ("type", "head_dim"), [("f16", 5), ("f16", 6), ("f32", 5), ("q8_0", 32), ("q8_0", 96)]
)
def test_neighbours_in_a_word_are_stored_in_one_step(vulkan: Any, type: str, head_dim: int) -> None:
    """Positions side by side, whose rows share words; what lies between other positions stays."""
    backend, ordered = MirroredBackend(vulkan), OrderedReference()
    batch = make_batch(backend, [Row(40, 1), Row(33, 2)], [Row(p) for p in range(3, 23)])
    k, v = random_rows(rng("kv"), 2, batch.limits.tokens, 3, head_dim)
    k[1], k[2], v[1] = 1.9 * 2.0**-101, 2.0**-100, 0  # the first is no block's largest value: it counts as 0
    shape = (page_count(batch), 3, PAGE, head_dim)
    pairs = [[random_cache(rng(name), ordered, shape, type) for name in "kv"] for _ in range(2)]
    for each, pair in zip((backend, ordered), pairs, strict=True):
        each.store_kv(k, v, batch, *pair)
    for a, b in zip(*pairs, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def test_float16_is_rounded_to_nearest_even(vulkan: Any) -> None:
    """All halves, what lies between two of them, and what lies beyond."""
    values = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (values[1:] + values[:-1]) / 2
    near = [np.nextafter(middle, np.float32(end)) for end in (-np.inf, np.inf)]
    ends = np.array([65519.996, 65520, 1e6, np.inf, np.nan, 2.0**-25, 1e-30], np.float32)
    k = np.concatenate([values, middle, *near, ends])
    k = np.concatenate([k, -k])
    k = np.pad(k, (0, -len(k) % 256)).reshape(1, 1, -1, 256).transpose(2, 0, 1, 3).reshape(-1, 1, 256)
    backend = MirroredBackend(vulkan)
    batch = make_batch(backend, [], [Row(p) for p in range(len(k))], spare=0)
    cache = backend.zeros((page_count(batch), 1, PAGE, 256), np.float16)
    backend.store_kv(k, k, batch, cache, cache.copy())
    stored = cache[batch.slots // PAGE, :, batch.slots % PAGE]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(stored, k.astype(np.float16))


def test_a_program_reads_its_numbers_anew(vulkan: Any) -> None:
    """Recorded once for up to 4 rows: other rows, positions, pages."""
    backend, ordered = MirroredBackend(vulkan), OrderedReference()
    batch = make_batch(backend, [Row(300, 1), Row(2)], [Row(p, 2) for p in range(30)])
    cache = [random_cache(rng(name), ordered, (page_count(batch), 1, PAGE, 8), "f16") for name in "kv"]
    q = random_rows(rng("q"), batch.limits.tokens, 2, 8)
    out, expected = np.zeros_like(q), np.zeros_like(q)
    program = backend.record(lambda: backend.attention(AttentionCall(q, *cache, batch, out, 1.0)), 4)
    for n in (2, 0, 4):
        out[:] = expected[:] = 7
        batch.counts[:2] = n, min(n, 2)
        batch.positions[0] = 300 - n
        program.run()
        ordered.attention(AttentionCall(q, *cache, batch, expected, 1.0))
        same_bits(out, expected)
    batch.counts[0] = 5
    with pytest.raises(ValueError, match="n_tokens 5 is out of range; allowed: 0 to 4"):
        program.run()


def test_numbers_of_a_batch_that_a_shader_must_not_see(vulkan: Any) -> None:
    backend = MirroredBackend(vulkan)
    batch = make_batch(backend, [Row(3), Row(40, 1)])
    pages = page_count(batch)
    cache = np.zeros((pages, 1, PAGE, 8), np.float16)
    x = np.zeros((batch.limits.tokens, 1, 8), np.float32)
    table = RopeTable(np.zeros((41, 4), np.float32), np.zeros((41, 4), np.float32), False)
    ops = {
        "rope": lambda: backend.rope(x, table, batch),
        "store_kv": lambda: backend.store_kv(x, x, batch, cache, cache.copy()),
        "attention": lambda: backend.attention(AttentionCall(x, cache, cache, batch, x.copy(), 1.0)),
    }
    for run in ops.values():
        run()
    wrong = (
        ("rope", batch.positions, 1, 41, "position 41 is out of range; allowed: 0 to 40"),
        ("store_kv", batch.slots, 0, pages * PAGE, f"slot {pages * PAGE} is out of range"),
        ("attention", batch.pages, (1, 0), pages, f"page {pages} is out of range; allowed: 0 to {pages - 1}"),
        ("attention", batch.positions, 0, -1, "position -1 is out of range"),
        ("attention", batch.sequence, 0, 9, "sequence 9 is out of range"),
    )
    for op, array, at, value, message in wrong:
        old = array[at]
        array[at] = value
        with pytest.raises(ValueError, match=message):
            ops[op]()
        array[at] = old


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"k": (4, 1, 16, 8)}, r"KV caches of shape \(4, 1, 16, 8\) and .*\[page, K, 32, head_dim\]"),
        ({"v": (4, 2, 32, 8)}, "KV caches of shape"),
        ({"k": (0, 1, 32, 8), "v": (0, 1, 32, 8)}, "KV caches of shape .* with values, are needed"),
        ({"q": (4, 2, 9)}, r"q of shape \(4, 2, 9\): \[T, H, 8\] with H a multiple of 1 is needed"),
        ({"q": (4, 0, 8)}, r"q of shape \(4, 0, 8\)"),
        ({"q": (3, 2, 8)}, "q: expected at least 4 rows of 16, got 3 rows of 16"),
        ({"out": (4, 1, 8)}, "out: expected at least 4 rows of 16, got 4 rows of 8"),
        ({"k": (4, 1, 32, 961), "v": (4, 1, 32, 961), "q": (4, 2, 961)}, "head_dim of 961: up to 960"),
    ],
)
def test_wrong_buffers_are_refused(vulkan: VulkanBackend, shapes: dict[str, Any], message: str) -> None:
    shapes = {"q": (4, 2, 8), "k": (4, 1, 32, 8), "v": (4, 1, 32, 8), "out": (4, 2, 8)} | shapes
    own = {
        name: vulkan.zeros(shape, np.float16 if name in "kv" else np.float32)
        for name, shape in shapes.items()
    }
    batch = plain_batch(vulkan, 1)  # 4 rows
    with pytest.raises(ValueError, match=message):
        vulkan.attention(AttentionCall(own["q"], own["k"], own["v"], batch, own["out"], 1.0))


def test_wrong_types_are_refused(vulkan: VulkanBackend) -> None:
    batch, rows = plain_batch(vulkan, 1), vulkan.zeros((4, 1, 32))
    f16, bytes_ = vulkan.zeros((1, 1, 32, 32), np.float16), vulkan.zeros((1, 1, 32, 33), np.uint8)
    with pytest.raises(TypeError, match="KV caches are float16 and uint8: both float16, float32 or uint8"):
        vulkan.store_kv(rows, rows, batch, f16, bytes_)
    with pytest.raises(ValueError, match="KV cache with rows of 33 bytes: blocks of 34 are needed"):
        vulkan.store_kv(rows, rows, batch, bytes_, bytes_)
    with pytest.raises(TypeError, match="buffers of this device are needed"):
        vulkan.store_kv(rows, rows, batch, np.zeros((1, 1, 32, 32), np.float16), f16)
    with pytest.raises(TypeError, match="k is float16: float32 is needed"):
        vulkan.store_kv(vulkan.zeros((4, 1, 32), np.float16), rows, batch, f16, f16)
    with pytest.raises(TypeError, match="attention sinks is int32: float32 is needed"):
        vulkan.attention(AttentionCall(rows, f16, f16, batch, rows, 1.0, sinks=vulkan.zeros((1,), np.int32)))
    for shape in ((50, 17), (50,)):
        table = RopeTable(vulkan.zeros(shape), vulkan.zeros(shape), True)
        with pytest.raises(ValueError, match=r"x of shape \(4, 1, 32\)|cos of shape \(50,\)"):
            vulkan.rope(rows, table, batch)


class _Named:
    name, max_range = "a small device", 1 << 20


def test_caches_that_a_device_cannot_bind_are_refused(
    vulkan: VulkanBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, rows = plain_batch(vulkan, 1), vulkan.zeros((4, 1, 64))
    cache = vulkan.zeros((257, 1, PAGE, 64), np.float16)
    monkeypatch.setattr(vulkan, "info", _Named)
    message = "a KV cache of 1052672 bytes: a small device allows 1048576 for a layer's keys; use a shorter"
    with pytest.raises(ValueError, match=message):
        vulkan.store_kv(rows, rows, batch, cache, cache)
