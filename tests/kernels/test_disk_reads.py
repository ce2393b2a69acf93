"""A disk's reads by io_uring and by threads, beside the file's own bytes: pieces of each size, ends of files,
short reads, faults, interrupts, forks, and systems that have no io_uring."""

from __future__ import annotations

import _thread
import errno
import gc
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from hotcold.errors import UserError
from hotcold.kernels import _native, cpu_disk, file_reads

F32 = 0
ON_LINUX = sys.platform == "linux"
RINGS = not _native.why_no_rings()
needs_rings = pytest.mark.skipif(not RINGS, reason="needs Linux with io_uring")
WAYS = [pytest.param(True, marks=needs_rings, id="io_uring"), pytest.param(False, id="threads")]


class Experts:
    """Matrices of random bytes, stored in a file one after another, from an odd place on."""

    def __init__(self, path: Path, count: int, rows: int, cols: int, first: int = 77, after: int = 0) -> None:
        self.path, self.count, self.rows, self.row_bytes, self.first = path, count, rows, 4 * cols, first
        self.nbytes = rows * self.row_bytes
        self.data = np.random.default_rng(3).bytes(first + count * self.nbytes + after)
        path.write_bytes(self.data)

    def offset(self, expert: int) -> int:
        return self.first + expert * self.nbytes

    def of(self, expert: int) -> bytes:
        return self.data[self.offset(expert) : self.offset(expert) + self.nbytes]

    def cache(self, disk: _native.Disk, slots: int, offsets: dict[int, int] | None = None) -> ExpertCache:
        with self.path.open("rb") as file:
            number = disk.add(file.fileno())
        return ExpertCache(self, disk, number, slots, offsets or {})


class ExpertCache:
    def __init__(
        self, own: Experts, disk: _native.Disk, number: int, slots: int, offsets: dict[int, int]
    ) -> None:
        count = slots * own.rows
        memory = _native.Arena().take(count * own.row_bytes)
        self.weights = _native.WeightRows(memory, 0, own.row_bytes, count, own.row_bytes // 4, F32)
        self.native = _native.ExpertCache(disk, "a layer", own.count, slots)
        where = [offsets.get(expert, own.offset(expert)) for expert in range(own.count)]
        self.native.add(disk, self.weights, False, number, where, own.rows, own.row_bytes)
        self.own = own

    def fill(self, experts: list[int]) -> None:
        self.native.fill(experts, 0)

    def at(self, place: int) -> bytes:
        return self.weights.part(place * self.own.rows, self.own.rows).packed()


def read_some(own: Experts, disk: _native.Disk, seed: int = 0) -> None:
    """Reads experts in any order, and looks at each byte."""
    order = np.random.default_rng(seed).permutation(own.count)[: own.count - 1].tolist()
    cache = own.cache(disk, own.count - 1)
    cache.fill(order)
    for place, expert in enumerate(order):
        assert cache.at(place) == own.of(expert)


#: By experts, rows and columns: several pieces of an expert, one, and more reads than are under way at once.
SHAPES = [(3, 700, 1024), (12, 64, 700), (200, 2, 33)]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("rings", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_the_files(shape: tuple[int, int, int], rings: bool, direct: bool, tmp_path: Path) -> None:
    """The last expert ends with the file, in the middle of a block."""
    own = Experts(tmp_path / "file", *shape)
    disk = _native.Disk(4, direct, rings)
    assert disk.rings == rings and disk.threads == 4
    for seed in range(2):
        read_some(own, disk, seed)
    nbytes, reads, busy_ns = disk.counts()
    assert nbytes >= 2 * (own.count - 1) * own.nbytes and reads >= 2 * (own.count - 1) and busy_ns > 0


@pytest.mark.parametrize("rings", WAYS)
@pytest.mark.parametrize("pieces", [1, 9])
def test_any_number_of_pieces(pieces: int, rings: bool, tmp_path: Path) -> None:
    disk = _native.Disk(pieces, True, rings)
    for i, shape in enumerate(SHAPES[1:]):
        read_some(Experts(tmp_path / f"file{i}", *shape), disk)


@pytest.mark.parametrize("rings", WAYS)
def test_rows_larger_than_a_piece(rings: bool, tmp_path: Path) -> None:
    row = file_reads.READ_BYTES + 4096
    read_some(Experts(tmp_path / "file", 3, 2, row // 4), _native.Disk(2, True, rings))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("rings", WAYS)
def test_a_file_system_that_gives_less(rings: bool, direct: bool, tmp_path: Path) -> None:
    """The rest is asked for."""
    own = Experts(tmp_path / "file", 12, 64, 700)
    disk = _native.Disk(4, direct, rings)
    disk.give_at_most(4096 if direct else 1000)
    read_some(own, disk)
    assert disk.counts()[1] == own.count - 1


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("rings", WAYS)
def test_one_read_that_fails_ends_nothing_else(rings: bool, direct: bool, tmp_path: Path) -> None:
    own = Experts(tmp_path / "file", 8, 64, 700, after=100)
    disk = _native.Disk(4, direct, rings)
    for offset in (1 << 40, len(own.data) - own.nbytes + 1, len(own.data) - 5000):
        cache = own.cache(disk, 6, {3: offset})
        with pytest.raises(_native.DiskError, match="a layer: expert 3 cannot be read: the file is shorter"):
            cache.fill([0, 1, 3, 5])
        cache = own.cache(disk, 6, {3: offset})
        cache.fill([7, 2, 6, 4])
        assert [cache.at(place) for place in range(4)] == [own.of(expert) for expert in (7, 2, 6, 4)]


@pytest.mark.skipif(sys.platform == "win32", reason="an open file is not cut there")
@pytest.mark.parametrize("rings", WAYS)
def test_a_file_that_changes(rings: bool, tmp_path: Path) -> None:
    own = Experts(tmp_path / "file", 8, 64, 700)
    disk = _native.Disk(4, True, rings)
    cache, times = own.cache(disk, 6), os.stat(own.path)
    os.truncate(own.path, own.offset(4) + 3)
    with pytest.raises(_native.DiskError, match="expert 7 cannot be read: the file is shorter"):
        cache.fill([7])
    own.path.write_bytes(own.data)
    os.utime(own.path, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))
    with pytest.raises(_native.DiskError, match="expert 2 cannot be read: the file has changed"):
        cache.fill([2])
    os.utime(own.path, ns=(times.st_atime_ns, times.st_mtime_ns))
    cache.fill([2])


@pytest.mark.parametrize("rings", WAYS)
def test_a_file_that_cannot_be_read(rings: bool, tmp_path: Path) -> None:
    own = Experts(tmp_path / "file", 4, 8, 64)
    disk = _native.Disk(2, False, rings)
    with (tmp_path / "other").open("wb") as other:
        number = disk.add(other.fileno())
    with pytest.raises(_native.DiskError, match=r"expert [01] cannot be read: (Bad file descriptor|Input)"):
        ExpertCache(own, disk, number, 3, {}).fill([0, 1])
    read_some(own, disk)


@pytest.mark.parametrize("rings", WAYS)
def test_an_interrupt_ends_the_wait(rings: bool, tmp_path: Path) -> None:
    """And what is under way then goes to memory that is still there."""
    own = Experts(tmp_path / "file", 40, 64, 700)
    disk = _native.Disk(4, True, rings)
    cache = own.cache(disk, 30)
    disk.hold(True)
    timer = threading.Timer(0.05, _thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        cache.fill(list(range(30)))
    timer.join()
    disk.hold(False)
    del cache
    read_some(own, disk)


@pytest.mark.skipif(not ON_LINUX, reason="needs /proc")
@pytest.mark.parametrize("rings", WAYS)
def test_no_descriptor_is_left(rings: bool, tmp_path: Path) -> None:
    """None goes to a program that this process starts, and none stays when the disk is gone."""
    import fcntl

    gc.collect()
    before = {*open_files()}
    own = Experts(tmp_path / "file", 5, 8, 64)
    disk = _native.Disk(8, True, rings)
    read_some(own, disk)
    found = {*open_files()} - before
    assert len(found) == (9 if rings else 1)  # four rings, what wakes each, and the file
    assert all(fcntl.fcntl(each, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for each in found)
    del disk
    gc.collect()
    assert not found & {*open_files()}


@pytest.mark.skipif(not ON_LINUX, reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("rings", WAYS)
def test_a_forked_process_leaves_the_disk_alone(rings: bool, tmp_path: Path) -> None:
    gc.collect()
    before = {*open_files()}
    own = Experts(tmp_path / "file", 30, 64, 700)
    disk = _native.Disk(4, True, rings)
    cache = own.cache(disk, 20)
    child = os.fork()
    if not child:
        try:
            del cache, disk
            left = [what for number, what in open_files().items() if number not in before]
            os._exit(5 if any("io_uring" in each for each in left) else 0)
        finally:
            os._exit(6)
    cache.fill(list(range(20)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [cache.at(place) for place in range(20)] == [own.of(expert) for expert in range(20)]
    read_some(own, disk)


def open_files() -> dict[int, str]:
    """This process's descriptors, and what each is of."""
    found = {}
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the list itself
            found[int(each)] = os.readlink(f"/proc/self/fd/{each}")
    return found


#: Forbids a system call, as containers do, for all threads.
FORBID = """
import ctypes, os, platform, struct, sys
from pathlib import Path
from hotcold.kernels import _native, cpu_disk, file_reads
sys.path.insert(0, sys.argv[4])
from test_disk_reads import Experts, read_some
number, error = int(sys.argv[1]), int(sys.argv[2])
code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | error), (0x06, 0, 0, 0x7FFF0000)]
packed = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in code))
program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(packed)))
libc = ctypes.CDLL(None, use_errno=True)
def forbid():
    seccomp = {"x86_64": 317, "aarch64": 277}.get(platform.machine())
    if seccomp is None or libc.prctl(38, 1, 0, 0, 0) or libc.syscall(seccomp, 1, 1, program):
        os._exit(77)
own = Experts(Path(sys.argv[3]), 12, 64, 700)
"""

FROM_THE_BEGINNING = """
forbid()
disk = _native.Disk(3, True)
assert not disk.rings and disk.threads == 3, disk.threads
read_some(own, disk)
assert _native.why_no_rings() == error and file_reads.way_of_reading() == "by 8 threads"
assert file_reads.reads_at_once(4096) == file_reads.READERS
assert _native.probe_disk(os.open(sys.argv[3], os.O_RDONLY), 4096, 8, 0.0, False)[0] > 0
for refused in (lambda: _native.Disk(3, True, True), file_reads.has_rings):
    os.environ["HOTCOLD_READS"] = "io_uring"
    try:
        refused()
    except (_native.DiskError, ValueError) as raised:
        print(raised)
"""

LATER = """
disk = _native.Disk(3, True, True)
read_some(own, disk)
forbid()
for seed in range(3):
    read_some(own, disk, seed)
"""


def run_forbidding(number: int, error: int, then: str, folder: Path) -> list[str]:
    given = [str(number), str(error), str(folder / "file"), str(Path(__file__).parent)]
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FORBID + then, *given], capture_output=True, text=True, env=where, timeout=120
    )
    if done.returncode == 77:
        pytest.skip("needs a system that lets a process forbid itself system calls")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_rings
@pytest.mark.parametrize(
    ("number", "error"), [(425, errno.EPERM), (426, errno.ENOSYS)], ids=["setup", "enter"]
)
def test_a_system_that_forbids_io_uring_reads_by_threads(number: int, error: int, tmp_path: Path) -> None:
    assert run_forbidding(number, error, FROM_THE_BEGINNING, tmp_path) == [
        f"there is no io_uring: {os.strerror(error)}",
        f"HOTCOLD_READS is 'io_uring': this system does not allow it ({os.strerror(error)})",
    ]


@needs_rings
def test_a_ring_that_takes_no_reads_any_more(tmp_path: Path) -> None:
    """As where the kernel has no memory for another: its thread reads by itself."""
    assert run_forbidding(426, errno.EAGAIN, LATER, tmp_path) == []


def test_the_way_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOTCOLD_READS", raising=False)
    assert cpu_disk.Disk().native.rings == file_reads.has_rings() == RINGS
    monkeypatch.setenv("HOTCOLD_READS", "threads")
    assert not cpu_disk.Disk().native.rings and file_reads.way_of_reading() == "by 8 threads"
    assert file_reads.reads_at_once(4096) == file_reads.reads_at_once(1 << 30) == file_reads.READERS
    monkeypatch.setenv("HOTCOLD_READS", "mmap")
    with pytest.raises(UserError, match="HOTCOLD_READS is 'mmap': choose from io_uring and threads"):
        cpu_disk.Disk()
    if not RINGS:
        return
    monkeypatch.setenv("HOTCOLD_READS", "io_uring")
    assert cpu_disk.Disk().native.rings and file_reads.way_of_reading() == "by io_uring"
    found = [file_reads.reads_at_once(n) for n in (4096, 64 << 10, 884736, file_reads.READ_BYTES, 1 << 30)]
    assert found == [64, 64, 16, file_reads.READERS, file_reads.READERS]


@pytest.mark.parametrize("rings", WAYS)
@pytest.mark.parametrize("depth", [1, 5, 64])
def test_a_probe_reads_so(depth: int, rings: bool, tmp_path: Path) -> None:
    """However many pieces are under way at once."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with path.open("rb") as file:
        for sequential in (True, False):
            rate, _ = _native.probe_disk(file.fileno(), 4096, depth, 0.0, sequential, rings=rings)
            assert rate > 0
