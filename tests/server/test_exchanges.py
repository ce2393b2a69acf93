"""A request and its answer on a connection whose transport is made up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from hotcold.server.connections import Connection
from hotcold.server.rare_lines import RareLines
from hotcold.server.settings import Settings

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


class Transport(asyncio.Transport):
    """Keeps what is written, and whether it is read from."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.1", 2)})
        self.written = b""
        self.reading, self.closed, self.ended = True, False, False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


def connected(app: Any, test: Callable[[Connection, Transport], Awaitable[None]]) -> None:
    async def run() -> None:
        rare, transport = RareLines(lambda line: None), Transport()
        connection = Connection(app, Settings(), rare, set(), set())
        connection.connection_made(transport)
        await test(connection, transport)
        connection.connection_lost(None)
        rare.close()

    asyncio.run(run())


async def turns() -> None:
    """Lets the application run until it waits for the client."""
    for _ in range(20):
        await asyncio.sleep(0)


async def answer(send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def test_a_body_that_the_application_does_not_read_is_not_taken_without_end() -> None:
    read, parts = asyncio.Event(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await read.wait()
        while (message := await receive())["more_body"]:
            parts.append(message["body"])
        parts.append(message["body"])
        await answer(send)

    async def test(connection: Connection, transport: Transport) -> None:
        connection.data_received(HEAD % 200_000 + b"a" * 60_000)
        assert transport.reading
        connection.data_received(b"b" * 60_000)
        assert not transport.reading
        read.set()
        await turns()
        assert transport.reading
        connection.data_received(b"c" * 80_000)
        await turns()
        assert b"".join(parts) == b"a" * 60_000 + b"b" * 60_000 + b"c" * 80_000
        assert transport.written.startswith(b"HTTP/1.1 200 OK\r\n") and not transport.closed

    connected(app, test)


def test_a_connection_is_closed_after_the_answer_that_has_begun() -> None:
    ends = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await ends.wait()
        await answer(send)

    async def test(connection: Connection, transport: Transport) -> None:
        connection.data_received(HEAD % 0)
        await asyncio.sleep(0)
        connection.shut()
        assert not transport.closed
        ends.set()
        await turns()
        assert transport.closed and transport.written.startswith(b"HTTP/1.1 200 OK\r\n")

    connected(app, test)


def test_an_application_that_fails_gets_an_answer_with_status_500_and_no_more_requests() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("a defect")

    async def test(connection: Connection, transport: Transport) -> None:
        connection.data_received(HEAD % 0)
        await turns()
        assert transport.written.startswith(b"HTTP/1.1 500 Internal Server Error\r\n") and transport.closed
        assert b"a defect" not in transport.written
        error = json.loads(transport.written.partition(b"\r\n\r\n")[2])["error"]
        assert (error["type"], error["code"]) == ("server_error", "internal_error")

    connected(app, test)


def test_a_client_that_still_sends_its_body_is_not_reset_after_the_last_answer() -> None:
    """A reset would discard the answer before the client reads it."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(send)

    async def test(connection: Connection, transport: Transport) -> None:
        connection.data_received(HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") % 100_000 + b"a")
        await turns()
        assert transport.written.startswith(b"HTTP/1.1 200 OK\r\n")
        assert transport.ended and transport.reading and not transport.closed
        written = transport.written
        connection.data_received(b"a" * 99_999 + HEAD % 0)
        await turns()
        assert transport.written == written
        connection.shut()
        assert transport.closed

    connected(app, test)


def test_headers_that_are_refused_become_an_answer_with_status_500() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"a\r\nb: c")]})

    async def test(connection: Connection, transport: Transport) -> None:
        connection.data_received(HEAD % 0)
        await turns()
        assert transport.written.startswith(b"HTTP/1.1 500 Internal Server Error\r\n") and transport.closed

    connected(app, test)
