"""Available memory of this process, so that a model that cannot fit is refused before it is read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotcold.errors import UserError
from hotcold.kernels.cores import cgroups, read_text
from hotcold.placement.memory_plan import MemoryPlan
from hotcold.runtime.options import LoadError
from hotcold.values import exact_size, round_size, size
from hotcold.windows import free_memory, kernel32, memory_size

#: A cgroup v1 limit at or above this means "no limit" (the kernel rounds 2**63 down to a page).
_UNLIMITED = 1 << 60

#: Part of the free memory that an automatic budget leaves to other programs, at most 1 GiB.
_RESERVE = 8

#: Files with the limit and the use, and the line of memory.stat with the droppable file cache.
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class MemoryShortError(LoadError):
    """A model that is larger than the available memory."""


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Returns the bytes that can be allocated without swapping or being killed; None if unknown. This is the
    minimum of the kernel's figure (``MemAvailable``, or Windows' call) and the remainder of every enclosing
    cgroup (version 1 or 2)."""
    limits = [_of_meminfo(proc / "meminfo", "MemAvailable"), _windows(free_memory)]
    for version, folder in cgroups(proc / "self" / "cgroup", cgroup, "memory"):
        limits.append(_free_of(folder, *(_V2 if version == 2 else _V1)))
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known)) if known else None


def machine_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Returns the bytes of this machine's memory, or of the smallest enclosing cgroup; None if unknown."""
    limits = [_of_meminfo(proc / "meminfo", "MemTotal"), _windows(memory_size)]
    for version, folder in cgroups(proc / "self" / "cgroup", cgroup, "memory"):
        limits.append(_limit(folder / (_V2 if version == 2 else _V1)[0]))
    return min((limit for limit in limits if limit is not None), default=None)


def check_budget(budget: int) -> None:
    """Raises UserError for a ``ram_budget`` above this machine's memory, or below 1 byte."""
    most = machine_memory()
    if budget < 1:
        raise UserError(f"`ram_budget` is {exact_size(budget)}: a size above 0 is needed, such as 8GiB")
    if most is not None and budget > most:
        got = f"`ram_budget` is {exact_size(budget)}, and this machine has {size(most)}"
        raise UserError(f"{got}: at most {exact_size(round_size(most))} are allowed (a bare number is GiB)")


def _of_meminfo(meminfo: Path, name: str) -> int | None:
    for line in read_text(meminfo).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _windows(ask: Callable[[Any], int]) -> int | None:
    try:
        return ask(kernel32())
    except OSError:
        return None


def _free_of(group: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> int | None:
    limit, usage = _limit(group / limit_name), read_text(group / usage_name).strip()
    if limit is None or not usage.isdigit():
        return None
    # File cache counts as use, but the kernel drops it before it kills a process.
    counts = dict(line.split(" ", 1) for line in read_text(group / "memory.stat").splitlines() if " " in line)
    return limit - int(usage) + int(counts.get(reclaimable_name, 0))


def _limit(path: Path) -> int | None:
    limit = read_text(path).strip()
    return int(limit) if limit.isdigit() and int(limit) < _UNLIMITED else None  # "max", or no such file


def own_budget() -> tuple[int, int] | None:
    """Returns the automatic budget, a round size, and the bytes that it leaves free; None if the free memory
    is unknown."""
    free = available_memory()
    if free is None:
        return None
    budget = round_size(free - min(1 << 30, free // _RESERVE))
    return budget, free - budget


def check_memory(plan: MemoryPlan, predictors: int | None = None) -> None:
    """Raises MemoryShortError if a plan needs more than the available memory; ``predictors`` as for
    :meth:`MemoryPlan.shortage`."""
    free = available_memory()
    if free is not None and (shortage := plan.shortage(free, predictors)):
        raise MemoryShortError(shortage)
