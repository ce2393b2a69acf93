"""The benchmarks of the server: a load that passes on it, and that sees each fault of one that has them."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("benchmarks")

OPTIONS = argparse.Namespace(
    clients=4, seconds=0.5, leave=0.0, requests=6, tokens=8, prompt=80, ignore_eos=True, seed=1,
    routes=["chat", "completions", "native"], dialects=False,
)  # fmt: skip


@pytest.fixture
def load() -> ModuleType:
    return importlib.import_module("serving.load")


@pytest.fixture
def client() -> ModuleType:
    return importlib.import_module("lib.client")


def last_line(script: str, arguments: list[str], repository: Path) -> dict[str, Any]:
    command = [sys.executable, repository / "benchmarks" / script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.full
def test_a_short_load_on_the_server(repository: Path) -> None:
    arguments = [
        "--seconds",
        "3",
        "--clients",
        "12",
        "-np",
        "4",
        "--requests",
        "12",
        "-n",
        "16",
        "--leave",
        "0.3",
        "--dialects",
    ]
    found = last_line("serving/load.py", arguments, repository)
    assert found["ok"] and found["wrong"].keys() == {
        "lost", "cut", "different", "running", "pages_leaked", "memory_grew",
        "figures_missing", "reconnected",
    }  # fmt: skip
    assert found["answers"] > 0 and found["left"] > 0 and found["tokens"] > 0
    assert found["figures"]["cache_pages"] > 0 and found["ttft_s"]["p50"] > 0


@pytest.mark.full
def test_a_short_run_of_what_http_costs(repository: Path) -> None:
    model = repository / "src" / "hotcold" / "demo" / "fable-7m-q8_0.gguf"
    # Long enough that both clients generate at the same time on a busy machine, too.
    arguments = ["-m", str(model), "--parallel", "2", "--rounds", "2", "-n", "200", "-c", "256", "-p", "4"]
    found = last_line("serving/cost.py", arguments, repository)
    assert len(found["samples"]) == 2 and found["ratio"]["least"] > 0


@pytest.mark.full
def test_a_short_run_of_dialects(repository: Path) -> None:
    found = last_line("serving/dialects.py", ["--rounds", "2", "-n", "16"], repository)
    assert set(found["ratio"]) == {"/v1/responses", "/v1/messages", "/api/chat"}
    assert all(each["tok_s"]["n"] == 2 and each["tok_s"]["median"] > 0 for each in found["ratio"].values())


@pytest.mark.full
def test_a_short_run_of_delays(repository: Path) -> None:
    found = last_line("serving/delay.py", ["--windows", "2", "--seconds", "0.5"], repository)
    assert found["steps"] > 0 and found["prompts"] > 0 and found["quiet"]["p50_ms"] > 0


@pytest.mark.full
def test_a_short_run_of_clients_that_do_not_stop_others(repository: Path) -> None:
    script = repository / "benchmarks" / "serving" / "no_client_stops_others.py"
    arguments = ["--mb", "0.6", "--text-mb", "0.6", "--connections", "60", "--seconds", "1"]
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)
    found = json.loads(done.stdout.splitlines()[-1])
    # Whether the times are right is for a quiet machine.
    assert found.keys() == {"large", "tokenize", "connections", "connections_without_files"}
    assert set(found["large"]["tools"]["status"]) == {400} and found["large"]["tools"]["completions"] > 0
    assert found["tokenize"]["status"] == 200 and found["tokenize"]["beside"]["pieces"] > 0
    assert found["connections"]["lines"] == 1 and found["connections_without_files"]["ok"]


# --- servers with faults ---


class Faulty:
    """Answers every request with the same text; ``fault`` makes something of some answers."""

    def __init__(self, fault: str) -> None:
        self.fault, self.count = fault, 0

    def lines(self, route: str, stream: bool) -> list[bytes]:
        self.count += 1
        wrong = self.count > OPTIONS.requests and self.count % 5 == 0  # not requests that are asked alone
        text = "other" if wrong and self.fault == "different" else "the same"
        if route == "/completion":
            events = [{"content": text, "stop": False}, {"content": "", "stop": True, "stop_type": "eos"}]
        elif route.endswith("chat/completions"):
            events = [
                {"choices": [{"index": 0, "delta": {"content": text}}]},
                {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            ]
        else:
            events = [{"choices": [{"index": 0, "text": text, "finish_reason": "stop"}]}]
        if not stream:
            reply = events[0] | {"stop": True, "stop_type": "eos"}
            for choice in reply.get("choices", ()):
                choice |= {"message": choice.pop("delta", {}), "finish_reason": "stop"}
            return [json.dumps(reply).encode()]
        found = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
        if route != "/completion":
            found.append(b"data: [DONE]\n\n")
        if wrong and self.fault == "cut":
            found.pop()
        if wrong and self.fault == "error event":
            found[-1:] = [b'data: {"error": {"message": "broken"}}\n\n', found[-1]]
        if wrong and self.fault == "inside an event":
            found[-1] = found[-1][:9]
        return found

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            blocks = self.lines(head.split(b" ")[1].decode(), body["stream"])
            if self.fault == "refused once" and self.count % 7 == 0:
                self.count += 1
                writer.write(b"HTTP/1.1 429 no\r\nRetry-After: 0\r\nContent-Length: 2\r\n\r\n{}")
                continue
            if self.fault == "status" and self.count % 5 == 0 and self.count > OPTIONS.requests:
                writer.write(b"HTTP/1.1 500 no\r\nContent-Length: 2\r\n\r\n{}")
                continue
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for block in blocks:
                writer.write(b"%x\r\n%s\r\n" % (len(block), block))
            if self.fault == "connection" and self.count % 5 == 0 and self.count > OPTIONS.requests:
                writer.close()
                return
            writer.write(b"0\r\n\r\n")
            await writer.drain()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        async def until_left(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await self.answer(reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(until_left, "127.0.0.1", 0)
        async with server:
            yield "http://{}:{}".format(*server.sockets[0].getsockname())


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("nothing", None),
        ("refused once", None),
        ("different", "different"),
        ("cut", "cut"),
        ("error event", "lost"),
        ("inside an event", "lost"),
        ("status", "lost"),
        ("connection", "lost"),
    ],
)
def test_faults_are_seen(load: ModuleType, client: ModuleType, fault: str, kind: str | None) -> None:
    async def run() -> Any:
        async with Faulty(fault).running() as url:
            made = load.Load(client.Server(url), load.requests(OPTIONS), OPTIONS)
            await made.answer_alone()
            await made.run(None)
            return made

    made = asyncio.run(run())
    found = load.report(made, {"requests_running": 0.0, "cache_pages": 0.0}, own_server=True)
    assert {name for name, value in found["wrong"].items() if value} == ({kind} if kind else set()), found
    assert found["ok"] is (kind is None) and found["answers"] > 0
    assert (found["refused_and_sent_again"] > 0) is (fault == "refused once")


def test_what_the_server_says_of_itself_is_judged(load: ModuleType, client: ModuleType) -> None:
    made = load.Load(client.Server("http://127.0.0.1:1"), [], OPTIONS)
    made.seconds = 1.0
    figures = {
        "requests_running": 0.0,
        "cache_pages": 10.0,
        "cache_pages_free": 7.0,
        "cache_pages_shared": 3.0,
    }
    assert load.report(made, figures, own_server=True)["ok"]
    assert not load.report(made, {}, own_server=True)["ok"] and load.report(made, {}, own_server=False)["ok"]
    assert (
        load.report(made, {**figures, "cache_pages_free": 6.0}, own_server=True)["wrong"]["pages_leaked"] == 1
    )
    assert load.report(made, {**figures, "requests_waiting": 1.0}, own_server=True)["wrong"]["running"] == 1
    flat, growing = [[{1: (100 + step * by) << 20} for step in range(40)] for by in (0, 3)]
    for memory, grew in ((flat, 0), (growing, 1)):
        made.found.memory = memory
        assert load.report(made, figures, own_server=True)["wrong"]["memory_grew"] == grew


def test_percentiles() -> None:
    report = importlib.import_module("lib.report")
    assert report.percentiles([float(n) for n in range(101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert report.percentiles([1.0])["p50"] is None
