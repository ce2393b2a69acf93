"""Progress bars on stderr, only where it is a terminal; otherwise nothing is printed or imported."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

#: Called with what is done and the total.
Advance = Callable[[int, int], None]


def _nothing(done: int, total: int) -> None:
    pass


@contextlib.contextmanager
def bytes_progress(label: str) -> Iterator[Advance]:
    """A bar for bytes, with their rate."""
    with _bar(label, in_bytes=True) as advance:
        yield advance


@contextlib.contextmanager
def count_progress(label: str) -> Iterator[Advance]:
    """A bar for counted things, with the time that is left."""
    with _bar(label, in_bytes=False) as advance:
        yield advance


@contextlib.contextmanager
def _bar(label: str, *, in_bytes: bool) -> Iterator[Advance]:
    if not sys.stderr.isatty():
        yield _nothing
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amount = (
        (DownloadColumn(), TransferSpeedColumn())
        if in_bytes
        else (MofNCompleteColumn(), TimeRemainingColumn())
    )
    columns = (TextColumn("{task.description}"), BarColumn(), *amount)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
