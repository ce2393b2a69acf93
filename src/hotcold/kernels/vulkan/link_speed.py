"""Measures the way between the processor and a device: copies, submits and handshakes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hotcold.kernels import _native
from hotcold.kernels.gpu import LinkSpeed
from hotcold.kernels.vulkan.link import handshake_seconds

if TYPE_CHECKING:
    from hotcold.kernels.vulkan import VulkanBackend

_LEAST = 1e-7  # seconds of a handshake: a difference of two measurements may come out as nothing
_CALLS = 20  # in a run, of what takes microseconds


def link_speed(backend: VulkanBackend, nbytes: int, runs: int) -> LinkSpeed:
    """Medians of so many runs, with copies of ``nbytes``. GPUError: the device fails."""
    device = backend.device
    own = device.allocate(nbytes)
    data = np.ones(nbytes, np.uint8)

    def gb_s(copy: Callable[[], None]) -> float:
        return nbytes / 1e9 / _seconds(copy, runs)

    def written() -> None:
        device.write(own, 0, data)
        device.read(own, 0, np.empty(4, np.uint8))  # waits until it is there

    def between(source: _native.VulkanMemory, target: _native.VulkanMemory) -> float:
        recorder = device.recorder()
        recorder.copy(source, 0, target, 0, nbytes)
        return gb_s(recorder.finish().run)

    pageable = gb_s(written)
    to_device = between(device.allocate(nbytes, "upload"), own)
    from_device = between(own, device.allocate(nbytes, "download"))
    recorder = device.recorder()
    recorder.copy(own, 0, own, 256, 4)  # next to nothing
    return LinkSpeed(
        to_gpu_gb_s=to_device,
        from_gpu_gb_s=from_device,
        pageable_gb_s=pageable,
        step_s=_seconds(recorder.finish().run, _CALLS * runs),
        handshake_submit_s=_at_least(handshake_seconds(backend, spin=False)) or _LEAST,
        handshake_spin_s=_at_least(handshake_seconds(backend, spin=True)),
    )


def _at_least(seconds: float | None) -> float | None:
    return None if seconds is None else max(seconds, _LEAST)


def _seconds(call: Callable[[], None], runs: int) -> float:
    """The median of so many runs, after one that is not counted."""
    call()
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
