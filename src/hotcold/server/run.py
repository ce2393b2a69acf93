"""Runs a server: it listens, loads the model, and answers. It ends by a signal, or when the model cannot be
loaded or its process has died."""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.types import ASGIApp

from hotcold.api.async_llm import AsyncLLM
from hotcold.server.app import make_app
from hotcold.server.connections import REFUSED, Connection
from hotcold.server.descriptors import most_connections, raise_limit
from hotcold.server.pages import is_page, page_routes
from hotcold.server.picture import picture_routes
from hotcold.server.rare_lines import RareLines
from hotcold.server.request_log import RequestLog
from hotcold.server.service import Service
from hotcold.server.settings import BACKLOG, Settings, listening_sockets

EXIT_ENGINE = 70
_EXIT_SECOND_SIGNAL = 130
#: SIGBREAK exists on Windows only. A program can send it, and the system sends it when a console closes.
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name))
_LOOK_S = 0.2  # seconds between checks of the engine process
_SWITCH_S = 0.001  # limit of the event loop's wait for Python's global lock while other threads compute
_ACCEPTED = 16  # connections accepted in one turn of the event loop; refused ones are closed in the next turn
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LAST_ANSWERS_S = 5.0  # time to report to requests that the engine died
_LAST_BYTES_S = 1.0  # time for clients to read the ends of answers


@dataclass(frozen=True)
class Listening:
    """The facts to print when the model is loaded."""

    url: str
    service: Service


def serve(llm: AsyncLLM, settings: Settings, alias: str | None, ready: Callable[[Listening], None]) -> int:
    """Serves until a signal, and returns the exit code. Raises UserError if the address cannot be used,
    before it loads the model, or if the model cannot be loaded."""
    settings = _with_possible_connections(settings)
    sockets = listening_sockets(settings)
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        return asyncio.run(_Run(llm, settings, alias, ready, sockets).run())
    finally:
        sys.setswitchinterval(before)
        for listening in sockets:
            listening.close()


def _with_possible_connections(settings: Settings) -> Settings:
    """Raises the system's limit of open files; returns the settings with the connections that fit."""
    files = raise_limit()
    # IPv4 and IPv6 sockets, accepted in this turn and in the last one
    refused = REFUSED + 4 * (_ACCEPTED + 1)
    connections = most_connections(settings.connections, files, refused)
    if connections < settings.connections:
        got = f"at most {connections} connections are accepted, not {settings.connections}"
        print(f"hotcold: note: {got}: the system allows {files} open files (ulimit -Hn)", file=sys.stderr)
    return replace(settings, connections=connections)


class HTTPServer:
    """Accepts connections. An ASGI application answers their requests."""

    def __init__(self, app: ASGIApp, settings: Settings, rare: RareLines) -> None:
        self.connections: set[Connection] = set()  #: the open ones
        self.running: set[asyncio.Task[None]] = set()  #: tasks of requests
        self._make = partial(Connection, app, settings, rare, self.connections, self.running)

    async def serve(self, sockets: Iterable[socket.socket], stop: asyncio.Event) -> None:
        """Serves until ``stop`` is set. Running answers then have a second to end; the others get an error,
        and a second to send it."""
        loop = asyncio.get_running_loop()
        servers = []
        for listening in sockets:
            servers.append(await loop.create_server(self._make, sock=listening, backlog=_ACCEPTED))
            listening.listen(BACKLOG)  # the queue is long, though each turn accepts few
        await stop.wait()
        for server in servers:
            server.close()
        for connection in [*self.connections]:
            connection.shut()
        await self._wait_for_last_bytes()
        for connection in [*self.connections]:
            connection.stop()
        for task in self.running:
            task.cancel()
        await self._wait_for_last_bytes()
        for connection in [*self.connections]:
            connection.transport.abort()

    async def _wait_for_last_bytes(self) -> None:
        """Waits until all connections are closed and all requests have ended, for a limited time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_BYTES_S):
                while self.connections or self.running:
                    await asyncio.sleep(_LOOK_S / 10)


class _Run:
    def __init__(
        self,
        llm: AsyncLLM,
        settings: Settings,
        alias: str | None,
        ready: Callable[[Listening], None],
        sockets: list[socket.socket],
    ) -> None:
        self._llm, self._settings, self._ready, self._sockets = llm, settings, ready, sockets
        self._alias = alias
        self._stop = asyncio.Event()
        self._signals = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        log = RequestLog()
        service = Service(self._llm, self._settings, self._alias, log.text)
        loop.set_exception_handler(lambda _, context: _note_error(service.rare, context))
        server = http_server(service, log if self._settings.log else None)
        with self._caught_signals(loop):
            ended = asyncio.Event()
            serving = asyncio.create_task(server.serve(self._sockets, ended))
            try:
                return await self._until_stopped(service)
            finally:
                ended.set()
                await serving
                await self._llm.close()
                service.close()
                log.close()

    async def _until_stopped(self, service: Service) -> int:
        loading = asyncio.create_task(service.load())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((loading, stop), return_when=asyncio.FIRST_COMPLETED)
            if not stop.done():
                loading.result()  # raises UserError if the model cannot be loaded
                # Otherwise each full collection would scan the vocabulary: 40 ms without another thread.
                gc.collect()
                gc.freeze()
                self._ready(Listening(_url(self._sockets[0]), service))
            while not stop.done() and service.state == "ready":
                await asyncio.wait((stop,), timeout=_LOOK_S)
            if not stop.done():
                print(f"hotcold: error: {self._llm.error or 'the engine has ended'}", file=sys.stderr)
                await service.drain(_LAST_ANSWERS_S)
                return EXIT_ENGINE
            await service.drain(self._settings.drain_s)
            return 0
        finally:
            for task in (loading, stop):
                task.cancel()
            await asyncio.gather(loading, stop, return_exceptions=True)

    @contextlib.contextmanager
    def _caught_signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Catches signals: the first lets requests finish, the second ends the process at once."""
        before = {caught_signal: signal.getsignal(caught_signal) for caught_signal in _SIGNALS}

        def caught(number: int, frame: object = None) -> None:
            self._signals += 1
            if self._signals > 1:
                os._exit(_EXIT_SECOND_SIGNAL)  # the engine process ends when its pipe closes
            loop.call_soon_threadsafe(self._stop.set)

        for caught_signal in _SIGNALS:
            signal.signal(caught_signal, caught)
        try:
            yield
        finally:
            for caught_signal, old in before.items():
                signal.signal(caught_signal, old)


def http_server(
    service: Service, log: RequestLog | None, wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app
) -> HTTPServer:
    """Makes the server of a service, with its pages. ``wrap`` may wrap the application."""
    logging.getLogger("asyncio").disabled = True  # it would log tracebacks and clients' data
    app = make_app(service, log, [*page_routes(), *picture_routes(service)], is_page)
    return HTTPServer(wrap(app), service.settings, service.rare)


def _url(listening: socket.socket) -> str:
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    host, port = socket.getnameinfo(listening.getsockname(), numeric)  # with the zone of a link-local address
    host = host.replace("%", "%25")
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _note_error(rare: RareLines, context: dict[str, Any]) -> None:
    """Logs the kind of an error outside of any request, without data of clients."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in _NO_FILES:
        rare.add(f"a connection has to wait: {error.strerror}; close connections, or allow more (ulimit -n)")
    elif not isinstance(error, ConnectionError | TimeoutError):
        rare.add(f"{type(error).__name__ if error else context.get('message')} in the server")
