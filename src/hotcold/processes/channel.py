"""Messages over two pipes, which threads read and write: the engine process's end of the channel."""

import os
import queue
import select
import sys
import threading
from array import array
from collections.abc import Callable
from typing import TypeAlias

from hotcold.processes.plain_data import HEADER, Plain, lengths, unpack

#: Returns the bytes of a message. The writer calls it in its own thread.
Message: TypeAlias = Callable[[], bytes]

_MOST_WAITING = 4096  # limit of queued messages; each step makes one
_PATIENCE_S = 120.0


def own_pipes() -> tuple[int, int]:
    """Reserves standard input and output for messages; prints go to standard error. Returns both
    descriptors."""
    reading, writing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdout.flush()
    os.dup2(2, 1)
    return reading, writing


class Reader:
    """Reads messages, one at a time."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "rb", buffering=1 << 16)

    def read(self) -> tuple[Plain, "array[int]"] | None:
        """Waits for the next message. Returns None if the other side has closed, even within a message.
        Raises PlainDataError for invalid data."""
        header = self._file.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        n_text, n_ids = lengths(header)
        body = self._file.read(n_text + n_ids)
        if len(body) < n_text + n_ids:
            return None
        view = memoryview(body)
        return unpack(view[:n_text], view[n_text:])

    def close(self) -> None:
        """Closes the pipe. No thread may be reading."""
        self._file.close()


class Writer:
    """Writes messages in its own thread, in the order of :meth:`write`.

    ``gone`` is called once, in that thread, when the other side has closed or has read nothing for
    ``patience_s``. Later messages are dropped."""

    def __init__(self, descriptor: int, gone: Callable[[], object], patience_s: float = _PATIENCE_S) -> None:
        self._descriptor, self._gone, self._patience_s = descriptor, gone, patience_s
        self._waiting: queue.Queue[Message | None] = queue.Queue(_MOST_WAITING)
        self._ready: select.poll | None = None
        if hasattr(select, "poll"):  # other systems wait without this limit
            os.set_blocking(descriptor, False)
            self._ready = select.poll()
            self._ready.register(descriptor, select.POLLOUT)
        self._thread = threading.Thread(target=self._run, name="hotcold-writer", daemon=True)
        self._thread.start()

    def write(self, message: Message) -> None:
        """Queues a message. It waits only if the queue is full, because the other side does not read."""
        self._waiting.put(message)

    def close(self) -> None:
        """Writes the queued messages, ends the thread and closes the pipe."""
        self._waiting.put(None)
        self._thread.join()
        os.close(self._descriptor)

    def _run(self) -> None:
        open = True
        while (message := self._waiting.get()) is not None:
            try:
                if open:
                    self._write(message())
            except OSError:
                open = False
                self._gone()
            except Exception as error:  # the front waits for this message, which cannot be encoded
                print(f"hotcold: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                open = False
                self._gone()

    def _write(self, data: bytes) -> None:
        """Writes all data. Raises OSError if the other side has closed, TimeoutError if it does not read."""
        view = memoryview(data)
        while view:
            if self._ready is not None and not self._ready.poll(self._patience_s * 1000):
                raise TimeoutError(f"nothing was read for {self._patience_s:g} s")
            view = view[os.write(self._descriptor, view) :]
