"""Windows calls that Python's library lacks: reads at a position, free memory, cores by kind.

Functions take the library to call, ``kernel32``; tests pass fakes. Numbers have the sizes of Windows' 64-bit
types on every system."""

import ctypes
import functools
import struct
import sys
from collections.abc import Collection
from typing import Any, NamedTuple

#: Error codes that callers handle.
END_OF_FILE, DENIED, IN_USE = 38, 5, 32

_GROUP = 64  # CPUs have numbers below this, in groups
_BY_CORE = 0  # RelationProcessorCore
#: A core's record: relationship, bytes, flag of several threads, kind, groups; and a group.
_RECORD, _IN_GROUP = struct.Struct("<IIBB20xH"), struct.Struct("<QH6x")


class Overlapped(ctypes.Structure):
    """Windows' structure OVERLAPPED."""

    _fields_ = (
        ("internal", ctypes.c_uint64 * 2),
        ("offset", ctypes.c_uint64),
        ("event", ctypes.c_uint64),
    )


class MemoryStatus(ctypes.Structure):
    """Windows' structure MEMORYSTATUSEX."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("free", ctypes.c_uint64),
        ("may_be_promised", ctypes.c_uint64),
        ("promisable", ctypes.c_uint64),
        ("addresses", ctypes.c_uint64 * 3),
    )


class Core(NamedTuple):
    cpus: frozenset[int]  #: numbers of its threads: 64 for each group
    kind: int  #: its efficiency class; higher is faster


@functools.cache
def kernel32() -> Any:
    """The system's library, with ``failure()``, which makes the ``OSError`` of this thread's last call.
    OSError: this system is not Windows."""
    if sys.platform != "win32":
        raise OSError("there is no kernel32")
    library: Any = ctypes.WinDLL("kernel32", use_last_error=True)
    library.failure = lambda: ctypes.WinError(ctypes.get_last_error())
    at, number = ctypes.c_void_p, ctypes.c_uint32
    library.CreateJobObjectW.restype = library.GetCurrentProcess.restype = at
    library.CreateJobObjectW.argtypes = [at, at]
    library.AssignProcessToJobObject.argtypes = [at, at]
    library.SetInformationJobObject.argtypes = [at, ctypes.c_int, at, number]
    library.K32GetProcessMemoryInfo.argtypes = [at, at, number]
    library.GetProcessTimes.argtypes = [at] * 5
    library.ReadFile.argtypes = [at, at, number, at, at]
    library.GlobalMemoryStatusEx.argtypes = [at]
    library.GetLogicalProcessorInformationEx.argtypes = [ctypes.c_int, at, at]
    library.GetProcessAffinityMask.argtypes = [at, at, at]
    return library


def read_at(library: Any, handle: int, view: memoryview, offset: int) -> int:
    """Reads bytes from a position of a file into ``view``, which must not be empty. Returns the number of
    bytes; 0 at the end. The file's own position becomes undefined. OSError: it cannot be read."""
    at, came = Overlapped(offset=offset), ctypes.c_uint32()
    first = ctypes.c_char.from_buffer(view)
    if library.ReadFile(handle, ctypes.byref(first), len(view), ctypes.byref(came), ctypes.byref(at)):
        return came.value
    error: OSError = library.failure()
    if code(error) == END_OF_FILE:
        return 0
    raise error


def code(error: OSError) -> int | None:
    """The system's own code of an error; None elsewhere."""
    number: int | None = getattr(error, "winerror", None)
    return number


def free_memory(library: Any) -> int:
    """Bytes that this process can allocate: the smaller of the free memory, including droppable caches, and
    the remaining commit limit. OSError: the system does not state them."""
    status = _memory_status(library)
    return min(int(status.free), int(status.promisable))


def memory_size(library: Any) -> int:
    """Bytes of this machine's memory. OSError: the system does not state them."""
    return int(_memory_status(library).total)


def _memory_status(library: Any) -> MemoryStatus:
    status = MemoryStatus(size=ctypes.sizeof(MemoryStatus))
    if not library.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise library.failure()
    return status


def cores(library: Any, cpus: Collection[int] | None = None) -> list[Core]:
    """The cores of ``cpus`` (None: the CPUs that this process may use). OSError: the call fails."""
    size = ctypes.c_uint32(0)
    library.GetLogicalProcessorInformationEx(_BY_CORE, None, ctypes.byref(size))  # returns the needed size
    data = ctypes.create_string_buffer(size.value)
    if not library.GetLogicalProcessorInformationEx(_BY_CORE, data, ctypes.byref(size)):
        raise library.failure()
    allowed = _affinity(library) if cpus is None else cpus
    result, at = [], 0
    while at < size.value:
        _, length, _, kind, groups = _RECORD.unpack_from(data, at)
        masks = [_IN_GROUP.unpack_from(data, at + _RECORD.size + _IN_GROUP.size * i) for i in range(groups)]
        members = {group * _GROUP + bit for mask, group in masks for bit in _bits(mask)}
        members = members if allowed is None else members.intersection(allowed)
        if members:
            result.append(Core(frozenset(members), kind))
        at += length
    return result


def _affinity(library: Any) -> list[int] | None:
    """The CPUs of this process's affinity mask; None if it has no restriction. Masks are for one group, and 0
    for a process in several groups."""
    process_mask, every = ctypes.c_uint64(), ctypes.c_uint64()
    process = library.GetCurrentProcess()
    known = library.GetProcessAffinityMask(process, ctypes.byref(process_mask), ctypes.byref(every))
    return _bits(process_mask.value) if known and process_mask.value != every.value else None


def _bits(mask: int) -> list[int]:
    return [bit for bit in range(_GROUP) if mask >> bit & 1]
