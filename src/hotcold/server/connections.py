"""A connection of the server. It bounds clients that open many connections, send slowly or stop reading, and
determines strictly where each request ends."""

import asyncio
import re
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import h11
from starlette.types import ASGIApp, Message

from hotcold.engine.request import RequestError
from hotcold.server.protocol.dialects import error_body
from hotcold.server.protocol.errors import APIError, from_job
from hotcold.server.protocol.json_parts import to_json
from hotcold.server.rare_lines import RareLines
from hotcold.server.settings import Settings
from hotcold.values import printable

#: Keys in a request's scope: the function that drops its connection, and a list with the status of an answer
#: that replaced the application's.
DROP, _REFUSED = "hotcold.drop", "hotcold.refused"
_NOT_HTTP = "the request is not valid HTTP/1.1"
_TWO_LENGTHS = "Transfer-Encoding needs HTTP/1.1 and excludes Content-Length: send one of the two"
_BAD_CHUNKS = "the body's chunks are broken: each has a hexadecimal size, CRLF, its data, CRLF"
_SMALL_CHUNKS = "the body's chunks are too small: send larger ones, or Content-Length"
#: Limit of empty lines before a request line. Old clients end a body with one (RFC 9112, 2.2).
_EMPTY_LINES = 8
#: A valid prefix of the line before a chunk: its size, and extensions, which are ignored.
_CHUNK_LINE = re.compile(rb"[0-9A-Fa-f]{1,20}[ \t]*(;[^\n]*)?\r?")
#: The form in which h11 quotes a line.
_BYTEARRAY = re.compile(r"bytearray\(b(.*)\)", re.DOTALL)
#: Limit of refused connections that stay open for a moment, so that their clients can read the answer.
REFUSED = 32
_MOST_PIPELINED = 64 << 10  # bytes of further requests to read before an answer is complete
_UNREAD = 64 << 10  # bytes of a body to buffer before the application reads them
_STATUSES = frozenset(HTTPStatus)
_LINGER_S = 1.0
_EXTRA_S = 1  # added to the write limit, so that a stream notices first that its client does not read
_READ = 16 << 10  # bytes to read from a connection in one turn of the event loop
_CHUNKS, _CHUNK = 4096, 64  # a body may have this number of chunks below this number of bytes
_PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class _Framing(h11.Connection):
    """h11's connection with rules of RFC 9112 that h11 lacks.

    A request states its length in one way. Empty lines may precede it. Data after the last request is
    ignored. A body of very many tiny chunks is refused, since it would block other connections."""

    reason = _NOT_HTTP  #: the error in a request that next_event() refuses
    _empty_lines = 0  # before the next request
    _chunks = _chunk_bytes = 0  # of the request's body

    def next_event(self) -> Any:
        try:
            return super().next_event()
        except h11.RemoteProtocolError as error:
            if self.reason == _NOT_HTTP:
                cause = _BYTEARRAY.sub(r"\1", str(error))
                self.reason = f"{_NOT_HTTP}: {printable(cause, 100)}"
            raise

    def _extract_next_receive_event(self) -> Any:
        state, buffer = self.their_state, self._receive_buffer
        self.reason = _BAD_CHUNKS if state is h11.SEND_BODY else _NOT_HTTP
        if state is h11.MUST_CLOSE:
            buffer.maybe_extract_at_most(len(buffer))
        elif state is h11.IDLE:
            if bytes(buffer) == b"\r":
                return h11.NEED_DATA
            if bytes(buffer).startswith(b"\r\n"):
                if self._empty_lines == _EMPTY_LINES:
                    raise h11.RemoteProtocolError(f"there are more than {_EMPTY_LINES} empty lines before it")
                buffer.maybe_extract_at_most(2)
                self._empty_lines += 1
                return self._extract_next_receive_event()
        event = super()._extract_next_receive_event()
        if isinstance(event, h11.Request):
            self._empty_lines = self._chunks = self._chunk_bytes = 0
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                self.reason = _TWO_LENGTHS
                raise h11.RemoteProtocolError(self.reason)
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._chunk_bytes += len(event.data)
            if self._chunks > _CHUNKS and self._chunk_bytes < _CHUNK * (self._chunks - 1):
                self.reason = _SMALL_CHUNKS
                raise h11.RemoteProtocolError(self.reason)
        elif event is h11.NEED_DATA and state is h11.SEND_BODY and not self._line_may_continue():
            raise h11.RemoteProtocolError(self.reason)
        return event

    def _line_may_continue(self) -> bool:
        """Returns whether further data can complete a valid line before a chunk; h11 would wait for it."""
        waiting = bytes(self._receive_buffer)  # never has data of the body, which h11 removes at once
        in_trailers = getattr(self._reader, "_reading_trailer", False)
        return not waiting or in_trailers or _CHUNK_LINE.fullmatch(waiting) is not None


class Connection(asyncio.Protocol):
    """One client's connection. It reads requests one after the other; the application answers each.
    ``connections`` has all connections of the server, and ``running`` the tasks that answer."""

    transport: asyncio.Transport

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        rare: RareLines,
        connections: "set[Connection]",
        running: set[asyncio.Task[None]],
    ) -> None:
        self.app, self.settings, self.rare = app, settings, rare
        self.connections, self.running = connections, running
        self.conn = _Framing(h11.SERVER, settings.head_bytes)
        self.writable = asyncio.Event()  #: whether the transport accepts data now
        self.writable.set()
        self._exchange: Exchange | None = None  # the last request and its answer
        self._timer: asyncio.TimerHandle | None = None
        self._limits_idle = False  # whether the timer limits the time between two requests
        self._refused = self._closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.connections.add(self)
        # Only asyncio's own loop has it. Other connections run between two reads.
        if hasattr(transport, "max_size"):
            transport.max_size = _READ
        if len(self.connections) > self.settings.connections:
            got = f"the server has {self.settings.connections} connections, which is its limit"
            self.rare.add(f"a connection was refused: {got} (--max-connections)")
            full = APIError(
                got,
                status=503,
                type="unavailable_error",
                code="too_many_connections",
                retry_after=1,
            )
            self._refuse(full)
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections.discard(self)
        self._stop_timer()
        self.writable.set()
        if self._exchange is not None:
            self._exchange.disconnect()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self.conn.their_state is h11.IDLE and self._head_too_long(data):
            message = f"the request's head is too long: {self.settings.head_bytes} bytes are allowed"
            self._refuse(APIError(message, status=431, code="head_too_large"))
            return
        self.conn.receive_data(data)
        self._read_events()
        self._watch()

    def _head_too_long(self, data: bytes) -> bool:
        """Returns whether a head exceeds the limit; h11 only checks incomplete heads."""
        allowed = self.settings.head_bytes
        head = (self.conn.trailing_data[0] + data).lstrip(b"\r\n")
        return len(head) > allowed and b"\r\n\r\n" not in head[: allowed + 4]

    def _read_events(self) -> None:
        """Processes the received data."""
        while not self._refused:
            try:
                event = self.conn.next_event()
            except h11.RemoteProtocolError:
                self._refuse(APIError(self.conn.reason, code="invalid_http"))
                return
            if isinstance(event, h11.Request):
                self._begin(event)
            elif isinstance(event, h11.Data) and self._exchange is not None:
                self._exchange.add(event.data)
            elif isinstance(event, h11.EndOfMessage) and self._exchange is not None:
                if self._exchange.complete:  # the answer was complete before the body
                    self._next_request()
                    continue
                self._exchange.end_body()
                if self.conn.their_state is h11.MUST_CLOSE:
                    return
            else:
                # Another request may follow. Reading on, up to a bound, shows when the client disconnects.
                if event is h11.PAUSED and len(self.conn.trailing_data[0]) > _MOST_PIPELINED:
                    self.transport.pause_reading()
                return

    def _begin(self, request: h11.Request) -> None:
        path, _, query = request.target.partition(b"?")
        refused: list[int] = []
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version.decode("ascii"),
            "server": self.transport.get_extra_info("sockname")[:2],
            "client": (self.transport.get_extra_info("peername") or ("", 0))[:2],
            "scheme": "http",
            "method": request.method.decode("ascii"),
            "root_path": "",
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "headers": [(name.lower(), value) for name, value in request.headers],
            DROP: self.transport.abort,
            _REFUSED: refused,
        }
        self._exchange = Exchange(self, scope)
        task = asyncio.get_running_loop().create_task(self._exchange.run(self.app))
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    def answered(self) -> None:
        """Closes the connection after a complete answer, or reads the next request."""
        if self.transport.is_closing() or self._refused:
            return
        if self._closing or self.conn.our_state is h11.MUST_CLOSE:
            self.close()
            return
        self.transport.resume_reading()
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.DONE:
            self._next_request()
            self._read_events()
        self._watch()

    def close(self) -> None:
        """Closes the connection after the data written so far. A client that still sends a body may finish
        it: closing at once would reset the connection, and the client would lose the answer."""
        if self.conn.their_state is h11.SEND_BODY:
            self._linger(self.settings.head_s)
        else:
            self._stop_timer()
            self.transport.close()
            self._timer = asyncio.get_running_loop().call_later(self.settings.write_s, self.transport.abort)

    def _linger(self, seconds: float) -> None:
        """Sends the end of the data, and discards what the client sends, for at most ``seconds``."""
        self._refused = True
        self._stop_timer()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.transport.abort)

    def _next_request(self) -> None:
        self.transport.resume_reading()
        self.conn.start_next_cycle()

    def shut(self) -> None:
        """Closes the connection, after the current answer if there is one."""
        if self._refused:
            self.transport.abort()
        elif self._exchange is None or self._exchange.complete:
            self.transport.close()
        else:
            self._closing = True

    def stop(self) -> None:
        """Ends an incomplete answer: with an error if it has not begun, and otherwise by closing."""
        if self._exchange is not None and not self._exchange.complete and not self._refused:
            self._refuse(from_job(RequestError("the server was stopped", "closed")))

    def _watch(self) -> None:
        """Limits the time until the client has sent the rest of a head or a body, or its next request."""
        if self._refused:
            return
        state, answered = self.conn.their_state, self._exchange is None or self._exchange.complete
        if not answered or self.transport.is_closing() or state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_timer()
            return
        idle = state is h11.IDLE and self._exchange is not None and not self.conn.trailing_data[0]
        if self._timer is None or idle is not self._limits_idle:
            self._stop_timer()
            self._limits_idle = idle
            seconds = self.settings.idle_s if idle else self.settings.head_s
            self._timer = asyncio.get_running_loop().call_later(seconds, self._late)

    def _late(self) -> None:
        if self._limits_idle:
            self.close()
            return
        if self.conn.our_state is not h11.IDLE or not self.conn.trailing_data[0]:
            self.transport.abort()  # the client sent nothing, or still sends a body that is not read
            return
        message = f"the request's head did not arrive within {self.settings.head_s:g} seconds"
        self._refuse(APIError(message, status=408, type="timeout_error", code="request_timeout"))

    def _refuse(self, error: APIError) -> None:
        """Sends an error instead of the application's answer, unless that has begun, and closes."""
        self._refused = True
        self._stop_timer()
        path = ""
        if self.conn.our_state is h11.SEND_RESPONSE:  # the application still reads the request
            assert self._exchange is not None
            path = self._exchange.scope["path"]
            self._exchange.scope[_REFUSED].append(error.status)
            self._exchange.disconnect()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_response(error, path))
        elif self.conn.our_state is not h11.DONE:  # a partial answer must not look complete
            self.transport.abort()
            return
        if len(self.connections) > self.settings.connections + REFUSED:
            self.transport.close()
            return
        self._linger(_LINGER_S)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Exchange:
    """A request and its answer, for an ASGI application."""

    def __init__(self, connection: Connection, scope: dict[str, Any]) -> None:
        self.scope = scope
        self.complete = False  #: whether the whole answer was sent
        self._connection, self._conn = connection, connection.conn
        self._body = bytearray()  # not yet read by the application
        self._more_body = True
        self._begun = self._disconnected = False
        self._news = asyncio.Event()  # wakes the application

    async def run(self, app: ASGIApp) -> None:
        """Calls the application. An answer that it leaves incomplete must not look complete."""
        try:
            await app(self.scope, self._receive, self._send)
        except BaseException as error:  # already in the log
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
        transport = self._connection.transport
        if self.complete or self._disconnected or transport.is_closing():
            return
        if not self._begun:
            message = "an internal error: see the server's log"
            error_500 = APIError(message, status=500, type="server_error", code="internal_error")
            transport.write(_response(error_500, self.scope["path"]))
        self._connection.close()

    def add(self, data: bytes) -> None:
        """Adds data of the request's body, unless the answer is complete."""
        if self.complete:
            return
        self._body += data
        if len(self._body) > _UNREAD:
            self._connection.transport.pause_reading()
        self._news.set()

    def end_body(self) -> None:
        self._more_body = False
        self._news.set()

    def disconnect(self) -> None:
        """Reports to the application that the client has disconnected."""
        self._disconnected = self._disconnected or not self.complete
        self._news.set()

    async def _receive(self) -> Message:
        if self._conn.they_are_waiting_for_100_continue and not self._connection.transport.is_closing():
            self._write(h11.InformationalResponse(status_code=100, headers=[]))
        if not self._disconnected and not self.complete:
            self._connection.transport.resume_reading()
            await self._news.wait()
            self._news.clear()
        if self._disconnected or self.complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self._more_body}

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._connection.settings.write_s + _EXTRA_S):
                await self._connection.writable.wait()
        except TimeoutError:
            self._connection.transport.abort()
            self.disconnect()
        if self._disconnected:
            return
        if message["type"] == "http.response.start":
            headers = [(b"date", formatdate(usegmt=True).encode()), *message.get("headers", ())]
            status = message["status"]
            reason = HTTPStatus(status).phrase.encode() if status in _STATUSES else b""
            self._write(h11.Response(status_code=status, headers=headers, reason=reason))
            self._begun = True
            return
        body = b"" if self.scope["method"] == "HEAD" else message.get("body", b"")
        self._write(h11.Data(data=body))
        if not message.get("more_body", False):
            self._write(h11.EndOfMessage())
            self.complete = True
            self._news.set()
            self._connection.answered()

    def _write(self, event: h11.Event) -> None:
        self._connection.transport.write(self._conn.send(event) or b"")


def _response(error: APIError, path: str) -> bytes:
    body = to_json(error_body(error, path))
    head = [
        f"HTTP/1.1 {error.status} {_PHRASES[error.status]}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if error.retry_after is not None:
        head.append(f"Retry-After: {error.retry_after}")
    return "\r\n".join([*head, "", ""]).encode() + body


def drop(scope: Any) -> None:
    """Closes a request's connection at once and discards unsent data."""
    abort: Callable[[], None] | None = scope.get(DROP)
    if abort is not None:
        abort()


def refused_status(scope: Any) -> int | None:
    """Returns the status of the answer that was sent instead of the application's; None if there was none."""
    return next(iter(scope.get(_REFUSED, ())), None)
