"""Several replicas of a model behind Ray Serve, on one machine or many, with the API of ``hotcold serve``.

    pip install '.[ray]'
    python examples/ray_serve.py -m model.gguf --replicas 2 --port 8000

If a replica dies, requests whose answers have not begun are sent to another. Streams that have begun cannot
be taken back; they end with an error event."""

import argparse
import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from hotcold import AsyncLLM
from hotcold.server.app import make_app
from hotcold.server.protocol.errors import INVALID
from hotcold.server.service import Service
from hotcold.server.settings import Settings, api_keys

# Ray waits three times this number of seconds for its proxy to start, and then ends it. Its default, 5, is
# too short on a busy machine with two cores. The processes that Ray starts read this variable.
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")

TRIES = 5
DIED = {"message": "a replica died", "type": "server_error", "param": None, "code": "replica_died"}
TOO_LARGE = {
    "message": f"the body is too large: {Settings.body_bytes} bytes are allowed",
    "type": INVALID,
    "param": None,
    "code": "request_too_large",
}
SCOPE = ("type", "method", "path", "raw_path", "query_string", "headers", "http_version", "scheme", "client")


def settings_for(key_file: Path | None) -> Settings:
    """The settings of the server. Without a key, only the names of this machine are answered: another page
    could make a name point here and call this machine (DNS rebinding)."""
    keys = api_keys(key_file)
    return Settings(keys=keys, allow_hosts=("*",) if keys else ())


@serve.deployment(max_ongoing_requests=256, health_check_period_s=2, graceful_shutdown_timeout_s=60)
class Replica:
    """A whole server without its socket: a model in a process of its own, and the routes."""

    async def __init__(self, model: str | None, key_file: Path | None) -> None:
        self._service = Service(AsyncLLM(model), settings_for(key_file))
        await self._service.load()
        self._app = make_app(self._service)

    def check_health(self) -> None:
        if self._service.state != "ready":
            raise RuntimeError(f"{self._service.state}: Ray starts another")

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Any]:
        """Yields ASGI's events that the application sends."""
        received: asyncio.Queue[Any] = asyncio.Queue()  # and then nothing: who leaves is cancelled
        received.put_nowait({"type": "http.request", "body": body, "more_body": False})
        events: asyncio.Queue[Any] = asyncio.Queue()
        running = asyncio.create_task(self._app(scope, received.get, events.put))
        running.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
        finally:
            running.cancel()


@serve.deployment(max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0})
class Front:
    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        body = await bounded_body(request)
        if body is None:
            return JSONResponse({"error": TOO_LARGE}, 413, {"Connection": "close"})
        scope = {name: request.scope.get(name) for name in SCOPE}
        for _ in range(TRIES):
            answer = self._replicas.answer.remote(scope, body)
            try:
                start = await anext(answer)
                first = await anext(answer)  # before this nothing has begun
            except RayError:
                continue
            headers = {name.decode(): value.decode() for name, value in start["headers"]}
            return StreamingResponse(rest_of(answer, first, headers), start["status"], headers)
        return JSONResponse({"error": DIED}, 503, {"Retry-After": "2"})


async def bounded_body(request: Request) -> bytes | None:
    """None for one that no replica would read: it is not kept until they say so."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > Settings.body_bytes:
            return None
    return bytes(body)


async def rest_of(answer: Any, event: Any, headers: dict[str, str]) -> AsyncIterator[bytes]:
    try:
        yield event.get("body", b"")
        async for event in answer:
            yield event.get("body", b"")
    except RayError:
        if not headers.get("content-type", "").startswith("text/event-stream"):
            raise  # the connection ends before the length that was stated
        yield b"data: " + bytes(JSONResponse({"error": DIED}).body) + b"\n\n"
    finally:
        answer.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Replicas of a model behind Ray Serve, on 127.0.0.1.")
    parser.add_argument("-m", "--model", help="GGUF file, or hf:REPO/FILE")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--api-key-file", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    with suppress(TimeoutError):  # the proxy still starts, and the replicas need not wait for it
        serve.start(http_options={"host": "127.0.0.1", "port": given.port})
    replicas = Replica.options(num_replicas=given.replicas).bind(given.model, given.api_key_file)
    serve.run(Front.bind(replicas), blocking=True)
