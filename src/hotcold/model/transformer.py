"""The forward pass of a decoder-only Transformer (arXiv 1706.03762), recorded once and replayed per step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from hotcold.kernels.backend import (
    PAGE,
    Backend,
    Batch,
    BatchLimits,
    Buffer,
    Chosen,
    FFNWeights,
    Floats,
    IndexedBy,
    Norm,
    Program,
    RopeTable,
    Rows,
)
from hotcold.model.config import Config
from hotcold.model.devices import Devices
from hotcold.model.experts import room_for
from hotcold.model.kv_cache import KVCache
from hotcold.model.rope import Rope, chosen_factors, rope_table
from hotcold.model.weights import Weights, upload

#: Of a step's stages, in order, by the most rows that they are for.
Programs: TypeAlias = dict[int, list[Program]]
#: Cosines and sines.
Tables: TypeAlias = dict[Rope, tuple[Floats, Floats]]


class FFN(Protocol):
    def __call__(
        self, normed: Buffer, residual: Buffer, batch: Batch, out: Buffer, chosen: Chosen | None = None
    ) -> None:
        """Adds ``ffn(normed)`` to ``out``; all ``[T, D]``. ``residual`` is what ``normed`` was made from, or
        the same buffer; ``out`` may be ``residual``: read it before writing. ``chosen``, of experts, is there
        where the layer has any."""


@dataclass(frozen=True)
class DenseFFN:
    backend: Backend
    weights: FFNWeights

    def __call__(
        self, normed: Buffer, residual: Buffer, batch: Batch, out: Buffer, chosen: Chosen | None = None
    ) -> None:
        self.backend.ffn(normed, self.weights, batch, out, skip=False, accumulate=True, chosen=chosen)


class _Side:
    """A backend's buffers."""

    def __init__(self, ops: Backend, config: Config, limits: BatchLimits, tables: Tables) -> None:
        if limits.decode > ops.decode_rows or limits.tokens > ops.step_rows:
            most = f"{ops.decode_rows} decode rows and {ops.step_rows} in all"
            raise ValueError(f"steps of {limits}: backend {ops.name!r} takes {most}")
        self.ops = ops
        self.ropes: dict[Rope, RopeTable] = {
            rope: RopeTable(upload(ops, cos), upload(ops, sin), rope.interleaved)
            for rope, (cos, sin) in tables.items()
        }
        rows = limits.tokens

        def heads(count: int) -> Buffer:
            return ops.zeros((rows, count, config.head_dim))

        self.x, self.normed = (ops.zeros((rows, config.dim)) for _ in range(2))  # x: residual stream
        self.ffn_normed = ops.zeros((rows, config.dim)) if config.family.parallel else self.normed
        #: what attention or the FFN adds to the residual stream, where that is not x itself
        self.branch = ops.zeros((rows, config.dim)) if config.branches else self.x
        self.q, self.k, self.v = map(heads, (config.heads, config.kv_heads, config.kv_heads))
        self.mixed = heads(config.heads)
        self.last = ops.zeros((limits.logits, config.dim))
        shared = config.experts and config.experts.shared
        self.factor = room_for(ops, rows, 1) if shared else None  #: of the shared expert


class Transformer:
    """A model that turns the rows of :attr:`batch` into :attr:`logits`, one step at a time.

    ``weights`` and ``cache`` lie in ``backend``, one or several; there is one of ``ffns`` per layer.
    ``limits`` are the most that one step may hold; positions go up to ``limits.pages_per_sequence * PAGE``.
    ``batch`` is filled in place before each :meth:`run`; its slots and pages refer to ``cache``. Row r of
    ``logits`` ``[limits.logits, V]``, float32, belongs to the step's row ``batch.logits_rows[r]``;
    :meth:`read_logits` gives what the backend of the head has there.

    Parts that follow each other on one backend are a stage, with a program of its own; between two stages the
    residual stream moves. ``watch``, if set, is called with a stage's backend and first layer before it, and
    with None after the last."""

    def __init__(
        self,
        config: Config,
        weights: Weights,
        backend: Backend | Devices,
        ffns: Sequence[FFN],
        limits: BatchLimits,
        cache: KVCache,
    ) -> None:
        if len(ffns) != config.layers:
            raise ValueError(f"{len(ffns)} FFNs for {config.layers} layers: one each is needed")
        devices = Devices.of(backend, config.layers)
        length = limits.pages_per_sequence * PAGE
        tables = {
            rope: rope_table(rope, length, chosen_factors(rope, weights.rope_factors, length))
            for rope in config.ropes
        }
        # The first has the embedding.
        self._sides = {ops: _Side(ops, config, limits, tables) for ops in dict.fromkeys(devices.parts)}
        self.config = config
        self.batch = Batch(limits)
        self.head = devices.head  #: the backend of ``logits``
        self.logits: Buffer = devices.head.zeros((limits.logits, config.vocab))
        self.watch: Callable[[Backend | None, int], None] | None = None
        #: of each layer, what the rows of a step chose of its experts; empty without any
        self.chosen: list[Chosen] = []
        if config.experts:
            rows, k = limits.tokens, config.experts.chosen
            self.chosen = [room_for(ops, rows, k) for ops in devices.layers]
        self._weights = weights
        self._cache = cache
        self._scale = config.scales.attention or 1 / math.sqrt(config.head_dim)
        self._stages = [(self._sides[devices.parts[parts.start]], parts) for parts in devices.stages]
        self._programs = self.record(ffns)

    def record(self, ffns: Sequence[FFN]) -> Programs:
        """Programs with other FFNs, of the same weights, on the same buffers, for :meth:`run`."""
        limits = self.batch.limits
        smaller = {size for ops in self._sides for size in ops.program_rows if size < limits.tokens}
        # The largest first: a backend whose programs share scratch then makes no smaller one before it.
        recorded = {
            size: [
                side.ops.record(partial(self._forward, side, parts, ffns), size)
                for side, parts in self._stages
            ]
            for size in sorted(smaller | {limits.tokens}, reverse=True)
        }
        return dict(sorted(recorded.items()))

    def run(self, programs: Programs | None = None) -> None:
        """Computes one step from :attr:`batch` into the KV cache and :attr:`logits`, by the programs of its
        own FFNs or those that :meth:`record` made. ``ValueError``: the batch holds more rows, decode rows or
        logits than its limits allow."""
        rows, limits = self.batch.n_tokens, self.batch.limits
        if rows > limits.tokens or self.batch.n_logits > limits.logits:
            raise ValueError(f"step of {rows} rows, {self.batch.n_logits} logits: the limits are {limits}")
        if self.batch.n_decode > min(rows, limits.decode):
            raise ValueError(f"{self.batch.n_decode} decode rows: {min(rows, limits.decode)} are the most")
        of_sizes = self._programs if programs is None else programs
        stages = next(stages for size, stages in of_sizes.items() if rows <= size)
        before: _Side | None = None
        for program, (side, parts) in zip(stages, self._stages, strict=True):
            if before is not None:
                side.ops.copy(before.ops, before.x, side.x, rows)
            if self.watch:
                self.watch(side.ops, max(parts.start - 1, 0))
            program.run()
            before = side
        if self.watch:
            self.watch(None, 0)

    def read_logits(self, start: int = 0, stop: int | None = None) -> Floats:
        """Rows of :attr:`logits`, ``[stop - start, V]``, valid until the next :meth:`run`."""
        return self.head.read(self.logits, start, stop)

    def _forward(self, side: _Side, parts: range, ffns: Sequence[FFN]) -> None:
        ops, batch, weights, x = side.ops, self.batch, self._weights, side.x
        if parts.start == 0:
            self._embed(ops, x)
        for part in parts:
            if 0 < part <= self.config.layers:
                self._layer(side, part - 1, ffns[part - 1])
        if parts.stop == self.config.layers + 2:
            ops.gather(x, batch, side.last)
            ops.norm(side.last, weights.norm, batch, side.last, Rows.LOGITS)
            ops.linear(side.last, [weights.head], batch, [self.logits], rows=Rows.LOGITS)

    def _embed(self, ops: Backend, x: Buffer) -> None:
        batch, weights, scale = self.batch, self._weights, self.config.scales.embedding
        ops.embed(weights.embedding, batch, x)
        if scale != 1:
            ops.add(x, x, batch, keep=0, scale=scale)
        if weights.positions is not None:
            ops.embed(weights.positions, batch, x, by=IndexedBy.POSITIONS, accumulate=True)

    def _layer(self, side: _Side, index: int, ffn: FFN) -> None:
        ops, batch, x, normed = side.ops, self.batch, side.x, side.normed
        layer, parallel = self._weights.layers[index], self.config.family.parallel
        chosen, early = self.chosen[index : index + 1], self.config.family.router_early
        if layer.router and early:
            layer.router.choose(ops, x, batch, *chosen)
        read = x  # by attention; then by the FFN
        if layer.attn_norm is not None:
            ops.norm(x, layer.attn_norm, batch, normed)
            read = normed
        if not parallel:
            self._attention(side, index, read)
            read = x
        if layer.ffn_norm is not None:
            ops.norm(x, layer.ffn_norm, batch, side.ffn_normed)
            read = side.ffn_normed
        if side.branch is not x:
            ops.add(side.branch, x, batch, keep=0, scale=0)
        if layer.router and not early:
            layer.router.choose(ops, read, batch, *chosen)
        ffn(read, x, batch, side.branch, *chosen)
        if layer.shared and side.factor:
            layer.shared.add(ops, read, batch, side.branch, side.factor)
        self._join(side, layer.ffn_post_norm)
        if parallel:
            self._attention(side, index, normed)

    def _attention(self, side: _Side, index: int, read: Buffer) -> None:
        """``x += o(attention(q, k, v))`` of the rows ``read``."""
        ops, batch = side.ops, self.batch
        layer, kv_cache = self._weights.layers[index], self._cache.layers[index]
        positions = self.config.positions[index]
        q, k, v, mixed = side.q, side.k, side.v, side.mixed
        ops.linear(read, [layer.q, layer.k, layer.v], batch, [q, k, v])
        if layer.q_norm is not None:
            ops.norm(q, layer.q_norm, batch, q)
        if layer.k_norm is not None:
            ops.norm(k, layer.k_norm, batch, k)
        if positions.rope is not None:
            ops.rope(q, side.ropes[positions.rope], batch)
            ops.rope(k, side.ropes[positions.rope], batch)
        ops.store_kv(k, v, batch, *kv_cache)
        ops.attention(
            q,
            *kv_cache,
            batch,
            mixed,
            self._scale,
            window=positions.window,
            sinks=layer.sinks,
            softcap=self.config.softcap,
        )
        ops.linear(mixed, [layer.o], batch, [side.branch], accumulate=side.branch is side.x)
        self._join(side, layer.attn_post_norm)

    def _join(self, side: _Side, norm: Norm | None) -> None:
        """Adds what attention or the FFN gave, if that is not done."""
        if norm is not None:
            side.ops.norm(side.branch, norm, self.batch, side.branch)
        if side.branch is not side.x:
            side.ops.add(side.x, side.branch, self.batch, scale=self.config.scales.residual)
