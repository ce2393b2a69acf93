"""How much memory this process may still take: a model that cannot fit is refused before it is read."""

from pathlib import Path

from hotcold.kernels.cores import cgroups, read_text

#: A cgroup v1 limit at or above this means "no limit" (the kernel rounds 2**63 down to a page).
_UNLIMITED = 1 << 60

#: Files with the limit and the use, and the line of memory.stat with the file cache that can be dropped.
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that can be allocated without swapping or being killed; None where the system does not say. The
    smaller of the kernel's ``MemAvailable`` and what every enclosing cgroup (version 1 or 2) has left."""
    limits = [_mem_available(proc / "meminfo")]
    for version, folder in cgroups(proc / "self" / "cgroup", cgroup, "memory"):
        limits.append(_room(folder, *(_V2 if version == 2 else _V1)))
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known)) if known else None


def _mem_available(meminfo: Path) -> int | None:
    for line in read_text(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _room(group: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> int | None:
    limit, usage = read_text(group / limit_name).strip(), read_text(group / usage_name).strip()
    if not limit.isdigit() or not usage.isdigit() or int(limit) >= _UNLIMITED:
        return None  # "max", or no such file
    # File cache counts as use, but the kernel drops it before it kills.
    counts = dict(line.split(" ", 1) for line in read_text(group / "memory.stat").splitlines() if " " in line)
    return int(limit) - int(usage) + int(counts.get(reclaimable_name, 0))
