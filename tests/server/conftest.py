"""Servers for tests: the application by itself, and one that listens, both on a made-up model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from starlette.testclient import TestClient
from support.made_up_llm import MadeUpLLM

from hotcold.server.app import make_app
from hotcold.server.run import HTTPServer, http_server
from hotcold.server.service import Service
from hotcold.server.settings import Settings, listening_sockets

if TYPE_CHECKING:
    from selenium.webdriver import Chrome


@dataclass
class Application:
    client: TestClient
    service: Service
    llm: MadeUpLLM


@contextmanager
def application(settings: Settings | None = None) -> Iterator[Application]:
    llm = MadeUpLLM()
    service = Service(llm, settings or Settings(log=False))  # type: ignore[arg-type]
    asyncio.run(service.load())
    app = make_app(service)
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield Application(client, service, llm)
    service.close()


@pytest.fixture(scope="module")
def app() -> Iterator[Application]:
    with application() as found:
        yield found


@pytest.fixture
def app_with() -> Iterator[Callable[..., Application]]:
    """Makes applications with settings of their own."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(application(Settings(log=False, **settings)))


@dataclass
class Live:
    """A server that listens, in a thread of this process."""

    port: int
    service: Service
    llm: MadeUpLLM
    loop: asyncio.AbstractEventLoop
    server: HTTPServer

    def connections(self) -> int:
        return len(self.server.connections)

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs it in the server's thread."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)


@contextmanager
def live_server(**values: Any) -> Iterator[Live]:
    settings = Settings(port=0, log=False, **values)
    sockets = listening_sockets(settings)
    found: list[Live] = []
    started = threading.Event()
    stop = asyncio.Event()

    async def run() -> None:
        llm = MadeUpLLM()
        service = Service(llm, settings)  # type: ignore[arg-type]
        await service.load()
        server = http_server(service, None)
        found.append(Live(sockets[0].getsockname()[1], service, llm, asyncio.get_running_loop(), server))
        started.set()
        await server.serve(sockets, stop)
        service.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert started.wait(30)
    try:
        yield found[0]
    finally:
        found[0].call(stop.set)
        thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def live() -> Iterator[Callable[..., Live]]:
    """Starts servers with settings of their own."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(live_server(**settings))


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """A browser for the tests of a file, which have looked whether there is one."""
    from support.browsing import browser

    with browser(tmp_path_factory.mktemp("browser")) as driver:
        yield driver
