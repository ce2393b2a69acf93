"""Progress bars on stderr, if that is a terminal; otherwise it prints and imports nothing."""

import contextlib
import sys
from collections.abc import Callable, Iterator

LOADING = "loading"
DOWNLOADING = "downloading"
IN_BYTES = (LOADING, DOWNLOADING)  #: phases that are counted in bytes


@contextlib.contextmanager
def progress(label: str, *, in_bytes: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar for counted things, or for bytes. The body gets a function to call with (done, total)."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich import progress as rich
    from rich.console import Console

    columns = [rich.TextColumn("{task.description}"), rich.BarColumn()]
    if in_bytes:
        columns += [rich.DownloadColumn(), rich.TransferSpeedColumn()]
    else:
        columns += [rich.MofNCompleteColumn(), rich.TimeRemainingColumn()]
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def phases() -> Iterator[Callable[[str, int, int], None]]:
    """Shows a bar for each phase. The body gets a function to call with (phase, done, total)."""
    current = ""
    advance: Callable[[int, int], None] | None = None
    with contextlib.ExitStack() as bars:

        def show(phase: str, done: int, total: int) -> None:
            nonlocal current, advance
            if phase != current or advance is None:
                bars.close()
                current = phase
                advance = bars.enter_context(progress(phase, in_bytes=phase in IN_BYTES))
            advance(done, total)
            if done == total:  # the next output must not share a line with a bar
                bars.close()
                advance = None

        yield show
