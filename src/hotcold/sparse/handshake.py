"""How a layer's two sides wait for each other: the hot one posts and waits, the cold one takes and gives.

A layer is posted when its input lies in the mailbox, and done when the cold side's answer does. Both are
sequence numbers, and at most one layer is out at a time."""

import contextlib
import sys
import threading
from collections.abc import Callable

from hotcold.kernels.backend import Program

#: Called with (what, layer) at the moments that a timeline shows.
Mark = Callable[[str, int], None]

_LIVENESS_S = 0.2  #: how long a wait sleeps before it looks whether the other side still lives


class HandshakeError(RuntimeError):
    """The cold side has failed, was closed, or is gone: no layer can be posted any more."""


class _Interrupted(Exception):
    """A step ended early: the layer posted is not the next one."""


class _Bell:
    """Wakes a thread. Each method is one call into C, so that an interrupt cannot leave it half done."""

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # it rings already
            self._silent.release()

    def sleep(self, seconds: float = -1) -> bool:
        """Until it rings; False where the time is over before."""
        return self._silent.acquire(timeout=seconds)


class Handshake:
    """Between two threads of one process; its methods are host functions of the two sides' programs.

    Whoever waits sleeps: spinning would hold Python's lock. The state is in plain attributes, and bells only
    say that it may have changed: Ctrl-C may come at any moment. ``mark``, if set, is told what happens."""

    def __init__(self) -> None:
        self.mark: Mark | None = None
        self._hot, self._cold = _Bell(), _Bell()
        self._posted = self._done = 0
        self._layer = -1  # that is posted
        self._ended: BaseException | None = None
        self._thread: threading.Thread | None = None

    def post(self, layer: int, fill: Callable[[], None]) -> None:
        """Hot side: calls ``fill``, which fills the layer's mailbox, and tells the cold side."""
        self._settle()  # an interrupted step may have left the cold side at work
        fill()
        self._layer = layer
        self._posted += 1
        self._cold.ring()
        self._note("post", layer)

    def wait(self, layer: int) -> None:
        """Hot side: returns when the answer lies there; HandshakeError where it will never come."""
        self._note("wait", layer)
        self._settle()
        self._note("waited", layer)

    def _settle(self) -> None:
        while self._done < self._posted:
            if self._ended is not None:
                raise HandshakeError(f"the cold side has ended: {self._ended!r}") from self._ended
            if not self._hot.sleep(_LIVENESS_S):
                # Not is_alive(): an interrupt inside of it makes Python 3.11 take the thread for dead.
                if self._thread is None or self._thread.ident not in sys._current_frames():
                    raise HandshakeError("the cold side has ended: its thread is gone")
                self._cold.ring()  # post may have been interrupted before it did

    def take(self, layer: int) -> None:
        """Cold side: returns when this layer is posted."""
        while self._done == self._posted and self._ended is None:
            self._cold.sleep()
        if self._ended is not None:
            raise self._ended
        if self._layer != layer:
            raise _Interrupted
        self._note("take", layer)

    def give(self, layer: int) -> None:
        """Cold side: the layer's answer lies in the mailbox."""
        self._note("give", layer)
        self._done = self._posted
        self._hot.ring()

    def serve(self, program: Program) -> None:
        """Starts the cold side: runs the program, which takes and gives every split layer, for each step."""
        self._thread = threading.Thread(target=self._run, args=(program,), name="cold side", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the cold side; harmless when it has ended."""
        self._end(HandshakeError("closed"))
        # The garbage collector may call this on any thread.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, program: Program) -> None:
        try:
            while True:
                with contextlib.suppress(_Interrupted):
                    program.run()
        except BaseException as error:  # whatever it is, the hot side must not wait for ever
            self._end(error)

    def _end(self, reason: BaseException) -> None:
        self._ended = self._ended or reason
        self._hot.ring()
        self._cold.ring()

    def _note(self, what: str, layer: int) -> None:
        if self.mark is not None:
            self.mark(what, layer)
