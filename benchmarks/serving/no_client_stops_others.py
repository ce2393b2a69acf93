"""How long a client waits for others that send large requests, and what strangers can make the server write.

    python benchmarks/serving/no_client_stops_others.py              # the built-in model (SentencePiece)
    python benchmarks/serving/no_client_stops_others.py -m FILE      # a file of yours
    python benchmarks/serving/no_client_stops_others.py --only tokenize

Three measures, each with a server of its own:

* ``large``: four requests of ``--mb`` (3) at once, one in each dialect, with 128 tools, and then with long
  messages. Completions of two tokens are asked for until all four are answered. ``later_s`` is the slowest of
  these completions minus the median of completions alone; at most 1 s is right.
* ``tokenize``: a text of ``--text-mb`` (4) becomes tokens with their pieces while a text is streamed.
  ``longest_pause_s`` of the stream beside it; below 0.1 s is right. Bytes are those of the server's front.
* ``connections``: ``--connections`` (3000) without a key that stay for ``--seconds`` (8), with a server that
  may open enough files, and with one that may not. ``lines`` is the most of one cause; 1 is right.

The last line of stdout is a JSON object; the exit code is 1 where something was not right."""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.server import ServerProcess, resident_bytes, serving

TEXT = Path(__file__).resolve().parents[2] / "tests" / "data" / "heidi.txt"
SHORT = {"prompt": "Once upon a time", "max_tokens": 2, "ignore_eos": True, "temperature": 0}
LATER_S, PAUSE_S, LINES = 1.0, 0.1, 1
_PATIENCE_S = 300.0
_TOOLS = 128
_FEW_FILES = 160  # of a server that runs out of them


class Asked:
    """One request over a connection of its own, and when the bytes of its answer came."""

    def __init__(self, url: str, path: str, body: Any) -> None:
        parts = urlsplit(url)
        data = json.dumps(body).encode()
        head = [f"POST {path} HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json"]
        head += [f"Content-Length: {len(data)}", "Connection: close", "", ""]
        self._sent = "\r\n".join(head).encode() + data
        self._address = (parts.hostname or "", parts.port or 80)
        self.size = len(data)
        self.status, self.received, self.seconds = 0, 0, 0.0
        self.moments: list[float] = []

    def run(self) -> None:
        start = time.perf_counter()
        with socket.create_connection(self._address, timeout=_PATIENCE_S) as connection:
            connection.sendall(self._sent)
            while data := connection.recv(1 << 20):
                if not self.received:
                    self.status = int(data.split()[1])
                self.received += len(data)
                self.moments.append(time.perf_counter())
        self.seconds = time.perf_counter() - start

    def begin(self) -> threading.Thread:
        thread = threading.Thread(target=self.run, daemon=True)
        thread.start()
        return thread


def large_bodies(kind: str, size: int) -> list[tuple[str, dict[str, Any]]]:
    """One request of about ``size`` bytes for each dialect."""
    text = TEXT.read_text(encoding="utf-8").encode("ascii", "replace").decode()
    text = text * (size // len(text) + 1)
    share = size // _TOOLS
    said = [{"role": "user", "content": "Hello" if kind == "tools" else text[:size]}]
    schema = {"type": "object", "properties": {"place": {"type": "string"}}}
    tools = [
        {"name": f"tool_{i}", "description": text[i * share : (i + 1) * share], "parameters": schema}
        for i in range(_TOOLS if kind == "tools" else 0)
    ]
    functions = [{"type": "function", "function": each} for each in tools]
    claudes = [
        {"name": each["name"], "description": each["description"], "input_schema": schema} for each in tools
    ]
    return [
        ("/v1/chat/completions", {"messages": said, "tools": functions, "max_tokens": 2}),
        ("/v1/responses", {"input": said, "tools": [{"type": "function", **each} for each in tools]}),
        ("/v1/messages", {"messages": said, "tools": claudes, "max_tokens": 2, "model": "any"}),
        ("/api/chat", {"messages": said, "tools": functions, "stream": False}),
    ]


def measure_large(url: str, size: int) -> dict[str, Any]:
    def completion() -> float:
        asked = Asked(url, "/v1/completions", SHORT)
        asked.run()
        if asked.status != 200:
            raise SystemExit(f"a completion of two tokens was answered with {asked.status}")
        return asked.seconds

    completion()
    alone = statistics.median(completion() for _ in range(5))
    figures: dict[str, Any] = {"alone_s": round(alone, 3)}
    for kind in ("tools", "messages"):
        asked = [Asked(url, path, body) for path, body in large_bodies(kind, size)]
        threads = [each.begin() for each in asked]
        beside = [completion()]
        while any(thread.is_alive() for thread in threads):
            beside.append(completion())
        figures[kind] = {
            "bytes": [each.size for each in asked],
            "status": [each.status for each in asked],
            "answered_s": [round(each.seconds, 2) for each in asked],
            "completions": len(beside),
            "slowest_s": round(max(beside), 3),
            "later_s": round(max(beside) - alone, 3),
        }
    figures["ok"] = all(figures[kind]["later_s"] <= LATER_S for kind in ("tools", "messages"))
    return figures


def measure_tokenize(server: ServerProcess, size: int) -> dict[str, Any]:
    """The stream is long enough to last, or is asked for again."""
    text = TEXT.read_text(encoding="utf-8").encode("ascii", "replace").decode()
    text = (text * (size // len(text) + 1))[:size]
    stream = {**SHORT, "max_tokens": 400, "stream": True}
    front = server.process.pid
    figures: dict[str, Any] = {}
    for name in ("alone", "beside"):
        tokenize = Asked(server.url, "/tokenize", {"content": text[: size - 100], "with_pieces": True})
        before, most = resident_bytes(front), 0
        ends = time.perf_counter() + 3
        thread = tokenize.begin() if name == "beside" else None
        pauses: list[float] = []
        while thread.is_alive() if thread else time.perf_counter() < ends:
            asked = Asked(server.url, "/v1/completions", stream)
            asked.run()
            pauses += [later - earlier for earlier, later in pairwise(asked.moments)]
            most = max(most, resident_bytes(front))
        figures[name] = {"longest_pause_s": round(max(pauses), 4), "pieces": len(pauses)}
        if thread:
            figures |= {"status": tokenize.status, "seconds": round(tokenize.seconds, 2)}
            figures |= {"sent_bytes": tokenize.size, "received_bytes": tokenize.received}
            figures["front_bytes"] = {"before": before, "most": most, "after": resident_bytes(front)}
    return {**figures, "ok": figures["status"] == 200 and figures["beside"]["longest_pause_s"] < PAUSE_S}


def measure_connections(server: ServerProcess, log: Path, count: int, seconds: float) -> dict[str, Any]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    parts = urlsplit(server.url)
    before = len(log.read_text(encoding="utf-8").splitlines())
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.socket()) for _ in range(count)]
        for connection in made:
            connection.setblocking(False)  # some wait until the server accepts them
            connection.connect_ex((parts.hostname or "", parts.port or 80))
        time.sleep(seconds / 4)
        for connection in made:
            with contextlib.suppress(OSError):
                connection.send(f"GET /v1/models HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        time.sleep(seconds)
        lines = log.read_text(encoding="utf-8").splitlines()[before:]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    server.wait_until_ready()  # once they have gone
    causes = Counter(" ".join(line.split()[2:5]) for line in lines)  # without times and the request's id
    most = max(causes.values(), default=0)
    return {"lines": most, "causes": [*causes], "ok": most <= LINES}


@contextlib.contextmanager
def running(
    options: argparse.Namespace, arguments: list[str], *, requests: bool = False
) -> Iterator[tuple[ServerProcess, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        arguments = [*arguments, *(["-m", options.model] if options.model else [])]
        arguments += ["-t", str(options.threads)] if options.threads else []
        with serving(arguments, log, requests=requests) as server:
            yield server, log


def measures(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    mb = 1_000_000
    if "large" in options.only:
        with running(options, []) as (server, _):
            yield "large", measure_large(server.url, int(options.mb * mb))
    if "tokenize" in options.only:
        with running(options, []) as (server, _):
            yield "tokenize", measure_tokenize(server, int(options.text_mb * mb))
    if "connections" in options.only:
        with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
            keys.write("a-key-for-this-measure\n")
            keys.flush()
            for name, files in (("connections", None), ("connections_without_files", _FEW_FILES)):
                with running(options, ["--api-key-file", keys.name], requests=True) as (server, log):
                    if files is not None:
                        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (files, files))
                    yield name, measure_connections(server, log, options.connections, options.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-m", "--model", help="GGUF file (default: the built-in model)")
    add("-t", "--threads", type=int, help="of the server's engine (its default)")
    add("--mb", type=float, default=3, help="size of each large request")
    add("--text-mb", type=float, default=4, help="size of the text that becomes tokens")
    add("--connections", type=int, default=3000)
    add("--seconds", type=float, default=8, help="how long the connections stay")
    kinds = ("large", "tokenize", "connections")
    add("--only", nargs="+", choices=kinds, default=kinds)
    results: dict[str, Any] = {}
    for name, figures in measures(parser.parse_args()):
        print(name, json.dumps(figures), flush=True)
        results[name] = figures
    print(json.dumps(results))
    return 0 if all(each["ok"] for each in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
