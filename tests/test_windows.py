"""Holds the code to what Windows has, as far as it can be seen elsewhere: no calls of POSIX but in the places
listed here, texts with a stated encoding, and the forms of Windows with stand-ins for its library."""

from __future__ import annotations

import ast
import ctypes
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

import hotcold.windows as calls
from hotcold.formats import files
from hotcold.formats.files import FileError, RegularFile, replacing
from hotcold.kernels.cores import Cores, find_cores, windows_cores
from hotcold.processes import guarded, windows
from hotcold.processes.windows import OVER_TIME, Bounds, ExtendedLimits, MemoryCounters, memory_counters
from hotcold.runtime.memory import available_memory
from hotcold.windows import DENIED, END_OF_FILE, IN_USE, MemoryStatus, Overlapped, cores, free_memory, read_at

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "hotcold"

MODULES = {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "readline", "syslog", "select"}
#: Attributes of modules that Windows lacks, or has with another meaning.
ATTRIBUTES = {
    "os": {
        "fork", "forkpty", "kill", "killpg", "getuid", "geteuid", "getpgrp", "tcgetpgrp", "setsid", "sysconf",
        "sched_getaffinity", "sched_setaffinity", "preadv", "pread", "pwrite", "mkfifo", "getloadavg",
        "uname", "statvfs", "fchmod", "chown", "O_NONBLOCK", "O_DIRECT", "O_CLOEXEC", "waitpid",
        "wait", "rename", "set_blocking",
    },
    "signal": {
        "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM", "SIGPROF", "SIGPIPE", "setitimer", "alarm",
        "pthread_kill", "pthread_sigmask", "ITIMER_PROF", "ITIMER_REAL",
    },
    "socket": {"AF_UNIX", "socketpair"},
    "time": {"tzset", "clock_gettime"},
}  # fmt: skip

#: Where they are, and what keeps Windows from them.
ALLOWED = {
    "processes/guarded.py": {  # behind sys.platform
        "resource", "signal.SIGPROF", "signal.SIGALRM", "signal.SIGKILL", "signal.setitimer",
        "signal.ITIMER_PROF", "signal.ITIMER_REAL", "signal.pthread_sigmask",
    },
    "processes/channel.py": {"select", "os.set_blocking"},  # only where select has poll
    "server/descriptors.py": {"resource"},  # behind sys.platform
    "hosting/state.py": {"os.sysconf"},  # behind sys.platform
    "kernels/cores.py": {"os.sched_getaffinity", "os.sched_setaffinity"},  # where os has them
    "kernels/memory_nodes.py": {"os.sched_getaffinity"},
    "formats/files.py": {"fcntl", "os.pread", "os.preadv"},  # behind sys.platform
    "commands/echo.py": {"termios", "os.tcgetpgrp", "os.getpgrp"},  # behind sys.platform
    "commands/interrupts.py": {"os.set_blocking", "signal.SIGUSR1", "signal.pthread_kill"},
    "commands/line_input.py": {"readline"},  # an ImportError is expected
    "training/saving.py": {"os.rename"},  # of a folder, to a name that was free
}  # fmt: skip


def uses(source: str) -> set[str]:
    """The modules and attributes above that a source imports or names."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} & MODULES
            named = {alias.name for alias in node.names} & ATTRIBUTES.get(node.module, set())
            found |= {f"{node.module}.{name}" for name in named}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= (
                {f"{node.value.id}.{node.attr}"} if node.attr in ATTRIBUTES.get(node.value.id, ()) else set()
            )
    return found


def without_encoding(source: str) -> list[int]:
    """The lines that read or write text in an encoding that the system chooses."""
    lines = []
    tree = ast.parse(source)
    own_open = any(isinstance(node, ast.arg) and node.arg == "open" for node in ast.walk(tree))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(word.arg == "encoding" for word in node.keywords):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("read_text", "write_text"):
            positional = 0 if node.func.attr == "read_text" else 1
            if len(node.args) == positional:
                lines.append(node.lineno)
        elif isinstance(node.func, ast.Name) and node.func.id == "open" and not own_open:
            mode = next((word.value for word in node.keywords if word.arg == "mode"), None)
            mode = node.args[1] if len(node.args) > 1 else mode
            if mode is None or (isinstance(mode, ast.Constant) and "b" not in mode.value):
                lines.append(node.lineno)
    return lines


def test_calls_of_posix_are_where_the_list_says() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): used
        for path in sorted(PACKAGE.rglob("*.py"))
        if (used := uses(path.read_text(encoding="utf-8")))
    }
    assert found == ALLOWED


def test_texts_have_an_encoding() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if (lines := without_encoding(path.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_what_is_looked_for_is_found() -> None:
    assert uses("import os, fcntl\nfrom signal import SIGKILL\nos.fork()\nself.kill()") == {
        "fcntl", "signal.SIGKILL", "os.fork",
    }  # fmt: skip
    text = 'open(p)\nopen(p, "w")\nopen(p, "rb")\np.read_text()\np.write_text("a")\nopen(p, encoding="ascii")'
    assert without_encoding(text) == [1, 2, 4, 5]


class Kernel32:
    """A stand-in: a job keeps its limits, and the process has used 3 s and holds 100 bytes."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.limits: list[tuple[int, int, float, int]] = []  # flags, bytes, seconds, size

    def CreateJobObjectW(self, security: None, name: None) -> int:
        return 0xFFFF_0000_0001  # a handle has 64 bits

    def GetCurrentProcess(self) -> int:
        return 2**64 - 1

    def AssignProcessToJobObject(self, job: int, process: int) -> int:
        assert (job, process) == (0xFFFF_0000_0001, 2**64 - 1)
        return 0 if self.refuses else 1

    def SetInformationJobObject(self, job: int, kind: int, at: Any, size: int) -> int:
        assert kind == 9 and not self.refuses
        found = ctypes.cast(at, ctypes.POINTER(ExtendedLimits)).contents
        self.limits.append((found.basic.flags, found.process_memory, found.basic.process_time / 1e7, size))
        return 1

    def GetProcessTimes(self, process: int, *at: Any) -> int:
        for place, ticks in zip(at, (1, 2, 50_000_000, 30_000_000), strict=True):
            ctypes.cast(place, ctypes.POINTER(ctypes.c_uint64))[0] = ticks
        return 1

    def K32GetProcessMemoryInfo(self, process: int, at: Any, size: int) -> int:
        found = ctypes.cast(at, ctypes.POINTER(MemoryCounters)).contents
        assert size == found.size == ctypes.sizeof(MemoryCounters)
        found.resident, found.committed = 70, 100
        return 0 if self.refuses else 1


def test_a_job_bounds_the_process_and_lifts_its_bounds() -> None:
    system = Kernel32()
    bounds = Bounds(system)
    bounds.memory(1000)
    bounds.time(2.5, 600)
    bounds.time(0, 0)
    size = ctypes.sizeof(ExtendedLimits)
    assert [limits[::3] for limits in system.limits] == [
        (0x400, size),
        (0x500, size),
        (0x502, size),
        (0x500, size),
    ]
    assert [limits[1] for limits in system.limits] == [0, 1100, 1100, 1100]
    assert system.limits[2][2] == 5.5


def test_where_a_job_is_refused_nothing_is_bounded() -> None:
    system = Kernel32(refuses=True)
    bounds = Bounds(system)
    bounds.memory(1000)
    bounds.time(2.5, 600)
    bounds.time(0, 0)
    assert system.limits == []


def test_the_clock_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timer:
        daemon = False

        def __init__(self, seconds: float, call: Any, arguments: tuple[int]) -> None:
            made.append((seconds, call, arguments))

        def start(self) -> None:
            made.append("started")

        def cancel(self) -> None:
            made.append("cancelled")

    made: list[Any] = []
    monkeypatch.setattr("threading.Timer", Timer)
    bounds = Bounds(Kernel32())
    bounds.time(1, 11)
    bounds.time(0, 0)
    assert made == [(11, os._exit, (OVER_TIME,)), "started", "cancelled"]


def test_memory_of_the_process() -> None:
    assert memory_counters(Kernel32()).resident == 70
    with pytest.raises(OSError, match="unknown"):
        memory_counters(Kernel32(refuses=True))


def test_ctrl_c_stays_away_from_children() -> None:
    assert guarded.apart("win32") == {"creationflags": 0x200}
    assert guarded.apart("linux") == {"start_new_session": True}


def failure(code: int) -> OSError:
    """An error as Python raises it on Windows."""
    error = PermissionError(13, "Access is denied") if code in (DENIED, IN_USE) else OSError(5, "A fault")
    error.winerror = code  # type: ignore[attr-defined,unused-ignore]
    return error


class System:
    """A stand-in: a file with the bytes 0 to 99 at ``start``, memory, and cores; each has a kind and a
    mask in each of its groups."""

    records = b""

    def __init__(
        self, *kinds: tuple[int, list[tuple[int, int]]], start: int = 0, own: int = 0, every: int = 0
    ) -> None:
        self.kinds, self.start, self.masks = kinds, start, (own, every)
        self.free, self.promisable, self.code = 3000, 2000, 0

    def failure(self) -> OSError:
        return failure(self.code)

    def ReadFile(self, handle: int, to: Any, size: int, came: Any, at: Any) -> int:
        low, high = struct.unpack_from("<16xII", ctypes.cast(at, ctypes.POINTER(Overlapped)).contents)
        data = bytes(range(100))[(high << 32 | low) - self.start :][:size]
        if not data and not self.code:
            self.code = END_OF_FILE
        if self.code:
            return 0
        ctypes.memmove(to, data, len(data))
        ctypes.cast(came, ctypes.POINTER(ctypes.c_uint32))[0] = len(data)
        return 1

    def GlobalMemoryStatusEx(self, at: Any) -> int:
        found = ctypes.cast(at, ctypes.POINTER(MemoryStatus)).contents
        assert found.size == ctypes.sizeof(MemoryStatus) == 64
        found.free, found.promisable = self.free, self.promisable
        return 0 if self.code else 1

    def GetLogicalProcessorInformationEx(self, kind: int, at: Any, size: Any) -> int:
        assert kind == 0
        data = self.records
        for kind, groups in self.kinds:
            body = struct.pack("<BB20xH", len(groups), kind, len(groups))
            body += b"".join(struct.pack("<QH6x", mask, group) for mask, group in groups)
            data += struct.pack("<II", 0, 8 + len(body)) + body
        ctypes.cast(size, ctypes.POINTER(ctypes.c_uint32))[0] = len(data)
        if at is None or self.code:
            return 0
        ctypes.memmove(at, data, len(data))
        return 1

    def GetCurrentProcess(self) -> int:
        return 2**64 - 1

    def GetProcessAffinityMask(self, process: int, own: Any, every: Any) -> int:
        for place, mask in zip((own, every), self.masks, strict=True):
            ctypes.cast(place, ctypes.POINTER(ctypes.c_uint64))[0] = mask
        return 1


def test_reads_are_at_a_position() -> None:
    view = memoryview(bytearray(8))
    assert read_at(System(), 7, view, 90) == 8 and bytes(view) == bytes(range(90, 98))
    far = (5 << 32) - 2  # from the one half of an offset to the other
    assert read_at(System(start=far), 7, view[2:6], far + 1) == 4 and bytes(view[2:6]) == b"\1\2\3\4"
    assert read_at(System(), 7, view, 96) == 4
    assert read_at(System(), 7, view, 100) == 0
    broken = System()
    broken.code = 23
    with pytest.raises(OSError, match="A fault"):
        read_at(broken, 7, view, 0)


def test_a_file_is_read_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    system = System()
    monkeypatch.setattr(files, "_read_at", lambda fd, view, offset: read_at(system, fd, view, offset))
    monkeypatch.setattr(files, "_READ_BYTES", 7)
    file = RegularFile(path)
    assert file.read(3, 90) == bytes(range(3, 93))
    with pytest.raises(FileError, match="ended at byte 100"):
        file.read(90, 11)
    system.code = 23
    with pytest.raises(FileError, match="cannot be read at byte 5: A fault"):
        file.read(5, 1)


@pytest.mark.parametrize("code", [DENIED, IN_USE, None])
def test_a_file_that_is_open_elsewhere_is_not_replaced(
    code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"old")

    def refused(*_: object) -> None:
        raise failure(code) if code else PermissionError(13, "Access is denied")

    monkeypatch.setattr(os, "replace", refused)
    message = "cannot be replaced (Access is denied): close what has it open, or give another name"
    with pytest.raises(FileError) as raised, replacing(path) as file:
        file.write(b"new")
    assert str(raised.value) == (message if code else "cannot be written: Access is denied")
    assert os.listdir(tmp_path) == ["model.gguf"] and path.read_bytes() == b"old"


def test_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System()
    assert free_memory(system) == 2000
    system.free = 500
    monkeypatch.setattr("hotcold.runtime.memory.kernel32", lambda: system)
    assert available_memory(tmp_path, tmp_path) == 500
    system.code = 5
    assert available_memory(tmp_path, tmp_path) is None


#: Two fast cores of two threads, and four slow ones; and two groups of one core each.
MIXED = ((1, [(0b11, 0)]), (1, [(0b1100, 0)]), *((0, [(1 << bit, 0)]) for bit in range(4, 8)))
GROUPS = ((0, [(1 << 63, 0)]), (0, [(0b11, 1)]))


def test_cores_and_their_kinds() -> None:
    fast = [0, 1, 2, 3]
    assert windows_cores(System(*MIXED)) == Cores([*range(8)], 6, fast, 2, None)
    assert windows_cores(System(*MIXED)).wanted == 2
    assert windows_cores(System(*MIXED), {1, 4, 5}) == Cores([1, 4, 5], 3, [1], 1, None)
    assert windows_cores(System(*MIXED[2:])).wanted == 4
    assert windows_cores(System(*GROUPS)) == Cores([63, 64, 65], 2, [63, 64, 65], 2, None)


#: What wine 8 said to a program in C on a machine of two cores.
RECORDED = bytes.fromhex(
    "0000000030000000000000000000000000000000000000000000000000000100" "01000000000000000000000000000000"
    "0000000030000000000000010000000000000000000000000000000000000100" "02000000000000000000000000000000"
)  # fmt: skip


def test_a_list_of_cores_that_wine_gave() -> None:
    class Recorded(System):
        records = RECORDED

    found = windows_cores(Recorded(own=3, every=3))
    assert (found.cpus, found.physical, found.fast_cpus, found.fast) == ([0, 1], 2, [0, 1], 2)


def test_affinity_is_kept() -> None:
    assert windows_cores(System(*MIXED, own=0b110010, every=0xFF)) == Cores([1, 4, 5], 3, [1], 1, None)
    assert windows_cores(System(*MIXED, own=0xFF, every=0xFF)).physical == 6
    assert [core.kind for core in cores(System(*MIXED, own=0b11000, every=0xFF))] == [1, 0]


def test_the_number_of_threads_asks_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Windows")
    system = System(*MIXED)
    monkeypatch.setattr("hotcold.kernels.cores.kernel32", lambda: system)
    assert find_cores().wanted == 2
    system.code = 5  # it does not say: each CPU counts
    assert find_cores(Path("nowhere"), range(8)).wanted == 8
    assert find_cores(Path("nowhere")).wanted >= 1
    with pytest.raises(OSError, match="no core"):
        windows_cores(System())


COMPILER = "x86_64-w64-mingw32-g++"
LAYOUTS = """
#include <cstddef>
#include <windows.h>
#include <psapi.h>
using Job = JOBOBJECT_EXTENDED_LIMIT_INFORMATION;
using Memory = PROCESS_MEMORY_COUNTERS;
using Core = SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX;
using Group = GROUP_AFFINITY;
static_assert(sizeof(Job) == {job} && offsetof(Job, ProcessMemoryLimit) == {memory});
static_assert(offsetof(Job, BasicLimitInformation.LimitFlags) == {flags});
static_assert(sizeof(Memory) == {counters} && offsetof(Memory, WorkingSetSize) == {resident});
static_assert(offsetof(Memory, PagefileUsage) == {committed});
static_assert(JobObjectExtendedLimitInformation == 9 && JOB_OBJECT_LIMIT_DIE_ON_UNHANDLED_EXCEPTION == 0x400);
static_assert(JOB_OBJECT_LIMIT_PROCESS_TIME == 2 && JOB_OBJECT_LIMIT_PROCESS_MEMORY == 0x100);
static_assert(CREATE_NEW_PROCESS_GROUP == 0x200 && ERROR_NOT_ENOUGH_QUOTA == {over});
static_assert(sizeof(OVERLAPPED) == {overlapped} && offsetof(OVERLAPPED, Offset) == {offset});
static_assert(offsetof(OVERLAPPED, OffsetHigh) == {offset} + 4 && offsetof(OVERLAPPED, hEvent) == {event});
static_assert(sizeof(MEMORYSTATUSEX) == {status} && offsetof(MEMORYSTATUSEX, ullAvailPhys) == {free});
static_assert(offsetof(MEMORYSTATUSEX, ullAvailPageFile) == {promisable});
static_assert(offsetof(Core, Size) == 4 && offsetof(Core, Processor.Flags) == 8);
static_assert(offsetof(Core, Processor.GroupCount) == 30 && offsetof(Core, Processor.GroupMask) == {record});
static_assert(sizeof(Group) == {group} && offsetof(Group, Mask) == 0 && offsetof(Group, Group) == 8);
static_assert(RelationProcessorCore == 0 && sizeof(KAFFINITY) == 8 && sizeof(WORD) == 2);
static_assert(ERROR_HANDLE_EOF == {end} && ERROR_ACCESS_DENIED == {denied});
static_assert(ERROR_SHARING_VIOLATION == {used});
"""


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"needs {COMPILER}")
def test_structures_lie_as_in_the_headers_of_windows(tmp_path: Path) -> None:
    limits, counters = ExtendedLimits, MemoryCounters
    numbers = {
        "job": ctypes.sizeof(limits),
        "memory": limits.process_memory.offset,
        "flags": limits.basic.offset + windows._BasicLimits.flags.offset,
        "counters": ctypes.sizeof(counters),
        "resident": counters.resident.offset,
        "committed": counters.committed.offset,
        "over": OVER_TIME,
        "overlapped": ctypes.sizeof(Overlapped),
        "offset": Overlapped.offset.offset,
        "event": Overlapped.event.offset,
        "status": ctypes.sizeof(MemoryStatus),
        "free": MemoryStatus.free.offset,
        "promisable": MemoryStatus.promisable.offset,
        "record": calls._RECORD.size,
        "group": calls._IN_GROUP.size,
        "end": END_OF_FILE,
        "denied": DENIED,
        "used": IN_USE,
    }
    source = tmp_path / "layouts.cpp"
    source.write_text(LAYOUTS.format(**numbers), encoding="utf-8")
    done = subprocess.run(
        [COMPILER, "-std=c++17", "-fsyntax-only", str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
