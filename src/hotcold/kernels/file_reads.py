"""Reads of a model's file that bypass the system's cache: the method, the memory, and the speed."""

import os
from collections.abc import Sequence
from functools import cache

from hotcold.errors import UserError
from hotcold.formats.files import FileError
from hotcold.kernels import _native

READS_VARIABLE = "HOTCOLD_READS"  #: environment variable that selects the read method
READERS = 8  #: concurrent reads of :data:`READ_BYTES`
READ_BYTES = _native.DISK_READ_BYTES  #: of the largest read


def reading_bytes(row_bytes: Sequence[int]) -> int:
    """Returns the memory for reading tensors with such rows."""
    return READERS * max(_native.Disk.staging_bytes(each, by_output=True) for each in row_bytes)


@cache
def _no_rings() -> int:
    """Returns the errno of a missing io_uring; 0: available. Cached, since the test makes a ring."""
    return _native.why_no_rings()


def asked_for_rings() -> bool | None:
    """Returns whether :data:`READS_VARIABLE` names io_uring; None: it is not set. UserError: it has another
    value, or the system lacks io_uring."""
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
    """Returns whether io_uring reads experts; else threads do."""
    asked = asked_for_rings()
    return not _no_rings() if asked is None else asked


def reads_at_once(nbytes: float) -> int:
    """Returns how many reads of ``nbytes`` run concurrently."""
    return _native.Disk.at_once(READERS, round(nbytes), has_rings())


def way_of_reading() -> str:
    return "by io_uring" if has_rings() else f"by {READERS} threads"


def measure_reads(
    file: int, nbytes: int, depth: int, seconds: float, *, sequential: bool
) -> tuple[float, bool]:
    """Measures ``depth`` concurrent reads of ``nbytes`` from an open file. Returns bytes a second, and
    whether reads bypass the system's cache. FileError: the file cannot be read."""
    try:
        return _native.probe_disk(file, nbytes, depth, seconds, sequential, rings=asked_for_rings())
    except _native.DiskError as error:
        raise FileError(str(error)) from None
