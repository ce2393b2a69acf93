"""The specification of every op in NumPy, written for reading and not for speed.

Other backends agree with it to 1e-5 of a row's magnitude. A dot with weights of 8 bits or fewer first
quantises its input (:func:`~hotcold.kernels.numpy_matrix.quantise_input`) in prescribed float32 steps, so
that codes agree bit for bit. Sums are float32 in any order. numpy_ffn.py has the FFN op, and the order in
which other backends sum it. reference_states.py has the ops that keep a state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import BLOCK_TYPES, Tensor
from hotcold.formats.stored import AnyTensor
from hotcold.kernels import checks
from hotcold.kernels._native import FlagLink, Link
from hotcold.kernels.backend import (
    DECODE_ROWS,
    PAGE,
    AttentionCall,
    Batch,
    Buffer,
    Chosen,
    ExpertGroups,
    FFNCall,
    FFNStats,
    FFNTensors,
    Floats,
    IndexedBy,
    Ints,
    Mailbox,
    Masks,
    Matrix,
    Norm,
    PredictorTensors,
    PredictorWeights,
    Program,
    RopeTable,
    RouterCall,
    Rows,
    mask_words,
)
from hotcold.kernels.host_memory import HostMemory, own_link
from hotcold.kernels.numpy_ffn import (
    FFNStep,
    ReferenceExperts,
    ReferenceFFN,
    ReferencePredictor,
    ffn_weights,
    sigmoid,
    unpack_mask,
)
from hotcold.kernels.numpy_matrix import ReferenceMatrix, quantise_input
from hotcold.kernels.numpy_tiles import check_prompt_math
from hotcold.kernels.reference_rows import check as _check
from hotcold.kernels.reference_rows import flat_rows as _flat_rows
from hotcold.kernels.reference_rows import rows_of as _rows
from hotcold.kernels.reference_states import ReferenceStates

MOST_ROWS = 1 << 20  #: of a step; a larger number is surely a mistake


def _softmax(x: Floats) -> Floats:
    terms = np.exp(x - x.max(axis=-1, keepdims=True))
    softmax: Floats = terms / terms.sum(axis=-1, keepdims=True)
    return softmax


def _in_groups(ranks: Floats, values: Floats, groups: ExpertGroups) -> Floats:
    """Sets ranks of experts in unused groups to NaN, which ranks last (DeepSeek-V2, arXiv 2405.04434)."""
    best = np.sort(-values.reshape(*values.shape[:-1], groups.count, -1), axis=-1)[..., : groups.best]
    order = np.argsort(best.sum(axis=-1), axis=-1, kind="stable")
    used = np.zeros(order.shape, bool)
    np.put_along_axis(used, order[..., : groups.used], True, axis=-1)
    result: Floats = np.where(np.repeat(used, ranks.shape[-1] // groups.count, -1), ranks, np.float32(np.nan))
    return result


@dataclass(frozen=True)
class _Program:
    fn: Callable[[], None]

    def run(self) -> None:
        self.fn()


class ReferenceBackend(ReferenceStates, HostMemory):
    """Implements :class:`hotcold.kernels.backend.Backend`; a program calls its function again."""

    name = "reference"
    decode_rows = DECODE_ROWS
    chooses_rows = True
    step_rows = MOST_ROWS
    threads = None
    program_rows: tuple[int, ...] = ()

    def __init__(self, prompt_math: str = "same") -> None:
        self.prompt_math = check_prompt_math(prompt_math)

    def record(self, fn: Callable[[], None], rows: int | None = None) -> Program:
        return _Program(fn)

    def matrix(self, tensor: AnyTensor, bias: Floats | None = None) -> Matrix:
        return ReferenceMatrix(tensor.load(), bias)

    def ffn_weights(self, tensors: FFNTensors) -> ReferenceFFN | ReferenceExperts:
        checks.check_ffn(tensors)
        checks.check_resident(tensors)
        return ffn_weights(tensors)

    def disk_counts(self) -> None:
        """Returns None: all experts are in memory."""

    def read_probe(self, nbytes: int = 0) -> None:
        """Returns None: no thread of this backend streams memory."""

    def streamed_weights(self, tensors: FFNTensors) -> ReferenceFFN | ReferenceExperts:
        return self.ffn_weights(tensors)

    def predictor_weights(self, tensors: PredictorTensors) -> ReferencePredictor:
        checks.check_predictor(tensors)
        return ReferencePredictor(
            ReferenceMatrix(tensors.first),
            ReferenceMatrix(tensors.second),
            tensors.threshold,
            tensors.relu,
            tensors.ends,
            tensors.chosen,
        )

    def link(self, timeout_seconds: float) -> Link:
        return FlagLink(timeout_seconds)

    def post(
        self, box: Mailbox, x: Buffer, mask: Buffer | None, batch: Batch, chosen: Chosen | None = None
    ) -> None:
        link, rows, decode = own_link(box), batch.n_tokens, batch.n_decode
        mask_words, box_words = (0 if each is None else each.shape[1] for each in (mask, box.mask))
        if mask_words < box_words or (mask is None) != (box.mask is None):
            raise ValueError(f"post: a mask of {mask_words} words, and the mailbox has {box_words}")
        if (chosen is None) != (box.chosen is None):
            raise ValueError(
                "post: chosen experts, and a mailbox without room for them, or the other way round"
            )
        if not rows:
            return
        link.wait_idle(box.layer)
        box.batch.counts[:] = batch.counts
        box.x[:rows] = _rows("x", x, batch, box.x.shape[1:])
        if chosen is not None and box.chosen is not None:
            experts = box.chosen.ids.shape[1:]
            box.chosen.ids[:rows] = _rows("ids", chosen.ids, batch, experts, np.int32)
            box.chosen.factors[:rows] = _rows("factors", chosen.factors, batch, experts)
        if box.mask is not None:
            words = _rows("mask", mask, batch, (mask_words,), np.uint64)
            box.mask[:decode] = words[:decode, mask_words - box_words :]
        link.post(box.layer)

    def collect(self, box: Mailbox, batch: Batch, out: Buffer) -> None:
        if batch.n_tokens:
            own_link(box).wait_answered(box.layer)
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
        except BaseException as error:  # on any error, or the hot side would wait for ever
            link.fail(repr(error))

    def embed(
        self,
        table: Matrix,
        batch: Batch,
        out: Buffer,
        *,
        by: IndexedBy = IndexedBy.TOKENS,
        accumulate: bool = False,
    ) -> None:
        table = checks.own_weights(table, ReferenceMatrix)
        rows = _rows("out", out, batch, (table.shape[1],))
        index = batch.tokens if by == IndexedBy.TOKENS else batch.positions
        _store(table.values[index[: len(rows)]], rows, accumulate)

    def norm(self, x: Buffer, norm: Norm, batch: Batch, out: Buffer, rows: Rows = Rows.TOKENS) -> None:
        """Computes RMSNorm, arXiv 1910.07467: ``x / sqrt(mean(x^2) + eps) * weight``. LayerNorm, arXiv
        1607.06450, subtracts the mean first."""
        values = _rows("x", x, batch, x.shape[1:], rows=rows)
        target = _rows("out", out, batch, x.shape[1:], rows=rows)
        weight = norm.weight
        if weight is not None and weight.ndim == 2:
            values, target = (each.reshape(len(each), *weight.shape) for each in (values, target))  # views
            _check("norm weight", weight, values.shape[1:])
        elif weight is not None:
            if weight.size != x.shape[-1]:
                values, target = (each.reshape(len(each), -1) for each in (values, target))
            _check("norm weight", weight, values.shape[-1:])
        if norm.bias is not None:
            _check("norm bias", norm.bias, values.shape[-1:] if weight is None else weight.shape)
        if norm.centre:
            values = values - values.mean(axis=-1, keepdims=True)
        variance = np.mean(values * values, axis=-1, keepdims=True)
        normed = values / np.sqrt(variance + np.float32(norm.eps))
        normed = normed if weight is None else normed * weight
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
        where: Buffer | None = None,
        stats: FFNStats | None = None,
    ) -> None:
        checks.check_where(where, stats, len(weights), rows, accumulate=accumulate)
        for matrix, out in zip(weights, outs, strict=True):
            w = checks.own_weights(matrix, ReferenceMatrix)
            values = _flat_rows("x", x, batch, w.shape[1], rows)
            decode, math = slice(0, batch.n_decode), self.prompt_math if rows == Rows.TOKENS else "same"
            y = w.dot(values, math, batch.n_decode)
            if where is not None:
                needed_values = _flat_rows("where", where, batch, w.shape[0], rows)[decode] > 0
                y[decode][~needed_values] = 0
                if stats is not None and batch.n_decode == batch.n_tokens:
                    stats.counts[stats.row] += 0, needed_values.any(axis=0).sum(), 0, needed_values.sum(), 0
            _store(y, _flat_rows("out", out, batch, w.shape[0], rows), accumulate)

    def linear_heads(self, x: Buffer, weights: Matrix, batch: Batch, out: Buffer) -> None:
        """Computes the products that latent attention absorbs, arXiv 2405.04434."""
        w = checks.own_weights(weights, ReferenceMatrix)
        checks.check_no_bias("linear_heads", w.bias)
        (heads, outputs), columns = out.shape[1:], w.shape[1]
        values = _rows("x", x, batch, (heads, *x.shape[2:]))
        target = _rows("out", out, batch, (heads, outputs))
        if heads * outputs != w.shape[0] or values.shape[-1] < columns:
            raise ValueError(f"linear_heads of {w.shape} from {x.shape} to {out.shape}")
        products = w.dot(np.ascontiguousarray(values[..., -columns:]))  # of each head with all rows
        for h in range(heads):
            target[:, h] = products[:, h, h * outputs : (h + 1) * outputs]

    def join_heads(self, x: Buffer, y: Buffer, batch: Batch, out: Buffer) -> None:
        first, second = (_rows(what, each, batch, each.shape[1:]) for what, each in (("x", x), ("y", y)))
        joined = np.concatenate([first, second], -1)
        _rows("out", out, batch, joined.shape[1:])[:] = joined

    def rope(self, x: Buffer, table: RopeTable, batch: Batch) -> None:
        """Applies rotary positions, arXiv 2104.09864: pairs (a, b) become (a cos - b sin, a sin + b cos)."""
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
        """Writes K and V, rounded, to their slots of a paged cache (PagedAttention, arXiv 2309.06180). A
        block of Q8_0 that holds a NaN or an infinity reads back as NaN."""
        for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
            values = _rows(name, new, batch, new.shape[1:])
            heads, head_dim = new.shape[1:]
            _check_cache(f"{name}_cache", cache, (len(cache), heads), head_dim)
            slots = batch.slots[: len(values)]
            with np.errstate(over="ignore", invalid="ignore"):
                rows = _q8_0_rows(values) if cache.dtype == np.uint8 else values
                cache[slots // PAGE, :, slots % PAGE] = rows

    def attention(self, call: AttentionCall) -> None:
        """Computes ``softmax(scale q k) v``; grouped queries, arXiv 2305.13245: H / K neighbours share a kv
        head. A score s becomes ``softcap tanh(s / softcap)``; a sink is one more scorewith the value 0."""
        q, batch, sinks = call.q, call.batch, call.sinks
        checks.check_attention(call, q, sinks)
        queries = _rows("q", q, batch, q.shape[1:])
        target = _rows("out", call.out, batch, q.shape[1:])
        (pages, kv_heads), (heads, head_dim) = call.k_cache.shape[:2], q.shape[1:]
        for name, cache in (("k_cache", call.k_cache), ("v_cache", call.v_cache)):
            _check_cache(name, cache, (pages, kv_heads), head_dim)
        if heads % kv_heads:
            raise ValueError(f"q of shape {q.shape} does not fit k_cache of shape {call.k_cache.shape}")
        for t, query in enumerate(queries):
            length = int(batch.positions[t]) + 1
            begin = max(0, length - call.window) if call.window else 0
            if call.window and call.chunked:
                begin = (length - 1) // call.window * call.window
            row_pages = batch.pages[batch.sequence[t], : -(-length // PAGE)]
            k, v = (_positions(cache[row_pages], length)[:, begin:] for cache in (call.k_cache, call.v_cache))
            # k and v [K, positions, head_dim], scores and weights [K, H / K, positions]
            scores = np.float32(call.scale) * (query.reshape(kv_heads, -1, head_dim) @ k.transpose(0, 2, 1))
            if call.softcap is not None:
                scores = np.float32(call.softcap) * np.tanh(scores / np.float32(call.softcap))
            largest = scores.max(axis=-1, keepdims=True)
            if sinks is not None:
                sink = sinks.reshape(kv_heads, -1, 1)
                largest = np.maximum(largest, sink)
            weights = np.exp(scores - largest)
            total = weights.sum(axis=-1, keepdims=True)
            if sinks is not None:
                total += np.exp(sink - largest)
            target[t] = (weights @ v / total).reshape(heads, head_dim)

    def predict(
        self,
        x: Buffer,
        weights: PredictorWeights,
        batch: Batch,
        mask: Buffer,
        chosen: Chosen | None = None,
    ) -> None:
        """Computes PowerInfer's predictor, arXiv 2312.12456; without ReLU two factors of a truncated SVD."""
        p = checks.own_weights(weights, ReferencePredictor)
        checks.check_chosen(chosen, len(p.ends))
        decode = slice(0, batch.n_decode)
        values = _rows("x", x, batch, (p.first.shape[1],))[decode]
        target = _rows("mask", mask, batch, (mask_words(p.ends)[-1],), np.uint64)
        ids = _rows("ids", chosen.ids, batch, (p.chosen,), np.int32)[decode] if chosen else None
        p.mark(values, target[decode], ids)

    def ffn(self, call: FFNCall) -> None:
        """Computes ``down(act(gate x) * up x)``: GLU variants, arXiv 2002.05202.

        A gate is active when it is greater than the threshold; drelu also needs up > 0. ``skip`` leaves out
        zeros, so it changes the rows read (``stats``) and no value. Both masks are of decode rows."""
        if isinstance(call.weights, ReferenceExperts):
            w: ReferenceFFN | ReferenceExperts = call.weights
        else:
            w = checks.own_weights(call.weights, ReferenceFFN)
        checks.check_ffn_call(call, w)
        batch, chosen, decode = call.batch, call.chosen, slice(0, call.batch.n_decode)
        values = _rows("x", call.x, batch, (w.up.shape[1],))
        target = _rows("out", call.out, batch, (w.up.shape[1],))
        named = ids = factors = gates = None
        if call.mask is not None:
            width = max(w.words, call.mask.shape[-1])
            named = _rows("mask", call.mask, batch, (width,), np.uint64)[decode, : w.words]
        if chosen is not None:
            ids = _rows("ids", chosen.ids, batch, (w.chosen,), np.int32)
            factors = _rows("factors", chosen.factors, batch, (w.chosen,))
        if call.gates is not None:
            gates = _rows("gates", call.gates, batch, (w.neurons,))
        y, masks, counts = FFNStep(
            values, batch.n_decode, call.skip, named, ids, factors, gates, self.prompt_math
        ).run(w)
        for name, buffer, mask in zip(
            ("active", "strongest"), (call.active, call.strongest), masks, strict=True
        ):
            if buffer is not None:
                _rows(name, buffer, batch, (w.words,), np.uint64)[decode] = mask
        if call.stats is not None and batch.n_decode == batch.n_tokens:
            call.stats.counts[call.stats.row] += counts
        _store(y, target, call.accumulate)

    def router(self, call: RouterCall) -> None:
        """Routes to experts (arXiv 1701.06538) like current models."""
        w, k, batch = checks.own_weights(call.weights, ReferenceMatrix), call.k, call.batch
        bias, groups = call.selection_bias, call.groups
        checks.check_router(call, w.shape[0], bias, call.expert_scale)
        chosen = _rows("ids", call.ids, batch, (k,), np.int32)
        target = _rows("factors", call.factors, batch, (k,))
        logits = w.dot(_rows("x", call.x, batch, (w.shape[1],)))
        scores = sigmoid(logits) if call.score == "sigmoid" else _softmax(logits)
        ranks = logits if bias is None else scores + bias
        if groups is not None:
            ranks = _in_groups(ranks, scores if bias is None else ranks, groups)
        best = np.argsort(-ranks, axis=-1, kind="stable")[:, :k]  # NaN comes last
        chosen[:] = np.sort(best, axis=-1)
        picked = np.take_along_axis(scores, chosen, axis=-1)
        if call.normalise:
            picked = picked / np.maximum(picked.sum(axis=-1, keepdims=True), np.float32(1e-20))
        target[:] = picked * np.float32(call.scale)
        if call.expert_scale is not None:
            target *= call.expert_scale[chosen]

    def add(self, x: Buffer, y: Buffer, batch: Batch, *, keep: float = 1.0, scale: float = 1.0) -> None:
        rows, addends = (_rows(what, each, batch, x.shape[1:]) for what, each in (("x", x), ("y", y)))
        parts = [np.float32(f) * values for f, values in ((keep, rows), (scale, addends)) if f]
        rows[:] = sum(parts, np.float32(0)) if len(parts) < 2 else parts[0] + parts[1]

    def gather(self, x: Buffer, batch: Batch, out: Buffer) -> None:
        _rows("x", x, batch, x.shape[1:])
        target = _rows("out", out, batch, x.shape[1:], rows=Rows.LOGITS)
        target[:] = x[batch.logits_rows[: len(target)]]

    def softcap(self, logits: Buffer, batch: Batch, cap: float) -> None:
        checks.check_softcap(cap)
        rows = _rows("logits", logits, batch, logits.shape[1:], rows=Rows.LOGITS)
        rows[:] = np.float32(cap) * np.tanh(rows / np.float32(cap))

    def top_k(
        self,
        logits: Buffer,
        row: int,
        k: int,
        bias: tuple[Ints, Floats] | None = None,
        allowed: Masks | None = None,
    ) -> tuple[Ints, Floats]:
        """Ranks by a stable sort."""
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


def _check_cache(label: str, cache: Buffer, pages: tuple[int, int], head_dim: int) -> None:
    dtype = cache.dtype if cache.dtype in (np.float32, np.uint8) else np.float16
    if dtype == np.uint8:
        head_dim = BLOCK_TYPES["Q8_0"].row_bytes(head_dim)
    _check(label, cache, (*pages, PAGE, head_dim), dtype)


def _q8_0_rows(values: Floats) -> npt.NDArray[np.uint8]:
    """Packs ``[..., n]`` into blocks of Q8_0, ``[..., n / 32 * 34]``."""
    codes, scales = quantise_input(values)
    blocks = (scales.astype("<f2").view(np.uint8), np.nan_to_num(codes).astype(np.int8).view(np.uint8))
    return np.concatenate(blocks, axis=-1).reshape(*values.shape[:-1], -1)


def _positions(pages: npt.NDArray[Any], length: int) -> Floats:
    """Unpacks from ``[P, K, PAGE, row]`` the first ``length`` positions, ``[K, length, head_dim]``
    float32."""
    _, heads, _, width = pages.shape
    rows = pages.transpose(1, 0, 2, 3).reshape(heads, -1, width)[:, :length]
    if rows.dtype == np.uint8:
        type = BLOCK_TYPES["Q8_0"]
        blocks = np.ascontiguousarray(rows).reshape(heads * length, width)
        return Tensor(type, (heads, length, width // type.nbytes * type.weights), blocks).dequantise()
    return rows.astype(np.float32)


def _store(values: Floats, out: Floats, accumulate: bool) -> None:
    out[:] = out + values if accumulate else values
