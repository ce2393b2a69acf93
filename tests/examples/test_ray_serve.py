"""The example of replicas behind Ray Serve: a local cluster of two; one is killed under load.

One test, since tests of a file may run in several processes, and each would start a cluster."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("benchmarks"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]

REPLICA = b"ray::ServeReplica:default:Replica"
#: A bound, not an expectation: two replicas start beside other tests on two slow cores.
PATIENCE_S = 900


@dataclass(frozen=True)
class Cluster:
    """The example in a process of its own."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


@pytest.fixture(scope="module")
def cluster(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ray")
    # Ray binds with SO_REUSEPORT as well; what is bound here and never listens keeps the port for it.
    with socket.socket() as held, (folder / "log").open("wb") as log:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        command = [sys.executable, repository / "examples" / "ray_serve.py", "--port", str(port)]
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            yield Cluster(f"http://127.0.0.1:{port}", process, folder / "log")
        finally:
            started = below(process.pid)
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pid in started:
                if is_ray(pid):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def client() -> ModuleType:
    return importlib.import_module("lib.client")


def below(pid: int) -> list[int]:
    """The processes that one has started, and they."""
    found: list[int] = importlib.import_module("lib.server").children(pid)
    return found


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def is_ray(pid: int) -> bool:
    return b"ray" in command_line(pid)


def replicas(pid: int) -> list[int]:
    """The processes that hold a replica."""
    return [each for each in below(pid) if command_line(each).startswith(REPLICA)]


async def until_ready(server: Any, cluster: Cluster) -> None:
    ends = time.monotonic() + PATIENCE_S
    while True:
        try:
            status, _ = await asyncio.wait_for(server.get("/health"), 5)
            if status == 200:
                return
        except (OSError, EOFError, TimeoutError):
            pass
        assert cluster.process.poll() is None, f"the example has ended: {cluster.said()}"
        assert time.monotonic() < ends, f"the replicas did not start: {cluster.said()}"
        await asyncio.sleep(0.5)


async def one(client: ModuleType, server: Any, request: Any, stream: bool) -> Any:
    async with client.Connection(server) as connection:
        return await client.ask(connection, server, request, stream)


def test_replicas_behind_one_url(cluster: Cluster, client: ModuleType) -> None:
    """Their API is that of a server alone. When one is killed under load, answers that had not begun are
    whole, streams that had begun end with an event that says so, and none is wrong."""
    asyncio.run(ask_for_what_a_server_has(cluster, client))
    asyncio.run(killed_under_load(cluster, client))


async def ask_for_what_a_server_has(cluster: Cluster, client: ModuleType) -> None:
    server = client.Server(cluster.url)
    await until_ready(server, cluster)
    status, models = await server.get("/v1/models")
    assert status == 200 and json.loads(models)["data"][0]["id"].startswith("fable")
    status, missing = await server.get("/v1/nothing")
    assert status == 404 and json.loads(missing)["error"].keys() == {"message", "type", "param", "code"}
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    assert (await one(client, server, client.Ask(client.CHAT, body), True)).whole


async def killed_under_load(cluster: Cluster, client: ModuleType) -> None:
    server = client.Server(cluster.url)
    await until_ready(server, cluster)
    body = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "temperature": 0.8}
    asks = [client.Ask(client.COMPLETIONS, {**body, "seed": seed}) for seed in range(24)]
    alone = [await one(client, server, each, False) for each in asks[:6]]
    assert all(answer.whole for answer in alone), alone

    running = [asyncio.create_task(one(client, server, each, i % 2 == 0)) for i, each in enumerate(asks)]
    while not any(task.done() for task in running):  # both are in the middle of their answers
        await asyncio.sleep(0.01)
    victims = replicas(cluster.process.pid)
    assert len(victims) == 2
    os.kill(victims[0], signal.SIGKILL)
    answers = await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S)

    for number, answer in enumerate(answers):
        if not answer.whole:  # it had begun
            assert number % 2 == 0 and answer.status == 200 and "replica_died" in answer.error, answer
    for answer, expected in zip(answers, alone, strict=False):
        text = answer.texts.get(0, "")  # a slow one may have sent a comment alone
        assert text == expected.texts[0] if answer.whole else expected.texts[0].startswith(text)
    assert sum(answer.whole for answer in answers) >= 12  # all that were not streamed
    assert victims[0] not in replicas(cluster.process.pid)
    await until_ready(server, cluster)
    await both_killed(client, server, cluster, asks)
    assert (await one(client, server, asks[0], True)).texts == alone[0].texts


async def both_killed(client: ModuleType, server: Any, cluster: Cluster, requests: list[Any]) -> None:
    """Kills both replicas while streams arrive: these end with the error event, and the next request waits
    for new replicas."""
    running = [asyncio.create_task(one(client, server, each, True)) for each in requests]
    while not any(task.done() for task in running):
        await asyncio.sleep(0.005)
    for victim in replicas(cluster.process.pid):
        os.kill(victim, signal.SIGKILL)
    answers = await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S)
    cut = [answer for answer in answers if not answer.whole]
    assert cut  # one stream takes 0.2 s, and may end before it is killed
    for answer in cut:
        assert "replica_died" in answer.error and "server_error" in answer.error, answer
    await until_ready(server, cluster)
