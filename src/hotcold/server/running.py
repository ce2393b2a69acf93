"""The texts that one request asked for, generated at the same time."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Self

from hotcold.api.async_llm import AsyncLLM
from hotcold.engine.generation import Piece
from hotcold.engine.request import Job, RequestError
from hotcold.server.metrics import Metrics


class Running:
    """The jobs of one request, as a context manager. Its exit cancels unfinished jobs and waits for that."""

    def __init__(
        self, llm: AsyncLLM, jobs: Sequence[Job], metrics: Metrics, at_once: int | None = None
    ) -> None:
        self.generated = 0  #: tokens so far
        self.ttft_s: float | None = None
        self._llm = llm
        self._jobs = jobs
        self._metrics = metrics
        self._tasks: list[asyncio.Task[None]] = []
        self._found: list[tuple[int, Piece]] = []
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._left = len(jobs)
        self._slots = asyncio.Semaphore(at_once or max(len(jobs), 1))

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._follow(i, job)) for i, job in enumerate(self._jobs)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        # Even if this task is cancelled, the engine must receive the cancellation of each job.
        await asyncio.shield(asyncio.gather(*self._tasks, return_exceptions=True))

    @property
    def left(self) -> int:
        """The number of jobs that have not ended."""
        return self._left

    @property
    def finished(self) -> bool:
        """True if all jobs have ended without an error and the caller has every piece."""
        return not self._left and not self._found and self._error is None

    async def take(self, patience_s: float) -> list[tuple[int, Piece]]:
        """Returns the pieces since the last call, each with the index of its job; an empty list after the
        timeout. Raises the first error of a job after the pieces that preceded it. The last piece of each job
        has the finish reason ``stop`` or ``length``: any other end is an error."""
        if not self._found and self._error is None and self._left:
            self._news.clear()
            try:
                async with asyncio.timeout(patience_s):
                    await self._news.wait()
            except TimeoutError:
                return []
        if not self._found and self._error is not None:
            raise self._error
        pieces, self._found = self._found, []
        return pieces

    def fail(self, error: Exception) -> None:
        """Ends the request with an error, unless all of its jobs have ended."""
        if self._left:
            self._set_error(error)

    def _set_error(self, error: Exception) -> None:
        self._error = self._error or error
        self._news.set()

    async def _follow(self, index: int, job: Job) -> None:
        """Collects the pieces of a job until it ends. An error of any job stops the collection of all."""
        self._metrics.begun()
        reason, last = "cancelled", 0.0
        try:
            async with self._slots, aclosing(self._llm.stream(job)) as pieces:
                async for piece in pieces:
                    if self._error is not None:
                        return
                    # a piece may have scores of the prompt only
                    if piece.ids or piece.finish_reason is not None:
                        now = time.perf_counter()
                        self._measure(piece, now - last if last else None)
                        last = now
                    reason = piece.finish_reason or reason
                    if piece.finish_reason not in (None, "stop", "length"):
                        piece = replace(piece, finish_reason=None)  # an error follows
                    self._found.append((index, piece))
                    self._news.set()
            if reason not in ("stop", "length"):
                raise _cut_short()
        except asyncio.CancelledError:  # also raised when a future of the engine was cancelled
            self._set_error(_cut_short())
            raise
        except Exception as error:
            reason = "error"
            self._set_error(error)
        finally:
            self._left -= 1
            self._news.set()
            self._metrics.ended(reason)

    def _measure(self, piece: Piece, since_last: float | None) -> None:
        self.generated += len(piece.ids)
        if since_last is None:
            self._metrics.first(piece)
            self.ttft_s = self.ttft_s or piece.timings.ttft_s
        elif piece.ids:
            self._metrics.between(since_last / len(piece.ids))


def _cut_short() -> RequestError:
    return RequestError("the server ended the answer early: try again", "cancelled")
