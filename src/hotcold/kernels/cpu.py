"""The ``cpu`` backend: C++ kernels for the best instruction set of this processor, on one pool of threads.

cpu_weights.py says how weights lie in memory."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.formats.stored import AnyTensor
from hotcold.kernels import _native, checks, host_memory
from hotcold.kernels.backend import (
    DECODE_ROWS,
    SPARSE_ACTIVATIONS,
    Backend,
    Batch,
    BatchLimits,
    Buffer,
    Chosen,
    DiskCounts,
    ExpertGroups,
    ExpertReadError,
    FFNStats,
    FFNTensors,
    FFNWeights,
    Floats,
    IndexedBy,
    Ints,
    LookAhead,
    Mailbox,
    Masks,
    Matrix,
    Norm,
    PredictorTensors,
    PredictorWeights,
    Program,
    RopeTable,
    Rows,
)
from hotcold.kernels.cores import find_cores, on_fast_cores
from hotcold.kernels.cpu_disk import reading_ahead
from hotcold.kernels.cpu_states import CPUStateOps
from hotcold.kernels.cpu_weights import PackedFFN, PackedMatrix, PackedPredictor, Packer
from hotcold.kernels.gpu import StepShape
from hotcold.kernels.memory_nodes import memory_nodes

ISAS = ("avx512", "avxvnni", "avx2", "i8mm", "dotprod", "neon", "scalar")
ISA_VARIABLE = "HOTCOLD_ISA"  #: of the environment; names the instruction set to use instead of the best one
MAX_THREADS = 1024
_BLOCK, _GROUP = 32, 512  # values of an input that share a scale; inputs end at whole groups
MOST_ROWS = 1 << 20  #: of a step; pieces of work are counted in 32 bits
_INT32_MAX = 2**31 - 1


def supported_isas() -> tuple[str, ...]:
    """The instruction sets that this build has kernels for and this processor can run, best first."""
    return tuple(isa for isa in ISAS if _native.has_isa(isa))


def default_isa() -> str:
    """Returns the instruction set that :data:`ISA_VARIABLE` names, else the best. UserError: this machine
    lacks it."""
    forced = os.environ.get(ISA_VARIABLE)
    if not forced:
        return _native.best_isa()
    if forced not in supported_isas():
        raise UserError(f"{ISA_VARIABLE} is {forced!r}: this machine has {', '.join(supported_isas())}")
    return forced


def fetching() -> str:
    """How far ahead weights are fetched, and into which cache: ``3K:1`` is 3 KiB into L1."""
    ahead, level = _native.fetching()
    return f"{ahead / 1024:g}K:{level}"


def scratch_bytes(shape: StepShape) -> int:
    """Bytes of scratch that all ops of a step share on a CPU: as many as the largest needs, as the ops
    say."""
    rows = shape.limits.tokens * shape.heads
    of_heads = [rows * _heads_input_bytes(columns) for columns in shape.head_columns]
    most = _native.step_scratch_bytes(
        tokens=shape.limits.tokens,
        logits=shape.limits.logits,
        pages_per_sequence=shape.limits.pages_per_sequence,
        dim=shape.dim,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        neurons=shape.neurons // shape.experts,
        experts=shape.experts,
        chosen=shape.chosen,
        shared=shape.shared,
        by_output=shape.down_layout == "by_output" and shape.activation not in SPARSE_ACTIVATIONS,
    )
    return max(most, *of_heads) if of_heads else most


def _heads_input_bytes(columns: int) -> int:
    """Bytes that op linear_heads takes for one head's input of one row: quantised, or float32 where blocks
    do not fit (``Input`` in csrc/simd/kernels.h)."""
    if columns % _BLOCK:
        return 4 * (columns + 16)
    return -(-columns // _GROUP) * (_GROUP + _GROUP // _BLOCK * 12)


class _Recorder:
    """A program under construction, with the arrays and weights that its pointers lead to."""

    def __init__(self, isa: str, pool: _native.Pool, batch: Batch) -> None:
        self.batch = batch
        self.native = _native.Program(isa, pool, batch)
        self.kept: list[object] = [pool, batch]

    def run(self) -> None:
        """Runs every op, without the GIL; ValueError if a number of the batch is out of its range. On
        the main thread what a signal handler raises (KeyboardInterrupt) ends it within a tenth of a second,
        once the pieces under way are done. ExpertReadError: an expert cannot be read."""
        try:
            self.native.run()
        except _native.DiskError as error:
            raise ExpertReadError(str(error)) from None


class _Empty:
    def run(self) -> None:
        """No op was recorded."""


class _Here(threading.local):
    """The program that a thread records. Each has its own: two sessions may be opened at the same time."""

    recording = False
    recorder: _Recorder | None = None


class CPUBackend(CPUStateOps):
    """Kernels in C++ on a pool of ``threads``, for the instruction set ``isa`` or :func:`default_isa`."""

    name = "cpu"
    decode_rows = DECODE_ROWS
    chooses_rows = True
    step_rows = MOST_ROWS
    program_rows: tuple[int, ...] = ()  # ops read the row count, so one program serves every size

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        cores = find_cores()
        threads = cores.wanted if threads is None else threads
        if not 1 <= threads <= MAX_THREADS:
            raise UserError(f"threads {threads}: choose from 1 to {MAX_THREADS}")
        if isa is not None and isa not in supported_isas():
            raise UserError(f"ISA {isa!r}: this machine has {', '.join(supported_isas())}")
        self.isa = isa or default_isa()
        try:
            with on_fast_cores(threads, cores):
                self._pool = _native.Pool(threads)
        except ValueError as error:  # some could not be started
            raise UserError(str(error)) from None
        self._packer = Packer(self._pool)
        self._here = _Here()

    @property
    def threads(self) -> int:
        return self._pool.threads

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Buffer:
        return np.zeros(shape, dtype)

    def write(self, buffer: Buffer, values: npt.NDArray[Any], row: int = 0) -> None:
        host_memory.write(buffer, values, row)

    def read(self, buffer: Buffer, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        return host_memory.read(buffer, start, stop)

    def copy(self, source: Backend, values: Buffer, out: Buffer, rows: int) -> None:
        self.write(out, source.read(values, 0, rows))

    def record(self, fn: Callable[[], None], rows: int | None = None) -> _Recorder | _Empty:
        here = self._here
        if here.recording:
            raise RuntimeError("record inside record: one program is recorded at a time")
        here.recording = True
        try:
            fn()
            return here.recorder or _Empty()
        finally:
            here.recording, here.recorder = False, None

    def _op(self, batch: Batch, append: Callable[[_native.Program], None], *kept: object) -> None:
        """Appends one op to the program being recorded, or runs it at once."""
        recorder = self._recorder_of(batch)
        append(recorder.native)
        recorder.kept.extend(kept)
        if not self._here.recording:
            recorder.run()

    def _recorder_of(self, batch: Batch) -> _Recorder:
        recorder = self._here.recorder or _Recorder(self.isa, self._pool, batch)
        if recorder.batch is not batch:
            raise ValueError("a program reads one batch: record a second program for another")
        if self._here.recording:
            self._here.recorder = recorder
        return recorder

    # Weights

    def matrix(self, tensor: AnyTensor, bias: Floats | None = None) -> Matrix:
        checks.check_matrix(tensor, bias)
        return self._packer.matrix(tensor, bias)

    def ffn_weights(self, tensors: FFNTensors) -> FFNWeights:
        checks.check_ffn(tensors)
        return self._packer.ffn(tensors)

    def disk_counts(self) -> DiskCounts | None:
        """None: all experts lie in memory."""
        disk = self._packer.disk
        return None if disk is None else disk.counts()

    def predictor_weights(self, tensors: PredictorTensors) -> PredictorWeights:
        checks.check_predictor(tensors)
        return self._packer.predictor(tensors)

    # The two sides of a hybrid model

    def link(self, timeout_seconds: float) -> _native.Link:
        self._pool.share_cores()
        return _native.FlagLink(timeout_seconds)

    def mailboxes(
        self, link: _native.Link, limits: BatchLimits, dim: int, words: Mapping[int, int], experts: int = 0
    ) -> dict[int, Mailbox]:
        return host_memory.mailboxes(link, limits, dim, words, experts)

    def post(
        self, box: Mailbox, x: Buffer, mask: Buffer | None, batch: Batch, chosen: Chosen | None = None
    ) -> None:
        args = host_memory.own_link(box), box.layer, box.x, box.y, box.mask, box.batch.counts
        room = (box.chosen.ids, box.chosen.factors) if box.chosen else (None, None)
        experts = (chosen.ids, chosen.factors) if chosen else (None, None)
        self._op(batch, lambda p: p.post(*args, x, mask, *room, *experts), x, mask, box, chosen)

    def collect(self, box: Mailbox, batch: Batch, out: Buffer) -> None:
        args = host_memory.own_link(box), box.layer, box.x, box.y, box.mask, box.batch.counts
        self._op(batch, lambda p: p.collect(*args, out), out, box)

    def serve(self, link: _native.Link, layers: Sequence[tuple[int, Program]]) -> None:
        own = []
        for layer, program in layers:
            if not isinstance(program, _Recorder):
                raise TypeError(
                    f"a {type(program).__name__} of layer {layer}: this backend's programs are needed"
                )
            own.append((layer, program.native))
        self._pool.share_cores()
        _native.serve(link, own)

    # Ops; the extension refuses buffers that are not exactly right

    def embed(
        self,
        table: Matrix,
        batch: Batch,
        out: Buffer,
        *,
        by: IndexedBy = IndexedBy.TOKENS,
        accumulate: bool = False,
    ) -> None:
        w = checks.own_weights(table, PackedMatrix)
        self._op(batch, lambda p: p.embed(w.rows, out, int(by), accumulate), w, out)

    def norm(self, x: Buffer, norm: Norm, batch: Batch, out: Buffer, rows: Rows = Rows.TOKENS) -> None:
        args = norm.weight, norm.bias, norm.eps, norm.centre, int(rows)
        self._op(batch, lambda p: p.norm(x, out, *args), x, norm, out)

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
        own = [checks.own_weights(w, PackedMatrix) for w in weights]
        args = [w.rows for w in own], [w.bias for w in own], list(outs), accumulate, int(rows)
        counts = stats.counts[stats.row] if stats else None
        self._op(batch, lambda p: p.linear(x, *args, where, counts), x, *own, *outs, where, counts)

    def linear_heads(self, x: Buffer, weights: Matrix, batch: Batch, out: Buffer) -> None:
        w = checks.own_weights(weights, PackedMatrix)
        checks.check_no_bias("linear_heads", w.bias)
        self._op(batch, lambda p: p.linear_heads(x, w.rows, out), x, w, out)

    def join_heads(self, x: Buffer, y: Buffer, batch: Batch, out: Buffer) -> None:
        self._op(batch, lambda p: p.join_heads(x, y, out), x, y, out)

    def rope(self, x: Buffer, table: RopeTable, batch: Batch) -> None:
        self._op(batch, lambda p: p.rope(x, table.cos, table.sin, table.interleaved), x, table)

    def store_kv(self, k: Buffer, v: Buffer, batch: Batch, k_cache: Buffer, v_cache: Buffer) -> None:
        caches = _bits(k_cache), _bits(v_cache)
        self._op(batch, lambda p: p.store_kv(k, v, *caches), k, v, k_cache, v_cache)

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
        chunked: bool = False,
        sinks: Buffer | None = None,
        softcap: float | None = None,
    ) -> None:
        checks.check_attention(q, window, sinks, softcap, chunked=chunked)
        keys, values = _bits(k_cache), _bits(v_cache)
        seen = None if window is None else min(window, _INT32_MAX)
        self._op(
            batch,
            lambda p: p.attention(q, keys, values, out, scale, seen, chunked, sinks, softcap),
            q,
            k_cache,
            v_cache,
            out,
            sinks,
        )

    def predict(
        self,
        x: Buffer,
        weights: PredictorWeights,
        batch: Batch,
        mask: Buffer,
        chosen: Chosen | None = None,
    ) -> None:
        w = checks.own_weights(weights, PackedPredictor)
        checks.check_chosen(chosen, len(w.ends))
        factors = w.first.rows, w.second.rows, w.relu, w.threshold
        experts = w.ends, w.chosen, chosen.ids if chosen else None
        self._op(batch, lambda p: p.predict(x, *factors, mask, *experts), x, w, mask, chosen)

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
        chosen: Chosen | None = None,
        gates: Buffer | None = None,
        strongest: Buffer | None = None,
        ahead: LookAhead | None = None,
    ) -> None:
        w = checks.own_weights(weights, PackedFFN)
        checks.check_skip(skip, w.activation)
        checks.check_chosen(chosen, w.experts)
        counts = stats.counts[stats.row] if stats else None
        checks.check_gates(gates, gated=w.gated, chosen=chosen)
        checks.check_strongest(strongest, dense=w.dense, chosen=chosen)
        args = skip, mask, fired, counts, accumulate
        ids, factors = (chosen.ids, chosen.factors) if chosen else (None, None)
        more = ids, factors, gates, strongest, None if ahead is None else _look_ahead(ahead)
        kept = x, w, out, mask, fired, counts, chosen, gates, strongest, ahead
        self._op(batch, lambda p: p.ffn(x, w.native, out, *args, *more), *kept)

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
        expert_scale: Buffer | None = None,
        groups: ExpertGroups | None = None,
    ) -> None:
        w = checks.own_weights(weights, PackedMatrix)
        checks.check_router(w.shape[0], k, score, selection_bias, expert_scale, groups)
        of = (groups.count, groups.used, groups.best) if groups else (1, 1, 2)
        args = k, score == "softmax", selection_bias, normalise, scale, expert_scale, *of
        self._op(
            batch,
            lambda p: p.router(x, w.rows, w.bias, ids, factors, *args),
            x,
            w,
            ids,
            factors,
            selection_bias,
            expert_scale,
        )

    def add(self, x: Buffer, y: Buffer, batch: Batch, *, keep: float = 1.0, scale: float = 1.0) -> None:
        self._op(batch, lambda p: p.add(x, y, keep, scale), x, y)

    def gather(self, x: Buffer, batch: Batch, out: Buffer) -> None:
        self._op(batch, lambda p: p.gather(x, out), x, out)

    def softcap(self, logits: Buffer, batch: Batch, cap: float) -> None:
        checks.check_softcap(cap)
        self._op(batch, lambda p: p.softcap(logits, cap), logits)

    def top_k(
        self,
        logits: Buffer,
        row: int,
        k: int,
        bias: tuple[Ints, Floats] | None = None,
        allowed: Masks | None = None,
    ) -> tuple[Ints, Floats]:
        checks.check_top_k(logits, row, k, bias)
        k = min(k, logits.shape[1])
        ids, values = np.empty(k, np.int32), np.empty(k, np.float32)
        bias_ids, biases = bias or (None, None)
        n = _native.top_k(logits[row], bias_ids, biases, allowed, ids, values)
        return ids[:n], values[:n]


STREAMS = range(1, 9)  #: numbers of streams a thread that the read probe tries


class ReadProbe:
    """Measures how fast a backend's pool can stream through ``nbytes`` (whole MiB, at least one), far more
    than any cache holds."""

    def __init__(self, backend: CPUBackend, nbytes: int = 256 << 20) -> None:
        self._backend = backend
        pieces = max(1, nbytes >> 20)
        self._memory = _native.Arena(memory_nodes()).take(pieces << 20)
        # Unwritten pages all map to one page of zeros: write each, as rows of 64 KiB, 1 MiB at a time.
        ones = np.ones((16, 1 << 16), np.uint8)
        for piece in range(pieces):
            _native.WeightRows(self._memory, piece << 20, 1 << 16, 16, 1 << 14, 0).pack(ones, backend._pool)

    def measure(self, seconds: float = 0.2, backend: CPUBackend | None = None) -> float:
        """GB/s (10^9 bytes) of the fastest of :data:`STREAMS`, each for its part of ``seconds``."""
        return max(self.rate(n, seconds / len(STREAMS), backend) for n in STREAMS)

    def rate(self, streams: int, seconds: float, backend: CPUBackend | None = None) -> float:
        """GB/s of all threads of the pool, or of another backend's, with this number of streams a thread."""
        backend = backend or self._backend
        return _native.read_bandwidth(backend.isa, backend._pool, self._memory, seconds, streams)


def _bits(cache: Buffer) -> Buffer:
    """A KV cache as the extension takes it, which knows no float16."""
    return cache.view(np.uint16) if cache.dtype == np.float16 else cache


def _look_ahead(of: LookAhead) -> _native.LookAhead | None:
    """None where all experts of that layer lie in memory, or are not read as wholes."""
    ffn, w = checks.own_weights(of.ffn, PackedFFN), checks.own_weights(of.weights, PackedMatrix)
    if ffn.shelf is None or reading_ahead() == "off":
        return None
    groups = (of.groups.count, of.groups.used, of.groups.best) if of.groups else (1, 1, 2)
    router = w.rows, w.bias, of.k, of.score == "softmax", of.selection_bias, *groups
    norm = of.norm or Norm(None, None, 0)
    args = of.norm is not None, norm.weight, norm.bias, norm.eps, norm.centre
    return _native.LookAhead(of.x, *router, *args, ffn.shelf)
