"""Requests to an ASGI application, as a server would pass them on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

PATIENCE_S = 90


class Client:
    """One request to the application, as a server would pass it on."""

    def __init__(self, app: Any, path: str, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self.news = asyncio.Event()
        self.leaving = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.writes = asyncio.Event()
        self.writes.set()
        self.asked = False  #: for its body
        self.dropped = False
        self._messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1",
            "hotcold.drop": self._drop,
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    def _drop(self) -> None:
        self.dropped = True

    async def _receive(self) -> dict[str, Any]:
        self.asked = True
        await self.writes.wait()
        if self._messages:
            return self._messages.pop()
        await self.leaving.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.reads.wait()
        self.sent.append(message)
        self.news.set()
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.leaving.set()  # as servers do when an answer is complete

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def events(self) -> list[Any]:
        """Data of events, parsed; comments are left out."""
        blocks = self.body.decode().split("\n\n")
        assert blocks.pop() == ""
        lines = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    async def end(self) -> None:
        await asyncio.wait_for(self.task, PATIENCE_S)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)
