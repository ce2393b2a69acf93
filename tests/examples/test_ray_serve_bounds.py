"""Bounds of the example of replicas, tested without Ray: its decorators give the classes as they are."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")

from starlette.requests import Request

from hotcold.server.security import Guard
from hotcold.server.settings import Settings

MIB = 1 << 20


@pytest.fixture
def example(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    serve = SimpleNamespace(deployment=lambda **_: lambda kind: kind)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve))
    monkeypatch.setitem(sys.modules, "ray.exceptions", SimpleNamespace(RayError=OSError))
    monkeypatch.delenv("HOTCOLD_API_KEY", raising=False)
    spec = importlib.util.spec_from_file_location("ray_serve", repository / "examples" / "ray_serve.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def status(settings: Settings, host: str) -> int:
    """Returns the status of a request for that host, without a key."""
    sent: list[Any] = []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def asked() -> None:
        scope = {"type": "http", "method": "GET", "path": "/v1/models", "http_version": "1.1"}
        scope["headers"] = [(b"host", host.encode())]

        async def send(message: Any) -> None:
            sent.append(message)

        await Guard(answer, settings, lambda path: False)(scope, None, send)  # type: ignore[arg-type]

    asyncio.run(asked())
    return int(sent[0]["status"])


def test_names_that_were_made_to_point_here_are_refused_without_a_key(
    example: ModuleType, tmp_path: Path
) -> None:
    open_to_all = example.settings_for(None)
    assert status(open_to_all, "attacker.example:8000") == 403
    assert status(open_to_all, "127.0.0.1:8000") == status(open_to_all, "localhost:8000") == 200
    keys = tmp_path / "keys"
    keys.write_text("a-key\n")
    assert status(example.settings_for(keys), "llm.example.org") == 401  # by any name, with the key


def test_a_body_without_an_end_is_not_kept(example: ModuleType) -> None:
    taken = 0
    asked: list[Any] = []

    async def receive() -> dict[str, Any]:
        nonlocal taken
        taken += MIB
        assert taken < 1 << 30
        return {"type": "http.request", "body": bytes(MIB), "more_body": True}

    class Replicas:
        def options(self, **_: Any) -> Replicas:
            return self

        @property
        def answer(self) -> Any:
            return SimpleNamespace(remote=lambda *given: asked.append(given))

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    reply = asyncio.run(example.Front(Replicas())(Request(scope, receive)))
    assert reply.status_code == 413 and taken == Settings.body_bytes + MIB and not asked
    assert json.loads(reply.body)["error"].keys() == {"message", "type", "param", "code"}


def test_a_body_within_the_bound_reaches_a_replica_whole(example: ModuleType) -> None:
    parts = [b"a" * MIB, b"b" * MIB]
    asked: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def answer(scope: Any, body: bytes) -> AsyncIterator[Any]:
        asked.append(body)
        yield {"type": "http.response.start", "status": 200, "headers": []}
        yield {"type": "http.response.body", "body": b"{}"}

    replicas = SimpleNamespace(answer=SimpleNamespace(remote=answer))
    replicas.options = lambda **_: replicas
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    reply = asyncio.run(example.Front(replicas)(Request(scope, receive)))
    assert reply.status_code == 200 and asked == [b"a" * MIB + b"b" * MIB]
