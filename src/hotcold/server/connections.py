"""uvicorn's connection, with bounds against clients that open many, send slowly or stop reading, and with a
strict reading of where each request ends."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from hotcold.server.protocol.dialects import error_body
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.json_parts import to_json
from hotcold.server.rare_lines import RareLines
from hotcold.server.settings import Settings
from hotcold.values import printable

#: Keys in a request's scope: the function that drops its connection, and a list that has the status of an
#: answer that was sent instead of the application's.
DROP, _REFUSED = "hotcold.drop", "hotcold.refused"
_NOT_HTTP = "the request is not valid HTTP/1.1"
_TWO_LENGTHS = "Transfer-Encoding is for HTTP/1.1 alone, and never with Content-Length: send one of the two"
_BAD_CHUNKS = "the body's chunks are broken: each has a hexadecimal size, CRLF, its data, CRLF"
_SMALL_CHUNKS = "the body's chunks are too small: send larger ones, or Content-Length"
#: Limit of empty lines before a request line. Old clients end a body with one (RFC 9112, 2.2).
_EMPTY_LINES = 8
#: What an incomplete line before a chunk may be: its size, and extensions, which are ignored.
_CHUNK_LINE = re.compile(rb"[0-9A-Fa-f]{1,20}[ \t]*(;[^\n]*)?\r?")
#: Refused connections that stay open for a moment, so that their clients read the answer.
REFUSED = 32
_MOST_PIPELINED = 64 << 10
_LINGER_S = 1.0
_READ = 16 << 10  # bytes of a connection in one turn of the event loop
_CHUNKS, _CHUNK = 4096, 64  # so many chunks of a body may be smaller than so many bytes
_PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


def bounded(settings: Settings, rare: RareLines) -> type[H11Protocol]:
    """The class of connections, for uvicorn's ``http``. Refused ones are noted in ``rare``."""
    return type("BoundedConnection", (_Connection,), {"settings": settings, "rare": rare})


class _Framing(h11.Connection):
    """h11's connection with rules of RFC 9112 that h11 lacks: a request states its length in one way, empty
    lines may precede it, and data after the last request is ignored. So many tiny chunks that they would hold
    up other connections are refused."""

    reason = _NOT_HTTP  #: what is wrong with a request that next_event() refuses
    _empty_lines = 0  # before the next request
    _chunks = _chunk_bytes = 0  # of the request's body

    def next_event(self) -> Any:
        try:
            return super().next_event()
        except h11.RemoteProtocolError as error:
            if self.reason == _NOT_HTTP:
                self.reason = f"{_NOT_HTTP}: {printable(str(error), 100)}"
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
                    raise h11.RemoteProtocolError(f"more than {_EMPTY_LINES} empty lines precede it")
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
        elif event is h11.NEED_DATA and state is h11.SEND_BODY and not self._line_may_go_on():
            raise h11.RemoteProtocolError(self.reason)
        return event

    def _line_may_go_on(self) -> bool:
        """False if no further data can make a valid line before a chunk; h11 waits for the line's end."""
        waiting = bytes(self._receive_buffer)  # never data of the body, which h11 takes out at once
        in_trailers = getattr(self._reader, "_reading_trailer", False)
        return not waiting or in_trailers or _CHUNK_LINE.fullmatch(waiting) is not None


class _Connection(H11Protocol):
    settings: Settings
    rare: RareLines
    _timer: asyncio.TimerHandle | None = None
    _refused = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn: _Framing = _Framing(h11.SERVER, self.settings.head_bytes)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # asyncio's own: others get their turn between two reads
            transport.max_size = _READ
        if len(self.connections) > self.settings.connections:
            seen = f"the server has {self.settings.connections} connections, the most that it takes"
            self.rare.add(f"a connection was refused: {seen} (--max-connections)")
            full = APIError(
                seen,
                status=503,
                type="unavailable_error",
                code="too_many_connections",
                retry_after=1,
            )
            self._refuse(full)
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self.conn.their_state is h11.IDLE and self._head_too_long(data):
            message = f"the request's head is too long: {self.settings.head_bytes} bytes are allowed"
            self._refuse(APIError(message, status=431, code="head_too_large"))
            return
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # uvicorn answers nonsense amid an answer
            self.transport.abort()
        self._watch()

    def _head_too_long(self, data: bytes) -> bool:
        """h11 looks at heads that are incomplete only."""
        allowed = self.settings.head_bytes
        head = (self.conn.trailing_data[0] + data).lstrip(b"\r\n")
        return len(head) > allowed and b"\r\n\r\n" not in head[: allowed + 4]

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None:
            self.scope[DROP] = self.transport.abort  # type: ignore[literal-required]
            self.scope.setdefault(_REFUSED, [])  # type: ignore[misc]
        # uvicorn stops reading where another request follows, and would not see that the client goes.
        if self.flow.read_paused and len(self.conn.trailing_data[0]) <= _MOST_PIPELINED:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        self._refuse(APIError(self.conn.reason, code="invalid_http"))

    def shutdown(self) -> None:
        if self._refused:
            self.transport.abort()
        else:
            super().shutdown()

    def _watch(self) -> None:
        """A client that has the word must use it in time."""
        if self._refused:
            return
        answered = self.cycle is None or self.cycle.response_complete
        if not answered or self.transport.is_closing() or self._between_requests():
            self._stop_timer()
        elif self._timer is None and self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._timer = self.loop.call_later(self.settings.head_s, self._late)

    def _between_requests(self) -> bool:
        """True while uvicorn's own timer runs, which any data stops."""
        idle = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        return idle and self.timeout_keep_alive_task is not None

    def _late(self) -> None:
        if self.conn.our_state is not h11.IDLE or not self.conn.trailing_data[0]:
            self.transport.abort()  # it said nothing, or goes on with a body that nobody wants
            return
        message = f"the request's head did not arrive within {self.settings.head_s:g} seconds"
        self._refuse(APIError(message, status=408, type="timeout_error", code="request_timeout"))

    def _refuse(self, error: APIError) -> None:
        """Answers instead of the application, unless that has begun to answer, and closes."""
        self._refused = True
        self._stop_timer()
        path = ""
        if self.conn.our_state is h11.SEND_RESPONSE:  # the application still reads the request
            path = self.scope["path"]
            self.scope.setdefault(_REFUSED, []).append(error.status)  # type: ignore[misc]
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_response(error, path))
        elif self.conn.our_state is not h11.DONE:  # a part of an answer must not look whole
            self.transport.abort()
            return
        if len(self.connections) > self.settings.connections + REFUSED:
            self.transport.close()
            return
        # Closing while the client still sends would take the answer away from it.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


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
    """The status of the answer that was sent instead of the application's; None if there was none."""
    return next(iter(scope.get(_REFUSED, ())), None)
