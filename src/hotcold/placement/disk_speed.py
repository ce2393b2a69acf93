"""Measurement of a disk's read speed, past the system's cache if possible."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hotcold.errors import UserError
from hotcold.formats.files import FileError, RegularFile
from hotcold.kernels.file_reads import READERS, measure_reads, reads_at_once, way_of_reading
from hotcold.values import printable, size

#: Bytes and number of concurrent random reads. If a model has more concurrent reads of a size, that number is
#: measured, too.
SIZES = (4 << 10, 64 << 10, 512 << 10, 2 << 20)
DEPTHS = (1, 4, READERS)
_SECONDS = 0.25  # per measurement


@dataclass(frozen=True)
class Reads:
    """One measurement."""

    nbytes: int  #: bytes of one read
    depth: int  #: concurrent reads
    sequential: bool
    gb_s: float  #: 1e9 bytes a second


@dataclass(frozen=True)
class DiskSpeed:
    """Measured speeds of a file's disk; ``str()`` gives a table."""

    path: str
    direct: bool  #: read past the system's cache; otherwise figures may be the cache's
    reads: tuple[Reads, ...]
    way: str = "by threads"

    def _depths(self, nbytes: int) -> dict[int, float]:
        return {each.depth: each.gb_s for each in self.reads if each.nbytes == nbytes and not each.sequential}

    @property
    def sequential_gb_s(self) -> float:
        return next(each.gb_s for each in self.reads if each.sequential)

    def report(self) -> dict[str, Any]:
        """Returns the report for ``--json``."""
        return asdict(self)

    def __str__(self) -> str:
        how = "past the system's cache" if self.direct else "through the system's cache, which may have them"
        lines = [
            f"{'disk':<12}of {printable(self.path, 60)}",
            f"{'':<12}{how}, {self.way}",
            f"{'':<12}one after another: {self.sequential_gb_s:.2f} GB/s",
            "",
            f"{'GB/s, random':<14}" + "".join(f"{size(n):>12}" for n in SIZES),
        ]
        columns = [self._depths(n) for n in SIZES]
        for depth in sorted({depth for column in columns for depth in column}):
            row = "".join(f"{column[depth]:12.3f}" if depth in column else f"{'-':>12}" for column in columns)
            lines.append(f"{f'{depth} at once':<14}{row}")
        return "\n".join(lines)


def large_file(path: Path) -> RegularFile:
    """Opens a file that is long enough for :func:`measure_disk`. UserError: too short, or no regular file."""
    file = RegularFile(path)
    if file.size < 8 * SIZES[-1]:
        got = f"{printable(path.name)} has {size(file.size)}"
        raise UserError(f"{got}: a file of {size(8 * SIZES[-1])} at least is needed to measure its disk")
    return file


def measure_disk(path: Path, advance: Callable[[int, int], None] | None = None) -> DiskSpeed:
    """Reads a file in several ways, for some seconds in total. ``advance`` gets the number of finished
    measurements and their total. UserError: the file is too short, or cannot be read."""
    file = large_file(path)
    kinds = [(SIZES[-1], DEPTHS[-1], True)]
    for nbytes in SIZES:
        kinds += [(nbytes, depth, False) for depth in sorted({*DEPTHS, reads_at_once(nbytes)})]
    reads, direct = list[Reads](), True
    with file.descriptor() as number:
        for i, (nbytes, depth, sequential) in enumerate(kinds):
            if advance is not None:
                advance(i, len(kinds))
            try:
                probe = number, nbytes, depth, _SECONDS
                rate, past_cache = measure_reads(*probe, sequential=sequential)
            except FileError as error:
                raise UserError(f"{printable(path.name)}: {error}") from None
            direct = direct and past_cache
            reads.append(Reads(nbytes, depth, sequential, rate / 1e9))
    if advance is not None:
        advance(len(kinds), len(kinds))
    return DiskSpeed(str(path), direct, tuple(reads), way_of_reading())
