"""Measured memory bandwidth of decoding, on the CPU and a GPU: streams, and neuron rows that a mask
selects."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

import numpy as np

from hotcold.errors import UserError
from hotcold.formats.blocks import BlockType, Tensor, block_type
from hotcold.kernels import open_backend
from hotcold.kernels.backend import (
    FFN_COUNTS,
    Backend,
    Batch,
    BatchLimits,
    Buffer,
    FFNCall,
    FFNStats,
    FFNTensors,
    FFNWeights,
    Masks,
)
from hotcold.kernels.gpu import GPU, LinkSpeed
from hotcold.kernels.gpus import open_gpu
from hotcold.kernels.numpy_ffn import pack_mask
from hotcold.kernels.processor import STREAMS

#: Block type and dim of gathered neurons; the first entry is also streamed.
SHAPES = (("Q4_0", 4096), ("Q4_0", 1024), ("Q4_0", 8192), ("F16", 8192))
RUNS = 5
#: Errors of a measurement that come from the machine: memory, threads, files, drivers.
FAILURES = (MemoryError, OSError, RuntimeError, ValueError)
SMALLEST_BUFFER, LARGEST_BUFFER = 16 << 20, 2 << 30

_USUAL_BUFFER = 128 << 20
_CACHE_MULTIPLE = 4  # data are read again only after this multiple of the caches' size
_MEMORY_SHARE = 4  # a buffer takes at most this part of the available memory: filling it takes twice its size
_MOST_NEURONS = 1 << 16  # limit per layer: the widest models have about as many, and a backend has a limit
_WORD = 64  # neurons in one word of a mask
_OF_A_LAYER = 3  # a layer has about this multiple of an FFN's kernels
_LINK_BYTES = 64 << 20  # bytes per copy
_TURNS = 10  # a pass reads one neuron in ten


def reason_of(error: Exception) -> str:
    """Returns the message of one of :data:`FAILURES`, or the name of its class if it has none."""
    return str(error) or type(error).__name__


def buffer_bytes(caches: int, available: int | None) -> int:
    """Returns the size of a buffer so large that ``caches`` bytes of caches hold little of it, in whole MiB.
    ``available``: memory that may still be taken, None if unknown. UserError: too little memory."""
    if available is not None and available < _MEMORY_SHARE * SMALLEST_BUFFER:
        got = f"{available >> 20} MiB of memory are available"
        needed = f"{_MEMORY_SHARE * SMALLEST_BUFFER >> 20} MiB are needed to measure how fast it is"
        raise UserError(f"{got}: {needed}; close other programs and try again")
    wanted = min(max(_USUAL_BUFFER, _CACHE_MULTIPLE * caches), LARGEST_BUFFER)
    return wanted if available is None else min(wanted, available // _MEMORY_SHARE >> 20 << 20)


@dataclass(frozen=True)
class ProbePlan:
    """The neurons that a probe reads: one or more layers, none wider than in real models."""

    type: BlockType
    dim: int
    widths: tuple[int, ...]  #: neurons of each layer, in whole words of a mask

    @classmethod
    def from_sizes(cls, kind: str, dim: int, nbytes: int) -> Self:
        """Makes a plan for the neurons in ``nbytes``, at least 64; layers differ by at most a word."""
        type = block_type(kind)
        words = max(1, nbytes // (3 * type.row_bytes(dim) * _WORD))
        layers = -(-words * _WORD // _MOST_NEURONS)
        widths = tuple(_WORD * (words // layers + (i < words % layers)) for i in range(layers))
        return cls(type, dim, widths)

    @property
    def row_bytes(self) -> int:
        return self.type.row_bytes(self.dim)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows of all neurons; a neuron has three."""
        return 3 * self.row_bytes * sum(self.widths)

    @property
    def run_bytes(self) -> int:
        """Mean bytes of a contiguous run. As in decoding, a neuron has two: its gate row, and its up and down
        rows."""
        return 3 * self.row_bytes // 2


class NeuronProbe:
    """Reads whole FFNs, or a tenth of one layer at a time in rotation: a neuron is read again only after all
    others. ``run_bytes``: mean length of a contiguous run."""

    def __init__(self, backend: Backend, plan: ProbePlan) -> None:
        self.plan = plan
        random = np.random.default_rng(0)
        self._layers = [_layer(backend, plan, width) for width in plan.widths]
        self._masks = [_tenths(width, random) for width in plan.widths]
        self._x, self._out = (backend.zeros((1, plan.dim)) for _ in range(2))
        self._calls = 0

    def measure(self, seconds: float, backend: Backend, *, dense: bool) -> float:
        """Returns GB/s (10^9 bytes) on the threads of ``backend``, from calls during ``seconds``."""
        stats = FFNStats(backend.zeros((1, len(FFN_COUNTS)), np.int64))
        batch = _one_row()
        start = time.perf_counter()
        elapsed = 0.0
        while elapsed <= seconds:
            turn, layer = divmod(self._calls, len(self._layers))
            self._calls += 1
            mask = None if dense else self._masks[layer][turn % _TURNS][None]
            self._read(backend, layer, batch, stats, mask)
            elapsed = time.perf_counter() - start
        return self._bytes_read(backend, stats) / elapsed / 1e9

    def measure_passes(self, seconds: float, backend: Backend, *, dense: bool) -> list[float]:
        """Returns the GB/s of :data:`RUNS` runs, each pass over all layers recorded as one program: for
        devices with slow calls."""
        stats = FFNStats(backend.zeros((1, len(FFN_COUNTS)), np.int64))
        batch = _one_row()
        layers = range(len(self._layers))
        masks: list[tuple[int, Buffer | None]] = [(layer, None) for layer in layers]
        if not dense:
            turns = [(layer, turn) for turn in range(_TURNS) for layer in layers]
            masks = [(layer, _uploaded(backend, self._masks[layer][turn][None])) for layer, turn in turns]

        def read_all() -> None:
            for layer, mask in masks:
                self._read(backend, layer, batch, stats, mask)

        program = backend.record(read_all)
        program.run()  # the first time takes longer
        read = self._bytes_read(backend, stats)
        return [read / mean_time(program.run, seconds / RUNS) / 1e9 for _ in range(RUNS)]

    def _read(self, backend: Backend, layer: int, batch: Batch, stats: FFNStats, mask: Buffer | None) -> None:
        weights = self._layers[layer]
        skip = mask is not None
        backend.ffn(FFNCall(self._x, weights, batch, self._out, skip=skip, mask=mask, stats=stats))

    def _bytes_read(self, backend: Backend, stats: FFNStats) -> float:
        return float(backend.read(stats.counts)[0, :3] @ self._layers[0].row_bytes[:3])


def mean_time(run: Callable[[], object], seconds: float) -> float:
    """Returns the mean time of a call, over at least ``seconds`` and one call."""
    start, calls, elapsed = time.perf_counter(), 0, 0.0
    while not calls or elapsed <= seconds:
        run()
        calls += 1
        elapsed = time.perf_counter() - start
    return elapsed / calls


def _one_row() -> Batch:
    batch = Batch(BatchLimits(1, 1, 1, 1))
    batch.counts[:] = 1, 1, 0, 1
    return batch


def _uploaded(backend: Backend, mask: Masks) -> Buffer:
    buffer = backend.zeros(mask.shape, mask.dtype)
    backend.write(buffer, mask)
    return buffer


def _layer(backend: Backend, plan: ProbePlan, width: int) -> FFNWeights:
    """Makes a layer with zero weights, whose biases make gates active, so that down rows are added."""
    rows = Tensor(plan.type, (width, plan.dim), np.zeros((width, plan.row_bytes), np.uint8))
    ones = np.ones(width, np.float32)
    return backend.ffn_weights(
        FFNTensors(rows, rows, rows, "by_neuron", "relu", gate_bias=ones, up_bias=ones)
    )


def _tenths(width: int, random: np.random.Generator) -> Masks:
    """Returns disjoint masks ``[10, width / 64]`` that together have all neurons."""
    turn_of = random.permutation(width) % _TURNS
    return pack_mask(turn_of == np.arange(_TURNS)[:, None])


@dataclass(frozen=True)
class Bandwidth:
    """One row of ``bandwidths`` in docs/formats.md; GB/s (10^9 bytes) of :data:`RUNS` runs."""

    access: str  #: ``memory``, ``dense`` or ``rows``
    run_bytes: int
    threads: int
    gb_s: float  #: the median
    least_gb_s: float
    most_gb_s: float
    streams: int = 0  #: streams of each thread, for ``memory``


class _Access(NamedTuple):
    name: str
    run_bytes: int
    measure: Callable[[float, Backend], float]  # takes seconds, and the backend whose threads read
    streams: int = 0


def measure(
    threads: Sequence[int],
    nbytes: int,
    seconds: float,
    advance: Callable[[int, int], None],
    failed: Callable[[str], None],
) -> list[Bandwidth]:
    """Measures each access on each number of threads, from buffers of ``nbytes``, in ``seconds`` altogether.
    ``failed`` gets a line for each access that cannot be measured; the result omits it."""
    backends = [open_backend("cpu", n) for n in threads]
    ways = len(STREAMS) + 1 + len(SHAPES)
    seconds_of_a_run = seconds / (ways * len(backends) * RUNS)
    bandwidths: list[Bandwidth] = []
    probes = [("memory", partial(_memory_accesses, backends[-1], nbytes))]
    for kind, dim in SHAPES:
        probe = partial(_neuron_accesses, backends[-1], (kind, dim), nbytes)
        probes.append((f"an FFN of {kind} with {dim} columns", probe))
    for number, (name, accesses) in enumerate(probes):
        advance(number, len(probes))
        try:  # One buffer at a time: each is freed before the next is made.
            measured = [
                [_bandwidth(access, backend, seconds_of_a_run) for backend in backends]
                for access in accesses()
            ]
        except FAILURES as error:
            failed(f"{name} was not measured: {reason_of(error)}")
            continue
        if name == "memory":
            measured = [[max(row, key=lambda each: each.gb_s) for row in zip(*measured, strict=True)]]
        bandwidths.extend(each for row in measured for each in row)
    advance(len(probes), len(probes))
    return sorted(bandwidths, key=lambda each: each.run_bytes)


def _memory_accesses(backend: Backend, nbytes: int) -> list[_Access]:
    probe = backend.read_probe(nbytes)
    assert probe is not None
    return [_Access("memory", 0, partial(probe.rate, streams), streams) for streams in STREAMS]


def _neuron_accesses(backend: Backend, shape: tuple[str, int], nbytes: int) -> list[_Access]:
    probe = NeuronProbe(backend, ProbePlan.from_sizes(*shape, nbytes))
    rows = _Access("rows", probe.plan.run_bytes, partial(probe.measure, dense=False))
    if shape == SHAPES[0]:
        return [_Access("dense", 0, partial(probe.measure, dense=True)), rows]
    return [rows]


def _bandwidth(access: _Access, backend: Backend, seconds: float) -> Bandwidth:
    assert backend.threads is not None
    speeds = sorted(access.measure(seconds, backend) for _ in range(RUNS))
    return Bandwidth(
        access=access.name,
        run_bytes=access.run_bytes,
        threads=backend.threads,
        gb_s=speeds[RUNS // 2],
        least_gb_s=speeds[0],
        most_gb_s=speeds[-1],
        streams=access.streams,
    )


@dataclass(frozen=True)
class GPUSpeed:
    """Figures of a GPU: medians of :data:`RUNS` runs; GB/s are 10^9 bytes."""

    stream_gb_s: float  #: reading an FFN in Q4_0 whole
    rows_gb_s: float  #: reading a tenth of the neurons of such an FFN
    layer_s: float  #: time of a layer with almost no work (:data:`_OF_A_LAYER`)
    link: LinkSpeed


def measure_gpu(gpu: GPU, nbytes: int, seconds: float, advance: Callable[[int, int], None]) -> GPUSpeed:
    """Measures a GPU with ``nbytes`` of its memory, for ``seconds``. GPUError: the GPU is not usable."""
    backend = open_gpu(gpu, None)
    probe = NeuronProbe(backend, ProbePlan.from_sizes(*SHAPES[0], nbytes))

    stream = statistics.median(probe.measure_passes(seconds / 2, backend, dense=True))
    advance(1, 3)
    rows = statistics.median(probe.measure_passes(seconds / 2, backend, dense=False))
    advance(2, 3)
    small = ProbePlan(block_type("Q4_0"), 256, (_WORD,) * 32)  # so small that only overhead counts
    speeds = NeuronProbe(backend, small).measure_passes(seconds / 10, backend, dense=True)
    ffn_s = small.nbytes / 1e9 / statistics.median(speeds) / len(small.widths)
    link = backend.link_speed(min(nbytes, _LINK_BYTES), RUNS)
    advance(3, 3)
    return GPUSpeed(stream, rows, _OF_A_LAYER * ffn_s, link)
