"""Measures what decoding gets of a machine's memory: streams, and the rows of neurons that a mask picks."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from hotcold.formats.blocks import Tensor, block_type
from hotcold.kernels.backend import BatchLimits, FFNStats, FFNTensors
from hotcold.kernels.cpu import CPUBackend, ReadProbe

#: Block type and dim of the neurons that are gathered; the first are streamed as well.
SHAPES = (("Q4_0", 4096), ("Q4_0", 1024), ("Q4_0", 8192), ("F16", 8192))
RUNS = 5


class NeuronProbe:
    """A layer's FFN, all of it, or at each call another tenth: none is due again while a cache has it.

    As in decoding, a neuron lies in two places, its gate row, and its up and down rows: ``run_bytes`` each.
    """

    def __init__(self, backend: CPUBackend, kind: str, dim: int, nbytes: int) -> None:
        type = block_type(kind)
        size = type.row_bytes(dim)
        n = max(1, nbytes // (3 * size * 64)) * 64
        rows, ones = Tensor(type, (n, dim), np.zeros((n, size), np.uint8)), np.ones(n, np.float32)
        # All weights are 0: through the biases gates fire and down rows are added.
        tensors = FFNTensors(rows, rows, rows, "by_neuron", "relu", gate_bias=ones, up_bias=ones)
        self.run_bytes, self._weights = 3 * size // 2, backend.ffn_weights(tensors)
        tenths = np.random.default_rng(0).permutation(n) % 10 == np.arange(10)[:, None]
        self._masks = np.packbits(tenths, axis=1, bitorder="little").view(np.uint64)
        self._x, self._out, self._calls = *np.zeros((2, 1, dim), np.float32), 0

    def measure(self, dense: bool, seconds: float, backend: CPUBackend) -> float:
        """GB/s (10^9 bytes) on the threads of ``backend``."""
        stats, batch, elapsed = FFNStats(), backend.batch(BatchLimits(1, 1, 1, 1)), 0.0
        batch.counts[:] = 1, 1, 0, 1
        start = time.perf_counter()
        while elapsed <= seconds:
            mask, self._calls = None if dense else self._masks[self._calls % 10][None], self._calls + 1
            backend.ffn(self._x, self._weights, batch, self._out, skip=not dense, mask=mask, stats=stats)
            elapsed = time.perf_counter() - start
        return float(stats.counts[:3] @ self._weights.row_bytes[:3] / elapsed / 1e9)


def measure(
    threads: Sequence[int], nbytes: int, seconds: float, advance: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """What docs/formats.md says, from buffers of ``nbytes``, 1 MiB or more, in ``seconds`` of reading."""
    backends, found = [CPUBackend(n) for n in threads], list[dict[str, Any]]()
    for done, (access, run_bytes, speed) in enumerate(_probes(backends[-1], nbytes)):
        for backend in backends:
            each = seconds / (2 + len(SHAPES)) / len(backends) / RUNS
            speeds = sorted(speed(each, backend) for _ in range(RUNS))
            place = {"access": access, "run_bytes": run_bytes, "threads": backend.threads}
            figures = {"gb_s": speeds[RUNS // 2], "least_gb_s": speeds[0], "most_gb_s": speeds[-1]}
            found.append(place | figures)
        advance(done + 1, 2 + len(SHAPES))
    return sorted(found, key=lambda each: each["run_bytes"])


def _probes(backend: CPUBackend, nbytes: int) -> Iterator[tuple[str, int, Callable[..., float]]]:
    yield "memory", 0, ReadProbe(backend, nbytes).measure
    for shape in SHAPES:
        probe = NeuronProbe(backend, *shape, nbytes)
        if shape == SHAPES[0]:
            yield "dense", 0, partial(probe.measure, True)
        yield "rows", probe.run_bytes, partial(probe.measure, False)
