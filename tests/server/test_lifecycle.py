"""A server process: how it starts, drains and ends; what clients leave behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from support.served import LONG, PATIENCE_S, Served, served, stream_of, until

from hotcold.demo import model_path

#: Slow enough for a test to do something amid an answer.
SLOW = ("--backend", "reference", "-np", "2")
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


def children(pid: int) -> list[int]:
    """Processes that a process has started (Linux)."""
    tasks = Path(f"/proc/{pid}/task")
    if not tasks.is_dir():
        pytest.skip("needs /proc")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("-t", "1") as found:
        yield found


def test_one_line_tells_the_url(server: Served) -> None:
    with server.client() as client:
        assert client.get("/health").json() == {"status": "ok"}
    assert len(server.lines) == 1 and server.url.startswith("http://127.0.0.1:")
    assert not [line for line in server.errors if "Traceback" in line or "INFO" in line]


def test_answers(server: Served) -> None:
    with server.client() as client:
        whole = client.post("/v1/completions", json={**LONG, "temperature": 0, "max_tokens": 20}).json()
    with stream_of(server, {**LONG, "temperature": 0, "max_tokens": 20}) as events:
        chunks = list(events)
    assert chunks.pop() == "[DONE]"
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == whole["choices"][0]["text"] and len(text) > 20
    assert whole["usage"]["completion_tokens"] == 20


def test_the_log_has_no_prompts(server: Served) -> None:
    with server.client() as client:
        client.post(
            "/v1/completions", json={"prompt": "a secret", "max_tokens": 2}, headers={"X-Request-Id": "r1"}
        )
        client.get("/a%0Aforged%20line%1b[2J")
    until(lambda: any("forged" in line for line in server.errors))
    assert any(" r1 POST /v1/completions 200 " in line for line in server.errors)
    assert not any("secret" in line or "\x1b" in line for line in server.errors)
    assert not any(line.startswith("forged") for line in server.errors)


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_go_leave_nothing(server: Served, stream: bool) -> None:
    """Amid the queue, the prompt and the answer, as chance has it."""
    free = server.metric("hotcold_cache_pages_free") + server.metric("hotcold_cache_pages_shared")
    body = json.dumps({**LONG, "n": 4, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            if stream:
                client.recv(1)

    def idle() -> bool:
        return not any(map(server.metric, ("hotcold_requests_running", "hotcold_requests_waiting")))

    until(idle)
    assert server.metric("hotcold_cache_pages_free") + server.metric("hotcold_cache_pages_shared") == free


def test_clients_beside_each_other_get_their_own_answers(server: Served) -> None:
    prompts = [f"Once upon a time there was a {animal}" for animal in ("cat", "dog", "bird", "fox")] * 3
    body = {"temperature": 0, "max_tokens": 30}

    def ask(prompt: str) -> str:
        with server.client() as client:
            reply = client.post("/v1/completions", json={**body, "prompt": prompt})
        return str(reply.json()["choices"][0]["text"])

    alone = {prompt: ask(prompt) for prompt in set(prompts)}
    found: list[tuple[str, str]] = []
    threads = [threading.Thread(target=lambda p=p: found.append((p, ask(p)))) for p in prompts]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(found) == len(prompts) and all(text == alone[prompt] for prompt, text in found)


@contextmanager
def paused_engine(server: Served) -> Iterator[None]:
    """Stops the engine's process, so that no answer ends before the test lets it go on."""
    (engine,) = children(server.process.pid)
    os.kill(engine, signal.SIGSTOP)
    try:
        yield
    finally:
        if alive(engine):
            os.kill(engine, signal.SIGCONT)


@POSIX
def test_sigterm_lets_requests_finish() -> None:
    with served(*SLOW) as server, stream_of(server, {**LONG, "max_tokens": 40}) as events:
        next(events)
        with paused_engine(server):
            server.signal(signal.SIGTERM)
            with server.client() as client:
                until(lambda: client.get("/health").status_code == 503)
                late = client.post("/v1/completions", json=LONG)
        assert late.status_code == 503 and late.headers["retry-after"]
        assert late.json()["error"]["code"] == "shutting_down"
        chunks = list(events)
        assert chunks[-1] == "[DONE]" and chunks[-2]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0


@POSIX
def test_what_does_not_finish_in_time_is_told_so() -> None:
    with served(*SLOW, "--drain", "0") as server, stream_of(server, LONG) as events:
        next(events)
        with paused_engine(server):
            server.signal(signal.SIGTERM)
            assert list(events)[-1]["error"]["code"] == "shutting_down"
        assert server.wait() == 0


@POSIX
def test_a_second_sigint_ends_at_once() -> None:
    with served(*SLOW) as server, stream_of(server, LONG) as events:
        next(events)
        engines = children(server.process.pid)
        assert engines
        with paused_engine(server):
            server.signal(signal.SIGINT)
            with server.client() as client:
                until(lambda: client.get("/health").status_code == 503)
            server.signal(signal.SIGINT)
        assert server.wait() == 130
        with pytest.raises(httpx.TransportError):
            list(events)
        until(lambda: not any(map(alive, engines)))


@POSIX
def test_an_engine_that_dies() -> None:
    with served(*SLOW) as server, stream_of(server, LONG) as events:
        next(events)
        (engine,) = (pid for pid in children(server.process.pid))
        os.kill(engine, signal.SIGKILL)
        assert list(events)[-1]["error"]["code"] == "engine_failed"
        assert server.wait() == 70
    assert any("engine" in line and "signal 9" in line for line in server.errors)
    assert not any("Traceback" in line for line in server.errors)


@POSIX
def test_a_server_that_is_killed_leaves_no_engine() -> None:
    with served(*SLOW) as server:
        assert server.url
        engines = children(server.process.pid)
        server.signal(signal.SIGKILL)
        server.wait()
        until(lambda: not any(map(alive, engines)))


@POSIX
def test_sigint_while_it_loads() -> None:
    with served() as server:
        until(lambda: bool(children(server.process.pid)))
        server.signal(signal.SIGINT)
        assert server.wait() == 0


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    """The file's header is good, so only the engine notices that it is broken."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(model_path().read_bytes())
    with served("-m", str(broken), "-c", "100000000", "--drain", "0") as server:
        assert server.wait() == 2
    assert len(server.errors) == 1 and server.errors[0].startswith("hotcold: error: ") and not server.lines


def test_two_servers_on_one_port(server: Served) -> None:
    with served("--port", str(server.port)) as second:
        assert second.wait() == 2
    assert len(second.errors) == 1 and "is in use" in second.errors[0]


def test_keys_of_a_file(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    with served("-t", "1", "--api-key-file", str(keys), "--host", "0.0.0.0") as server:
        port = server.port
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            assert client.get("/v1/models").status_code == 401
            assert client.get("/metrics").status_code == 401
            assert client.get("/v1/models", headers={"Authorization": "Bearer second"}).status_code == 200
            assert client.get("/health").status_code == 200
