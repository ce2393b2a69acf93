"""Threads that a test has begun; those that others left behind and that end meanwhile do not count."""

from __future__ import annotations

import threading
from collections.abc import Callable


def begun_threads() -> Callable[[], list[str]]:
    """Returns a function that names the threads which began after this call and still run."""
    before = set(threading.enumerate())
    return lambda: [thread.name for thread in threading.enumerate() if thread not in before]
