"""How much memory this process may still take: a model that cannot fit is refused before it is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

#: A cgroup v1 limit at or above this means "no limit" (the kernel rounds 2**63 down to a page).
_UNLIMITED = 1 << 60

#: Files with the limit and the use, and the line of memory.stat with the file cache that can be dropped.
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that can be allocated without swapping or being killed; None where the system does not say.

    The smaller of the kernel's ``MemAvailable`` and what every enclosing cgroup (version 1 or 2) has left.
    """
    limits = [_mem_available(proc / "meminfo"), *_cgroup_rooms(proc / "self" / "cgroup", cgroup)]
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known)) if known else None


def _mem_available(meminfo: Path) -> int | None:
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_rooms(membership: Path, root: Path) -> Iterator[int | None]:
    """Limit minus use of each cgroup that this process is in; None for those without a limit."""
    for line in _read(membership).splitlines():
        hierarchy, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            if hierarchy == "0":
                yield _room(root.joinpath(*parts[:depth]), *_V2)
            elif "memory" in controllers.split(","):
                yield _room(root.joinpath("memory", *parts[:depth]), *_V1)


def _room(group: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> int | None:
    limit, usage = _read(group / limit_name).strip(), _read(group / usage_name).strip()
    if not limit.isdigit() or not usage.isdigit() or int(limit) >= _UNLIMITED:
        return None  # "max", or no such file
    # File cache counts as use, but the kernel drops it before it kills.
    counts = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines() if " " in line)
    return int(limit) - int(usage) + int(counts.get(reclaimable_name, 0))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
