"""Shares among tests of bad files a bound on time and memory, and what an error must look like."""

from __future__ import annotations

import re
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from hotcold.formats.gguf import GGUFError


@contextmanager
def _bounded() -> Iterator[None]:
    """At most 8 MiB at once (numpy's too), and no endless loop: 10 s of processor time end the test."""

    def stop(*_: object) -> None:
        raise TimeoutError("10 seconds of processor time")

    guard = hasattr(signal, "ITIMER_PROF")
    before = signal.signal(signal.SIGPROF, stop) if guard else None
    if guard:
        signal.setitimer(signal.ITIMER_PROF, 10)
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
        if guard:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)


def _check(error: BaseException, path: Path, pattern: str = "") -> None:
    message = str(error)
    assert message.isprintable(), message  # one line, and nothing that a terminal obeys
    assert message.startswith(f"{path}: ")
    assert len(message) - len(str(path)) < 400
    assert re.search(pattern, message), message


@contextmanager
def _refused(path: Path, pattern: str = "") -> Iterator[None]:
    with _bounded(), pytest.raises(GGUFError) as caught:
        yield
    _check(caught.value, path, pattern)


@pytest.fixture(scope="session")
def bounded() -> Callable[[], AbstractContextManager[None]]:
    """A block that may use 8 MiB and 10 s of processor time."""
    return _bounded


@pytest.fixture(scope="session")
def refused() -> Callable[..., AbstractContextManager[None]]:
    """``refused(path, pattern)``: a bounded block that must raise a GGUFError of one line about this file."""
    return _refused
