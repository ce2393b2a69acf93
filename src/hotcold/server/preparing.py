"""Threads that prepare requests: they parse JSON and schemas, render templates and encode texts.

Requests of similar size share a lane with its own threads, so a small request never waits for a large one.
All threads share Python's global lock: their number bounds how long the event loop waits for it."""

import asyncio
import contextlib
import ctypes
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from hotcold.server.protocol.errors import APIError

T = TypeVar("T")

_RETRY_S = 2  # time before a refused client should try again


class Lane(NamedTuple):
    """The limits of a lane."""

    body_bytes: float  #: largest body of a request in this lane
    threads: int  #: preparations that run at the same time
    waiting: float  #: preparations that may wait for a thread


_SMALL = 64 << 10
LANES = (Lane(_SMALL, 4, float("inf")), Lane(512 << 10, 2, 32), Lane(float("inf"), 1, 8))


class Preparing:
    """The lanes by size, the smallest first. An instance belongs to one event loop."""

    def __init__(self, lanes: Sequence[Lane] = LANES) -> None:
        self._lanes = [_RunningLane(lane) for lane in lanes]

    async def run(self, body_bytes: int, function: Callable[[], T]) -> T:
        """Calls a function in a thread of the lane for requests of this size. Raises APIError with status 429
        if the lane's queue is full. If the caller is cancelled, a queued function is never called; a running
        function keeps its thread until it returns."""
        lane = next(each for each in self._lanes if body_bytes <= each.limits.body_bytes)
        return await lane.run(function)

    def close(self) -> None:
        for lane in self._lanes:
            lane.threads.shutdown(wait=False, cancel_futures=True)


class _RunningLane:
    def __init__(self, limits: Lane) -> None:
        self.limits = limits
        self.threads = ThreadPoolExecutor(limits.threads, "hotcold-prepare")
        self._free = asyncio.Semaphore(limits.threads)
        self._waiting = 0

    async def run(self, function: Callable[[], T]) -> T:
        if self._free.locked() and self._waiting >= self.limits.waiting:
            raise self._busy()
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        loop = asyncio.get_running_loop()

        def release(_: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._free.release)

        future = self.threads.submit(self._call, function)
        future.add_done_callback(release)
        return await asyncio.wrap_future(future)

    def _call(self, function: Callable[[], T]) -> T:
        try:
            return function()
        finally:
            if self.limits.body_bytes > _SMALL:
                _return_memory()

    def _busy(self) -> APIError:
        got = f"{self.limits.threads + self._waiting} requests of this size are being prepared or wait"
        return APIError(
            f"{got}, and no more are allowed: try again later",
            status=429,
            type="rate_limit_error",
            code="rate_limit_exceeded",
            retry_after=_RETRY_S,
        )


def _return_memory() -> None:
    """Returns freed memory to the system, which the C library would keep: encoding 4 MB of text takes
    hundreds of MB for a second."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)
