"""Where a request ends: every message has one reading, however packets divide it (RFC 9112)."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator

import h11
import pytest
from support.served import until

from hotcold.server.connections import _Framing
from tests.server.conftest import Live, live_server
from tests.server.test_connections import BODY, Connection, check_error, get, post, status_of

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
OLD = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0")
CHUNKED = b"Transfer-Encoding: chunked\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
CLOSE = "Connection: close"
LAST = CLOSE.encode() + b"\r\n"
EMPTY = b"\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live_server() as found:
        yield found


@contextlib.contextmanager
def connected(server: Live) -> Iterator[Connection]:
    connection = Connection(server.port)
    with connection.socket:
        yield connection


def counted(server: Live, route: str, status: int) -> int:
    """How many answers of a route had this status."""
    text = server.service.metrics.text(1, None).decode()
    found = re.findall(rf'requests_total{{route="{route}",status="{status}"}} (\d+)', text)
    return int(found[0]) if found else 0


#: Requests and the statuses of their answers; a request that ends the connection comes last.
MESSAGES = {
    "two lengths": (HEAD + CHUNKED + LENGTH + EMPTY + CHUNKS + get(), [400]),
    "two lengths, the other way round": (HEAD + LENGTH + CHUNKED + EMPTY + CHUNKS + get(), [400]),
    "no body within two lengths": (HEAD + CHUNKED + b"Content-Length: 0\r\n\r\n0\r\n\r\n" + get(), [400]),
    "two lengths and Expect": (HEAD + CHUNKED + LENGTH + b"Expect: 100-continue\r\n\r\n", [400]),
    "two lengths after a good request": (post() + HEAD + CHUNKED + LENGTH + EMPTY + CHUNKS, [200, 400]),
    "HTTP/1.0 in chunks": (OLD + CHUNKED + EMPTY + CHUNKS, [400]),
    "HTTP/1.0 with two lengths": (OLD + CHUNKED + LENGTH + EMPTY + CHUNKS, [400]),
    "HTTP/1.0": (OLD + LENGTH + EMPTY + BODY, [200]),
    "a length twice": (HEAD + LAST + LENGTH + LENGTH + EMPTY + BODY, [200]),  # one value: 6.3 allows it
    "different lengths": (HEAD + LAST + LENGTH + b"Content-Length: 5\r\n\r\n" + BODY, [400]),
    "a signed length": (HEAD + b"Content-Length: +5\r\n\r\n" + BODY, [400]),
    "an empty length": (HEAD + b"Content-Length: \r\n\r\n" + BODY, [400]),
    "two codings": (HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n" + CHUNKS, [400]),
    "a coding twice": (HEAD + CHUNKED + CHUNKED + EMPTY + CHUNKS, [400]),
    "an unknown coding": (HEAD + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKS, [400]),
    "a coding in upper case": (HEAD + LAST + CHUNKED.upper() + EMPTY + CHUNKS, [200]),
    "a folded line": (HEAD + LAST + b"X: a\r\n b\r\n" + LENGTH + EMPTY + BODY, [200]),  # 5.2: as a space
    "a folded coding": (HEAD + LAST + b"Transfer-Encoding:\r\n chunked\r\n" + EMPTY + CHUNKS, [200]),
    "a folded first line": (b"GET /health HTTP/1.1\r\n Host: localhost\r\n\r\n", [400]),
    "CR alone in a value": (get("/health", "X: a\rY: b"), [400]),
    "CR alone between lines": (get().replace(b"\r\nHost", b"\rHost"), [400]),
    "lines that end with LF": (get("/health", CLOSE).replace(b"\r\n", b"\n"), [200]),  # 2.2
    "an empty line first": (EMPTY + get("/health", CLOSE), [200]),
    "eight empty lines first": (8 * EMPTY + get("/health", CLOSE), [200]),
    "nine empty lines first": (9 * EMPTY + get(), [400]),
    "an empty line after a body": (post() + EMPTY + get() + EMPTY + get("/x", CLOSE), [200, 200, 404]),
    "an empty line after the last body": (HEAD + LAST + LENGTH + EMPTY + BODY + EMPTY, [200]),
    "a request after the last one": (HEAD + LAST + LENGTH + EMPTY + BODY + get(), [200]),
    "nonsense after the last one": (OLD + LENGTH + EMPTY + BODY + b"\x00\r\n", [200]),
    "extensions": (HEAD + LAST + CHUNKED + EMPTY + CHUNKS.replace(b"\r\n", b";a=b;c\r\n", 1), [200]),
    "trailers": (HEAD + LAST + CHUNKED + EMPTY + CHUNKS[:-2] + b"X: y\r\n Z\r\n\r\n", [200]),
    "a length as a trailer": (HEAD + LAST + CHUNKED + EMPTY + CHUNKS[:-2] + LENGTH + EMPTY, [200]),
}  # fmt: skip
#: Bodies that are not in chunks.
BROKEN = {
    "no size": b"zz\r\n",
    "no digits": b"\r\n\r\n",
    "a negative size": b"-1\r\n",
    "a hexadecimal prefix": b"0x5\r\nabcde\r\n0\r\n\r\n",
    "a size of 21 digits": b"0" * 20 + b"1\r\na\r\n0\r\n\r\n",
    "a space before the size": b" 1\r\na\r\n0\r\n\r\n",
    "a line that ends with LF": CHUNKS.replace(b"\r\n", b"\n"),
    "LF in an extension": CHUNKS.replace(b"\r\n", b";a=\nb\r\n", 1),
    "a chunk that is too long": CHUNKS.replace(b"}", b"}}"),
    "a chunk that is too short": CHUNKS.replace(b"}", b""),
    "a trailer without a colon": CHUNKS[:-2] + b"no colon\r\n\r\n",
    "a coding in a trailer": CHUNKS[:-2] + b"Transfer-Encoding: gzip\r\n\r\n",
    "an endless extension": b"1;" + b"a" * 100_000,
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(server: Live, name: str) -> None:
    message, expected = MESSAGES[name]
    with connected(server) as connection:
        connection.send(message)
        found = [connection.answer() for _ in expected]
        assert connection.rest() == b""
    assert [status for status, _, _ in found] == expected
    if expected[-1] == 400:
        assert json.loads(found[-1][2])["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n", "Content-Length"),
        (HEAD + b"Transfer-Encoding: identity\r\n", "Transfer-Encoding"),
        (b"GET /health HTTP/1.1\r\n", "Host"),
        (b"GET /a b HTTP/1.1\r\n", "illegal request line: 'GET /a b HTTP/1.1'"),
        (HEAD + b"X\x1b[2J: " + 9000 * b"a" + b"\r\n", "header line"),
    ],
)
def test_a_refusal_says_what_is_not_http(server: Live, head: bytes, reason: str) -> None:
    with connected(server) as connection:
        connection.send(head + EMPTY)
        message = json.loads(connection.rest().partition(b"\r\n\r\n")[2])["error"]["message"]
    assert message.startswith("the request is not valid HTTP/1.1: ") and reason in message
    assert "bytearray" not in message and len(message) < 200 and message.isprintable()


@pytest.mark.parametrize("name", BROKEN)
def test_broken_chunks(server: Live, name: str) -> None:
    """Also where they come after the application has begun to read the body."""
    before = len(server.llm.jobs)
    for at_once in (True, False):
        with connected(server) as connection:
            connection.send(HEAD + CHUNKED + EMPTY + BROKEN[name] * at_once)
            if not at_once:
                until(lambda: server.server.running)
                connection.send(BROKEN[name])
            answer = connection.rest()
            check_error(answer, 400, "invalid_http")
            assert b"chunks" in answer and answer.count(b"HTTP/1.1") == 1
    until(lambda: not server.server.running)
    assert len(server.llm.jobs) == before


ERRORS = {
    "/v1/chat/completions": lambda reply: reply["error"]["code"] == "invalid_http",
    "/v1/responses": lambda reply: reply["error"]["code"] == "invalid_http",
    "/completion": lambda reply: reply["error"]["code"] == "invalid_http",
    "/v1/messages": lambda reply: reply["error"]["type"] == "invalid_request_error",
    "/api/chat": lambda reply: isinstance(reply["error"], str),
}


@pytest.mark.parametrize("path", ERRORS)
def test_a_broken_chunk_is_refused_in_the_form_of_each_dialect(server: Live, path: str) -> None:
    head = HEAD.replace(b"/v1/completions", path.encode())
    with connected(server) as connection:
        connection.send(head + CHUNKED + EMPTY + b"zz\r\n")
        answer = connection.rest()
        assert status_of(answer) == 400 and ERRORS[path](json.loads(answer.partition(b"\r\n\r\n")[2]))

    until(lambda: counted(server, path, 400) == 1)  # and not as a client that has gone


def test_a_refusal_is_not_counted_as_the_answer_before_it(server: Live) -> None:
    before = counted(server, "/tokenize", 200)
    good = post(b'{"content": "a"}', "/tokenize")
    with connected(server) as connection:
        connection.send(
            good + good + HEAD.replace(b"/v1/completions", b"/tokenize") + CHUNKED + LENGTH + EMPTY
        )
        assert [connection.answer()[0] for _ in range(3)] == [200, 200, 400]
    until(lambda: not server.server.running)
    assert counted(server, "/tokenize", 200) == before + 2 and counted(server, "/tokenize", 400) == 0


def test_a_broken_chunk_after_the_answer_takes_nothing_from_it(server: Live) -> None:
    with connected(server) as connection:
        connection.send(HEAD.replace(b"application/json", b"text/html") + CHUNKED + EMPTY)
        assert connection.answer()[0] == 415
        connection.send(b"zz\r\n")
        assert connection.rest() == b""


def test_an_empty_line_does_not_hold_a_connection() -> None:
    """After it, the next request must arrive within the time for a head."""
    with live_server(head_s=0.3) as server, connected(server) as connection:
        connection.send(get())
        assert connection.answer()[0] == 200
        connection.send(EMPTY)
        assert connection.rest() == b""


def events(packets: list[bytes]) -> list[object]:
    """The requests, bodies and errors that a connection reads when the server answers each at once."""
    connection = _Framing(h11.SERVER, 32 << 10)
    found: list[object] = []
    for packet in packets:
        connection.receive_data(packet)
        while True:
            try:
                event = connection.next_event()
            except h11.RemoteProtocolError:
                return [*found, connection.reason]
            if event is h11.PAUSED:
                connection.start_next_cycle()
            elif event is h11.NEED_DATA:
                break
            elif isinstance(event, h11.Data):
                found[-1] += bytes(event.data)  # type: ignore[operator]
            elif isinstance(event, h11.Request):
                found += [(event.method, event.target, *event.headers), b""]
                for sent in (
                    h11.Response(status_code=200, headers=[("content-length", "0")]),
                    h11.EndOfMessage(),
                ):
                    connection.send(sent)
    return found


@pytest.mark.parametrize("name", [*MESSAGES, *BROKEN])
def test_packets_change_nothing(name: str) -> None:
    message = MESSAGES[name][0] if name in MESSAGES else HEAD + CHUNKED + EMPTY + BROKEN[name][:500]
    whole = events([message])
    assert events([bytes([byte]) for byte in message]) == whole
    assert all(events([message[:i], message[i:]]) == whole for i in range(1, len(message)))
