"""The forward pass of a decoder-only Transformer (arXiv 1706.03762), recorded once and replayed per step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from hotcold.kernels.backend import (
    PAGE,
    Backend,
    Batch,
    BatchLimits,
    Buffer,
    FFNWeights,
    Floats,
    RopeTable,
    Rows,
)
from hotcold.model.config import Config
from hotcold.model.devices import Devices
from hotcold.model.kv_cache import KVCache
from hotcold.model.rope import rope_table
from hotcold.model.weights import Weights, upload


class FFN(Protocol):
    def __call__(self, normed: Buffer, residual: Buffer, batch: Batch, out: Buffer) -> None:
        """Adds ``ffn(normed)`` to ``out``; all ``[T, D]``. ``residual`` is what ``normed`` was made from;
        ``out`` may be the same buffer: read it before writing."""


@dataclass(frozen=True)
class DenseFFN:
    backend: Backend
    weights: FFNWeights

    def __call__(self, normed: Buffer, residual: Buffer, batch: Batch, out: Buffer) -> None:
        self.backend.ffn(normed, self.weights, batch, out, skip=False, accumulate=True)


class _Side:
    """A backend's buffers."""

    def __init__(self, ops: Backend, config: Config, limits: BatchLimits, tables: Sequence[Floats]) -> None:
        if limits.decode > ops.decode_rows or limits.tokens > ops.step_rows:
            most = f"{ops.decode_rows} decode rows and {ops.step_rows} in all"
            raise ValueError(f"steps of {limits}: backend {ops.name!r} takes {most}")
        self.ops = ops
        cos, sin = (upload(ops, table) for table in tables)
        self.rope = RopeTable(cos, sin, config.rope.interleaved)
        rows = limits.tokens

        def heads(count: int) -> Buffer:
            return ops.zeros((rows, count, config.head_dim))

        self.x, self.normed = (ops.zeros((rows, config.dim)) for _ in range(2))  # x: residual stream
        self.ffn_normed = ops.zeros((rows, config.dim)) if config.family.parallel else self.normed
        self.q, self.k, self.v = map(heads, (config.heads, config.kv_heads, config.kv_heads))
        self.mixed = heads(config.heads)
        self.last = ops.zeros((limits.logits, config.dim))


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
        tables = rope_table(config.rope, limits.pages_per_sequence * PAGE, weights.rope_factors)
        # The first has the embedding.
        self._sides = {ops: _Side(ops, config, limits, tables) for ops in dict.fromkeys(devices.parts)}
        self.config = config
        self.batch = Batch(limits)
        self.head = devices.head  #: the backend of ``logits``
        self.logits: Buffer = devices.head.zeros((limits.logits, config.vocab))
        self.watch: Callable[[Backend | None, int], None] | None = None
        self._weights = weights
        self._ffns = ffns
        self._cache = cache
        self._scale = 1 / math.sqrt(config.head_dim)
        self._stages = [(self._sides[devices.parts[parts.start]], parts) for parts in devices.stages]
        smaller = {size for ops in self._sides for size in ops.program_rows if size < limits.tokens}
        self._programs = {
            size: [side.ops.record(partial(self._forward, side, parts), size) for side, parts in self._stages]
            for size in sorted(smaller | {limits.tokens})
        }

    def run(self) -> None:
        """Computes one step from :attr:`batch` into the KV cache and :attr:`logits`. ``ValueError``: the
        batch holds more rows, decode rows or logits than its limits allow."""
        rows, limits = self.batch.n_tokens, self.batch.limits
        if rows > limits.tokens or self.batch.n_logits > limits.logits:
            raise ValueError(f"step of {rows} rows, {self.batch.n_logits} logits: the limits are {limits}")
        if self.batch.n_decode > min(rows, limits.decode):
            raise ValueError(f"{self.batch.n_decode} decode rows: {min(rows, limits.decode)} are the most")
        programs = next(programs for size, programs in self._programs.items() if rows <= size)
        before: _Side | None = None
        for program, (side, parts) in zip(programs, self._stages, strict=True):
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

    def _forward(self, side: _Side, parts: range) -> None:
        ops, batch, weights, x = side.ops, self.batch, self._weights, side.x
        if parts.start == 0:
            ops.embed(weights.embedding, batch, x)
        for part in parts:
            if 0 < part <= self.config.layers:
                self._layer(side, part - 1)
        if parts.stop == self.config.layers + 2:
            ops.gather(x, batch, side.last)
            ops.norm(side.last, weights.norm, batch, side.last, Rows.LOGITS)
            ops.linear(side.last, [weights.head], batch, [self.logits], rows=Rows.LOGITS)

    def _layer(self, side: _Side, index: int) -> None:
        ops, batch = side.ops, self.batch
        x, normed, ffn_normed = side.x, side.normed, side.ffn_normed
        layer, parallel = self._weights.layers[index], self.config.family.parallel
        ops.norm(x, layer.attn_norm, batch, normed)
        if not parallel:
            self._attention(side, index)
        if layer.ffn_norm is not None:
            ops.norm(x, layer.ffn_norm, batch, ffn_normed)
        self._ffns[index](normed if layer.ffn_norm is None else ffn_normed, x, batch, x)
        if parallel:
            self._attention(side, index)

    def _attention(self, side: _Side, index: int) -> None:
        """``x += o(attention(q, k, v))``."""
        ops, batch = side.ops, self.batch
        layer, kv_cache = self._weights.layers[index], self._cache.layers[index]
        q, k, v, mixed = side.q, side.k, side.v, side.mixed
        ops.linear(side.normed, [layer.q, layer.k, layer.v], batch, [q, k, v])
        if layer.q_norm is not None:
            ops.norm(q, layer.q_norm, batch, q)
        if layer.k_norm is not None:
            ops.norm(k, layer.k_norm, batch, k)
        ops.rope(q, side.rope, batch)
        ops.rope(k, side.rope, batch)
        ops.store_kv(k, v, batch, *kv_cache)
        ops.attention(q, *kv_cache, batch, mixed, self._scale)
        ops.linear(mixed, [layer.o], batch, [side.x], accumulate=True)
