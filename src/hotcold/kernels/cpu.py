"""The ``cpu`` backend: C++ kernels for the best instruction set of this processor, on one pool of threads.

cpu_weights.py describes the memory layout of weights."""

import threading
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from hotcold.errors import UserError
from hotcold.formats.stored import AnyTensor
from hotcold.kernels import _native, checks
from hotcold.kernels.backend import (
    DECODE_ROWS,
    AttentionCall,
    Backend,
    Batch,
    Buffer,
    Chosen,
    DiskCounts,
    ExpertGroups,
    ExpertReadError,
    FFNCall,
    FFNStats,
    FFNTensors,
    FFNWeights,
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
)
from hotcold.kernels.cores import find_cores, on_fast_cores
from hotcold.kernels.cpu_states import CPUStateOps
from hotcold.kernels.cpu_weights import PackedFFN, PackedMatrix, PackedPredictor, Packer
from hotcold.kernels.host_memory import HostMemory, own_link
from hotcold.kernels.instruction_sets import check_isa, default_isa
from hotcold.kernels.memory_nodes import memory_nodes
from hotcold.kernels.numpy_tiles import PROMPT_MATHS, check_prompt_math
from hotcold.kernels.processor import STREAMS

MAX_THREADS = 1024
MOST_ROWS = 1 << 20  #: of a step; work items are counted in 32 bits
_INT32_MAX = 2**31 - 1


class _Recorder:
    """A program under construction, with the arrays and weights that it points to."""

    def __init__(self, isa: str, pool: _native.Pool, batch: Batch, math: int) -> None:
        self.batch = batch
        self.native = _native.Program(isa, pool, batch, math)
        self.kept: list[object] = [pool, batch]

    def run(self) -> None:
        """Runs every op, without the GIL. ValueError: a number of the batch is out of range. ExpertReadError:
        an expert cannot be read.

        On the main thread an exception of a signal handler (KeyboardInterrupt) ends it within a tenth of a
        second, after the current work items."""
        try:
            self.native.run()
        except _native.DiskError as error:
            raise ExpertReadError(str(error)) from None


class _Empty:
    def run(self) -> None:
        """No op was recorded."""


class _ThreadRecording(threading.local):
    """The program that a thread records: one per thread, since two sessions may open at once."""

    recording = False
    recorder: _Recorder | None = None


class CPUBackend(CPUStateOps, HostMemory):
    """Kernels in C++ on a pool of ``threads``, for the instruction set ``isa`` or :func:`default_isa`.
    ``prompt_math``: one of :data:`~hotcold.kernels.numpy_tiles.PROMPT_MATHS`."""

    name = "cpu"
    decode_rows = DECODE_ROWS
    chooses_rows = True
    step_rows = MOST_ROWS
    program_rows: tuple[int, ...] = ()  # ops read the row count, so one program serves every size

    def __init__(self, threads: int | None = None, isa: str | None = None, prompt_math: str = "same") -> None:
        cores = find_cores()
        threads = cores.wanted if threads is None else threads
        if not 1 <= threads <= MAX_THREADS:
            raise UserError(f"threads {threads}: choose from 1 to {MAX_THREADS}")
        if isa is not None:
            check_isa(isa, f"ISA {isa!r}")
        self.isa = isa or default_isa()
        self.prompt_math = check_prompt_math(prompt_math)
        if prompt_math != "same" and not _native.has_tiles(self.isa):
            needs, fault = f"`prompt_math={prompt_math}` needs a processor with AMX", _native.tile_fault()
            raise UserError(f"{needs}, and {self.isa} runs here{fault and f' ({fault})'}: choose same")
        try:
            with on_fast_cores(threads, cores):
                self._pool = _native.Pool(threads)
        except ValueError as error:  # the system refused to start some threads
            raise UserError(str(error)) from None
        self._packer = Packer(self._pool)
        self._current = _ThreadRecording()

    @property
    def threads(self) -> int:
        return self._pool.threads

    def record(self, fn: Callable[[], None], rows: int | None = None) -> _Recorder | _Empty:
        current = self._current
        if current.recording:
            raise RuntimeError("record inside record: one program is recorded at a time")
        current.recording = True
        try:
            fn()
            return current.recorder or _Empty()
        finally:
            current.recording, current.recorder = False, None

    def _op(self, batch: Batch, append: Callable[[_native.Program], None], *kept: object) -> None:
        """Appends one op to the program being recorded, or runs it at once."""
        recorder = self._recorder_of(batch)
        append(recorder.native)
        recorder.kept.extend(kept)
        if not self._current.recording:
            recorder.run()

    def _recorder_of(self, batch: Batch) -> _Recorder:
        math = PROMPT_MATHS.index(self.prompt_math)
        recorder = self._current.recorder or _Recorder(self.isa, self._pool, batch, math)
        if recorder.batch is not batch:
            raise ValueError("a program reads one batch: record a second program for another")
        if self._current.recording:
            self._current.recorder = recorder
        return recorder

    # Weights

    def matrix(self, tensor: AnyTensor, bias: Floats | None = None) -> Matrix:
        checks.check_matrix(tensor, bias)
        return self._packer.matrix(tensor, bias)

    def ffn_weights(self, tensors: FFNTensors) -> FFNWeights:
        checks.check_ffn(tensors)
        return self._packer.ffn(tensors)

    def disk_counts(self) -> DiskCounts | None:
        disk = self._packer.disk
        return None if disk is None else disk.counts()

    def streamed_weights(self, tensors: FFNTensors) -> FFNWeights:
        return self.ffn_weights(tensors)

    def predictor_weights(self, tensors: PredictorTensors) -> PredictorWeights:
        checks.check_predictor(tensors)
        return self._packer.predictor(tensors)

    def read_probe(self, nbytes: int = 256 << 20) -> "ReadProbe":
        return ReadProbe(self, nbytes)

    # The two sides of a hybrid model

    def link(self, timeout_seconds: float) -> _native.Link:
        self._pool.share_cores()
        return _native.FlagLink(timeout_seconds)

    def post(
        self, box: Mailbox, x: Buffer, mask: Buffer | None, batch: Batch, chosen: Chosen | None = None
    ) -> None:
        args = own_link(box), box.layer, box.x, box.y, box.mask, box.batch.counts
        mailbox_choices = (box.chosen.ids, box.chosen.factors) if box.chosen else (None, None)
        experts = (chosen.ids, chosen.factors) if chosen else (None, None)
        self._op(batch, lambda p: p.post(*args, x, mask, *mailbox_choices, *experts), x, mask, box, chosen)

    def collect(self, box: Mailbox, batch: Batch, out: Buffer) -> None:
        args = own_link(box), box.layer, box.x, box.y, box.mask, box.batch.counts
        self._op(batch, lambda p: p.collect(*args, out), out, box)

    def serve(self, link: _native.Link, layers: Sequence[tuple[int, Program]]) -> None:
        programs = []
        for layer, program in layers:
            if not isinstance(program, _Recorder):
                raise TypeError(
                    f"a {type(program).__name__} of layer {layer}: this backend's programs are needed"
                )
            programs.append((layer, program.native))
        self._pool.share_cores()
        _native.serve(link, programs)

    # Ops; the extension checks their buffers

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
        matrices = [checks.own_weights(w, PackedMatrix) for w in weights]
        args = [w.rows for w in matrices], [w.bias for w in matrices], list(outs), accumulate, int(rows)
        counts = stats.counts[stats.row] if stats else None
        self._op(batch, lambda p: p.linear(x, *args, where, counts), x, *matrices, *outs, where, counts)

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

    def attention(self, call: AttentionCall) -> None:
        checks.check_attention(call, call.q, call.sinks)
        window = None if call.window is None else min(call.window, _INT32_MAX)
        caches = _bits(call.k_cache), _bits(call.v_cache)
        args = call.q, *caches, call.out, call.scale, window, call.chunked, call.sinks, call.softcap
        self._op(call.batch, lambda p: p.attention(*args), call)

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

    def ffn(self, call: FFNCall) -> None:
        w = checks.own_weights(call.weights, PackedFFN)
        checks.check_ffn_call(call, w)
        counts = call.stats.counts[call.stats.row] if call.stats else None
        ids, factors = (call.chosen.ids, call.chosen.factors) if call.chosen else (None, None)
        args = call.x, w.native, call.out, call.skip, call.mask, call.active, counts, call.accumulate
        options = ids, factors, call.gates, call.strongest
        self._op(call.batch, lambda p: p.ffn(*args, *options), call)

    def router(self, call: RouterCall) -> None:
        w = checks.own_weights(call.weights, PackedMatrix)
        bias, expert_scale = call.selection_bias, call.expert_scale
        checks.check_router(call, w.shape[0], bias, expert_scale)
        args = call.x, w.rows, w.bias, call.ids, call.factors, call.k, call.score == "softmax", bias
        scaling = call.normalise, call.scale, expert_scale, *_group_numbers(call.groups)
        self._op(call.batch, lambda p: p.router(*args, *scaling), call)

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


class ReadProbe:
    """Measures how fast a backend's pool streams through ``nbytes`` (whole MiB, at least one)."""

    def __init__(self, backend: CPUBackend, nbytes: int = 256 << 20) -> None:
        self._backend = backend
        pieces = max(1, nbytes >> 20)
        self._memory = _native.Arena(memory_nodes()).take(pieces << 20)
        # Unwritten pages all map to one page of zeros: write each, as rows of 64 KiB, 1 MiB at a time.
        ones = np.ones((16, 1 << 16), np.uint8)
        for piece in range(pieces):
            _native.WeightRows(self._memory, piece << 20, 1 << 16, 16, 1 << 14, 0).pack(ones, backend._pool)

    def measure(self, seconds: float = 0.2, backend: Backend | None = None) -> float:
        """Returns GB/s (10^9 bytes) of the fastest of :data:`STREAMS`; all take ``seconds`` together."""
        return max(self.rate(n, seconds / len(STREAMS), backend) for n in STREAMS)

    def rate(self, streams: int, seconds: float, backend: Backend | None = None) -> float:
        """Returns GB/s of all threads of this or another backend's pool, with ``streams`` per thread."""
        measured = cast(CPUBackend, backend or self._backend)
        return _native.read_bandwidth(measured.isa, measured._pool, self._memory, seconds, streams)


def _bits(cache: Buffer) -> Buffer:
    """Returns a KV cache as the extension takes it: float16 as uint16, since it knows no float16."""
    return cache.view(np.uint16) if cache.dtype == np.float16 else cache


def _group_numbers(groups: ExpertGroups | None) -> tuple[int, int, int]:
    return (groups.count, groups.used, groups.best) if groups else (1, 1, 2)
