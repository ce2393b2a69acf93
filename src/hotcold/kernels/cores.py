"""Number of threads worth starting, from affinity, fast physical cores, and CPU quotas of cgroups."""

import ctypes
import os
import platform
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from hotcold.windows import cores as cores_of
from hotcold.windows import kernel32

#: A core is slow below this share of the fastest one's speed. Small cores are below it (Cortex-A55 with A76:
#: 0.52 and less). Equal cores at lower clocks are above (Zen 5c with Zen 5: 0.65). These help with prompts,
#: and reading memory does not depend on the clock.
_FAST_SHARE = 0.6


class Cores(NamedTuple):
    cpus: Collection[int]  #: logical CPUs of the affinity
    physical: int  #: their physical cores; two threads of one core compete for the same units
    fast_cpus: Collection[int]  #: CPUs of the faster kind, if a processor has two
    fast: int  #: physical cores of ``fast_cpus``
    quota: int | None  #: CPUs, rounded up, by the smallest CPU quota of its cgroups

    @property
    def wanted(self) -> int:
        """Number of threads to start: as many as fast cores, at least 1."""
        return max(1, min(self.fast, self.quota or self.fast))


def find_cores(root: Path = Path("/"), cpus: Collection[int] | None = None) -> Cores:
    """Finds the cores of ``cpus`` (None: the affinity). Files that ``root`` lacks set no limit."""
    if platform.system() == "Windows":
        with suppress(OSError):  # Windows does not report cores
            return windows_cores(kernel32(), cpus)
    if cpus is None:
        if hasattr(os, "sched_getaffinity"):
            cpus = os.sched_getaffinity(0)
        else:
            cpus = range(getattr(os, "process_cpu_count", os.cpu_count)() or 1)
    fast = _fast_cpus(root, cpus)
    groups = cgroups(root / "proc/self/cgroup", root / "sys/fs/cgroup", "cpu")
    quotas = [quota for version, folder in groups if (quota := _quota(version, folder))]
    return Cores(cpus, _count_cores(root, cpus), fast, _count_cores(root, fast), min(quotas, default=None))


def windows_cores(library: Any, cpus: Collection[int] | None = None) -> Cores:
    """Finds cores with the ``kernel32`` of Windows, which reports no quotas. Its kinds of cores have no
    speeds; only the highest kind is fast. OSError: Windows reports no cores."""
    cores = cores_of(library, cpus)
    if not cores:
        raise OSError("Windows names no core of this process")
    fastest = max(each.kind for each in cores)
    fast = [each for each in cores if each.kind == fastest]
    every, fast_cpus = (sorted(cpu for core in some for cpu in core.cpus) for some in (cores, fast))
    return Cores(every, len(cores), fast_cpus, len(fast), None)


def available_cores(root: Path = Path("/"), cpus: Collection[int] | None = None) -> int:
    """Returns :attr:`Cores.wanted`; parameters of :func:`find_cores`."""
    return find_cores(root, cpus).wanted


@contextmanager
def on_fast_cores(threads: int, cores: Cores) -> Iterator[None]:
    """Keeps threads that the calling thread starts inside the block on the fast cores, if these suffice.

    The calling thread's affinity is restored. Without affinity support the system places threads."""
    if not hasattr(os, "sched_setaffinity") or not threads <= cores.fast < cores.physical:
        yield
        return
    before = os.sched_getaffinity(0)
    with suppress(OSError):
        os.sched_setaffinity(0, cores.fast_cpus)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)


def cache_bytes(cpus: Collection[int], root: Path = Path("/")) -> int:
    """Returns bytes of these CPUs' caches, of caches of the same CPUs only the largest; 0 if unknown."""
    sizes: dict[str, int] = {}
    for path in (root / f"sys/devices/system/cpu/cpu{cpu}/cache" for cpu in cpus):
        for size in path.glob("index*/size"):
            users, kib = read_text(size.with_name("shared_cpu_list")), re.match(r"(\d+)K", read_text(size))
            sizes[users] = max(sizes.get(users, 0), int(kib[1]) << 10 if kib else 0)
    return sum(sizes.values())


def cgroups(membership: Path, mount: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yields version (1, 2) and folder of each cgroup around this process that a controller may limit.

    ``membership`` is ``/proc/self/cgroup``, ``mount`` ``/sys/fs/cgroup``. A container may have its own group
    mounted there, and not the path in ``membership``."""
    for line in read_text(membership).splitlines():
        hierarchy, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            if hierarchy == "0":
                yield 2, mount.joinpath(*parts[:depth])
            elif controller in controllers.split(","):
                yield 1, mount.joinpath(controller, *parts[:depth])


def read_text(path: Path) -> str:
    """Returns the text of a file of ``/proc`` or ``/sys``; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _count_cores(root: Path, cpus: Collection[int]) -> int:
    topology = root / "sys/devices/system/cpu"
    return len({_core(topology / f"cpu{cpu}/topology/thread_siblings_list", cpu) for cpu in cpus})


def _fast_cpus(root: Path, cpus: Collection[int]) -> Collection[int]:
    """Returns the CPUs of the faster kind; all CPUs if they are equal or unknown."""
    if platform.system() == "Darwin":
        return list(cpus)[: _sysctl("hw.perflevel0.physicalcpu") or len(cpus)]
    speeds = _speeds(root, cpus)
    least = _FAST_SHARE * max(speeds, default=0)
    fast = [cpu for cpu, speed in zip(cpus, speeds, strict=True) if speed >= least]
    return cpus if len(fast) == len(cpus) else fast


def _speeds(root: Path, cpus: Collection[int]) -> list[int]:
    """Returns the speed of each CPU, in any unit: Intel's two kinds, else Arm's capacity, else the clock."""
    kinds = [ranges_of(read_text(root / f"sys/devices/cpu_{kind}/cpus")) for kind in ("core", "atom")]
    if all(kinds):
        return [int(any(first <= cpu <= last for first, last in kinds[0])) for cpu in cpus]
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        texts = [read_text(root / f"sys/devices/system/cpu/cpu{cpu}" / name).strip() for cpu in cpus]
        if all(text.isdecimal() for text in texts):
            return [int(text) for text in texts]
    return [1] * len(cpus)


def _sysctl(name: str) -> int:
    """Returns an integer setting of macOS; 0 if the name is unknown."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    status = ctypes.CDLL(None).sysctlbyname(
        name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return value.value if status == 0 else 0


def ranges_of(text: str) -> list[tuple[int, int]]:
    """Returns the ranges in a list of CPUs such as "0-3,8"; empty if it cannot be parsed."""
    try:
        ends = [part.split("-") for part in text.strip().split(",")]
        return [(int(each[0]), int(each[-1])) for each in ends]
    except ValueError:
        return []


def _core(siblings: Path, cpu: int) -> str:
    """Returns the list of a core's CPUs, such as "0,4" or "0-1": the same text for each of them."""
    text = read_text(siblings).strip()
    return text if any(first <= cpu <= last for first, last in ranges_of(text)) else str(cpu)


def _quota(version: int, folder: Path) -> int | None:
    """Returns the quota in CPUs' worth of time, rounded up; None without a limit."""
    try:
        if version == 2:
            quota, period = map(int, read_text(folder / "cpu.max").split())
        else:
            quota, period = (int(read_text(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
        return -(-quota // period) if quota > 0 else None
    except (ValueError, ZeroDivisionError):
        return None  # "max", or no such file
