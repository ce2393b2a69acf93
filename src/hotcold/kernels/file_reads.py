"""Reads of a model's file that bypass the system's cache: the method, the memory, and the speed."""

import os
from collections.abc import Sequence
from functools import cache

from hotcold.errors import UserError
from hotcold.formats.files import FileError
from hotcold.kernels import _native

READS_VARIABLE = "HOTCOLD_READS"  #: of the environment; names the way of reading instead of the best one
READERS = 8  #: reads of :data:`READ_BYTES` that are under way at once
READ_BYTES = _native.DISK_READ_BYTES  #: of the largest


def reading_bytes(row_bytes: Sequence[int]) -> int:
    """Memory that is taken to read tensors of such rows."""
    return READERS * max(_native.Disk.staging_bytes(each, by_output=True) for each in row_bytes)


@cache
def _no_rings() -> int:
    """errno of why this system has no io_uring; 0: it has. Asked once, as a ring must be made to know."""
    return _native.why_no_rings()


def asked_for_rings() -> bool | None:
    """Whether :data:`READS_VARIABLE` names io_uring; None: it names nothing. UserError: it names another, or
    the system lacks it."""
    asked = os.environ.get(READS_VARIABLE)
    if not asked:
        return None
    if asked not in ("io_uring", "threads"):
        raise UserError(f"{READS_VARIABLE} is {asked!r}: choose from io_uring and threads")
    if asked == "io_uring" and (error := _no_rings()):
        raise UserError(
            f"{READS_VARIABLE} is {asked!r}: this system does not allow it ({os.strerror(error)})"
        )
    return asked == "io_uring"


def has_rings() -> bool:
    """Whether experts are read by io_uring; else by threads."""
    asked = asked_for_rings()
    return not _no_rings() if asked is None else asked


def reads_at_once(nbytes: float) -> int:
    """How many reads of so many bytes are under way at once."""
    return _native.Disk.at_once(READERS, round(nbytes), has_rings())


def way_of_reading() -> str:
    return "by io_uring" if has_rings() else f"by {READERS} threads"


def measure_reads(
    file: int, nbytes: int, depth: int, seconds: float, *, sequential: bool
) -> tuple[float, bool]:
    """Measures reads of ``nbytes``, ``depth`` at once, from an open file: bytes a second, and whether they
    bypass the system's cache. FileError: it cannot be read."""
    try:
        return _native.probe_disk(file, nbytes, depth, seconds, sequential, rings=asked_for_rings())
    except _native.DiskError as error:
        raise FileError(str(error)) from None
