"""Reads of a file as models larger than memory make them, by io_uring and by threads in turns.

    python benchmarks/cpu/disk_reads.py -m model.gguf
    python benchmarks/cpu/disk_reads.py -m model.gguf --rounds 25

Rows of 1152 bytes (Q4_0, 2048 weights) at random places, one alone or as many as an expert has, are read
together and packed, again and again for 0.1 s in each way. Columns: reads together, bytes of each, MB/s by
threads and by io_uring (medians), the median of the rounds' ratios, and processor seconds for a GB by both.
The file should be some GB, and nothing else should use its disk: ratios of pairs bear some of that.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import time
from pathlib import Path

from hotcold.kernels import _native
from hotcold.kernels.file_reads import READERS

ROW, COLUMNS, Q4_0 = 1152, 2048, 2
#: Reads together, and rows of each.
CASES = ((400, 1), (400, 4), (200, 14), (9, 768), (24, 768), (12, 1820), (36, 1820))
SECONDS = 0.1
PLACES = 1000  #: that reads are drawn of


class Reads:
    """Random places of a file, and memory for so many of them."""

    def __init__(self, path: Path, disk: _native.Disk, number: int, count: int, rows: int) -> None:
        memory = _native.Arena().take(count * rows * ROW)
        weights = _native.WeightRows(memory, 0, ROW, count * rows, COLUMNS, Q4_0)
        draw = random.Random(1)
        where = [draw.randrange(path.stat().st_size - rows * ROW) for _ in range(PLACES)]
        self.shelf = _native.Shelf(disk, path.name, PLACES, count)
        self.shelf.add(disk, weights, False, number, where, rows, ROW)
        self.count, self.draw, self.nbytes = count, draw, count * rows * ROW
        self.last: set[int] = set()

    def measure(self) -> tuple[float, float]:
        """Bytes a second, and processor seconds of a GB."""
        began, before, done = time.perf_counter(), cpu_seconds(), 0
        while not done or time.perf_counter() < began + SECONDS:
            others = [i for i in range(PLACES) if i not in self.last]  # a shelf reads what it does not have
            self.last = {*self.draw.sample(others, self.count)}
            self.shelf.fill(list(self.last), 0)
            done += self.nbytes
        return done / (time.perf_counter() - began), (cpu_seconds() - before) / (done / 1e9)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", type=Path, required=True, metavar="FILE", help="any large file")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    disks = [_native.Disk(READERS, True, rings) for rings in (False, True)]
    with args.model.open("rb") as file:
        numbers = [disk.add(file.fileno()) for disk in disks]
    direct = all(disk.direct(number) for disk, number in zip(disks, numbers, strict=True))
    print("past the system's cache" if direct else "through the system's cache")
    print(f"{'reads':>6}{'bytes':>10}{'threads':>10}{'io_uring':>10}{'ratio':>8}{'CPU s/GB':>16}")
    for count, rows in CASES:
        ways = [
            Reads(args.model, disk, number, count, rows) for disk, number in zip(disks, numbers, strict=True)
        ]
        found: list[list[tuple[float, float]]] = []
        for i in range(args.rounds):
            pair = [each.measure() for each in (ways if i % 2 else reversed(ways))]
            found.append(pair if i % 2 else pair[::-1])
        rates = [statistics.median(pair[way][0] for pair in found) / 1e6 for way in (0, 1)]
        cpu = [statistics.median(pair[way][1] for pair in found) for way in (0, 1)]
        ratio = statistics.median(rings[0] / threads[0] for threads, rings in found)
        line = f"{count:>6}{rows * ROW:>10}{rates[0]:>10.1f}{rates[1]:>10.1f}{ratio:>8.2f}"
        print(f"{line}{cpu[0]:>8.2f}{cpu[1]:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
