"""Delivers Ctrl-C where it does no harm, without losing it."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_AGAIN_S = 0.05
_TRIES = 200


class Interrupts:
    """A context in which Ctrl-C raises ``KeyboardInterrupt`` only within :meth:`heard`; an earlier Ctrl-C is
    raised on entering it. Only for the main thread.

    Python runs no code of ours while a read blocks, so a signal that comes just before it would wait for the
    next key. Therefore a thread, told by the system's side of the signal, wakes the main thread until the
    signal was heard. Windows has no such gap, and no way to close it."""

    def __init__(self) -> None:
        self._pending = False
        self._armed = False
        self._heard = threading.Event()
        self._closing = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Interrupts":
        with contextlib.ExitStack() as stack:
            before = signal.signal(signal.SIGINT, self._interrupt)
            stack.callback(signal.signal, signal.SIGINT, before)
            if hasattr(signal, "pthread_kill"):
                self._watch(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        try:
            self._armed = True
            if self._pending:
                raise KeyboardInterrupt
            yield
        finally:
            self._armed = self._pending = False

    def _interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        self._heard.set()
        self._pending = True
        if self._armed:
            self._armed = False  # raised once, so that the code that handles it is not interrupted again
            raise KeyboardInterrupt

    def _watch(self, stack: contextlib.ExitStack) -> None:
        read, write = os.pipe()
        os.set_blocking(write, False)
        wake = signal.SIGUSR1
        before = signal.signal(wake, _nothing)
        stack.callback(signal.signal, wake, before)
        fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        main = threading.get_ident()
        thread = threading.Thread(target=self._wake, args=(read, main), daemon=True)
        thread.start()

        def stop() -> None:
            self._closing = True
            self._heard.set()
            signal.set_wakeup_fd(fd)
            os.close(write)
            thread.join()
            os.close(read)

        stack.callback(stop)

    def _wake(self, read: int, main: int) -> None:
        while data := os.read(read, 1):  # nothing when the other end is closed
            if data[0] != signal.SIGINT:
                continue
            self._heard.clear()
            for _ in range(_TRIES):  # harmless if it was heard before this line
                if self._closing or self._heard.wait(_AGAIN_S):
                    break
                signal.pthread_kill(main, signal.SIGUSR1)


def _nothing(_signal: int, _frame: FrameType | None) -> None:
    """Handles the signal that wakes a blocking read; the read then continues."""
