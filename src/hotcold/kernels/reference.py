"""The specification of every op, in NumPy: plain and readable, without any care for speed.

Other backends agree with it to 1e-5 of a row's magnitude. A dot with weights of 8 bits or fewer quantises
its input first (:func:`quantise_input`): prescribed float32 steps, so that codes agree bit for bit. Sums are
float32 in any order."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import BLOCK_TYPES, Tensor
from hotcold.formats.stored import AnyTensor
from hotcold.kernels import checks, host_memory
from hotcold.kernels._cpu import FlagLink, Link
from hotcold.kernels.backend import (
    DECODE_ROWS,
    PAGE,
    SPARSE_ACTIVATIONS,
    Backend,
    Batch,
    BatchLimits,
    Buffer,
    FFNStats,
    FFNTensors,
    FFNWeights,
    Floats,
    Ints,
    Mailbox,
    Masks,
    Matrix,
    Norm,
    PredictorTensors,
    PredictorWeights,
    Program,
    RopeTable,
    Rows,
    panel_bytes,
    scale_run,
)

Bools = npt.NDArray[np.bool_]

MOST_ROWS = 1 << 20  #: of a step; more would be a mistake
INPUT_BLOCK = 32  #: values of a dot's input that share one scale
#: A block whose largest magnitude is below this counts as zero: its inverse scale would overflow.
SMALLEST_AMAX = np.float32(2.0**-100)


def quantise_input(x: Floats) -> tuple[Floats, Floats]:
    """int8 codes of a dot's input ``[..., I]`` and their scales, as ggml's ``quantize_row_q8_0`` has them.

    Per 32 values: ``scale = amax / 127``, ``code = round(value * (127 / amax))``, to nearest even, every step
    in float32. The scale stays float32 (ggml rounds it to float16). Codes ``[..., I / 32, 32]`` are float32
    too (in a block with a NaN or an infinity, codes times scale is NaN), scales ``[..., I / 32, 1]``."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // INPUT_BLOCK, INPUT_BLOCK)
    amax: Floats = np.abs(blocks).max(axis=-1, keepdims=True)
    amax[amax < SMALLEST_AMAX] = 0
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse: Floats = np.float32(127) / amax
        inverse[amax == 0] = 0
        codes: Floats = np.rint(blocks * inverse)
        scales: Floats = amax / np.float32(127)
    return codes, scales


def pack_mask(active: Bools) -> Masks:
    """``[..., N]`` booleans as ``[..., ceil(N / 64)]`` words: bit i of word j is element 64 j + i."""
    padding = -active.shape[-1] % 64
    padded = np.pad(active, [(0, 0)] * (active.ndim - 1) + [(0, padding)])
    packed: Masks = np.packbits(padded, axis=-1, bitorder="little").view("<u8").astype(np.uint64)
    return packed


def unpack_mask(mask: Masks, n: int) -> Bools:
    """The first ``n`` bits of each row of words, as :func:`pack_mask` lays them."""
    words = np.ascontiguousarray(mask, dtype="<u8")
    return np.unpackbits(words.view(np.uint8), axis=-1, count=n, bitorder="little").astype(np.bool_)


@dataclass(frozen=True)
class ReferenceMatrix:
    """Weights as the file's blocks; their values are made when first used."""

    tensor: Tensor
    bias: Floats | None = None

    def __post_init__(self) -> None:
        checks.check_matrix(self.tensor, self.bias)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.tensor.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def quantised(self) -> bool:
        return self.tensor.type.weights > 1  # float types are blocks of one value

    @cached_property
    def values(self) -> Floats:
        return self.tensor.dequantise()

    def dot(self, x: Floats) -> Floats:
        """``[..., columns]`` -> ``[..., rows]``, with the bias; quantised weights quantise ``x`` first."""
        if self.quantised:
            codes, scales = quantise_input(x)
            x = (codes * scales).reshape(x.shape)
        y: Floats = x @ self.values.T
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class ReferenceFFN:
    """An FFN's weights, of which :meth:`coefficients` and :meth:`down_sum` are the two halves of the op."""

    gate: ReferenceMatrix | None
    up: ReferenceMatrix
    down: ReferenceMatrix
    down_layout: str
    activation: str
    threshold: np.float32
    limit: np.float32
    alpha: np.float32
    down_bias: Floats | None

    @property
    def neurons(self) -> int:
        return self.up.shape[0]

    @property
    def nbytes(self) -> int:
        bias = 0 if self.down_bias is None else self.down_bias.nbytes
        return (self.gate.nbytes if self.gate else 0) + self.up.nbytes + self.down.nbytes + bias

    @property
    def dense(self) -> bool:
        return self.down_layout == "by_output" and self.activation not in SPARSE_ACTIVATIONS

    @property
    def runs(self) -> int:
        """Of neurons that share scales: down by output, quantised, and summed by neuron."""
        panels = self.down_layout == "by_output" and not self.dense and self.down.quantised
        return self.neurons // scale_run(self.down.tensor.type) if panels else 0

    @property
    def row_bytes(self) -> tuple[int, int, int, int]:
        parts = (self.gate, self.up, self.down)
        gate, up, down = (m.tensor.nbytes // self.neurons if m else 0 for m in parts)
        panels = panel_bytes(self.down.tensor.type, self.down.shape[0]) if self.runs else (down, 0)
        return gate, up, *panels

    def coefficients(self, x: Floats) -> tuple[Bools, Floats]:
        """Which neurons' gates fire, and what multiplies their down rows; both ``[T, N]``. Without a gate, up
        plays the gate's part and the coefficient is ``act(up)``."""
        gate = (self.gate or self.up).dot(x)
        value = np.float32(1) if self.gate is None else self.up.dot(x)
        fires = gate > self.threshold
        if self.activation == "relu":
            return fires, np.where(fires, gate * value, np.float32(0))
        if self.activation == "drelu":  # TurboSparse, arXiv 2406.05955: relu(gate) * relu(up)
            return fires, np.where(fires & (value > 0), gate * value, np.float32(0))
        if self.activation == "relu2":  # Primer, arXiv 2109.08668: relu(gate)^2
            return fires, np.where(fires, gate * gate * value, np.float32(0))
        if self.activation == "swiglu_oai":  # gpt-oss, as its published PyTorch code has it
            gate, value = np.minimum(gate, self.limit), np.clip(value, -self.limit, self.limit)
            return np.ones_like(fires), gate * _sigmoid(self.alpha * gate) * (value + np.float32(1))
        return np.ones_like(fires), _smooth(self.activation, gate) * value

    def down_sum(self, coefficients: Floats) -> Floats:
        """``[T, N]`` -> ``[T, D]``, with the bias.

        Here in any order. Other backends add rows by neuron in one that the shape alone decides, so that
        neither threads nor the rest of a batch change a bit. The neurons are cut into ``R = min(max(W // 2,
        1), 64)`` leaves, W being the 64-bit words of their mask; leaf r has words ``[W * r // R, W * (r + 1)
        // R)``. Each leaf starts at +0 and adds its neurons' rows, ascending. The leaves are summed in a
        binary tree: neighbours (0 and 1, 2 and 3, ...), then neighbouring pairs, and so on; the last one
        without a neighbour goes up as it is."""
        if self.dense:
            y = self.down.dot(coefficients)
        else:
            y = coefficients @ (self.down.values if self.down_layout == "by_neuron" else self.down.values.T)
        return y if self.down_bias is None else y + self.down_bias


def _sigmoid(x: Floats) -> Floats:
    one = np.float32(1)
    with np.errstate(over="ignore"):
        sigmoid: Floats = one / (one + np.exp(-x))
    return sigmoid


def _softmax(x: Floats) -> Floats:
    terms = np.exp(x - x.max(axis=-1, keepdims=True))
    softmax: Floats = terms / terms.sum(axis=-1, keepdims=True)
    return softmax


def _smooth(activation: str, gate: Floats) -> Floats:
    """SiLU, or GELU (arXiv 1606.08415): exact, or in the tanh form that ggml's ``gelu`` computes."""
    half, root, cubic = (np.float32(c) for c in (0.5, np.sqrt(2 / np.pi), 0.044715))
    if activation == "silu":
        factor = _sigmoid(gate)
    elif activation == "gelu_erf":
        factor = half * _ERFC(-gate / np.sqrt(2))
    else:
        with np.errstate(over="ignore"):
            factor = half * (1 + np.tanh(root * gate * (1 + cubic * gate * gate)))
    smooth: Floats = np.multiply(gate, factor, dtype=np.float32)
    return smooth


_ERFC = np.vectorize(math.erfc, otypes=[np.float32])


@dataclass(frozen=True)
class ReferencePredictor:
    """A predictor's factors: a neuron is a candidate where its score is at least its threshold."""

    first: ReferenceMatrix
    second: ReferenceMatrix
    threshold: Floats
    relu: bool

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + self.second.nbytes + self.threshold.nbytes

    def scores(self, x: Floats) -> Floats:
        """``[T, D]`` -> ``[T, N]``."""
        hidden = self.first.dot(x)
        return self.second.dot(np.maximum(hidden, 0) if self.relu else hidden)


@dataclass(frozen=True)
class _Program:
    fn: Callable[[], None]

    def run(self) -> None:
        self.fn()


class ReferenceBackend:
    """Implements :class:`hotcold.kernels.backend.Backend`; a program calls its function again."""

    name = "reference"
    decode_rows = DECODE_ROWS
    step_rows = MOST_ROWS
    threads = None
    program_rows: tuple[int, ...] = ()

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Buffer:
        return np.zeros(shape, dtype)

    def write(self, buffer: Buffer, values: npt.NDArray[Any], row: int = 0) -> None:
        host_memory.write(buffer, values, row)

    def read(self, buffer: Buffer, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        return host_memory.read(buffer, start, stop)

    def copy(self, source: Backend, values: Buffer, out: Buffer, rows: int) -> None:
        self.write(out, source.read(values, 0, rows))

    def record(self, fn: Callable[[], None], rows: int | None = None) -> Program:
        return _Program(fn)

    def matrix(self, tensor: AnyTensor, bias: Floats | None = None) -> Matrix:
        return ReferenceMatrix(tensor.load(), bias)

    def ffn_weights(self, tensors: FFNTensors) -> ReferenceFFN:
        checks.check_ffn(tensors)
        gate = None if tensors.gate is None else ReferenceMatrix(tensors.gate.load(), tensors.gate_bias)
        up, down = ReferenceMatrix(tensors.up.load(), tensors.up_bias), ReferenceMatrix(tensors.down.load())
        numbers = np.float32(tensors.threshold), np.float32(tensors.limit), np.float32(tensors.alpha)
        rule = tensors.down_layout, tensors.activation
        return ReferenceFFN(gate, up, down, *rule, *numbers, tensors.down_bias)

    def predictor_weights(self, tensors: PredictorTensors) -> ReferencePredictor:
        checks.check_predictor(tensors)
        return ReferencePredictor(
            ReferenceMatrix(tensors.first), ReferenceMatrix(tensors.second), tensors.threshold, tensors.relu
        )

    def link(self, timeout_seconds: float) -> Link:
        return FlagLink(timeout_seconds)

    def mailboxes(
        self, link: Link, limits: BatchLimits, dim: int, words: Mapping[int, int]
    ) -> dict[int, Mailbox]:
        return host_memory.mailboxes(link, limits, dim, words)

    def post(self, box: Mailbox, x: Buffer, mask: Buffer | None, batch: Batch) -> None:
        link, rows, decode = host_memory.own_link(box), batch.n_tokens, batch.n_decode
        if not rows:
            return
        link.wait_idle(box.layer)
        box.batch.counts[:] = batch.counts
        box.x[:rows] = _rows("x", x, batch, box.x.shape[1:])
        if (mask is None) != (box.mask is None):
            raise ValueError("a mask, and a mailbox without, or the other way round: both are needed")
        if mask is not None and box.mask is not None:
            words = _rows("mask", mask, batch, mask.shape[1:], np.uint64)[:decode]
            box.mask[:decode] = words[:, mask.shape[1] - box.mask.shape[1] :]
        link.post(box.layer)

    def collect(self, box: Mailbox, batch: Batch, out: Buffer) -> None:
        if batch.n_tokens:
            host_memory.own_link(box).wait_answered(box.layer)
        self.add(out, box.y, batch)

    def serve(self, link: Link, layers: Sequence[tuple[int, Program]]) -> None:
        try:
            while not link.ended:
                answered = 0
                for layer, program in layers:
                    if not link.wait_posted(layer):
                        break
                    program.run()
                    link.answer(layer)
                    answered += 1
                if not answered:
                    link.fail("a step began with a layer that is not its first one")
        except BaseException as error:  # whatever it is, the hot side must not wait for ever
            link.fail(repr(error))

    def embed(self, table: Matrix, batch: Batch, out: Buffer) -> None:
        table = checks.own_weights(table, ReferenceMatrix)
        rows = _rows("out", out, batch, (table.shape[1],))
        rows[:] = table.values[batch.tokens[: len(rows)]]

    def norm(self, x: Buffer, norm: Norm, batch: Batch, out: Buffer, rows: Rows = Rows.TOKENS) -> None:
        """RMSNorm, arXiv 1910.07467: ``x / sqrt(mean(x^2) + eps) * weight``; LayerNorm, arXiv 1607.06450,
        subtracts the mean first."""
        values = _rows("x", x, batch, x.shape[1:], rows=rows)
        _check("norm weight", norm.weight, (x.shape[-1],))
        if norm.bias is not None:
            _check("norm bias", norm.bias, (x.shape[-1],))
        target = _rows("out", out, batch, x.shape[1:], rows=rows)
        if norm.centre:
            values = values - values.mean(axis=-1, keepdims=True)
        variance = np.mean(values * values, axis=-1, keepdims=True)
        normed = values / np.sqrt(variance + np.float32(norm.eps)) * norm.weight
        target[:] = normed if norm.bias is None else normed + norm.bias

    def linear(
        self,
        x: Buffer,
        weights: Sequence[Matrix],
        batch: Batch,
        outs: Sequence[Buffer],
        *,
        accumulate: bool = False,
        rows: Rows = Rows.TOKENS,
    ) -> None:
        for matrix, out in zip(weights, outs, strict=True):
            w = checks.own_weights(matrix, ReferenceMatrix)
            values = _flat_rows("x", x, batch, w.shape[1], rows)
            _store(w.dot(values), _flat_rows("out", out, batch, w.shape[0], rows), accumulate)

    def rope(self, x: Buffer, table: RopeTable, batch: Batch) -> None:
        """Rotary positions, arXiv 2104.09864: pairs (a, b) become (a cos - b sin, a sin + b cos)."""
        values = _rows("x", x, batch, x.shape[1:])
        _check("cos", table.cos, table.cos.shape)
        _check("sin", table.sin, table.cos.shape)
        half = table.cos.shape[-1]
        if values.ndim != 3 or 2 * half > values.shape[-1]:
            raise ValueError(f"x of shape {x.shape}: [T, H, head_dim of {2 * half} or more] is needed")
        first, second = slice(0, half), slice(half, 2 * half)
        if table.interleaved:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        positions = batch.positions[: len(values)]
        cos, sin = table.cos[positions, None], table.sin[positions, None]
        a, b = values[..., first].copy(), values[..., second].copy()
        values[..., first] = a * cos - b * sin
        values[..., second] = a * sin + b * cos

    def store_kv(self, k: Buffer, v: Buffer, batch: Batch, k_cache: Buffer, v_cache: Buffer) -> None:
        """K and V to their slots of a paged cache (PagedAttention, arXiv 2309.06180), rounded to its dtype. A
        block of Q8_0 that holds a NaN or an infinity reads back as NaN."""
        for what, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
            values = _rows(what, new, batch, new.shape[1:])
            heads, head_dim = new.shape[1:]
            _check_cache(f"{what}_cache", cache, (len(cache), heads), head_dim)
            slots = batch.slots[: len(values)]
            with np.errstate(over="ignore", invalid="ignore"):
                rows = _q8_0_rows(values) if cache.dtype == np.uint8 else values
                cache[slots // PAGE, :, slots % PAGE] = rows

    def attention(
        self,
        q: Buffer,
        k_cache: Buffer,
        v_cache: Buffer,
        batch: Batch,
        out: Buffer,
        scale: float,
        *,
        window: int | None = None,
        sinks: Buffer | None = None,
        softcap: float | None = None,
    ) -> None:
        """``softmax(scale q k) v``; grouped queries, arXiv 2305.13245: H / K neighbours share a kv head. A
        score s becomes ``softcap tanh(s / softcap)``; a sink is one more score, whose value is 0."""
        checks.check_attention(q, window, sinks, softcap)
        queries = _rows("q", q, batch, q.shape[1:])
        target = _rows("out", out, batch, q.shape[1:])
        (pages, kv_heads), (heads, head_dim) = k_cache.shape[:2], q.shape[1:]
        for what, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            _check_cache(what, cache, (pages, kv_heads), head_dim)
        if heads % kv_heads:
            raise ValueError(f"q of shape {q.shape} does not fit k_cache of shape {k_cache.shape}")
        for t, query in enumerate(queries):
            length = int(batch.positions[t]) + 1
            begin = max(0, length - window) if window else 0
            own = batch.pages[batch.sequence[t], : -(-length // PAGE)]
            k, v = (_positions(cache[own], length)[:, begin:] for cache in (k_cache, v_cache))
            # k and v [K, seen, head_dim], scores and weights [K, H / K, seen]
            scores = np.float32(scale) * (query.reshape(kv_heads, -1, head_dim) @ k.transpose(0, 2, 1))
            if softcap is not None:
                scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
            largest = scores.max(axis=-1, keepdims=True)
            if sinks is not None:
                sink = sinks.reshape(kv_heads, -1, 1)
                largest = np.maximum(largest, sink)
            weights = np.exp(scores - largest)
            total = weights.sum(axis=-1, keepdims=True)
            if sinks is not None:
                total += np.exp(sink - largest)
            target[t] = (weights @ v / total).reshape(heads, head_dim)

    def predict(self, x: Buffer, weights: PredictorWeights, batch: Batch, mask: Buffer) -> None:
        """PowerInfer's predictor, arXiv 2312.12456; without the ReLU, two factors of a truncated SVD."""
        p = checks.own_weights(weights, ReferencePredictor)
        values = _rows("x", x, batch, (p.first.shape[1],))[: batch.n_decode]
        target = _rows("mask", mask, batch, (-(-p.second.shape[0] // 64),), np.uint64)
        target[: batch.n_decode] = pack_mask(p.scores(values) >= p.threshold)

    def ffn(
        self,
        x: Buffer,
        weights: FFNWeights,
        batch: Batch,
        out: Buffer,
        *,
        skip: bool,
        mask: Buffer | None = None,
        fired: Buffer | None = None,
        stats: FFNStats | None = None,
        accumulate: bool = False,
    ) -> None:
        """``down(act(gate x) * up x)``: GLU variants, arXiv 2002.05202.

        A gate fires when it is greater than the threshold; drelu also needs up > 0. ``skip`` leaves out what
        is zero, so it changes what is read (``stats``) and no value. ``fired`` is set for decode rows."""
        w = checks.own_weights(weights, ReferenceFFN)
        checks.check_skip(skip, w.activation)
        n, words = w.neurons, -(-w.neurons // 64)
        values = _rows("x", x, batch, (w.up.shape[1],))
        target = _rows("out", out, batch, (w.up.shape[1],))
        decode = slice(0, batch.n_decode)
        fires, coefficients = w.coefficients(values)
        candidates = np.ones((batch.n_decode, n), np.bool_)
        if mask is not None:
            own = _rows("mask", mask, batch, (max(words, mask.shape[-1]),), np.uint64)[decode, :words]
            candidates = unpack_mask(own, n)
            coefficients[decode][~candidates] = 0
        if fired is not None:
            _rows("fired", fired, batch, (words,), np.uint64)[decode] = pack_mask(coefficients[decode] != 0)
        if stats is not None and batch.n_decode == batch.n_tokens:
            gated = candidates & fires[decode] if skip else candidates
            added = coefficients[decode] != 0 if skip else candidates
            _count(stats, w, candidates, gated, added)
        _store(w.down_sum(coefficients), target, accumulate)

    def router(
        self,
        x: Buffer,
        weights: Matrix,
        batch: Batch,
        ids: Buffer,
        factors: Buffer,
        *,
        k: int,
        score: str,
        selection_bias: Buffer | None = None,
        normalise: bool,
        scale: float,
    ) -> None:
        """Mixture of experts, arXiv 1701.06538, as models of today route to them."""
        w = checks.own_weights(weights, ReferenceMatrix)
        checks.check_router(w.shape[0], k, score, selection_bias)
        chosen, target = _rows("ids", ids, batch, (k,), np.int32), _rows("factors", factors, batch, (k,))
        logits = w.dot(_rows("x", x, batch, (w.shape[1],)))
        scores = _sigmoid(logits) if score == "sigmoid" else _softmax(logits)
        ranks = logits if selection_bias is None else scores + selection_bias
        best = np.argsort(-ranks, axis=-1, kind="stable")[:, :k]  # NaN comes last
        chosen[:] = np.sort(best, axis=-1)
        picked = np.take_along_axis(scores, chosen, axis=-1)
        if normalise:
            picked = picked / np.maximum(picked.sum(axis=-1, keepdims=True), np.float32(1e-20))
        target[:] = picked * np.float32(scale)

    def add(self, x: Buffer, y: Buffer, batch: Batch) -> None:
        rows = _rows("x", x, batch, x.shape[1:])
        rows += _rows("y", y, batch, x.shape[1:])

    def gather(self, x: Buffer, batch: Batch, out: Buffer) -> None:
        _rows("x", x, batch, x.shape[1:])
        target = _rows("out", out, batch, x.shape[1:], rows=Rows.LOGITS)
        target[:] = x[batch.logits_rows[: len(target)]]

    def top_k(
        self,
        logits: Buffer,
        row: int,
        k: int,
        bias: tuple[Ints, Floats] | None = None,
        allowed: Masks | None = None,
    ) -> tuple[Ints, Floats]:
        """A stable sort."""
        checks.check_top_k(logits, row, k, bias)
        values = logits[row].copy()
        if bias is not None:
            values[bias[0]] += bias[1]
        ids = np.arange(len(values), dtype=np.int32)
        if allowed is not None:
            _check("allowed", allowed, (-(-len(values) // 64),), np.uint64)
            ids = ids[unpack_mask(allowed, len(values))]
        ids = ids[np.argsort(-values[ids], kind="stable")[:k]]
        return ids, values[ids]


def _count(stats: FFNStats, w: ReferenceFFN, candidates: Bools, gated: Bools, added: Bools) -> None:
    """Adds one step to ``stats``: rows are unions over the step's tokens, pairs are counted by token."""
    if not len(candidates):
        return
    rows = (candidates, gated if w.gate else candidates[:0], added)
    read = [int(which.any(axis=0).sum()) for which in rows]
    if w.dense:
        read = [w.neurons, w.neurons if w.gate else 0, w.neurons]
    runs = int(added.any(axis=0).reshape(w.runs, -1).any(axis=1).sum()) if w.runs else 0
    stats.counts[stats.row] += (*read, int(added.sum()), runs)


def _check_cache(what: str, cache: Buffer, pages: tuple[int, int], head_dim: int) -> None:
    dtype = cache.dtype if cache.dtype in (np.float32, np.uint8) else np.float16
    if dtype == np.uint8:
        head_dim = BLOCK_TYPES["Q8_0"].row_bytes(head_dim)
    _check(what, cache, (*pages, PAGE, head_dim), dtype)


def _q8_0_rows(values: Floats) -> npt.NDArray[np.uint8]:
    """``[..., n]`` -> blocks of Q8_0, ``[..., n / 32 * 34]``."""
    codes, scales = quantise_input(values)
    blocks = (scales.astype("<f2").view(np.uint8), np.nan_to_num(codes).astype(np.int8).view(np.uint8))
    return np.concatenate(blocks, axis=-1).reshape(*values.shape[:-1], -1)


def _positions(pages: npt.NDArray[Any], length: int) -> Floats:
    """``[P, K, PAGE, row]`` -> the first ``length`` positions, ``[K, length, head_dim]`` float32."""
    _, heads, _, width = pages.shape
    rows = pages.transpose(1, 0, 2, 3).reshape(heads, -1, width)[:, :length]
    if rows.dtype == np.uint8:
        type = BLOCK_TYPES["Q8_0"]
        blocks = np.ascontiguousarray(rows).reshape(heads * length, width)
        return Tensor(type, (heads, length, width // type.nbytes * type.weights), blocks).dequantise()
    return rows.astype(np.float32)


def _store(values: Floats, out: Floats, accumulate: bool) -> None:
    out[:] = out + values if accumulate else values


def _rows(
    what: str,
    array: Buffer,
    batch: Batch,
    tail: tuple[int, ...],
    dtype: npt.DTypeLike = np.float32,
    rows: Rows = Rows.TOKENS,
) -> npt.NDArray[Any]:
    """The rows of this step, after checking that the buffer has room for the largest one."""
    most, now = batch.limits.tokens, batch.n_tokens
    if rows == Rows.LOGITS:
        most, now = batch.limits.logits, batch.n_logits
    if array.ndim and len(array) < most:
        raise ValueError(f"{what} has {len(array)} rows: this batch needs {most}")
    _check(what, array, (len(array) if array.ndim else most, *tail), dtype)
    step: npt.NDArray[Any] = array[:now]
    return step


def _flat_rows(what: str, array: Buffer, batch: Batch, width: int, rows: Rows) -> Floats:
    """As :func:`_rows`, whatever axes the values of a row have."""
    if array.ndim > 2 and array.flags.c_contiguous:
        array = array.reshape(len(array), -1)  # a view
    return _rows(what, array, batch, (width,), rows=rows)


def _check(what: str, array: Buffer, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> None:
    if array.dtype != dtype:
        raise TypeError(f"{what} is {array.dtype}: {np.dtype(dtype)} is needed")
    if array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(f"{what} of shape {array.shape}: {shape}, without gaps, is needed")
