"""Chooses the memory nodes (NUMA) of weights: interleaved over each node whose CPUs this process may use.

Any thread may read any weight: threads are not pinned, a thread that is done takes others' pieces, prompts
and single tokens are cut differently, and which neurons fire is not known when a file is read. So no page has
a thread that it should be near. Spread evenly, the weights are read at the speed of all nodes' memory
together, instead of that of the node whose thread happened to load them.
"""

import os
from collections.abc import Collection
from pathlib import Path

from hotcold.kernels.cores import ranges_of, read_text


def memory_nodes(root: Path = Path("/"), cpus: Collection[int] | None = None) -> tuple[int, ...]:
    """The nodes' numbers; empty if there is only one. ``cpus`` None: the affinity; ``root`` has ``sys``."""
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
    """The numbers in a list of the system, such as "0-3,8"."""
    return {number for first, last in ranges_of(text) for number in range(first, last + 1)}
