"""Measured memory bandwidth of decoding on the CPU: streams, and neuron rows that a mask selects."""

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
    PAGE,
    Backend,
    Batch,
    BatchLimits,
    FFNCall,
    FFNStats,
    FFNTensors,
    FFNWeights,
    Masks,
)
from hotcold.kernels.numpy_ffn import pack_mask
from hotcold.kernels.processor import FETCHING, STREAMS, fetching, set_fetching

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
_TURNS = 10  # a pass reads one neuron in ten
_PROMPT_ROWS = 128
_PROMPT_BUFFER = 32 << 20  # for all rows, these weights take a slow CPU tenths of a second
_CLEAR_GAIN = 1.03  # a setting that gains less over the default may be noise


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
        self._masks = [tenth_masks(width, random) for width in plan.widths]
        self._x, self._out = (backend.zeros((1, plan.dim)) for _ in range(2))
        self._calls = 0

    def measure(self, seconds: float, backend: Backend, *, dense: bool) -> float:
        """Returns GB/s (10^9 bytes) on the threads of ``backend``, from calls during ``seconds``."""
        stats = FFNStats(backend.zeros((1, len(FFN_COUNTS)), np.int64))
        batch = one_row()
        start = time.perf_counter()
        elapsed = 0.0
        while elapsed <= seconds:
            turn, layer = divmod(self._calls, len(self._layers))
            self._calls += 1
            mask = None if dense else self._masks[layer][turn % _TURNS][None]
            self._read(backend, layer, batch, stats, mask)
            elapsed = time.perf_counter() - start
        return self._bytes_read(backend, stats) / elapsed / 1e9

    def _read(self, backend: Backend, layer: int, batch: Batch, stats: FFNStats, mask: Masks | None) -> None:
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


def one_row(positions: int = 1) -> Batch:
    """Makes a batch of one decode row at the last of these positions, in consecutive pages."""
    pages = -(-positions // PAGE)
    batch = Batch(BatchLimits(1, 1, pages, 1))
    batch.counts[:] = 1, 1, 0, 1
    batch.positions[:] = positions - 1
    batch.lengths[:] = positions
    batch.pages[:] = np.arange(pages).reshape(batch.pages.shape)
    return batch


def measure_prompts(threads: int, nbytes: int, seconds: float) -> float:
    """Returns :func:`prompt_gflops` of the CPU, from weights of at most ``nbytes``."""
    return prompt_gflops(open_backend("cpu", threads), SHAPES[0][1], min(nbytes, _PROMPT_BUFFER), seconds)


def prompt_gflops(backend: Backend, dim: int, nbytes: int, seconds: float) -> float:
    """Measures an FFN in Q4_0 with 128 prompt rows and weights of about ``nbytes``, for ``seconds``. Returns
    1e9 multiplications and additions per second."""
    plan = ProbePlan.from_sizes("Q4_0", dim, nbytes)
    layers = [_layer(backend, plan, width) for width in plan.widths]
    x, out = (backend.zeros((_PROMPT_ROWS, dim)) for _ in range(2))
    batch = Batch(BatchLimits(_PROMPT_ROWS, 1, _PROMPT_ROWS // PAGE, 1, decode=0))
    batch.counts[:] = _PROMPT_ROWS, 0, 0, 1

    def ffns() -> None:
        for weights in layers:
            backend.ffn(FFNCall(x, weights, batch, out, skip=False))

    program = backend.record(ffns)
    program.run()  # the first time takes longer
    taken_s = statistics.median(mean_time(program.run, seconds / RUNS) for _ in range(RUNS))
    return 2e-9 * _PROMPT_ROWS * 3 * dim * sum(plan.widths) / taken_s


def _layer(backend: Backend, plan: ProbePlan, width: int) -> FFNWeights:
    """Makes a layer with zero weights, whose biases make gates active, so that down rows are added."""
    rows = Tensor(plan.type, (width, plan.dim), np.zeros((width, plan.row_bytes), np.uint8))
    ones = np.ones(width, np.float32)
    return backend.ffn_weights(
        FFNTensors(rows, rows, rows, "by_neuron", "relu", gate_bias=ones, up_bias=ones)
    )


def tenth_masks(width: int, random: np.random.Generator) -> Masks:
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


def measure_fetching(threads: int, nbytes: int, seconds: float) -> str:
    """Sets and returns the fastest of :data:`FETCHING` for an FFN of Q4_0, by the geometric mean of GB/s of
    all neurons and of a tenth. The present setting stays unless another is clearly faster."""
    backend, default = open_backend("cpu", threads), fetching()
    probe = NeuronProbe(backend, ProbePlan.from_sizes(*SHAPES[0], nbytes))
    settings = [default, *(each for each in FETCHING if each != default)]
    seconds_of_a_run = seconds / (2 * RUNS * len(settings))
    speeds: dict[str, list[float]] = {setting: [] for setting in settings}
    try:
        for _ in range(RUNS):
            for setting in settings:  # in turns, since a machine's speed changes by the second
                set_fetching(setting)
                runs = [probe.measure(seconds_of_a_run, backend, dense=dense) for dense in (True, False)]
                speeds[setting].append(statistics.geometric_mean(runs))
    finally:
        set_fetching(default)
    medians = {setting: statistics.median(each) for setting, each in speeds.items()}
    best = max(settings, key=medians.__getitem__)
    if medians[best] > _CLEAR_GAIN * medians[default]:
        set_fetching(best)
    return fetching()


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
