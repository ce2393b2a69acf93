"""Measurements of the link between the processor and a device: copies, submits and handshakes."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np

from hotcold.kernels import _native
from hotcold.kernels.backend import Batch, BatchLimits
from hotcold.kernels.cpu import CPUBackend
from hotcold.kernels.gpu import GPUBackend, GPUError, LinkSpeed

_LEAST = 1e-7  # seconds of a handshake: a difference of two measurements may be 0
_CALLS = 20  # in a run, of calls that take microseconds
_WIDTH = 256  # values of a row that the two sides exchange


class _Linked(GPUBackend, Protocol):
    """The part of :mod:`~hotcold.kernels.vulkan.backend`, which imports this file, that is needed here."""

    device: _native.VulkanDevice

    def link(self, timeout_seconds: float, spin: bool | None = None) -> _native.VulkanLink: ...


def link_speed(backend: _Linked, nbytes: int, runs: int) -> LinkSpeed:
    """Measures medians of ``runs`` runs, with copies of ``nbytes``. GPUError: the device fails."""
    device = backend.device
    device_memory = device.allocate(nbytes)
    data = np.ones(nbytes, np.uint8)

    def gb_s(copy: Callable[[], None]) -> float:
        return nbytes / 1e9 / _seconds(copy, runs)

    def written() -> None:
        device.write(device_memory, 0, data)
        device.read(device_memory, 0, np.empty(4, np.uint8))  # waits for the write

    def between(source: _native.VulkanMemory, target: _native.VulkanMemory) -> float:
        recorder = device.recorder()
        recorder.copy(source, 0, target, 0, nbytes)
        return gb_s(recorder.finish().run)

    pageable = gb_s(written)
    to_device = between(device.allocate(nbytes, "upload"), device_memory)
    from_device = between(device_memory, device.allocate(nbytes, "download"))
    recorder = device.recorder()
    recorder.copy(device_memory, 0, device_memory, 256, 4)  # almost nothing
    return LinkSpeed(
        to_gpu_gb_s=to_device,
        from_gpu_gb_s=from_device,
        pageable_gb_s=pageable,
        step_s=_seconds(recorder.finish().run, _CALLS * runs),
        handshake_submit_s=_at_least(handshake_seconds(backend, spin=False)) or _LEAST,
        handshake_spin_s=_at_least(handshake_seconds(backend, spin=True)),
    )


def handshake_seconds(backend: _Linked, spin: bool, runs: int = 30) -> float | None:
    """Measures the time that a split layer adds to a step whose cold side has almost nothing to compute: the
    median of ``runs`` runs.

    None, only with ``spin``: shaders never read the host's answers, or not the data that the host wrote
    before them. GPUError: the device fails, or gives wrong results without ``spin``."""
    few, many = (_step_seconds(backend, spin, layers, runs) for layers in (1, 9))
    if few is None or many is None:
        return None
    return max(many - few, 0.0) / 8


def _step_seconds(backend: _Linked, spin: bool, layers: int, runs: int) -> float | None:
    """Returns the median seconds of a step with ``layers`` split layers. The cold side answers y = x, and the
    device adds y to x. Every layer of every run has its own values, so that a stale value shows. The cold
    side never reads y, whose memory may be fast to write and slow to read."""
    limits = BatchLimits(1, 1, 1, 1)
    link = backend.link(10.0, spin)
    boxes = backend.mailboxes(link, limits, _WIDTH, dict.fromkeys(range(layers), 0))
    batch, x = Batch(limits), backend.zeros((1, _WIDTH))
    batch.counts[:] = 1, 1, 0, 1
    cpu = CPUBackend(1)
    cold = [(i, cpu.record(partial(cpu.add, box.y, box.x, box.batch, keep=0))) for i, box in boxes.items()]

    def step() -> None:
        for box in boxes.values():
            backend.post(box, x, None, batch)
            backend.collect(box, batch, x)

    program = backend.record(step)
    thread = threading.Thread(target=cpu.serve, args=(link, cold), daemon=True)
    thread.start()
    correct, seconds = True, []
    try:
        for run in range(runs + 1):
            values = np.arange(run + 1, run + 1 + _WIDTH, dtype=np.float32).reshape(1, _WIDTH)
            backend.write(x, values)
            boxes[0].y[:] = np.nan  # remains if the cold side adds its answer to y
            start = time.perf_counter()
            program.run()
            seconds.append(time.perf_counter() - start)
            correct = correct and np.array_equal(backend.read(x), values * 2**layers)
        counts = link.counts
        answered = not spin or (counts.spins and counts.answered > counts.gave_up)
    finally:
        link.stop()
        thread.join()
    if not correct and not spin:
        raise GPUError(
            f"{backend.device.info.name}: steps with split layers gave wrong results: update its driver"
        )
    return statistics.median(seconds[1:]) if correct and answered else None


def _at_least(seconds: float | None) -> float | None:
    return None if seconds is None else max(seconds, _LEAST)


def _seconds(call: Callable[[], None], runs: int) -> float:
    """Returns the median of ``runs`` runs, after one uncounted run."""
    call()
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
