"""Inputs and float64 answers for tests of ops: brute force over dequantised weights, no backend involved."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from support.random_blocks import random_blocks

from hotcold.formats.blocks import Tensor
from hotcold.kernels.backend import (
    PAGE,
    Backend,
    Batch,
    BatchLimits,
    FFNTensors,
    PredictorTensors,
    is_dense,
)
from hotcold.model.mixers.attention import CACHE_TYPES

Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

BLOCK = 32
TOLERANCE = 1e-5  #: of a row's largest magnitude; DESIGN's bound between backends


def rng(*key: object) -> np.random.Generator:
    """The same numbers in every process for the same key."""
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def random_tensor(random: np.random.Generator, type: str, *shape: int, scale: float | None = None) -> Tensor:
    """Weights whose dots with unit inputs are about 1."""
    scale = shape[-1] ** -0.5 if scale is None else scale
    return random_blocks(random, type, *shape, scale=scale)


def random_rows(random: np.random.Generator, *shape: int) -> Floats:
    return random.standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Row:
    """One row of a step."""

    position: int
    sequence: int = 0
    token: int = 0


def make_batch(
    backend: Backend,
    decode: Sequence[Row],
    prompt: Sequence[Row] = (),
    logits: Sequence[int] = (),
    spare: int = 3,
) -> Batch:
    """A step with these rows, and room for more; every sequence has pages of its own, in no order."""
    rows = [*decode, *prompt]
    sequences = max((row.sequence for row in rows), default=0) + 1
    pages = max((row.position for row in rows), default=0) // PAGE + 1
    limits = BatchLimits(len(rows) + spare, sequences + 1, pages + 1, max(1, len(logits)) + 1)
    batch = Batch(limits)
    batch.pages[:] = rng("pages", len(rows)).permutation(batch.pages.size).reshape(batch.pages.shape)
    for t, row in enumerate(rows):
        batch.tokens[t], batch.positions[t], batch.sequence[t] = row.token, row.position, row.sequence
        page = batch.pages[row.sequence, row.position // PAGE]
        batch.slots[t] = page * PAGE + row.position % PAGE
        batch.lengths[row.sequence] = max(batch.lengths[row.sequence], row.position + 1)
    batch.logits_rows[: len(logits)] = logits
    batch.counts[:] = (len(rows), len(decode), len(logits), sequences)
    return batch


def plain_batch(backend: Backend, decode: int, prompt: int = 0) -> Batch:
    """Rows of one sequence at positions 0, 1, ..."""
    rows = [Row(position=t) for t in range(decode + prompt)]
    return make_batch(backend, rows[:decode], rows[decode:])


def buffers(backend: Backend, batch: Batch, x: np.ndarray) -> Any:
    """x in a buffer with room for the largest step; the rows beyond this step are not to be read."""
    buffer = backend.zeros((batch.limits.tokens, *x.shape[1:]))
    buffer[:] = np.nan
    buffer[: len(x)] = x
    return buffer


def filled(backend: Backend, rows: int, *shape: int, value: float = 7.0) -> Any:
    buffer = backend.zeros((rows, *shape))
    buffer[:] = value
    return buffer


def page_count(batch: Batch) -> int:
    return int(batch.pages.size)


def random_cache(random: np.random.Generator, backend: Backend, shape: tuple[int, ...], type: str) -> Any:
    """A KV cache ``[page, K, PAGE, head_dim]`` of random values, as the backend holds it."""
    cache = backend.zeros(cache_shape(shape, type), CACHE_TYPES[type])
    values = random.standard_normal(shape, np.float32)
    if type == "q8_0":
        import gguf  # not of those who take only inputs from here

        row = values.reshape(1, -1)
        values = gguf.quants.quantize(row, gguf.GGMLQuantizationType.Q8_0).reshape(cache.shape)
    cache[:] = values
    return cache


def cache_shape(shape: tuple[int, ...], type: str) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // 32 * 34) if type == "q8_0" else shape


def cache_values(cache: npt.NDArray[Any]) -> Doubles:
    if cache.dtype == np.uint8:
        import gguf

        rows = gguf.quants.dequantize(cache.reshape(1, -1), gguf.GGMLQuantizationType.Q8_0)  # faster as one
        cache = rows.reshape(*cache.shape[:-1], -1)
    return cache.astype(np.float64)


@dataclass(frozen=True)
class Answer:
    """The values that an op must give, within :data:`TOLERANCE` of each row's magnitude and ``slack``.

    A row's magnitude is its largest value, or the ``size`` that its sums would have if nothing cancelled
    out.
    """

    values: Doubles
    slack: Doubles | float = 0.0
    size: Doubles | float = 0.0

    @property
    def bounds(self) -> Doubles:
        largest = np.abs(self.values).max(axis=-1, keepdims=True)
        return TOLERANCE * np.maximum(largest, self.size) + 1e-30 + self.slack

    def check(self, actual: Floats, what: object = "") -> None:
        assert np.isfinite(actual).all(), what
        excess = np.abs(actual - self.values) / self.bounds
        assert excess.max(initial=0.0) <= 1, f"{what}: {excess.max():.3g} times the tolerance"


#: Of the last tensors that were asked for, which each step of a test asks for again.
_WEIGHTS: dict[int, tuple[Tensor, Doubles]] = {}


def weights_of(tensor: Tensor) -> Doubles:
    """``tensor`` in float64; not to be changed, nor the tensor."""
    found = _WEIGHTS.pop(id(tensor), None) or (tensor, tensor.dequantise().astype(np.float64))
    _WEIGHTS[id(tensor)] = found
    if len(_WEIGHTS) > 8:
        del _WEIGHTS[next(iter(_WEIGHTS))]
    return found[1]


def dot(
    x: Doubles | Floats, tensor: Tensor, bias: Floats | None = None, *, exact_input: bool = True
) -> Answer:
    """``x @ w.T + bias``. For weights in blocks, x becomes int8 codes per 32 values, in the prescribed steps.

    Without ``exact_input``, x is itself the result of sums, so a value on the edge between two codes may get
    either: the answer's slack covers those.
    """
    weights = weights_of(tensor)
    slack: Doubles | float = 0.0
    if tensor.type.weights > 1:
        blocks = np.asarray(x, np.float32).reshape(len(x), x.shape[1] // BLOCK, BLOCK)
        largest = np.abs(blocks).max(axis=2)
        inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
        scaled = blocks * inverse[:, :, None]
        step = (largest / np.float32(127)).astype(np.float64)[:, :, None]
        x = (np.rint(scaled).astype(np.float64) * step).reshape(x.shape)
        if not exact_input:
            edge = np.abs(scaled - np.floor(scaled) - 0.5) < 1e-3
            slack = (edge * step).reshape(x.shape) @ np.abs(weights).T
    x = np.asarray(x, np.float64)
    values = x @ weights.T
    size = np.sqrt(x**2 @ weights.T**2).max(axis=1, keepdims=True)
    return Answer(values if bias is None else values + bias, slack, size)


def activate(activation: str, gate: Doubles, threshold: float) -> Doubles:
    if activation in ("relu", "drelu", "relu2"):
        rectified = np.where(gate > threshold, gate, 0.0)
        return rectified**2 if activation == "relu2" else rectified
    if activation == "silu":
        return gate / (1 + np.exp(-gate))
    if activation == "gelu_erf":
        return gate * np.vectorize(NormalDist().cdf)(gate)
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))


@dataclass(frozen=True)
class FFNAnswer:
    """``out`` of the FFN op, which gates are active and which coefficients are not zero ``[T, N]``."""

    out: Answer
    active_gates: Bools
    coefficients: Doubles


def gate_and_up(x: Floats, tensors: FFNTensors) -> tuple[Doubles, Doubles]:
    """Without a gate, up plays its part and its own is played by ones."""
    up = dot(x, tensors.up, tensors.up_bias).values
    if tensors.gate is None:
        return up, np.ones_like(up)
    return dot(x, tensors.gate, tensors.gate_bias).values, up


def ffn_rows(random: np.random.Generator, count: int, tensors: FFNTensors) -> Floats:
    """Random inputs that put no gate or up on the edge of firing, where float32 may fall on either side."""
    rows = random_rows(random, count, tensors.up.shape[1])
    while True:
        gate, up = gate_and_up(rows, tensors)
        on_edge = np.minimum(np.abs(gate - tensors.threshold), np.abs(up)).min(axis=1) < 1e-6
        if not on_edge.any():
            return rows
        rows[on_edge] = random_rows(random, int(on_edge.sum()), rows.shape[1])


def ffn(x: Floats, tensors: FFNTensors, candidates: Bools | None = None) -> FFNAnswer:
    """``candidates`` ``[T, N]``: the neurons that count, for each row."""
    gate, up = gate_and_up(x, tensors)
    if tensors.activation == "drelu":
        up = np.maximum(up, 0)
    sparse = tensors.activation in ("relu", "drelu", "relu2")
    active_gates = gate > tensors.threshold if sparse else np.ones_like(gate, np.bool_)
    if tensors.activation == "swiglu_oai":
        gate, up = np.minimum(gate, tensors.limit), np.clip(up, -tensors.limit, tensors.limit)
        coefficients = gate / (1 + np.exp(-tensors.alpha * gate)) * (up + 1)
    else:
        coefficients = activate(tensors.activation, gate, tensors.threshold) * up
    if candidates is not None:
        coefficients = np.where(candidates, coefficients, 0.0)
    if not is_dense(tensors.down_layout, tensors.down.type, tensors.activation):
        down = weights_of(tensors.down)
        out = Answer(coefficients @ (down if tensors.down_layout == "by_neuron" else down.T))
    else:
        out = dot(coefficients, tensors.down, exact_input=False)
    if tensors.down_bias is not None:
        out = replace(out, values=out.values + tensors.down_bias)
    return FFNAnswer(out, active_gates, coefficients)


def scores(x: Floats, tensors: PredictorTensors) -> Answer:
    hidden = dot(x, tensors.first).values
    return dot(np.maximum(hidden, 0) if tensors.relu else hidden, tensors.second, exact_input=False)


class AttentionKind(NamedTuple):
    """The other inputs that attention may have: see ``Backend.attention``."""

    window: int | None = None
    sinks: Floats | None = None
    softcap: float | None = None
    chunked: bool = False


def attention(q: Floats, k: Doubles, v: Doubles, scale: float, kind: AttentionKind | None = None) -> Doubles:
    """The row at the last position: q ``[H, head_dim]`` over k, v ``[K, positions, head_dim]``."""
    kind = kind or AttentionKind()
    out = np.empty(q.shape, np.float64)
    last = k.shape[1] - 1
    visible = np.arange(last + 1)
    if kind.window is not None:
        first = last - last % kind.window if kind.chunked else last - kind.window + 1
        visible = visible[visible >= first]
    for head, query in enumerate(q.astype(np.float64)):
        group = head * len(k) // len(q)
        scores = scale * (k[group, visible] @ query)
        if kind.softcap is not None:
            scores = kind.softcap * np.tanh(scores / kind.softcap)
        if kind.sinks is not None:
            scores = np.append(scores, kind.sinks[head])
        weights = np.exp(scores - scores.max())
        out[head] = weights[: len(visible)] @ v[group, visible] / weights.sum()
    return out


def to_words(bits: Bools) -> npt.NDArray[np.uint64]:
    """Rows of booleans as 64-bit words, the first in the lowest bit."""
    rows, n = bits.shape
    whole = np.zeros((rows, -(-n // 64) * 64), np.bool_)
    whole[:, :n] = bits
    return np.packbits(whole, axis=1, bitorder="little").view("<u8")


def to_bits(words: npt.NDArray[np.uint64], n: int) -> Bools:
    shifts = np.arange(n) % 64
    return (words[:, np.arange(n) // 64] >> shifts.astype(np.uint64) & np.uint64(1)).astype(np.bool_)


class FFNKind(NamedTuple):
    """The kind of an FFN, whatever its weights."""

    activation: str = "relu"
    threshold: float = 0.0
    gated: bool = True
    biases: bool = False
    limit: float = 7.0
    alpha: float = 1.702


def random_ffn(
    random: np.random.Generator,
    shape: tuple[int, int],
    types: tuple[str, str, str],
    kind: FFNKind | None = None,
    layout: str = "by_neuron",
) -> FFNTensors:
    """An FFN of ``(N, D)`` whose gate, up and down have these types."""
    n, d = shape
    kind = kind or FFNKind()

    def bias(size: int) -> Floats | None:
        return random_rows(random, size) * np.float32(0.3) if kind.biases else None

    return FFNTensors(
        gate=random_tensor(random, types[0], n, d) if kind.gated else None,
        up=random_tensor(random, types[1], n, d),
        down=random_tensor(random, types[2], *((n, d) if layout == "by_neuron" else (d, n)), scale=n**-0.5),
        down_layout=layout,
        activation=kind.activation,
        threshold=kind.threshold,
        limit=kind.limit,
        alpha=kind.alpha,
        gate_bias=bias(n) if kind.gated else None,
        up_bias=bias(n),
        down_bias=bias(d),
    )
