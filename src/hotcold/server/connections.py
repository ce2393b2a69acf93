"""A connection as uvicorn has it, with what it lacks against clients that open many, send slowly or stop
reading: bounds on their number and on the time that a request's head may take, and a way to drop one."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from hotcold.server.protocol.errors import APIError
from hotcold.server.rare_lines import RareLines
from hotcold.server.settings import Settings

#: Where a request's scope has the function that drops its connection.
DROP = "hotcold.drop"
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


class _Connection(H11Protocol):
    settings: Settings
    rare: RareLines
    _timer: asyncio.TimerHandle | None = None
    _refused = False

    def __init__(self, *values: Any, **options: Any) -> None:
        super().__init__(*values, **options)
        self._next_event = self.conn.next_event
        self.conn.next_event = self._bounded_event  # type: ignore[method-assign]
        self._chunks = self._chunk_bytes = 0

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

    def _bounded_event(self) -> Any:
        """The next event. RemoteProtocolError: a body has so many tiny chunks that they hold up others."""
        event = self._next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._chunk_bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._chunk_bytes += len(event.data)
            if self._chunks > _CHUNKS and self._chunk_bytes < _CHUNK * (self._chunks - 1):
                raise h11.RemoteProtocolError("the chunks are too small")
        return event

    def _head_too_long(self, data: bytes) -> bool:
        """h11 looks at heads that are incomplete only."""
        allowed = self.settings.head_bytes
        before = self.conn.trailing_data[0]
        return len(before) + len(data) > allowed and b"\r\n\r\n" not in (before + data)[: allowed + 4]

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None:
            self.scope[DROP] = self.transport.abort  # type: ignore[literal-required]
        # uvicorn stops reading where another request follows, and would not see that the client goes.
        if self.flow.read_paused and len(self.conn.trailing_data[0]) <= _MOST_PIPELINED:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        self._refuse(APIError("this is no HTTP request that the server understands", code="invalid_http"))

    def _watch(self) -> None:
        """A client that has the word must use it in time."""
        answered = self.cycle is None or self.cycle.response_complete
        if not answered or self.transport.is_closing():
            self._stop_timer()
        elif self.conn.their_state is h11.IDLE and self.cycle is not None and not self.conn.trailing_data[0]:
            self._stop_timer()  # between two requests: uvicorn's own timer runs
        elif self._timer is None and self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._timer = self.loop.call_later(self.settings.head_s, self._late)

    def _late(self) -> None:
        if self.conn.our_state is not h11.IDLE or not self.conn.trailing_data[0]:
            self.transport.abort()  # it said nothing, or goes on with a body that nobody wants
            return
        message = f"the request's head did not arrive within {self.settings.head_s:g} seconds"
        self._refuse(APIError(message, status=408, type="timeout_error", code="request_timeout"))

    def _refuse(self, error: APIError) -> None:
        """Answers without the application, and closes."""
        self._refused = True
        self._stop_timer()
        if self.conn.our_state is not h11.IDLE:  # amid another answer
            self.transport.abort()
            return
        self.transport.write(_response(error))
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


def _response(error: APIError) -> bytes:
    body = json.dumps(error.body()).encode()
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
    """Closes a request's connection at once, without what is still to be sent."""
    abort: Callable[[], None] | None = scope.get(DROP)
    if abort is not None:
        abort()
