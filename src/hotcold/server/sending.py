"""Sends replies to clients that may read slowly or disconnect."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from hotcold.server.connections import drop
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.json_parts import json_parts
from hotcold.server.request_log import NOTES

T = TypeVar("T")
#: Calls a function in a thread.
InThread = Callable[..., Awaitable[Any]]

_PART_BYTES = 256 << 10  # limit of the bytes that a thread writes in one call


class Sending:
    """Sends messages, and drops the connection of a client that does not read."""

    def __init__(self, scope: Scope, send: Send, patience_s: float) -> None:
        self._scope, self._send, self._patience_s = scope, send, patience_s

    async def send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await self._send(message)
        except TimeoutError:
            drop(self._scope)
            raise asyncio.CancelledError from None

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def body(self, data: bytes, more_follows: bool = True) -> None:
        if data or not more_follows:
            await self.send({"type": "http.response.body", "body": data, "more_body": more_follows})

    async def response(self, response: Response) -> None:
        await response(self._scope, _never, self.send)

    async def json(
        self,
        value: Callable[[], Any],
        in_thread: InThread,
        before_part: Callable[[bool], None] = lambda last: None,
    ) -> None:
        """Sends a value as JSON. Threads make and write it in parts, so that a large value delays no other
        request. ``before_part`` is called before each part is sent, with whether it is the last one."""
        parts: Iterator[bytes] | None = None

        def part() -> tuple[bytes, bool]:
            nonlocal parts
            parts = json_parts(value()) if parts is None else parts
            data = bytearray()
            for json_part in parts:
                data += json_part
                if len(data) >= _PART_BYTES:
                    return bytes(data), False
            return bytes(data), True

        data, last = await in_thread(part)
        headers = [(b"content-type", b"application/json")]
        before_part(last)
        await self.start(headers + [(b"content-length", str(len(data)).encode())] * last)
        while not last:
            await self.body(data)
            data, last = await in_thread(part)
            before_part(last)
        await self.body(data, more_follows=False)


class LargeReply:
    """A response whose JSON may be large; see :meth:`Sending.json`."""

    def __init__(self, value: Any, in_thread: InThread, patience_s: float) -> None:
        self._value, self._in_thread, self._patience_s = value, in_thread, patience_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = Sending(scope, send, self._patience_s)
        work = sending.json(lambda: self._value, self._in_thread)
        try:
            await unless_gone(receive, work)
        except APIError as error:
            scope[NOTES]["status"] = error.status


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine. Cancels it and raises APIError if the client disconnects."""
    task, gone = asyncio.create_task(work), asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise APIError("the client closed the connection", status=499, code="cancelled")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected; discards what it sends, since the request is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _never() -> Message:
    raise AssertionError("a response reads nothing")
