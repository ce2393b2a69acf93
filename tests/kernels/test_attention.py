"""Attention with a window, with sinks and with a softcap: against float64 brute force, and bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.bits import same_bits
from support.op_truth import (
    Answer,
    AttentionKind,
    Row,
    attention,
    cache_shape,
    cache_values,
    make_batch,
    page_count,
    random_cache,
    random_rows,
    rng,
)

from hotcold.kernels import _native
from hotcold.kernels.backend import PAGE, SPLIT, AttentionCall, Backend, Batch, BatchLimits, Floats
from hotcold.kernels.reference import ReferenceBackend
from hotcold.model.mixers.attention import CACHE_TYPES

OpenBackend = Callable[..., Backend]

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 32
#: Heads with sinks that take nearly all of a row, hardly anything, and about as much as one position.
SINKS = np.array([20, 1e4, -30, -1e4, 0.5, -np.inf], np.float32)
#: From one position to more than there are; whole pages and splits, and one more or less.
WINDOWS = (1, 2, 5, 31, 32, 33, 100, 255, 256, 257, 513, 700, 10**6, 2**31, 2**40)
KINDS = (
    *(AttentionKind(window=window) for window in WINDOWS),
    *(AttentionKind(window=window, chunked=True) for window in (1, 5, 33, 256, 300, 700, 2**40)),
    AttentionKind(sinks=SINKS),
    *(AttentionKind(softcap=softcap) for softcap in (0.1, 2.0, 50.0)),
    AttentionKind(7, SINKS, 2.0),
    AttentionKind(300, SINKS[::-1].copy(), 30.0),
)
DECODE = [
    Row(n - 1, sequence)
    for sequence, n in enumerate((1, 2, 31, 32, 33, 64, 255, 256, 257, 259, 512, 600, 800))
]
PROMPT = [Row(position, 12) for position in (*range(222, 225), *range(254, 265), 511, 512, 513)]


def options(kind: AttentionKind) -> dict[str, Any]:
    return kind._asdict()


def shown(kind: AttentionKind) -> str:
    more = ", sinks" * (kind.sinks is not None) + ", chunks" * kind.chunked
    return f"window={kind.window}, softcap={kind.softcap}{more}"


def caches(backend: Backend, batch: Batch, type: str, head_dim: int = HEAD_DIM) -> tuple[Any, Any]:
    """Makes caches whose positions hold values that depend neither on a sequence's pages nor on other
    sequences."""
    shape = (KV_HEADS, PAGE, head_dim)
    size = cache_shape((page_count(batch), *shape), type)
    pair = [backend.zeros(size, CACHE_TYPES[type]) for _ in "kv"]
    for cache, name in zip(pair, "kv", strict=True):
        for sequence, pages in enumerate(batch.pages):
            cache[pages] = cached_pages(name, sequence, type, head_dim)[: len(pages)]
    return pair[0], pair[1]


@functools.cache
def cached_pages(name: str, sequence: int, type: str, head_dim: int) -> Any:
    return random_cache(rng(name, sequence), ReferenceBackend(), (40, KV_HEADS, PAGE, head_dim), type)


def own_rows(cache: Any, batch: Batch, row: Row) -> Any:
    """``[K, positions, head_dim]`` up to the row's own position."""
    pages = batch.pages[row.sequence, : row.position // PAGE + 1]
    return np.concatenate([*cache_values(cache[pages])], axis=1)[:, : row.position + 1]


def queries(backend: Backend, batch: Batch, rows: Sequence[Row], head_dim: int = HEAD_DIM) -> Any:
    q = backend.zeros((batch.limits.tokens, HEADS, head_dim))
    for t, row in enumerate(rows):
        q[t] = 2 * random_rows(rng("q", row), HEADS, head_dim)
    return q


def run(
    backend: Backend, decode: Sequence[Row], prompt: Sequence[Row], kind: AttentionKind, type: str = "f16"
) -> Floats:
    batch = make_batch(backend, decode, prompt)
    q = queries(backend, batch, [*decode, *prompt])
    out = backend.zeros(q.shape)
    backend.attention(AttentionCall(q, *caches(backend, batch, type), batch, out, 0.3, **options(kind)))
    return np.array(out[: len(decode) + len(prompt)])


@pytest.mark.parametrize("kind", KINDS, ids=shown)
@pytest.mark.parametrize(("type", "head_dim"), [("f16", 32), ("q8_0", 64), ("f32", 10)])
def test_attention_with_options(backend: Backend, type: str, head_dim: int, kind: AttentionKind) -> None:
    batch = make_batch(backend, DECODE, PROMPT)
    rows = [*DECODE, *PROMPT]
    q, (k_cache, v_cache) = queries(backend, batch, rows, head_dim), caches(backend, batch, type, head_dim)
    out = backend.zeros(q.shape)
    out[:] = 7
    backend.attention(AttentionCall(q, k_cache, v_cache, batch, out, 0.3, **options(kind)))
    for t, row in enumerate(rows):
        k, v = own_rows(k_cache, batch, row), own_rows(v_cache, batch, row)
        Answer(attention(q[t], k, v, 0.3, kind)).check(out[t], row)
    assert (out[len(rows) :] == 7).all()


@pytest.mark.parametrize("type", ["f16", "q8_0", "f32"])
@pytest.mark.parametrize("window", [1, 3, 30, 64, 256, 300])
def test_positions_before_the_window_are_not_read(backend: Backend, window: int, type: str) -> None:
    """It may be NaN: in other splits, in other pages, in the same four positions."""
    for position in (0, 2, 31, 255, 256, 300, 511, 515, 700):
        for decode in (True, False):
            row = [Row(position)]
            batch = make_batch(backend, row * decode, row * (not decode))
            k_cache, v_cache = caches(backend, batch, type)
            q, out = queries(backend, batch, row), backend.zeros((batch.limits.tokens, HEADS, HEAD_DIM))
            expected = attention(
                q[0],
                own_rows(k_cache, batch, row[0]),
                own_rows(v_cache, batch, row[0]),
                0.3,
                AttentionKind(window),
            )
            for cache in (k_cache, v_cache):
                for p in range(position + 1 - window):
                    gone = cache[batch.pages[0, p // PAGE], :, p % PAGE]
                    if type == "q8_0":
                        gone[:, :2] = np.array([np.nan], np.float16).view(np.uint8)
                    else:
                        gone[:] = np.nan
            backend.attention(AttentionCall(q, k_cache, v_cache, batch, out, 0.3, window=window))
            Answer(expected).check(out[0], (position, decode))


def attend_prompt(
    backend: Backend, rows: Sequence[Row], type: str, heads: int, head_dim: int, kind: AttentionKind
) -> Floats:
    """Prompt rows of one sequence, all together, two kv heads."""
    batch = make_batch(backend, [], rows)
    q, out = (backend.zeros((batch.limits.tokens, heads, head_dim)) for _ in range(2))
    for t, row in enumerate(rows):
        q[t] = random_rows(rng("q", row.position), heads, head_dim)
    backend.attention(
        AttentionCall(q, *caches(backend, batch, type, head_dim), batch, out, 0.3, **options(kind))
    )
    return np.array(out[: len(rows)])


#: Neighbours at the beginning, over the end of a split, and too few for a block; with gaps between.
BLOCKS = [Row(p) for p in (*range(19), *range(236, 300), *range(509, 514), 600, 602)]


#: Windows that begin behind the first row of a tile, anywhere in a page, and on both sides of position 192.
BLOCK_KINDS = (*map(AttentionKind, (None, 3, 40, 100)), AttentionKind(270, None, 5.0))


@pytest.mark.parametrize("kind", BLOCK_KINDS, ids=shown)
@pytest.mark.parametrize(
    ("type", "heads", "head_dim"),
    [("f16", 2, 128), ("f16", 14, 80), ("q8_0", 8, 64), ("q8_0", 4, 96), ("f16", 4, 256), ("f32", 6, 10)],
)
def test_rows_in_blocks_have_the_bits_of_single_rows(
    open_exact: OpenBackend, type: str, heads: int, head_dim: int, kind: AttentionKind
) -> None:
    backend = open_exact()
    whole = attend_prompt(backend, BLOCKS, type, heads, head_dim, kind)
    for at in range(0, len(BLOCKS), 7):
        single = attend_prompt(backend, BLOCKS[at : at + 1], type, heads, head_dim, kind)
        same_bits(whole[at : at + 1], single)


@pytest.mark.parametrize("type", ["f16", "q8_0", "f32"])
@pytest.mark.parametrize("window", [None, 20])
def test_rows_of_a_block_see_nothing_of_each_others_positions(
    open_exact: OpenBackend, window: int | None, type: str
) -> None:
    """One position is NaN: rows before it, and those whose window begins behind it, do not change."""
    backend, heads, head_dim = open_exact(), 6, 64
    rows = [Row(p) for p in range(240, 300)]
    batch = make_batch(backend, [], rows)
    q = backend.zeros((batch.limits.tokens, heads, head_dim))
    q[: len(rows)] = random_rows(rng("q"), len(rows), heads, head_dim)

    def attend(broken: int | None) -> Floats:
        pair = caches(backend, batch, type, head_dim)
        for cache in pair:
            if broken is not None:
                row = cache[batch.pages[0, broken // PAGE], :, broken % PAGE]
                if type == "q8_0":
                    row[:, :2] = np.array([np.nan], np.float16).view(np.uint8)
                else:
                    row[:] = np.nan
        out = backend.zeros(q.shape)
        backend.attention(AttentionCall(q, *pair, batch, out, 0.3, window=window))
        return np.array(out[: len(rows)])

    good = attend(None)
    for broken in (240, 255, 271, 299):
        sees_broken = np.array(
            [r.position >= broken and r.position - broken < (window or 1000) for r in rows]
        )
        got = attend(broken)
        same_bits(got[~sees_broken], good[~sees_broken])
        assert np.isnan(got[sees_broken]).all()


BIT_KINDS = (
    AttentionKind(window=100),
    AttentionKind(window=260, chunked=True),
    AttentionKind(257, SINKS, 5.0),
    AttentionKind(sinks=SINKS, softcap=9.0),
)


@pytest.mark.parametrize("kind", BIT_KINDS, ids=shown)
@pytest.mark.parametrize("type", ["f16", "q8_0", "f32"])
def test_a_row_is_the_same_in_any_batch_and_as_prompt(
    open_exact: OpenBackend, type: str, kind: AttentionKind
) -> None:
    backend = open_exact()
    alone = np.vstack([run(backend, [row], [], kind, type) for row in DECODE])
    same_bits(run(backend, DECODE, [], kind, type), alone)
    same_bits(run(backend, [], DECODE, kind, type), alone)
    same_bits(run(backend, DECODE, PROMPT, kind, type)[: len(DECODE)], alone)
    whole = run(backend, [], PROMPT, kind, type)
    same_bits(run(backend, DECODE, PROMPT, kind, type)[len(DECODE) :], whole)
    for start, stop in pairwise((0, 1, 5, len(PROMPT))):
        same_bits(run(backend, [], PROMPT[start:stop], kind, type), whole[start:stop])


@pytest.mark.parametrize("kind", BIT_KINDS, ids=shown)
@pytest.mark.parametrize("threads", [2, 5])
def test_threads_do_not_matter(open_exact: OpenBackend, threads: int, kind: AttentionKind) -> None:
    same_bits(run(open_exact(threads), DECODE, PROMPT, kind), run(open_exact(1), DECODE, PROMPT, kind))


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_do_not_matter_where_merging_is_shared_out(open_exact: OpenBackend, threads: int) -> None:
    """Many splits are merged by kv head; as a prompt row the same position is one piece."""
    row = [Row(20 * SPLIT + 3)]
    one = make_batch(open_exact(1), row)
    shape = (page_count(one), KV_HEADS, PAGE, 8)
    k_cache, v_cache = (random_cache(rng(name), open_exact(1), shape, "f16") for name in "kv")

    def attend(backend: Backend, *, decode: bool) -> Floats:
        batch = make_batch(backend, row * decode, row * (not decode))
        q = queries(backend, batch, row, 8)
        out = backend.zeros(q.shape)
        backend.attention(AttentionCall(q, k_cache, v_cache, batch, out, 0.3))
        return np.array(out[:1])

    single = attend(open_exact(1), decode=True)
    same_bits(attend(open_exact(threads), decode=True), single)
    same_bits(attend(open_exact(threads), decode=False), single)
    k, v = own_rows(k_cache, one, row[0]), own_rows(v_cache, one, row[0])
    Answer(attention(queries(open_exact(1), one, row, 8)[0], k, v, 0.3)).check(single[0])


def test_options_that_ask_for_nothing_change_no_bit(open_exact: OpenBackend) -> None:
    """A window beyond the context, sinks that weigh nothing."""
    backend = open_exact()
    plain = run(backend, DECODE, PROMPT, AttentionKind())
    same_bits(run(backend, DECODE, PROMPT, AttentionKind(window=801)), plain)
    nothing = np.full(HEADS, -np.inf, np.float32)
    same_bits(run(backend, DECODE, PROMPT, AttentionKind(sinks=nothing)), plain)


def test_partial_results_take_no_more_scratch_than_the_window_needs() -> None:
    """The splits are those of 3 heads, for each of 5 decode rows and 2 kv heads: 10 numbers a split."""
    batch = Batch(BatchLimits(5, 1, 800, 1))
    q, cache = np.zeros((5, 6, 8), np.float32), np.zeros((1, 2, PAGE, 8), np.float32)
    for window, splits in ((None, 100), (1, 1), (2, 2), (257, 2), (258, 3), (10**6, 100)):
        program = _native.Program("", _native.Pool(1), batch)
        program.attention(q, cache, cache, q.copy(), 1.0, window, False, None, None)
        assert program.scratch_bytes == -(-5 * 2 * splits * 3 * 10 * 4 // 64) * 64


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"chunked": True}, ValueError, "attention in chunks without a window: the length of a chunk is"),
        ({"window": 0}, ValueError, "attention window 0: at least 1 position is needed"),
        ({"window": -5}, ValueError, "attention window -5: at least 1 position is needed"),
        ({"softcap": 0.0}, ValueError, "attention softcap 0.0: a finite number above 0 is needed"),
        ({"softcap": -1.0}, ValueError, "attention softcap -1.0: a finite number above 0"),
        ({"softcap": float("nan")}, ValueError, "attention softcap nan: a finite number above 0"),
        ({"softcap": float("inf")}, ValueError, "attention softcap inf: a finite number above 0"),
        ({"sinks": np.zeros(6)}, TypeError, "attention sinks is float64: float32 is needed"),
        ({"sinks": SINKS[:5]}, ValueError, r"attention sinks of shape \(5,\): \(6,\) is needed"),
        ({"sinks": SINKS[:, None]}, ValueError, r"attention sinks of shape \(6, 1\): \(6,\) is needed"),
        ({"sinks": SINKS[::-1]}, ValueError, "attention sinks with gaps between its values"),
    ],
)  # fmt: skip
def test_options_without_meaning_are_refused(
    backend: Backend, wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    """By every backend in the same words."""
    batch = make_batch(backend, [Row(0)])
    q, out = (backend.zeros((batch.limits.tokens, HEADS, HEAD_DIM)) for _ in range(2))
    with pytest.raises(error, match=message):
        backend.attention(AttentionCall(q, *caches(backend, batch, "f16"), batch, out, 1.0, **wrong))
