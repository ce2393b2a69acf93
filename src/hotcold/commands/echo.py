"""Keeps what is typed while a program prints out of what it prints."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def unseen_typing() -> Iterator[None]:
    """Shows no key that is typed meanwhile. The keys are kept for whoever reads next, and Ctrl-C works.
    Without a terminal, or on Windows, nothing changes."""
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
    """The terminal of standard input; None where there is none, or another program has it: a program in the
    background that changes it would be stopped."""
    if sys.platform == "win32":
        return None
    try:
        fd = sys.stdin.fileno()
        return fd if os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp() else None
    except (OSError, ValueError):
        return None
