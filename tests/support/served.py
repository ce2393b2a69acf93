"""A ``hotcold serve`` process for tests, on the built-in model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

import hotcold

PATIENCE_S = 90
#: Answers that last, whatever the model would rather do.
LONG = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True}


class Served:
    """A running server. ``lines`` are those of stdout, ``errors`` those of stderr, so far."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hotcold", "serve", "--port", "0", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(hotcold.__file__).resolve().parents[1]),
                **(environment or {}),
            },
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.ready = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, args=(stream, lines))
            for stream, lines in ((self.process.stdout, self.lines), (self.process.stderr, self.errors))
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: Any, lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip("\n"))
            if " at http://" in line:
                self.ready.set()
        self.ready.set()  # it has ended

    @property
    def url(self) -> str:
        assert self.ready.wait(PATIENCE_S) and self.lines, self.errors
        found = re.search(r"http://\S+", self.lines[0])
        assert found
        return found[0]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, **more)

    def metric(self, name: str) -> float:
        with self.client() as client:
            text = client.get("/metrics").text
        (found,) = re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)
        return float(found)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit code, when it has ended by itself and all that it wrote was read."""
        code = self.process.wait(PATIENCE_S)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@contextmanager
def served(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[Served]:
    server = Served(*arguments, environment=environment)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def stream_of(server: Served, body: dict[str, Any], path: str = "/v1/completions") -> Iterator[Iterator[Any]]:
    """Data of the events of a stream, as they come."""
    with server.client() as client, client.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        yield (
            data if data == "[DONE]" else json.loads(data)
            for line in reply.iter_lines()
            if (data := line.removeprefix("data: ")) and line.startswith("data: ")
        )


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
