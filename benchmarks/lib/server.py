"""A ``hotcold serve`` process for benchmarks: started on a free port, watched, and ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ServerProcess:
    """The process and its children; ``url`` is the address that it printed."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    def wait_until_ready(self, patience_s: float = 120) -> None:
        """Until the model is loaded. SystemExit: it is not, in that time."""
        end = time.monotonic() + patience_s
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.2)
        raise SystemExit(f"the server at {self.url} is not ready")

    def resident_bytes(self) -> dict[int, int]:
        """Resident bytes of each of its processes, by process id."""
        return {pid: resident_bytes(pid) for pid in (self.process.pid, *children(self.process.pid))}


@contextmanager
def serving(arguments: list[str], log: Path, *, requests: bool = False) -> Iterator[ServerProcess]:
    """Runs ``hotcold serve --port 0`` with these arguments until the body ends; SystemExit where it does not
    start. What it says goes into ``log``, with a line for each request if ``requests``."""
    command = [sys.executable, "-m", "hotcold", "serve", "--port", "0", *arguments]
    command += [] if requests else ["--log-disable"]
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    try:
        address = None
        for line in process.stdout:
            if address := re.search(r"http://\S+", line):
                break
        if address is None:
            raise SystemExit(
                f"{' '.join(command)} ended with {process.wait()}: {log.read_text(encoding='utf-8')[-500:]}"
            )
        yield ServerProcess(process, address[0])
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()


def children(pid: int) -> list[int]:
    """The processes below one, on Linux."""
    ids: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            below = [int(child) for child in path.read_text().split()]
        except OSError:
            continue
        for child in below:
            ids += [child, *children(child)]
    return ids


def resident_bytes(pid: int) -> int:
    """0 for a process that has gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
