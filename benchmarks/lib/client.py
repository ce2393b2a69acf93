"""A client of the server's routes, in each dialect, that adds next to nothing to what it measures: sockets.

Its answers have the texts by choice, when each piece came, and whether the answer was whole: a reply of the
stated length, or a stream that ended as its route says, with a reason for each text."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lib import dialects
from lib.dialects import CHAT, COMPLETIONS, NATIVE, Answer

__all__ = ["CHAT", "COMPLETIONS", "NATIVE", "Answer", "Ask", "Connection", "Server", "ask"]

_LINE = 1 << 20


@dataclass(frozen=True)
class Ask:
    """A request without what says whether it streams."""

    route: str
    body: dict[str, Any]

    def sent(self, stream: bool) -> dict[str, Any]:
        body = {**self.body, "stream": stream}
        if stream and self.route in (CHAT, COMPLETIONS):
            body["stream_options"] = {"include_usage": True}
        return body


class Server:
    """An address, a key and a model's name."""

    def __init__(self, url: str, key: str | None = None, model: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise SystemExit(f"--url {url}: http://HOST:PORT is needed")
        self.host, self.port = parts.hostname, parts.port or 80
        self.key, self.model = key, model

    async def get(self, path: str) -> tuple[int, bytes]:
        async with Connection(self) as connection:
            status, headers = await connection.send("GET", path, None)
            return status, b"".join([block async for block in connection.blocks(headers)])

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON of a reply; RuntimeError for any status but 200."""
        async with Connection(self) as connection:
            status, headers = await connection.send("POST", path, body)
            data = b"".join([block async for block in connection.blocks(headers)])
        if status != 200:
            raise RuntimeError(f"{path} answered {status}: {data[:300]!r}")
        return json.loads(data)


class _Closed(EOFError):
    """Not a byte of an answer came."""


class Connection:
    """One connection, kept as long as answers end as they should."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.reconnected = 0  #: times that it was found closed when the next request was sent

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.drop()

    def drop(self) -> None:
        """Ends it at once, whatever is under way: what the server sees of a client that goes away."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None

    async def send(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, str]]:
        """Sends a request and reads the answer's head: status and headers."""
        if self._writer is not None:
            try:
                return await self._send(method, path, body)
            except _Closed:
                self.reconnected += 1
                self.drop()
        opened = asyncio.open_connection(self._server.host, self._server.port, limit=_LINE)
        self._reader, self._writer = await opened
        return await self._send(method, path, body)

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, str]]:
        server, writer = self._server, self._writer
        assert writer is not None
        data = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", f"Host: {server.host}:{server.port}"]
        if server.key is not None:
            lines.append(f"Authorization: Bearer {server.key}")
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}", "", ""]
        try:
            writer.write("\r\n".join(lines).encode() + data)
            await writer.drain()
            first = await self._line()
        except ConnectionError:
            raise _Closed from None
        status = int(first.split(" ", 2)[1])
        headers: dict[str, str] = {}
        while line := await self._line():
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        return status, headers

    async def blocks(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        """The body as it comes. EOFError: it ended before its end."""
        assert self._reader is not None
        if "chunked" in headers.get("transfer-encoding", ""):
            while size := int((await self._line()).partition(";")[0], 16):
                yield await self._reader.readexactly(size)
                await self._line()
            await self._line()
        elif "content-length" in headers:
            yield await self._reader.readexactly(int(headers["content-length"]))
        else:
            while block := await self._reader.read(1 << 16):
                yield block
        if headers.get("connection", "").lower() == "close":
            self.drop()

    async def _line(self) -> str:
        assert self._reader is not None
        line = await self._reader.readline()
        if not line:
            raise _Closed("the connection was closed where an answer was to come")
        if not line.endswith(b"\n"):
            raise EOFError("the connection ended inside an answer")
        return line.decode("latin-1").rstrip("\r\n")


async def ask(
    connection: Connection, server: Server, request: Ask, stream: bool, answer: Answer | None = None
) -> Answer:
    """Sends one request and reads all of the answer, which may be given to be watched as it grows; what goes
    wrong is in :attr:`Answer.error`."""
    answer, start = answer or Answer(), time.perf_counter()
    body = request.sent(stream)
    if server.model is not None:
        body["model"] = server.model
    try:
        answer.status, headers = await connection.send("POST", request.route, body)
        if answer.status != 200:
            data = b"".join([block async for block in connection.blocks(headers)])
            answer.error = f"status {answer.status}: {data[:200]!r}"
            with contextlib.suppress(ValueError):
                answer.retry_after_s = float(headers.get("retry-after", ""))
        elif stream:
            await _stream(connection, headers, request.route, answer, start)
        else:
            data = b"".join([block async for block in connection.blocks(headers)])
            dialects.take(request.route, json.loads(data), answer, None)
            answer.whole = bool(answer.reasons)
    except (OSError, EOFError, ValueError, asyncio.IncompleteReadError) as error:
        answer.error = f"{type(error).__name__}: {error}"
        connection.drop()
    answer.seconds = time.perf_counter() - start
    return answer


async def _stream(
    connection: Connection, headers: dict[str, str], route: str, answer: Answer, start: float
) -> None:
    rest, between = b"", b"\n" if route == dialects.OLLAMA else b"\n\n"
    async for block in connection.blocks(headers):
        *events, rest = (rest + block).split(between)
        for event in events:
            _, field, data = (b"", b"data: ", event) if route == dialects.OLLAMA else _data(event)
            if not field:
                continue  # a comment that keeps the connection alive
            if data == b"[DONE]":
                answer.whole = bool(answer.reasons) and not answer.error
                continue
            parsed = json.loads(data)
            if error := dialects.error_of(parsed):
                answer.error = answer.error or f"an error event: {error}"
                answer.whole = False
                continue
            dialects.take(route, parsed, answer, time.perf_counter() - start)
    if rest.strip():
        answer.error = f"a stream that ended inside an event: {rest[:80]!r}"


def _data(event: bytes) -> tuple[bytes, bytes, bytes]:
    """Cuts an event into what stands before its data, the mark of data, and the data."""
    if event.startswith(b"event: "):
        event = event.partition(b"\n")[2]
    return event.partition(b"data: ") if event.startswith(b"data: ") else (event, b"", b"")
