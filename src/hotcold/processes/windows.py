"""Bounds of a process by a job object, and its memory, on Windows.

Functions take the library ``kernel32``; tests pass substitutes. Numbers have the sizes of Windows' 64-bit
types on every system."""

import contextlib
import ctypes
import os
import threading
from typing import Any

OVER_TIME = 1816  #: exit code of a process after the end of its time

_PROCESS_TIME, _PROCESS_MEMORY, _DIE_SILENTLY = 0x2, 0x100, 0x400
_EXTENDED_LIMITS = 9  # the class of a job's information
_TICKS = 10_000_000  # in a second


class _BasicLimits(ctypes.Structure):
    _fields_ = (
        ("process_time", ctypes.c_int64),
        ("job_time", ctypes.c_int64),
        ("flags", ctypes.c_uint32),
        ("least_working_set", ctypes.c_uint64),
        ("most_working_set", ctypes.c_uint64),
        ("processes", ctypes.c_uint32),
        ("affinity", ctypes.c_uint64),
        ("priority", ctypes.c_uint32),
        ("scheduling", ctypes.c_uint32),
    )


class ExtendedLimits(ctypes.Structure):
    """JOBOBJECT_EXTENDED_LIMIT_INFORMATION."""

    _fields_ = (
        ("basic", _BasicLimits),
        ("io", ctypes.c_uint64 * 6),
        ("process_memory", ctypes.c_uint64),
        ("job_memory", ctypes.c_uint64),
        ("peaks", ctypes.c_uint64 * 2),
    )


class MemoryCounters(ctypes.Structure):
    """PROCESS_MEMORY_COUNTERS."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("faults", ctypes.c_uint32),
        ("peak_resident", ctypes.c_uint64),
        ("resident", ctypes.c_uint64),
        ("pools", ctypes.c_uint64 * 4),
        ("committed", ctypes.c_uint64),
        ("peak_committed", ctypes.c_uint64),
    )


def memory_counters(library: Any) -> MemoryCounters:
    """Returns the memory of this process. Raises OSError if the system does not report it."""
    counters = MemoryCounters(size=ctypes.sizeof(MemoryCounters))
    if not library.K32GetProcessMemoryInfo(
        library.GetCurrentProcess(), ctypes.byref(counters), counters.size
    ):
        raise OSError("the memory of this process is unknown")
    return counters


class Bounds:
    """The bounds of this process, which the system enforces whatever code is running. If it refuses a job
    object, there are none, and only the parent's clock limits the process."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._limits = ExtendedLimits()
        self._limits.basic.flags = _DIE_SILENTLY  # no dialogue that waits for a user
        self._clock: threading.Timer | None = None
        self._job = library.CreateJobObjectW(None, None)  # ends with the process
        if not self._job or not library.AssignProcessToJobObject(self._job, library.GetCurrentProcess()):
            self._job = None
        self._set()

    def memory(self, additional: int) -> None:
        """Lets the process allocate ``additional`` additional bytes."""
        with contextlib.suppress(OSError):
            self._limits.process_memory = memory_counters(self._library).committed + additional
            self._limits.basic.flags |= _PROCESS_MEMORY
            self._set()

    def time(self, seconds: float, by_clock: float) -> None:
        """Ends the process after ``seconds`` of processor time in user mode, and after ``by_clock`` seconds;
        0 removes both limits. Only the first limit also ends C code that holds the interpreter."""
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
        self._limits.basic.flags &= ~_PROCESS_TIME
        if seconds:
            self._limits.basic.process_time = self._used() + int(seconds * _TICKS)
            self._limits.basic.flags |= _PROCESS_TIME
            self._clock = threading.Timer(by_clock, os._exit, (OVER_TIME,))
            self._clock.daemon = True
            self._clock.start()
        self._set()

    def _used(self) -> int:
        times = (ctypes.c_uint64 * 4)()
        at = [ctypes.byref(times, 8 * i) for i in range(4)]
        self._library.GetProcessTimes(self._library.GetCurrentProcess(), *at)
        return times[3]

    def _set(self) -> None:
        if self._job is not None:
            size = ctypes.sizeof(self._limits)
            self._library.SetInformationJobObject(
                self._job, _EXTENDED_LIMITS, ctypes.byref(self._limits), size
            )
