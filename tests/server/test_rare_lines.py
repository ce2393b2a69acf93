"""Lines on stderr that strangers can cause: one a minute for each cause, with a count."""

from __future__ import annotations

import asyncio
import errno
import io
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.made_up_llm import MadeUpLLM
from support.served import served, until

from hotcold.server import descriptors, rare_lines, run
from hotcold.server.app import make_app
from hotcold.server.connections import REFUSED
from hotcold.server.descriptors import RESERVE, most_connections, raise_limit
from hotcold.server.rare_lines import MINUTE_S, RareLines
from hotcold.server.request_log import RequestLog
from hotcold.server.service import Service
from hotcold.server.settings import Settings, digest

resource = pytest.importorskip("resource")


class Clock:
    """Stands for the event loop: its calls come when a test says that their time has come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []
        monkeypatch.setattr(rare_lines.asyncio, "get_running_loop", lambda: self)

    def call_later(self, seconds: float, function: Callable[..., None], *values: Any) -> None:
        self._calls.append((self.now + seconds, function, values))

    def go_on(self, seconds: float) -> None:
        self.now += seconds
        due = [each for each in self._calls if each[0] <= self.now]
        self._calls = [each for each in self._calls if each[0] > self.now]
        for _, function, values in due:
            function(*values)


def test_a_cause_has_one_line_a_minute_with_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = Clock(monkeypatch), list[str]()
    rare = RareLines(lines.append)
    for _ in range(1000):
        rare.add("a cause")
    assert lines == ["hotcold: note: a cause"]
    rare.add("another", "the first line of another")
    assert lines[1:] == ["the first line of another"]
    clock.go_on(MINUTE_S)
    assert lines[2:] == ["hotcold: note: a cause, 999 more times in a minute"]
    rare.add("a cause")
    rare.add("another")
    assert lines[3:] == ["hotcold: note: another"]  # nothing had been counted: it begins anew
    clock.go_on(MINUTE_S)
    assert lines[4:] == ["hotcold: note: a cause, 1 more times in a minute"]
    clock.go_on(MINUTE_S)
    rare.add("a cause")
    rare.add("a cause")
    rare.close()
    assert lines[5:] == ["hotcold: note: a cause", "hotcold: note: a cause, 1 more times in a minute"]


def test_the_number_of_causes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    lines = list[str]()
    rare = RareLines(lines.append)
    for i in range(10_000):
        rare.add(f"cause {i}")
    assert len(lines) == 100


def requests(settings: Settings, *asked: tuple[str, dict[str, str]]) -> list[str]:
    """The lines of the log after these requests."""
    stream = io.StringIO()
    log = RequestLog(stream)
    service = Service(MadeUpLLM(), settings, None, log.text)  # type: ignore[arg-type]
    asyncio.run(service.load())
    app = make_app(service, log, page_paths=lambda path: path == "/page")
    with TestClient(app, base_url="http://localhost") as client:
        for path, headers in asked:
            client.get(path, headers=headers)
        client.portal.call(service.rare.close)  # type: ignore[union-attr]
    log.close()
    service.close()
    return stream.getvalue().splitlines()


KEY = {"Authorization": "Bearer key"}


def test_requests_without_a_key_are_counted_and_others_have_a_line_each() -> None:
    settings = Settings(keys=(digest("key"),))
    strangers = [("/v1/models", {}), ("/v1/models", {"x-api-key": "wrong"}), ("/nowhere", {}), ("/page", {})]
    lines = requests(settings, *strangers * 50, *[("/v1/models", KEY), ("/nowhere", KEY)] * 3)
    of_clients = [line for line in lines if "/models 200" in line or "/nowhere 404" in line]
    assert len(of_clients) == 6
    rest = [line.partition(" ")[2] for line in lines if line not in of_clients]
    assert len(rest) == 4 and " GET /v1/models 401 " in rest[0] and " GET /page 404 " in rest[1]
    cause = "note: a rejected request was answered with status"
    assert rest[2:] == [f"{cause} {each} more times in a minute" for each in ("401, 149", "404, 49")]


def test_foreign_pages_are_counted_where_no_key_is_needed() -> None:
    foreign = ("/v1/models", {"Origin": "https://evil.example"})
    lines = requests(Settings(), *[foreign] * 20, *[("/v1/models", {})] * 3)
    assert len([line for line in lines if " 200 " in line]) == 3
    assert len([line for line in lines if " 403" in line]) == 2 and len(lines) == 5


def test_errors_outside_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    lines = list[str]()
    rare = RareLines(lines.append)
    for number in (errno.EMFILE, errno.ENFILE, errno.EMFILE) * 100:
        error = OSError(number, "Too many open files")
        run._note_error(rare, {"message": "socket.accept() out of system resource", "exception": error})
    for _ in range(10):
        run._note_error(rare, {"message": "a task failed", "exception": KeyError("a client's secret")})
        run._note_error(rare, {"message": "lost", "exception": ConnectionResetError()})
        run._note_error(rare, {"message": "something else"})
    assert lines == [
        "hotcold: note: a connection has to wait: Too many open files; close connections, or allow more "
        "(ulimit -n)",
        "hotcold: note: KeyError in the server",
        "hotcold: note: something else in the server",
    ]


# --- open files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "files", "refused", "expected"),
    [
        (512, None, 100, 512),
        (512, 1 << 20, 100, 512),
        (512, 1024, 100, 512),
        (1024, 1024, 100, 1024 - 100 - RESERVE),
        (512, 256, 100, 256 - 100 - RESERVE),
        (512, 64, 100, 16),
        (4, 64, 100, 4),
    ],
)
def test_connections_leave_files_for_all_else(
    wanted: int, files: int | None, refused: int, expected: int
) -> None:
    assert most_connections(wanted, files, refused) == expected


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit there")
@pytest.mark.parametrize(
    ("hard", "fails", "expected"),
    [
        (5000, (), 5000),
        (resource.RLIM_INFINITY, (), None),
        (resource.RLIM_INFINITY, (resource.RLIM_INFINITY,), 10240),
        (5000, (5000, 10240), 256),
    ],
)
def test_the_limit_is_raised(
    hard: int, fails: tuple[int, ...], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [256, hard]

    def set_limit(kind: int, values: tuple[int, int]) -> None:
        assert kind == resource.RLIMIT_NOFILE and values[1] == hard
        if values[0] in fails:
            raise ValueError("not allowed to raise maximum limit")
        limits[:] = values

    monkeypatch.setattr(descriptors.resource, "setrlimit", set_limit)
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda kind: tuple(limits))
    assert raise_limit() == expected


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit of Linux")
def test_many_connections_of_a_server_that_may_open_few_files() -> None:
    """It takes fewer, says so, and answers when they have gone."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        server = stack.enter_context(served("-t", "1", "-np", "1"))
        assert server.url
        assert resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)[0] == before[1]
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (60, 60))
        with ExitStack() as connections:
            for _ in range(100):
                each = connections.enter_context(socket.socket())
                each.setblocking(False)
                each.connect_ex(("127.0.0.1", server.port))
            until(lambda: any("Too many open files" in line for line in server.errors))
            time.sleep(1.2)  # asyncio tries again each second
        with server.client() as client:
            assert client.get("/v1/models").status_code == 200
        assert len([line for line in server.errors if "open files" in line]) == 1


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit of Linux")
def test_a_server_says_that_it_takes_fewer_connections() -> None:
    import subprocess

    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 250));"
        "from hotcold.server.run import _with_possible_connections as possible;"
        "from hotcold.server.settings import Settings;"
        "print(possible(Settings()).connections, resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    connections, _, limits = done.stdout.partition(" ")
    assert limits.strip() == "(250, 250)" and int(connections) + REFUSED + RESERVE < 250
    assert done.stderr == (
        f"hotcold: note: at most {connections} connections are accepted, not 512: "
        "the system allows 250 open files (ulimit -Hn)\n"
    )


def test_a_refused_connection_is_noted(live: Any) -> None:
    lines = list[str]()
    server = live(connections=2)
    server.service.rare._write = lines.append
    with ExitStack() as stack:
        for _ in range(2 + REFUSED + 20):
            each = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            each.settimeout(30)
        assert b" 503 " in each.recv(1 << 16)
    assert lines == [
        "hotcold: note: a connection was refused: the server has 2 connections, which is its limit "
        "(--max-connections)"
    ]
    assert threading.active_count() < 50
