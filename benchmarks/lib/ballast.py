"""Memory that is taken away from a machine for a while, so that the system's cache of files has little room.

A child locks memory until only ``leave`` bytes of the machine's are not locked. It gives all of it back
when the block ends, when ``seconds`` are over, when its parent ends, or when less than ``floor`` bytes are
available, as others need more than they did; and it is the first that the kernel kills where memory runs
out. Linux, as root or with ``ulimit -l unlimited``.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CHUNK = 64 << 20
_READY, _GONE = "locked", "gave back"
_PR_SET_PDEATHSIG = 1


def meminfo(name: str) -> int:
    """Bytes of a line of /proc/meminfo."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def killed_first() -> None:
    """Lets the kernel end this process, and those that it starts, before all others."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


class Ballast:
    """What the child has said."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child = child
        self.locked = 0
        self.gave_back = ""  #: why, if it did so by itself

    def listen(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            said, rest = line.strip().split(":", 1)
            if said == _READY:
                self.locked = int(rest)
            else:
                self.gave_back = rest.strip()

    @property
    def holds(self) -> bool:
        return bool(self.locked) and not self.gave_back and self.child.poll() is None


@contextmanager
def ballast(leave: int, floor: int, seconds: int) -> Iterator[Ballast]:
    """Waits until memory is locked. RuntimeError: it cannot be."""
    command = [sys.executable, __file__, str(leave), str(floor), str(seconds), str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        found = Ballast(child)
        listener = threading.Thread(target=found.listen, daemon=True)
        listener.start()
        try:
            while not found.locked:
                if child.poll() is not None or found.gave_back:
                    raise RuntimeError(f"no memory could be locked: {found.gave_back or child.returncode}")
                time.sleep(0.05)
            yield found
        finally:
            child.kill()
            child.wait()
            listener.join()


def _lock(leave: int, floor: int, seconds: int, parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        return
    killed_first()
    until = time.monotonic() + seconds
    wanted = meminfo("MemTotal") - leave
    held: list[mmap.mmap] = []
    why = "nothing was to be locked"
    while len(held) * _CHUNK < wanted:
        if meminfo("MemAvailable") < floor + _CHUNK:
            why = "others need the memory"
            break
        chunk = mmap.mmap(-1, _CHUNK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        at = ctypes.addressof(ctypes.c_char.from_buffer(chunk))
        if libc.mlock(ctypes.c_void_p(at), ctypes.c_size_t(_CHUNK)):
            why = os.strerror(ctypes.get_errno())
            break
        held.append(chunk)
    else:
        print(f"{_READY}:{len(held) * _CHUNK}", flush=True)
        why = "the time is over"
        while time.monotonic() < until:
            if meminfo("MemAvailable") < floor:
                why = "others need the memory"
                break
            time.sleep(0.05)
    print(f"{_GONE}: {why}", flush=True)
    os._exit(0)  # which is the fastest way to give memory back


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("leave", "floor", "seconds", "parent"):
        parser.add_argument(name, type=int)
    _lock(**vars(parser.parse_args()))
