"""A program in a pseudo-terminal of 80 columns: what it shows, and keys for it. Waits are generous, and end
with what was seen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from typing import Any

from support.screen import Screen

PATIENCE_S = 120


class PseudoTerminal:
    def __init__(self, command: Sequence[str], **more: Any) -> None:
        self._main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", **more.pop("env", {})}
        self.process = subprocess.Popen(
            command,
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
            env=environment,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            **more,
        )
        os.close(side)
        self.shown = ""  #: everything so far, without escape sequences
        self._raw = b""
        self._read_up_to = 0  # of what is shown, by :meth:`wait_for`

    def send(self, text: str) -> None:
        os.write(self._main, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Returns what is shown from the end of the last match to the end of this one."""
        end = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, self.shown[self._read_up_to :])):
            assert time.monotonic() < end, f"{pattern!r} did not come: {self.shown[self._read_up_to :]!r}"
            assert self._read(), f"it ended before {pattern!r}: {self.shown[self._read_up_to :]!r}"
        text = self.shown[self._read_up_to : self._read_up_to + found.end()]
        self._read_up_to += found.end()
        return text

    def wait_for_raw(self, sequence: str) -> None:
        """Waits until the program has written a text with escape sequences, which may come later than what
        they colour."""
        end = time.monotonic() + PATIENCE_S
        while sequence not in self.raw:
            assert time.monotonic() < end, f"{sequence!r} did not come: {self.raw!r}"
            assert self._read(), f"it ended before {sequence!r}: {self.raw!r}"

    @property
    def lines(self) -> list[str]:
        """The lines that stay visible, including lines that have left the screen at the top."""
        return Screen().feed(self._raw.decode(errors="replace")).lines

    @property
    def raw(self) -> str:
        return self._raw.decode(errors="replace")

    def end(self) -> int:
        """Waits for the end of the program; its exit code."""
        end = time.monotonic() + PATIENCE_S
        while self._read():
            assert time.monotonic() < end, f"it did not end: {self.shown[self._read_up_to :]!r}"
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self._main)

    def __enter__(self) -> PseudoTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> bool:
        """True if more may come."""
        if not select.select([self._main], [], [], 1)[0]:
            return True
        try:
            data = os.read(self._main, 1 << 16)
        except OSError:  # so Linux says that the other side has closed
            return False
        self._raw += data
        text = self._raw.decode(errors="replace").replace("\r\n", "\n")
        self.shown = re.sub(r"\x1b\[\?2004l\r|\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]", "", text)
        return bool(data)
