"""A server with SmolLM2, which clients of other people talk to."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.served import Served, served

from tests.clients.recording import recorded

#: The name that every client asks for.
MODEL = "smollm2"
#: The text that they ask about.
ABOUT = "Alice is 30 years old and lives in Paris."


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    path = os.environ.get("HOTCOLD_SMOLLM2")
    if not path:
        pytest.skip("HOTCOLD_SMOLLM2 does not name the file of SmolLM2-135M-Instruct")
    with served("-m", path, "--alias", MODEL, "-t", "1", "-c", "4096") as found:
        yield found


@pytest.fixture
def url(server: Served, request: pytest.FixtureRequest) -> Iterator[str]:
    """The address that clients are given. What they send is written down where HOTCOLD_RECORD_CLIENTS names a
    folder for that."""
    folder = os.environ.get("HOTCOLD_RECORD_CLIENTS")
    if not folder:
        yield f"{server.url}/v1"
        return
    test = request.node.name.removeprefix("test_").translate(str.maketrans("[]", "__"))
    with recorded(
        server.url, Path(folder) / f"{request.path.stem.removeprefix('test_')}-{test}.jsonl"
    ) as url:
        yield f"{url}/v1"


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The event loop of a test; libraries that look for one find it, and leave none open."""
    found = asyncio.new_event_loop()
    asyncio.set_event_loop(found)
    yield found
    found.run_until_complete(found.shutdown_asyncgens())
    found.close()
    asyncio.set_event_loop(None)
