"""Attention, the paged cache of keys and values, and rotary positions."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np

from hotcold.formats.blocks import BLOCK_TYPES
from hotcold.kernels import checks
from hotcold.kernels.backend import DECODE_ROWS, PAGE, SPLIT, AttentionCall, BatchLimits, Buffer, RopeTable
from hotcold.kernels.vulkan.buffers import DeviceMemory
from hotcold.kernels.vulkan.memory import Range, aligned, shape_of
from hotcold.kernels.vulkan.recording import Dispatch, Recording, Written

#: Partial results of one pass over rows of a step; more rows take more passes.
PASS_BYTES = 8 << 20
MOST_HEAD_DIM = 960  #: largest that fits 32 KiB of shared memory
_QUERIES = 4  #: queries that a group computes together
_LOOPED = 16  #: heads per kv head that one group computes; with more heads it computes ``_QUERIES`` (MLA)
_CHUNKED = 1 << 31  # flag in a window for chunks, as in window.glsl
_CACHE_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(np.uint8): 2}  # as in cache.glsl


@dataclass(frozen=True)
class _Caches:
    k: Range
    v: Range
    type: int
    pages: int
    kv_heads: int
    head_dim: int


def _caches(memory: DeviceMemory, k_cache: Buffer, v_cache: Buffer) -> _Caches:
    k, v = memory.own(k_cache), memory.own(v_cache)
    if k.dtype != v.dtype or k.dtype not in _CACHE_TYPES:
        raise TypeError(f"KV caches are {k.dtype} and {v.dtype}: both float16, float32 or uint8 are needed")
    if k.shape != v.shape or len(k.shape) != 4 or k.shape[2] != PAGE or 0 in k.shape:
        got = f"KV caches of shape {k.shape} and {v.shape}"
        raise ValueError(f"{got}: both [page, K, {PAGE}, head_dim], with values, are needed")
    pages, kv_heads, _, head_dim = k.shape
    if k.dtype == np.uint8:
        block = BLOCK_TYPES["Q8_0"]
        if head_dim % block.nbytes:
            raise ValueError(f"KV cache with rows of {head_dim} bytes: blocks of {block.nbytes} are needed")
        head_dim = head_dim // block.nbytes * block.weights
    for cache in (k, v):
        if cache.range.nbytes > memory.info.max_range:
            got = f"a KV cache of {cache.range.nbytes} bytes: {memory.info.name} allows"
            raise ValueError(f"{got} {memory.info.max_range} for a layer's keys; use a shorter context")
    if head_dim > MOST_HEAD_DIM:
        raise ValueError(f"KV cache with a head_dim of {head_dim}: up to {MOST_HEAD_DIM} are allowed")
    return _Caches(k.range, v.range, _CACHE_TYPES[k.dtype], pages, kv_heads, head_dim)


def rope(recording: Recording, x: Buffer, table: RopeTable) -> None:
    shape, cos, sin = (recording.memory.own(each).shape for each in (x, table.cos, table.sin))
    if len(cos) != 2 or cos != sin:
        raise ValueError(f"cos of shape {cos}, sin of {sin}: both [P, rotary_dim / 2] are needed")
    positions, half = cos
    if len(shape) != 3 or 2 * half > shape[2]:
        raise ValueError(f"x of shape {shape}: [T, H, head_dim of {2 * half} or more] is needed")
    _, heads, head_dim = shape
    turned = recording.range_of("x", x, heads * head_dim)
    angles = [
        recording.memory.vector(name, each, positions, half)
        for name, each in (("cos", table.cos), ("sin", table.sin))
    ]
    recording.bound("positions", positions)
    groups = -(-heads * half // 64), recording.rows, 1
    push = heads, head_dim, half
    recording.run("rope", [Written(turned), *angles], push, groups, [0, 0, 0, int(table.interleaved)])


def store_kv(recording: Recording, k: Buffer, v: Buffer, k_cache: Buffer, v_cache: Buffer) -> None:
    caches = _caches(recording.memory, k_cache, v_cache)
    heads, head_dim = caches.kv_heads, caches.head_dim
    keys, values = (recording.range_of(name, each, heads * head_dim) for name, each in (("k", k), ("v", v)))
    recording.bound("pages", caches.pages)
    ropes = [] if keys.is_same(values) else _take_ropes(recording, keys, head_dim)
    angles, pairs, interleaved = ropes[0].turn if ropes else ((keys, keys), 0, False)
    queries, query_heads = (ropes[1].x, ropes[1].heads) if len(ropes) > 1 else (keys, 0)
    turned = (Written(keys), Written(queries)) if ropes else (keys, queries)
    recording.run(
        "store_kv",
        [turned[0], values, Written(caches.k), Written(caches.v), *angles, turned[1]],
        [heads, query_heads, pairs],
        (max(heads, query_heads), recording.rows, 3 if query_heads else 2),
        [caches.type, head_dim, int(bool(ropes)), int(interleaved)],
    )


@dataclass(frozen=True)
class _Rope:
    """A recorded rotation of rows."""

    x: Range
    heads: int
    head_dim: int
    turn: tuple[tuple[Range, Range], int, bool]  #: cosines and sines; pairs of a head; interleaved

    @classmethod
    def from_step(cls, step: object) -> _Rope | None:
        if not isinstance(step, Dispatch) or step.shader != "rope":
            return None
        x, cos, sin = (each.range if isinstance(each, Written) else each for each in step.ranges)
        heads, head_dim, pairs = struct.unpack("<3I", step.push)
        return cls(x, heads, head_dim, ((cos, sin), pairs, bool(step.constants[-1])))


def _take_ropes(recording: Recording, keys: Range, head_dim: int) -> list[_Rope]:
    """Takes back the last dispatches if they rotate these keys, and before them queries by the same angles: a
    store can rotate both. Returns the rope of the keys first."""
    taken: list[_Rope] = []
    for rope in map(_Rope.from_step, reversed(recording.steps[-2:])):
        if rope is None or rope.head_dim != head_dim or rope.x.is_same(keys) == bool(taken):
            break
        if taken and rope.turn != taken[0].turn:
            break
        taken.append(rope)
    del recording.steps[len(recording.steps) - len(taken) :]
    return taken


def _most_splits(limits: BatchLimits, window: int | None) -> int:
    """Returns the most splits of one row."""
    splits = -(-limits.pages_per_sequence * PAGE // SPLIT)
    return splits if window is None else min(splits, -(-(window - 1) // SPLIT) + 1)


def _heads_per_group(heads: int, kv_heads: int) -> int:
    """Returns how many heads of a kv head a group computes together."""
    return min(heads // kv_heads, _QUERIES)


def _tile(rows: int, together: int) -> int:
    """Returns how many rows of a step share reads of keys."""
    return _QUERIES // together if rows > DECODE_ROWS else 1


def _pass_rows(rows: int, row_bytes: int, tile: int) -> int:
    """Returns how many rows of a step have their partial results in scratch at a time."""
    return min(rows, max(tile, PASS_BYTES // row_bytes // tile * tile))


def attention_scratch_bytes(
    limits: BatchLimits, rows: int, heads: int, kv_heads: int, head_dim: int, window: int | None = None
) -> int:
    """Returns scratch bytes of a layer's attention in a program for ``rows`` rows."""
    row_bytes = heads * _most_splits(limits, window) * (head_dim + 2) * 4
    tile = _tile(rows, _heads_per_group(heads, kv_heads))
    return aligned(_pass_rows(rows, row_bytes, tile) * row_bytes)


def attention(recording: Recording, call: AttentionCall) -> None:
    shape, caches = recording.memory.own(call.q).shape, _caches(recording.memory, call.k_cache, call.v_cache)
    sinks, window, softcap = call.sinks, call.window, call.softcap
    checks.check_attention(call, shape_of(call.q), None if sinks is None else shape_of(sinks))
    if len(shape) != 3 or shape[2] != caches.head_dim or shape[1] < 1 or shape[1] % caches.kv_heads:
        needed_shape = f"[T, H, {caches.head_dim}] with H a multiple of {caches.kv_heads}"
        raise ValueError(f"q of shape {shape}: {needed_shape} is needed")
    heads, head_dim, limits = shape[1], shape[2], recording.batch.limits
    queries = recording.range_of("q", call.q, heads * head_dim)
    target = recording.range_of("out", call.out, heads * head_dim)
    recording.bound("pages", caches.pages)
    splits, span = _most_splits(limits, window), min(window or 0, _CHUNKED - 1) + call.chunked * _CHUNKED
    together = _heads_per_group(heads, caches.kv_heads)
    tile, group = _tile(recording.rows, together), heads // caches.kv_heads
    sharing = math.ceil(group / together) if group > _LOOPED else 1
    row_bytes = heads * splits * (head_dim + 2) * 4
    rows = _pass_rows(recording.rows, row_bytes, tile)
    partials = recording.scratch(rows * row_bytes)
    constants = [caches.type, head_dim, tile, together, int(softcap is not None)]
    for first in range(0, recording.rows, rows):
        end = min(first + rows, recording.rows)
        numbers = first, end, heads, caches.kv_heads, splits, span
        recording.work(2 * (end - first) * heads * splits * SPLIT * head_dim)
        recording.run(
            "attention",
            [queries, caches.k, caches.v, Written(partials)],
            [*numbers, float(call.scale), float(softcap or 0.0)],
            (splits, caches.kv_heads * sharing, math.ceil((end - first) / tile)),
            constants,
        )
        recording.run(
            "attention_merge",
            [
                partials,
                partials if sinks is None else recording.memory.own(sinks).range,
                Written(target),
                partials,
            ],
            [first, heads, head_dim, splits, span],
            (math.ceil(head_dim / 64), heads, end - first),
            [int(sinks is not None), 0],
        )
