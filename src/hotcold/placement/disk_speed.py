"""Measures how fast a file's disk reads, past the system's cache where that can be."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hotcold.errors import UserError
from hotcold.formats.files import FileError, RegularFile
from hotcold.kernels.file_reads import READERS, measure_reads, reads_at_once, way_of_reading
from hotcold.values import printable, size

#: Bytes of random reads, and how many are under way at once; where a model's reads of that size are more, as
#: many as these, too.
SIZES = (4 << 10, 64 << 10, 512 << 10, 2 << 20)
DEPTHS = (1, 4, READERS)
_SECONDS = 0.25  # of each


@dataclass(frozen=True)
class Reads:
    """One measurement."""

    nbytes: int  #: of one read
    depth: int  #: reads under way at once
    sequential: bool
    gb_s: float  #: 1e9 bytes a second


@dataclass(frozen=True)
class DiskSpeed:
    """Measured speeds of the disk that a file lies on; ``str()`` gives a table."""

    path: str
    direct: bool  #: past the system's cache; else figures may be the cache's
    reads: tuple[Reads, ...]
    way: str = "by threads"

    def _depths(self, nbytes: int) -> dict[int, float]:
        return {each.depth: each.gb_s for each in self.reads if each.nbytes == nbytes and not each.sequential}

    @property
    def sequential_gb_s(self) -> float:
        return next(each.gb_s for each in self.reads if each.sequential)

    def report(self) -> dict[str, Any]:
        """The report for ``--json``."""
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
        for depth in sorted({depth for own in columns for depth in own}):
            row = "".join(f"{own[depth]:12.3f}" if depth in own else f"{'-':>12}" for own in columns)
            lines.append(f"{f'{depth} at once':<14}{row}")
        return "\n".join(lines)


def large_file(path: Path) -> RegularFile:
    """Opens a file that is long enough for :func:`measure_disk`. UserError: it is too short, or no file."""
    file = RegularFile(path)
    if file.size < 8 * SIZES[-1]:
        seen = f"{printable(path.name)} has {size(file.size)}"
        raise UserError(f"{seen}: a file of {size(8 * SIZES[-1])} at least is needed to measure its disk")
    return file


def measure_disk(path: Path, advance: Callable[[int, int], None] | None = None) -> DiskSpeed:
    """Reads a file in several ways, for some seconds in all; ``advance`` gets the number of finished
    measurements and their total. UserError: it is too short, or cannot be read."""
    file = large_file(path)
    kinds = [(SIZES[-1], DEPTHS[-1], True)]
    for nbytes in SIZES:
        kinds += [(nbytes, depth, False) for depth in sorted({*DEPTHS, reads_at_once(nbytes)})]
    found, direct = list[Reads](), True
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
            found.append(Reads(nbytes, depth, sequential, rate / 1e9))
    if advance is not None:
        advance(len(kinds), len(kinds))
    return DiskSpeed(str(path), direct, tuple(found), way_of_reading())
