"""Keeps typed keys out of the output while a program prints."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def unseen_typing() -> Iterator[None]:
    """A context that hides typed keys. The next reader gets the keys, and Ctrl-C works. Without a terminal,
    or on Windows, it has no effect."""
    fd = _own_terminal()
    if fd is None:
        yield
        return
    import termios

    before = termios.tcgetattr(fd)
    silent = termios.tcgetattr(fd)
    silent[3] &= ~(termios.ECHO | termios.ECHONL)
    try:
        termios.tcsetattr(fd, termios.TCSANOW, silent)
        yield
    finally:
        if _own_terminal() == fd:
            termios.tcsetattr(fd, termios.TCSANOW, before)


def _own_terminal() -> int | None:
    """Returns the terminal of standard input. None: there is no terminal, or another program has it. Changing
    it from the background would stop this program."""
    if sys.platform == "win32":
        return None
    try:
        fd = sys.stdin.fileno()
        return fd if os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp() else None
    except (OSError, ValueError):
        return None
