"""The lock of a session: decides which thread runs the next step, or changes the input of that step."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from hotcold.errors import UserError

_Result = TypeVar("_Result")
_HOLDER = "holder"


class SessionLock:
    """Lets one thread at a time use a session, during one step or one change of its requests.

    A thread that waits for a result runs the next step itself if no other thread runs one. So threads that
    stop using the session delay no others. Changes wait in a queue; the next holder of the lock makes them
    before its step. So a thread that runs step after step cannot block a change.

    Python collects garbage at any instruction, which closes generators, and these call :meth:`run_soon`,
    perhaps within a step of the same thread. Ctrl-C may come at any instruction of the main thread. So no
    thread ever blocks on the lock itself, and the lock knows its holder from the first moment."""

    def __init__(self) -> None:
        # Has one entry while the lock is held. An ordinary lock would stay locked if Ctrl-C came between its
        # method `acquire` and the next instruction. `setdefault` takes the lock and records the holder in one
        # instruction, so that the holder's `finally` knows what to release.
        self._holder: dict[str, list[int]] = {}  # the thread's id, in a list that identifies this hold
        self._changes: deque[Callable[[], None]] = deque()
        self._sleepers: deque[threading.Lock] = deque()  # locks of the threads that wait for a release

    @property
    def held_here(self) -> bool:
        """True if this thread holds the lock, so that the caller is within a step or a change."""
        return self._holder.get(_HOLDER) == [threading.get_ident()]

    def run(self, work: Callable[[], _Result]) -> _Result:
        """Runs a change, perhaps in another thread, and returns its result or raises its error. UserError:
        Ctrl-C interrupted the other thread, or this thread is within a step."""
        change = _Change(work)
        try:
            self._changes.append(change)
            self.run_until(lambda: change.done, _nothing)
        finally:
            change.done = True  # after Ctrl-C, this thread no longer needs the change
        return change.outcome()

    def run_soon(self, work: Callable[[], None]) -> None:
        """Runs a change now if the lock is free, else after the current step; never waits. A change that
        Ctrl-C interrupts runs again."""
        self._changes.append(work)
        self._try(_yes, _nothing)

    def run_until(self, done: Callable[[], bool], step: Callable[[], object]) -> None:
        """Runs steps until ``done``; sleeps while another thread runs one. UserError: this thread is within a
        step."""
        if self.held_here:
            fix = "a constraint, a signal handler or a destructor must not do that"
            raise UserError(f"a step of a model uses the same model: {fix}")
        while not done():
            if self._try(done, step):
                continue
            wake = threading.Lock()
            wake.acquire()
            self._sleepers.append(wake)
            # Tries again, since a release before the line above wakes no thread.
            if not done() and not self._try(done, step):
                wake.acquire()

    def _try(self, done: Callable[[], bool], step: Callable[[], object]) -> bool:
        """Runs a step unless any thread holds the lock; returns whether the lock was free."""
        free = self._hold(done, step)
        while self._changes and self._hold(_yes, _nothing):  # changes that came during the step
            pass
        return free

    def _hold(self, done: Callable[[], bool], step: Callable[[], object]) -> bool:
        hold, held = [threading.get_ident()], False
        try:
            try:
                held = self._holder.setdefault(_HOLDER, hold) is hold
                if held:
                    self._make_changes()
                    if not done():
                        step()
            finally:
                if self._holder.get(_HOLDER) is hold:
                    self._release(hold)
        except BaseException:
            if held:  # Ctrl-C may have interrupted the release
                self._release(hold)
            raise
        return held

    def _make_changes(self) -> None:
        while self._changes:
            try:
                self._changes[0]()  # stays in the queue if Ctrl-C interrupts it
            except Exception:
                self._changes.popleft()
                raise
            self._changes.popleft()

    def _release(self, hold: list[int]) -> None:
        if self._holder.get(_HOLDER) is hold:
            del self._holder[_HOLDER]
        try:
            for _ in range(len(self._sleepers)):
                self._sleepers.popleft().release()
        except IndexError:  # another thread has woken the last one
            pass


class _Change(Generic[_Result]):
    """A change whose result a thread waits for."""

    __slots__ = ("_error", "_result", "_work", "done")

    def __init__(self, work: Callable[[], _Result]) -> None:
        self.done = False
        self._work = work
        self._result: list[_Result] = []
        self._error: Exception | None = None

    def __call__(self) -> None:
        if self.done:
            return
        try:
            self._result = [self._work()]
        except Exception as error:
            self._error = error
        except BaseException as error:  # ends the work of this thread and of the waiting one
            self._error = UserError(
                f"{type(error).__name__} in another thread interrupted this request: send it again"
            )
            self.done = True
            raise
        self.done = True

    def outcome(self) -> _Result:
        """Returns the result or raises the error, once: a stored error and its traceback form a cycle."""
        if self._error is None:
            return self._result[0]
        error, self._error = self._error, None
        try:
            raise error
        finally:
            del error


def _nothing() -> None:
    """The step of threads that only wait for a change."""


def _yes() -> bool:
    return True
