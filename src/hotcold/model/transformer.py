"""The forward pass of a decoder-only Transformer (arXiv 1706.03762), recorded once and replayed per step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from hotcold.kernels.backend import (
    MAX_DECODE_ROWS,
    PAGE,
    Backend,
    Batch,
    BatchLimits,
    Buffer,
    FFNWeights,
    RopeTable,
    Rows,
)
from hotcold.model.config import Config
from hotcold.model.kv_cache import KVCache
from hotcold.model.rope import rope_table
from hotcold.model.weights import LayerWeights, Weights, upload


class FFN(Protocol):
    """One layer's feed-forward network."""

    def __call__(self, normed: Buffer, residual: Buffer, batch: Batch, out: Buffer) -> None:
        """Adds ``ffn(normed)`` to ``out``; all ``[T, D]``.

        ``residual`` is what ``normed`` was made from. ``out`` may be the same buffer: read it before writing.
        """
        ...


@dataclass(frozen=True)
class DenseFFN:
    """Every neuron for every token."""

    backend: Backend
    weights: FFNWeights

    def __call__(self, normed: Buffer, residual: Buffer, batch: Batch, out: Buffer) -> None:
        self.backend.ffn(normed, self.weights, batch, out, skip=False, accumulate=True)


class Transformer:
    """A model that turns the rows of :attr:`batch` into :attr:`logits`, one step at a time.

    ``weights`` lie in ``backend``; there is one of ``ffns`` per layer. ``limits`` are the most that one step
    may hold; positions go up to ``limits.pages_per_sequence * PAGE``. ``batch`` is filled in place before
    each :meth:`run`; its slots and pages refer to ``cache``. Row r of ``logits`` ``[limits.logits, V]``,
    float32, belongs to the step's row ``batch.logits_rows[r]``.
    """

    def __init__(
        self,
        config: Config,
        weights: Weights,
        backend: Backend,
        ffns: Sequence[FFN],
        limits: BatchLimits,
        cache: KVCache,
    ) -> None:
        if len(ffns) != config.layers:
            raise ValueError(f"{len(ffns)} FFNs for {config.layers} layers: one each is needed")
        self.config = config
        self.batch = backend.batch(limits)
        self.logits: Buffer = backend.zeros((limits.logits, config.vocab))
        self._weights = weights
        self._backend = backend
        self._ffns = ffns
        self._cache = cache
        self._scale = 1 / math.sqrt(config.head_dim)
        cos, sin = rope_table(config.rope, limits.pages_per_sequence * PAGE, weights.rope_factors)
        self._rope = RopeTable(upload(backend, cos), upload(backend, sin), config.rope.interleaved)

        rows, q, kv = limits.tokens, config.heads * config.head_dim, config.kv_heads * config.head_dim
        zeros = backend.zeros
        self._x, self._normed = zeros((rows, config.dim)), zeros((rows, config.dim))  # x: residual stream
        self._ffn_normed = zeros((rows, config.dim)) if config.family.parallel else self._normed
        self._q, self._k, self._v = zeros((rows, q)), zeros((rows, kv)), zeros((rows, kv))
        self._mixed, self._last = zeros((rows, q)), zeros((limits.logits, config.dim))

        sizes = {size for size in backend.program_rows if size < rows} | {rows}
        self._programs = [(size, backend.record(partial(self._forward, size))) for size in sorted(sizes)]

    def run(self) -> None:
        """Computes one step from :attr:`batch` into the KV cache and :attr:`logits`.

        ``ValueError``: the batch holds more rows, decode rows or logits than its limits allow.
        """
        rows, limits = self.batch.n_tokens, self.batch.limits
        if rows > limits.tokens or self.batch.n_logits > limits.logits:
            raise ValueError(f"step of {rows} rows, {self.batch.n_logits} logits: the limits are {limits}")
        if self.batch.n_decode > min(rows, MAX_DECODE_ROWS):
            raise ValueError(f"{self.batch.n_decode} decode rows: {min(rows, MAX_DECODE_ROWS)} are the most")
        next(program for size, program in self._programs if rows <= size).run()

    def _forward(self, rows: int) -> None:
        """The forward pass over at most ``rows`` rows."""
        ops, batch, weights = self._backend, self.batch, self._weights
        x, normed, ffn_normed = self._x[:rows], self._normed[:rows], self._ffn_normed[:rows]

        parallel = self.config.family.parallel
        ops.embed(weights.embedding, batch, x)
        for layer, ffn, kv_cache in zip(weights.layers, self._ffns, self._cache.layers, strict=True):
            ops.norm(x, layer.attn_norm, batch, normed)
            if not parallel:
                self._attention(layer, normed, kv_cache, x)
            if layer.ffn_norm is not None:
                ops.norm(x, layer.ffn_norm, batch, ffn_normed)
            ffn(normed if layer.ffn_norm is None else ffn_normed, x, batch, x)
            if parallel:
                self._attention(layer, normed, kv_cache, x)

        ops.gather(x, batch, self._last)
        ops.norm(self._last, weights.norm, batch, self._last, Rows.LOGITS)
        ops.linear(self._last, [weights.head], batch, [self.logits], rows=Rows.LOGITS)

    def _attention(
        self, layer: LayerWeights, normed: Buffer, kv_cache: tuple[Buffer, Buffer], x: Buffer
    ) -> None:
        """``x += o(attention(q, k, v))``."""
        ops, batch, rows = self._backend, self.batch, len(normed)
        head_dim = self.config.head_dim
        q, k, v, mixed = (buffer[:rows] for buffer in (self._q, self._k, self._v, self._mixed))
        q_heads, k_heads, v_heads, mixed_heads = (b.reshape(rows, -1, head_dim) for b in (q, k, v, mixed))

        ops.linear(normed, [layer.q, layer.k, layer.v], batch, [q, k, v])
        if layer.q_norm is not None:
            ops.norm(q_heads, layer.q_norm, batch, q_heads)
        if layer.k_norm is not None:
            ops.norm(k_heads, layer.k_norm, batch, k_heads)
        ops.rope(q_heads, self._rope, batch)
        ops.rope(k_heads, self._rope, batch)
        ops.store_kv(k_heads, v_heads, batch, *kv_cache)
        ops.attention(q_heads, *kv_cache, batch, mixed_heads, self._scale)
        ops.linear(mixed, [layer.o], batch, [x], accumulate=True)
