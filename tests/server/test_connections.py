"""The port itself bears slow, broken, old, endless and too many connections."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.made_up_llm import MadeUpLLM
from support.served import PATIENCE_S, until

from hotcold.server import connections, run
from tests.server.conftest import Live, live_server

BODY = json.dumps({"prompt": "Once", "max_tokens": 3}).encode()


def post(body: bytes = BODY, path: str = "/v1/completions", *more: str, version: str = "1.1") -> bytes:
    head = [f"POST {path} HTTP/{version}", "Host: localhost", "Content-Type: application/json"]
    head += [f"Content-Length: {len(body)}", *more]
    return "\r\n".join([*head, "", ""]).encode() + body


def get(path: str = "/health", *more: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *more, "", ""]).encode()


class Connection:
    """A socket to the server, and what came out of it."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self._buffer = b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def rest(self) -> bytes:
        """All until the server closes."""
        with contextlib.suppress(ConnectionError):
            while data := self.socket.recv(65536):
                self._buffer += data
        found, self._buffer = self._buffer, b""
        return found

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            data = self.socket.recv(65536)
            assert data, f"closed after {self._buffer!r}"
            self._buffer += data
        found, _, self._buffer = self._buffer.partition(mark)
        return found

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """One response of known length: status, headers, body."""
        head = self._until(b"\r\n\r\n").decode()
        first, *lines = head.split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(self._until(b"\r\n"), 16):
                while len(self._buffer) < size + 2:
                    self._buffer += self.socket.recv(65536)
                body, self._buffer = body + self._buffer[:size], self._buffer[size + 2 :]
            self._until(b"\r\n")
            return int(first.split()[1]), headers, body
        length = int(headers.get("content-length", 0))
        while len(self._buffer) < length:
            data = self.socket.recv(65536)
            assert data
            self._buffer += data
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        return int(first.split()[1]), headers, body


Connect = Callable[[Any], Connection]


@pytest.fixture(scope="module")
def plain() -> Iterator[Live]:
    with live_server() as found:
        yield found


@pytest.fixture
def live(live: Callable[..., Live], plain: Live) -> Callable[..., Live]:
    """A request without settings gets the same server as others, and the same answers."""
    plain.llm.words, plain.llm.pace_s = MadeUpLLM().words, 0
    return lambda **settings: live(**settings) if settings else plain


@pytest.fixture
def connect() -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:

        def made(live: Any) -> Connection:
            found = Connection(live.port)
            stack.callback(found.socket.close)
            return found

        yield made


def status_of(answer: bytes) -> int:
    return int(answer.split()[1])


def check_error(answer: bytes, status: int, code: str | None = None) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert status_of(head) == status, answer
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and (code is None or error["code"] == code)


def check_healthy(live: Any, connect: Connect) -> None:
    connection = connect(live)
    connection.send(post())
    status, _, body = connection.answer()
    assert status == 200 and json.loads(body)["choices"][0]["text"] == "a b c"
    until(lambda: live.llm.running == 0)


def test_one_connection_serves_many_requests(live: Any, connect: Connect) -> None:
    server = live()
    connection = connect(server)
    for _ in range(3):
        connection.send(post())
        assert connection.answer()[0] == 200
        connection.send(get("/no/such/path"))
        assert connection.answer()[0] == 404


def test_requests_that_follow_before_they_are_answered(live: Any, connect: Connect) -> None:
    connection = connect(live())
    connection.send(post() + get() + post(b"nonsense") + post())
    assert [connection.answer()[0] for _ in range(4)] == [200, 200, 400, 200]


def test_http_1_0(live: Any, connect: Connect) -> None:
    server = live()
    for stream in (False, True):
        connection = connect(server)
        body = json.dumps({"prompt": "Once", "stream": stream}).encode()
        connection.send(post(body, version="1.0"))
        answer = connection.rest()
        assert status_of(answer) == 200 and b"chunked" not in answer.lower()
        assert answer.endswith(b"data: [DONE]\n\n") is stream


def test_http_1_0_without_host(live: Any, connect: Connect) -> None:
    connection = connect(live())
    connection.send(b"GET /health HTTP/1.0\r\n\r\n")
    assert status_of(connection.rest()) == 200


def test_bodies_in_chunks(live: Any, connect: Connect) -> None:
    connection = connect(live())
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.send(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
    for byte in BODY:
        connection.send(b"1\r\n%c\r\n" % byte)
    connection.send(b"0\r\n\r\n")
    assert connection.answer()[0] == 200


def test_a_body_of_very_many_tiny_chunks_is_not_read_to_its_end(live: Any, connect: Connect) -> None:
    server, head = live(), post(b"").partition(b"\r\nContent-Length")[0]
    for size, taken in ((1, False), (64, True)):
        connection = connect(server)
        connection.send(head + b"\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            chunk = b"%x\r\n%b\r\n" % (size, b" " * size)
            connection.send(chunk * 10_000)
            connection.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        status, _, body = connection.answer()
        assert status == (200 if taken else 400) and (taken or b"chunks are too small" in body)
    check_healthy(server, connect)


def test_who_waits_for_a_100_is_told_no_before_sending(live: Any, connect: Connect) -> None:
    server = live()
    connection = connect(server)
    whole = post(BODY, "/v1/completions", "Expect: 100-continue")
    head, _, body = whole.partition(b"\r\n\r\n")
    connection.send(head + b"\r\n\r\n")
    assert connection.answer()[0] == 100
    connection.send(body)
    assert connection.answer()[0] == 200
    connection.send(head.replace(b"application/json", b"text/html") + b"\r\n\r\n")
    assert connection.answer()[0] == 415


GARBAGE = [
    b"\x00" * 100,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"hello\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /health\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: a\r\nConnection: close\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",  # no Host
    b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nName : space\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n",
    b"GET /he alth HTTP/1.1\r\nHost: a\r\n\r\n",
    "GET /übel HTTP/1.1\r\nHost: a\r\n\r\n".encode(),
    b"PRI * HTTP/2.0\r\nConnection: close\r\n\r\nSM\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5, 6\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
]


def test_nonsense_is_refused(live: Any, connect: Connect) -> None:
    server = live()
    for data in GARBAGE:
        connection = connect(server)
        with contextlib.suppress(ConnectionError):
            connection.send(data)
        answer = connection.rest()
        assert answer, data[:60]
        status = status_of(answer)
        check_error(answer, status)
        assert status == (431 if len(data) > 50_000 else 400), data[:60]
    check_healthy(server, connect)


@pytest.mark.parametrize("begun", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_heads_that_do_not_arrive(live: Any, connect: Connect, begun: bytes) -> None:
    server = live(head_s=0.3)
    connection = connect(server)
    connection.send(begun)
    answer = connection.rest()
    if begun:
        check_error(answer, 408, "request_timeout")
    else:
        assert answer == b""


def test_a_head_that_arrives_byte_by_byte(live: Any, connect: Connect) -> None:
    """Bytes that come now and then do not put off the end."""
    server = live(head_s=0.3)
    connection = connect(server)
    with contextlib.suppress(ConnectionError):
        connection.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
        for _ in range(5000):  # far fewer than a head may have
            if select.select([connection.socket], [], [], 0.01)[0]:
                break  # the answer is there
            connection.send(b"y")
        else:
            pytest.fail("the server still waits for the rest")
    check_error(connection.rest(), 408, "request_timeout")
    until(lambda: server.call(lambda: not server.connections()))


def test_the_second_head_of_a_connection_must_arrive_too(live: Any, connect: Connect) -> None:
    connection = connect(live(head_s=1))
    connection.send(get())
    assert connection.answer()[0] == 200
    connection.send(b"GET /hea")
    check_error(connection.rest(), 408)


def test_idle_connections_are_closed(live: Any, connect: Connect) -> None:
    connection = connect(live(idle_s=1))
    connection.send(get())
    assert connection.answer()[0] == 200
    assert connection.rest() == b""


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_that_do_not_arrive(live: Any, connect: Connect, chunked: bool) -> None:
    server = live(body_s=0.3, head_s=0.6)  # too short for a check of its health under load
    connection = connect(server)
    size = "Transfer-Encoding: chunked" if chunked else "Content-Length: 1000"
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.send(f"{head}{size}\r\n\r\n".encode())
    status, _, body = connection.answer()
    assert status == 408 and json.loads(body)["error"]["code"] == "request_timeout"
    assert connection.rest() == b""  # what is left of the body is not waited for
    until(lambda: server.call(lambda: server.connections() == 0))
    check_healthy(live(), connect)


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(live: Any, connect: Connect) -> None:
    connection = connect(live(body_bytes=1000))
    connection.send(post(b"x" * 1001).partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
    status, _, body = connection.answer()
    assert status == 413 and json.loads(body)["error"]["code"] == "request_too_large"


def test_a_body_in_chunks_that_is_too_large(live: Any, connect: Connect) -> None:
    connection = connect(live(body_bytes=1000, head_s=0.6))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.send(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
    with contextlib.suppress(ConnectionError):
        for _ in range(2000):
            connection.send(b"400\r\n" + b"x" * 1024 + b"\r\n")
    answer = connection.rest()
    assert not answer or status_of(answer) == 413


def test_a_hundred_megabytes(live: Any, connect: Connect) -> None:
    server = live()
    connection = connect(server)
    connection.send(post(b"x" * (100 << 20))[:500])
    status, _, body = connection.answer()
    assert status == 413 and set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    check_healthy(server, connect)


def test_more_connections_than_allowed(live: Any, connect: Connect) -> None:
    server = live(connections=8)
    idle = [connect(server) for _ in range(8)]
    until(lambda: server.call(lambda: server.connections() == 8))
    refused = connect(server)
    refused.send(get())
    answer = refused.rest()
    check_error(answer, 503, "too_many_connections")
    assert b"Retry-After: 1" in answer
    for each in idle:
        each.socket.close()
    until(lambda: server.call(lambda: server.connections() == 0))
    check_healthy(server, connect)


def test_a_thousand_connections_that_drop(live: Any, connect: Connect) -> None:
    server = live(connections=64)
    requests = [b"", get(), post(), post()[:50], post()[:-1], b"\x00"]
    for i in range(1000):
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as each:
            with contextlib.suppress(ConnectionError):
                each.sendall(requests[i % len(requests)])
            if i % 2:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # RST
    until(lambda: server.call(lambda: server.connections() == 0))
    until(lambda: server.llm.running == 0)  # streams end after their connections
    check_healthy(server, connect)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("following", [b"", get(), b"x" * 1000], ids=["alone", "followed", "nonsense"])
def test_a_client_that_goes(live: Any, connect: Connect, stream: bool, following: bytes) -> None:
    """Also one that had sent its next request, which is read before the answer is complete."""
    server = live()
    server.llm.words, server.llm.pace_s = ("word ",) * 100_000, 0.001
    connection = connect(server)
    body = json.dumps({"prompt": "Once", "stream": stream, "max_tokens": 100_000}).encode()
    connection.send(post(body) + following)
    until(lambda: server.llm.running == 1)
    connection.socket.close()
    until(lambda: server.llm.running == 0)


def test_a_client_that_reads_nothing(live: Any, connect: Connect) -> None:
    server = live(write_s=0.2)
    server.llm.words = ("word " * 2000,) * 100_000
    connection = connect(server)
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.send(post(json.dumps({"prompt": "Once", "stream": True}).encode()))
    until(lambda: server.llm.running == 1)
    until(lambda: server.llm.running == 0 and server.call(lambda: server.connections() == 0))


def test_head_has_no_body(live: Any, connect: Connect) -> None:
    connection = connect(live())
    connection.send(get("/v1/models").replace(b"GET", b"HEAD") + get())
    head = connection._until(b"\r\n\r\n")
    assert status_of(head) == 200
    assert connection.answer()[2] == b'{"status":"ok"}'


def test_upgrades_are_passed_over(live: Any, connect: Connect) -> None:
    connection = connect(live())
    connection.send(get("/health", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"))
    assert connection.answer()[0] == 200


def test_small_writes_are_sent_at_once(live: Any, connect: Connect) -> None:
    """Otherwise each waits until the client acknowledges the previous one, often for 40 ms."""
    server = live()
    connection = connect(server)
    connection.send(get())
    assert connection.answer()[0] == 200

    def options() -> list[int]:
        sockets = [each.transport.get_extra_info("socket") for each in server.server.connections]
        return [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in sockets]

    found = server.call(options)
    assert found and all(found)


@pytest.mark.parametrize("last", ["", "Connection: close"])
def test_a_client_that_reads_no_answer_is_disconnected(
    live: Any, connect: Connect, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the answers are no streams: it would keep one of the connections for ever."""
    lost: list[connections.Connection] = []
    end = connections.Connection.connection_lost
    monkeypatch.setattr(
        connections.Connection, "connection_lost", lambda self, error: lost.append(self) or end(self, error)
    )
    server = live(write_s=0.1, idle_s=0.1)
    connection = connect(server)
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.send(get("/openapi.json") * 60 + (get("/openapi.json", last) if last else b""))
    until(lambda: any(each.connections is server.server.connections for each in lost))
    assert not server.server.connections


def test_shutdown_answers_a_request_whose_body_is_incomplete(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_LAST_BYTES_S", 0.01)
    with live_server() as server:
        connection = connect(server)
        connection.send(post()[:-1])
        until(lambda: server.call(lambda: len(server.server.running)) == 1)
    check_error(connection.rest(), 503, "shutting_down")
