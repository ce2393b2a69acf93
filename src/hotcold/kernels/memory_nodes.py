"""The memory nodes (NUMA) of weights: interleaved over each node whose CPUs this process may use.

Any thread may read any weight. Threads are not pinned and take each other's work; prompts and single tokens
are cut differently; active neurons are unknown at loading. So no page belongs near one thread. Interleaved
weights are read at the speed of all nodes' memory together, not at the speed of the one node whose thread
loaded them."""

import os
from collections.abc import Collection
from pathlib import Path

from hotcold.kernels.cores import ranges_of, read_text


def memory_nodes(root: Path = Path("/"), cpus: Collection[int] | None = None) -> tuple[int, ...]:
    """Returns the nodes' numbers; empty for one node. ``cpus`` None: the affinity; ``root`` has ``sys``."""
    if cpus is None:
        if not hasattr(os, "sched_getaffinity"):
            return ()
        cpus = os.sched_getaffinity(0)
    folder = root / "sys/devices/system/node"
    nodes = _numbers(read_text(folder / "has_memory"))
    used = [
        node for node in nodes if not _numbers(read_text(folder / f"node{node}/cpulist")).isdisjoint(cpus)
    ]
    return tuple(sorted(used)) if len(used) > 1 else ()


def _numbers(text: str) -> set[int]:
    """Returns the numbers in a list of the system, such as "0-3,8"."""
    return {number for first, last in ranges_of(text) for number in range(first, last + 1)}
