"""How many threads are worth starting: what affinity, physical cores and the CPU quotas of cgroups leave."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple


class Cores(NamedTuple):
    cpus: Collection[int]  #: logical CPUs of the affinity
    physical: int  #: cores of those; two threads of one core wait for the same units
    quota: int | None  #: CPUs' worth of time, rounded up: the smallest of the cgroups around this process


def find_cores(root: Path = Path("/"), cpus: Collection[int] | None = None) -> Cores:
    """Of ``cpus`` (None: the affinity); ``root`` has ``proc`` and ``sys``: what it lacks limits nothing."""
    if cpus is None:
        if hasattr(os, "sched_getaffinity"):
            cpus = os.sched_getaffinity(0)
        else:
            cpus = range(getattr(os, "process_cpu_count", os.cpu_count)() or 1)
    topology = root / "sys/devices/system/cpu"
    cores = {_core(topology / f"cpu{cpu}/topology/thread_siblings_list", cpu) for cpu in cpus}
    groups = cgroups(root / "proc/self/cgroup", root / "sys/fs/cgroup", "cpu")
    quotas = [quota for version, folder in groups if (quota := _quota(version, folder))]
    return Cores(cpus, len(cores), min(quotas, default=None))


def available_cores(root: Path = Path("/"), cpus: Collection[int] | None = None) -> int:
    """Cores that this process may keep busy, at least 1; parameters of :func:`find_cores`."""
    _, physical, quota = find_cores(root, cpus)
    return max(1, min(physical, quota or physical))


def cache_bytes(cpus: Collection[int], root: Path = Path("/")) -> int:
    """Of the caches of these CPUs, the largest where several have the same users; 0 where unknown."""
    sizes: dict[str, int] = {}
    for path in (root / f"sys/devices/system/cpu/cpu{cpu}/cache" for cpu in cpus):
        for size in path.glob("index*/size"):
            users, nbytes = read_text(size.with_name("shared_cpu_list")), read_text(size).partition("K")[0]
            sizes[users] = max(sizes.get(users, 0), int(f"0{nbytes}") << 10)
    return sum(sizes.values())


def cgroups(membership: Path, mount: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Version (1, 2) and folder of each cgroup around this process that may limit what a controller governs.

    ``membership`` is ``/proc/self/cgroup``, ``mount`` ``/sys/fs/cgroup``; a container may see its own group
    there, and not the path that it is told."""
    for line in read_text(membership).splitlines():
        hierarchy, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            if hierarchy == "0":
                yield 2, mount.joinpath(*parts[:depth])
            elif controller in controllers.split(","):
                yield 1, mount.joinpath(controller, *parts[:depth])


def read_text(path: Path) -> str:
    """A file of ``/proc`` or ``/sys``; the empty text where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _core(siblings: Path, cpu: int) -> str:
    """The same text for each CPU of one core: the list of them, as "0,4" or "0-1"."""
    text = read_text(siblings).strip()
    try:
        ranges = [part.split("-") for part in text.split(",")]
        return text if any(int(ends[0]) <= cpu <= int(ends[-1]) for ends in ranges) else str(cpu)
    except ValueError:
        return str(cpu)


def _quota(version: int, folder: Path) -> int | None:
    """CPUs' worth of time, rounded up; None without a limit."""
    try:
        if version == 2:
            quota, period = map(int, read_text(folder / "cpu.max").split())
        else:
            quota, period = (int(read_text(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
        return -(-quota // period) if quota > 0 else None
    except (ValueError, ZeroDivisionError):
        return None  # "max", or no such file
