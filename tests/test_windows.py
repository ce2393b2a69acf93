"""Holds the code to what Windows has, as far as it can be seen elsewhere: no calls of POSIX but in the places
listed here, texts with a stated encoding, and the forms of Windows with stand-ins for its library."""

from __future__ import annotations

import ast
import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hotcold.processes import guarded, windows
from hotcold.processes.windows import OVER_TIME, Bounds, ExtendedLimits, MemoryCounters, memory_counters

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
    "hosting/state.py": {"os.sysconf"},  # behind sys.platform
    "kernels/cores.py": {"os.sched_getaffinity", "os.sched_setaffinity"},  # where os has them
    "kernels/memory_nodes.py": {"os.sched_getaffinity"},
    "formats/files.py": {"os.preadv"},
    "commands/echo.py": {"termios", "os.tcgetpgrp", "os.getpgrp"},  # behind sys.platform
    "commands/interrupts.py": {"os.set_blocking", "signal.SIGUSR1", "signal.pthread_kill"},
    "commands/line_input.py": {"readline"},  # an ImportError is expected
    "training/sparse_checkpoint.py": {"os.rename"},  # of a folder, to a name that was free
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
    """A stand-in: a job keeps what it is told, and the process has used 3 s and holds 100 bytes."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.told: list[tuple[int, int, float, int]] = []  # flags, bytes, seconds, size

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
        self.told.append((found.basic.flags, found.process_memory, found.basic.process_time / 1e7, size))
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
    assert [told[::3] for told in system.told] == [(0x400, size), (0x500, size), (0x502, size), (0x500, size)]
    assert [told[1] for told in system.told] == [0, 1100, 1100, 1100]
    assert system.told[2][2] == 5.5


def test_where_a_job_is_refused_nothing_is_bounded() -> None:
    bounds = Bounds(Kernel32(refuses=True))
    bounds.memory(1000)
    bounds.time(2.5, 600)
    bounds.time(0, 0)


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


COMPILER = "x86_64-w64-mingw32-g++"
LAYOUTS = """
#include <cstddef>
#include <windows.h>
#include <psapi.h>
using Job = JOBOBJECT_EXTENDED_LIMIT_INFORMATION;
using Memory = PROCESS_MEMORY_COUNTERS;
static_assert(sizeof(Job) == {job} && offsetof(Job, ProcessMemoryLimit) == {memory});
static_assert(offsetof(Job, BasicLimitInformation.LimitFlags) == {flags});
static_assert(sizeof(Memory) == {counters} && offsetof(Memory, WorkingSetSize) == {resident});
static_assert(offsetof(Memory, PagefileUsage) == {committed});
static_assert(JobObjectExtendedLimitInformation == 9 && JOB_OBJECT_LIMIT_DIE_ON_UNHANDLED_EXCEPTION == 0x400);
static_assert(JOB_OBJECT_LIMIT_PROCESS_TIME == 2 && JOB_OBJECT_LIMIT_PROCESS_MEMORY == 0x100);
static_assert(CREATE_NEW_PROCESS_GROUP == 0x200 && ERROR_NOT_ENOUGH_QUOTA == {over});
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
    }
    source = tmp_path / "layouts.cpp"
    source.write_text(LAYOUTS.format(**numbers), encoding="utf-8")
    done = subprocess.run(
        [COMPILER, "-std=c++17", "-fsyntax-only", str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
