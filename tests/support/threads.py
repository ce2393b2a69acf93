"""Threads of tests: which ones a test has begun, and threads whose result a test waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from hotcold.runtime.session_lock import SessionLock

WAIT_S = 60.0  #: a test that is right waits far less; this ends one that would wait for ever

_Result = TypeVar("_Result")


def begun_threads() -> Callable[[], list[str]]:
    """Returns a function that names running threads that began after this call, without threads of other
    tests that end meanwhile."""
    before = set(threading.enumerate())
    return lambda: [thread.name for thread in threading.enumerate() if thread not in before]


class Running(Generic[_Result]):
    """A function that runs in a thread of its own. The thread never keeps the process from ending."""

    def __init__(self, work: Callable[[], _Result]) -> None:
        self._work = work
        self._results: list[_Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> _Result:
        """Waits for the function's end; returns its result or raises its error."""
        self._thread.join(WAIT_S)
        assert self.ended, "the thread does not end"
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:
            self._error = error


def wait_until(condition: Callable[[], object]) -> None:
    """Waits for what another thread does."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.001)


class Step:
    """A step that lasts from when it has ``begun`` until the test lets it ``go``."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.count = 0

    def __call__(self) -> None:
        self.begun.set()
        assert self.go.wait(60)
        self.count += 1


def held(lock: SessionLock) -> tuple[Step, Running[None]]:
    """Starts one step in another thread."""
    step = Step()
    thread = Running(lambda: lock.run_until(lambda: step.count > 0, step))
    assert step.begun.wait(60)
    return step, thread
