"""The ``cpu`` backend: C++ kernels for the best instruction set of this processor, on one pool of threads.

Weights are packed once (csrc/kernels.h says how): tensors that lie in a file are read piece by piece on the
pool's threads, which pack what they have just read. All matrices share one arena of huge pages. A layer's
FFN that lies by neuron takes two pieces of it: the gate rows, one contiguous stream, and for each neuron its
up row then its down row. Where the activation gives zeros, down by output is transposed if its type is a
float, and packed into panels if it is quantised."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.formats.stored import AnyTensor, StoredTensor
from hotcold.kernels import _cpu, checks, host_memory
from hotcold.kernels.backend import (
    ACTIVATIONS,
    DECODE_ROWS,
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
from hotcold.kernels.cores import available_cores

ISAS = ("avx512", "avx2", "neon", "scalar")
ISA_VARIABLE = "HOTCOLD_ISA"  #: of the environment; names the instruction set to use instead of the best one
MAX_THREADS = 1024
MOST_ROWS = 1 << 20  #: of a step; pieces of work are counted in 32 bits
_INT32_MAX = 2**31 - 1


def supported_isas() -> tuple[str, ...]:
    """The instruction sets that this build has kernels for and this processor can run, best first."""
    return tuple(isa for isa in ISAS if _cpu.has_isa(isa))


def default_isa() -> str:
    """What :data:`ISA_VARIABLE` names, else the best instruction set. UserError: this machine lacks it."""
    forced = os.environ.get(ISA_VARIABLE)
    if not forced:
        return _cpu.best_isa()
    if forced not in supported_isas():
        raise UserError(f"{ISA_VARIABLE} is {forced!r}: this machine has {', '.join(supported_isas())}")
    return forced


class _Recorder:
    """A program under construction, with the arrays and weights that its pointers lead to."""

    def __init__(self, isa: str, pool: _cpu.Pool, batch: Batch) -> None:
        self.batch = batch
        arrays = [batch.counts, batch.tokens, batch.positions, batch.sequence, batch.slots]
        self.native = _cpu.Program(isa, pool, [*arrays, batch.pages, batch.lengths, batch.logits_rows])
        self.kept: list[object] = [pool, batch]

    def run(self) -> None:
        """Runs every op, without the GIL; ValueError if a number of the batch is out of its range. On
        the main thread what a signal handler raises (KeyboardInterrupt) ends it within a tenth of a second,
        once the pieces under way are done."""
        self.native.run()


class _Empty:
    def run(self) -> None:
        """No op was recorded."""


@dataclass(frozen=True)
class _Matrix:
    rows: _cpu.WeightRows
    shape: tuple[int, int]
    nbytes: int
    bias: Floats | None


@dataclass(frozen=True)
class _FFN:
    native: _cpu.FfnWeights
    neurons: int
    dim: int
    nbytes: int
    row_bytes: tuple[int, int, int, int]
    runs: int
    activation: str


@dataclass(frozen=True)
class _Predictor:
    first: _Matrix
    second: _Matrix
    threshold: Floats
    relu: bool

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + self.second.nbytes + self.threshold.nbytes


class CPUBackend:
    """Kernels in C++ on a pool of ``threads``, for the instruction set ``isa`` or :func:`default_isa`."""

    name = "cpu"
    decode_rows = DECODE_ROWS
    step_rows = MOST_ROWS
    program_rows: tuple[int, ...] = ()  # ops read the row count, so one program serves every size

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        threads = available_cores() if threads is None else threads
        if not 1 <= threads <= MAX_THREADS:
            raise UserError(f"threads {threads}: choose from 1 to {MAX_THREADS}")
        if isa is not None and isa not in supported_isas():
            raise UserError(f"ISA {isa!r}: this machine has {', '.join(supported_isas())}")
        self.isa = isa or default_isa()
        try:
            self._pool = _cpu.Pool(threads)
        except ValueError as error:  # some could not be started
            raise UserError(str(error)) from None
        self._arena = _cpu.Arena()
        self._recording = False
        self._recorder: _Recorder | None = None

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
        if self._recording:
            raise RuntimeError("record inside record: one program is recorded at a time")
        self._recording, self._recorder = True, None
        try:
            fn()
            return self._recorder or _Empty()
        finally:
            self._recording, self._recorder = False, None

    def _op(self, batch: Batch, append: Callable[[_cpu.Program], None], *kept: object) -> None:
        """Appends one op to the program being recorded, or runs it at once."""
        recorder = self._recorder_of(batch)
        append(recorder.native)
        recorder.kept.extend(kept)
        if not self._recording:
            recorder.run()

    def _recorder_of(self, batch: Batch) -> _Recorder:
        recorder = self._recorder or _Recorder(self.isa, self._pool, batch)
        if recorder.batch is not batch:
            raise ValueError("a program reads one batch: record a second program for another")
        if self._recording:
            self._recorder = recorder
        return recorder

    # Weights

    def matrix(self, tensor: AnyTensor, bias: Floats | None = None) -> Matrix:
        checks.check_matrix(tensor, bias)
        return self._matrix(tensor, bias)

    def _matrix(self, tensor: AnyTensor, bias: Floats | None = None) -> _Matrix:
        rows, cols = tensor.shape
        size = _cpu.row_size(tensor.type.id, cols)
        packed = self._packed(self._arena.take(rows * size), 0, size, tensor)
        nbytes = rows * size + (0 if bias is None else bias.nbytes)
        return _Matrix(packed, (rows, cols), nbytes, bias)

    def _packed(self, memory: _cpu.Memory, offset: int, stride: int, tensor: AnyTensor) -> _cpu.WeightRows:
        rows = _cpu.WeightRows(memory, offset, stride, tensor.shape[0], tensor.shape[1], tensor.type.id)
        self._fill(rows, tensor)
        return rows

    def _transposed(self, memory: _cpu.Memory, offset: int, stride: int, down: AnyTensor) -> _cpu.WeightRows:
        """Down of a float type by output, as rows by neuron; no value changes."""
        dim, neurons = down.shape
        rows = _cpu.WeightRows(memory, offset, stride, neurons, dim, down.type.id)
        self._fill(rows, down, by_output=True)
        return rows

    def _panels(self, down: AnyTensor) -> _cpu.WeightRows:
        sizes = *down.shape, down.type.id
        panels = _cpu.WeightRows.panels(self._arena.take(_cpu.panels_size(*sizes)), *sizes)
        self._fill(panels, down, by_output=True)
        return panels

    def _fill(self, rows: _cpu.WeightRows, tensor: AnyTensor, *, by_output: bool = False) -> None:
        # Of chosen ones, the extension takes those that become rows.
        direct = isinstance(tensor, StoredTensor) and (tensor.chosen is None or tensor.by_column == by_output)
        if not (direct and hasattr(os, "pread")):
            rows.pack(tensor.load().data, self._pool, by_output)
            return
        assert isinstance(tensor, StoredTensor)
        with tensor.descriptor() as file:
            part = tensor.offset, tensor.rows, tensor.row_bytes
            rows.read(file, *part, self._pool, by_output, tensor.chosen)

    def ffn_weights(self, tensors: FFNTensors) -> FFNWeights:
        checks.check_ffn(tensors)
        neurons, dim = tensors.up.shape
        down, by_output = tensors.down, tensors.down_layout == "by_output"
        sparse = tensors.activation in SPARSE_ACTIVATIONS
        floats = down.type.weights == 1
        fill_down = self._transposed if by_output and sparse and floats else self._packed
        dense = by_output and not sparse
        sizes = [t.nbytes // neurons if t else 0 for t in (tensors.gate, tensors.up, down)]
        row_bytes, runs = (sizes[0], sizes[1], sizes[2], 0), 0
        gate = self._matrix(tensors.gate) if tensors.gate else None
        if by_output and sparse and not floats:
            up_rows = self._matrix(tensors.up).rows
            down_rows = self._panels(down)
            row_bytes = (*row_bytes[:2], *panel_bytes(down.type, dim))
            runs = neurons // scale_run(down.type)
        elif dense or gate is None:  # without a gate up is the stream
            up_rows = self._matrix(tensors.up).rows
            stride = sizes[2] if not dense else down.nbytes // dim
            down_rows = fill_down(self._arena.take(down.nbytes), 0, stride, down)
        else:  # one piece of memory: a neuron's up row, then its down row
            stride = sizes[1] + sizes[2]
            memory = self._arena.take(neurons * stride)
            up_rows = self._packed(memory, 0, stride, tensors.up)
            down_rows = fill_down(memory, sizes[1], stride, down)
        biases = (tensors.gate_bias, tensors.up_bias, tensors.down_bias)
        kind = dense, ACTIVATIONS.index(tensors.activation)
        numbers = tensors.threshold, tensors.limit, tensors.alpha
        native = _cpu.FfnWeights(gate.rows if gate else None, up_rows, down_rows, *biases, *kind, *numbers)
        nbytes = sum(t.nbytes for t in (tensors.gate, tensors.up, down, *biases) if t is not None)
        return _FFN(native, neurons, dim, nbytes, row_bytes, runs, tensors.activation)

    def predictor_weights(self, tensors: PredictorTensors) -> PredictorWeights:
        checks.check_predictor(tensors)
        first, second = self._matrix(tensors.first), self._matrix(tensors.second)
        return _Predictor(first, second, tensors.threshold, tensors.relu)

    # The two sides of a hybrid model

    def link(self, timeout_seconds: float) -> _cpu.Link:
        return _cpu.FlagLink(timeout_seconds)

    def mailboxes(
        self, link: _cpu.Link, limits: BatchLimits, dim: int, words: Mapping[int, int]
    ) -> dict[int, Mailbox]:
        return host_memory.mailboxes(link, limits, dim, words)

    def post(self, box: Mailbox, x: Buffer, mask: Buffer | None, batch: Batch) -> None:
        args = host_memory.own_link(box), box.layer, box.x, box.y, box.mask, box.batch.counts
        self._op(batch, lambda p: p.post(*args, x, mask), x, mask, box)

    def collect(self, box: Mailbox, batch: Batch, out: Buffer) -> None:
        args = host_memory.own_link(box), box.layer, box.x, box.y, box.mask, box.batch.counts
        self._op(batch, lambda p: p.collect(*args, out), out, box)

    def serve(self, link: _cpu.Link, layers: Sequence[tuple[int, Program]]) -> None:
        own = []
        for layer, program in layers:
            if not isinstance(program, _Recorder):
                raise TypeError(
                    f"a {type(program).__name__} of layer {layer}: this backend's programs are needed"
                )
            own.append((layer, program.native))
        _cpu.serve(link, own)

    # Ops; the extension refuses buffers that are not exactly right

    def embed(self, table: Matrix, batch: Batch, out: Buffer) -> None:
        w = checks.own_weights(table, _Matrix)
        self._op(batch, lambda p: p.embed(w.rows, out), w, out)

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
    ) -> None:
        own = [checks.own_weights(w, _Matrix) for w in weights]
        args = [w.rows for w in own], [w.bias for w in own], list(outs), accumulate, int(rows)
        self._op(batch, lambda p: p.linear(x, *args), x, *own, *outs)

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
        sinks: Buffer | None = None,
        softcap: float | None = None,
    ) -> None:
        checks.check_attention(q, window, sinks, softcap)
        buffers = q, _bits(k_cache), _bits(v_cache), out
        args = scale, None if window is None else min(window, _INT32_MAX), sinks, softcap
        self._op(batch, lambda p: p.attention(*buffers, *args), q, k_cache, v_cache, out, sinks)

    def predict(self, x: Buffer, weights: PredictorWeights, batch: Batch, mask: Buffer) -> None:
        w = checks.own_weights(weights, _Predictor)
        args = w.first.rows, w.second.rows, w.relu, w.threshold, mask
        self._op(batch, lambda p: p.predict(x, *args), x, w, mask)

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
        w = checks.own_weights(weights, _FFN)
        checks.check_skip(skip, w.activation)
        counts = stats.counts[stats.row] if stats else None
        args = skip, mask, fired, counts, accumulate
        self._op(batch, lambda p: p.ffn(x, w.native, out, *args), x, w, out, mask, fired, counts)

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
        w = checks.own_weights(weights, _Matrix)
        checks.check_router(w.shape[0], k, score, selection_bias)
        args = k, score == "softmax", selection_bias, normalise, scale
        self._op(
            batch,
            lambda p: p.router(x, w.rows, w.bias, ids, factors, *args),
            x,
            w,
            ids,
            factors,
            selection_bias,
        )

    def add(self, x: Buffer, y: Buffer, batch: Batch) -> None:
        self._op(batch, lambda p: p.add(x, y), x, y)

    def gather(self, x: Buffer, batch: Batch, out: Buffer) -> None:
        self._op(batch, lambda p: p.gather(x, out), x, out)

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
        n = _cpu.top_k(logits[row], bias_ids, biases, allowed, ids, values)
        return ids[:n], values[:n]


class ReadProbe:
    """Measures how fast a backend's pool can stream through ``nbytes``, far more than any cache holds."""

    def __init__(self, backend: CPUBackend, nbytes: int = 256 << 20) -> None:
        self._backend = backend
        self._memory = _cpu.Arena().take(nbytes)
        # Unwritten pages all map to one page of zeros: write each.
        rows = _cpu.WeightRows(self._memory, 0, nbytes // 256, 256, nbytes // 256 // 4, 0)
        rows.pack(np.ones((256, nbytes // 256), np.uint8), backend._pool)

    def measure(self, seconds: float = 0.2, backend: CPUBackend | None = None) -> float:
        """GB/s (10^9 bytes), all threads of the pool together, or of another backend's pool."""
        backend = backend or self._backend
        return _cpu.read_bandwidth(backend.isa, backend._pool, self._memory, seconds)


def _bits(cache: Buffer) -> Buffer:
    """A KV cache as the extension takes it, which knows no float16."""
    return cache.view(np.uint16) if cache.dtype == np.float16 else cache
