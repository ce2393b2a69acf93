"""A bound of memory for a program and its share of the system's cache of files: a cgroup (Linux, as root).

The group is made inside this process's own, so its bounds apply, too. Cached pages of a file belong to
the group that read them first: drop the file from the cache before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """A group with a limit on the bytes of all its members."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        old = (folder / "memory.limit_in_bytes").exists()  # version 1
        for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if old else ("memory.max",):
            if (folder / name).exists():
                (folder / name).write_text(str(limit), encoding="ascii")
        self._cache = "\ncache " if old else "\nfile "

    def enter(self) -> None:
        """Takes the process that calls this into the group: ``preexec_fn`` of a child."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

    @property
    def cached_bytes(self) -> int:
        """How much of it files in the system's cache have."""
        stat = "\n" + (self.folder / "memory.stat").read_text(encoding="ascii")
        return int(stat.split(self._cache, 1)[1].split("\n", 1)[0])


def _own() -> Path:
    """The folder of this process's own group. RuntimeError: there is none for memory."""
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _ROOT / "memory" / path.lstrip("/")
    if (_ROOT / "cgroup.controllers").exists():
        return _ROOT / path.lstrip("/")
    raise RuntimeError("this system has no cgroups for memory")


@contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup]:
    """A group of at most ``limit`` bytes, removed at the end; its members must have ended by then."""
    folder = _own() / f"hotcold-{os.getpid()}"
    folder.mkdir()
    try:
        yield MemoryGroup(folder, limit)
    finally:
        for _ in range(100):  # members that were killed take a moment
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.1)
        else:
            folder.rmdir()
