"""A window in which a model writes: Hotcold's page, with a server that answers this window alone.

    pip install . pywebview
    python examples/desktop_app/app.py -m model.gguf      # without -m: the built-in model

Where there is a system web view that pywebview knows (macOS, Windows, GTK or Qt on Linux), it shows the page;
otherwise a browser does. ``pack.py`` makes a folder of all this that needs no Python."""

import argparse
import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import hotcold
from hotcold.errors import UserError

if __name__ == "__main__":
    hotcold.freeze_support()  # before anything else: the packed program is also its own child process

TITLE = "Hotcold"
SIZE = (1100, 800)
#: Browsers that open a page in a window without tabs. Closing it ends their process, and so the program.
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "microsoft-edge", "brave-browser")
_LOOK_S = 0.2  # seconds between looks at what ends the program
_LIBRARIES = "LD_LIBRARY_PATH"


class Server:
    """A server on a free port of this machine, in its own thread. It answers clients with ``key``.

        >>> with Server() as server:
        ...     print(server.page)

    The model loads meanwhile, and the page shows the progress."""

    def __init__(self, model: str | None = None) -> None:
        self.key = secrets.token_urlsafe(24)
        self.url = ""
        self.last = time.monotonic()  #: when the last request came
        self.error: BaseException | None = None
        self._model = model
        self._listening = threading.Event()
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server")

    @property
    def page(self) -> str:
        """The page's address with the key, which the page takes out of it."""
        return f"{self.url}/#key={self.key}"

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._listening.wait()
        except KeyboardInterrupt:
            self.close()
            raise
        if not self.url:
            self.close()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self) -> None:
        """Waits until the model is loaded, or raises why it cannot be."""
        self._ready.wait()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Stops the server and its engine. Raises what ended the server before, if anything did."""
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # the thread that made this one shows it
            self.error = error
        finally:
            self._listening.set()
            self._ready.set()

    async def _serve(self) -> None:
        from hotcold.server.run import http_server
        from hotcold.server.service import Service
        from hotcold.server.settings import Settings, digest, listening_sockets

        settings = Settings(port=0, keys=(digest(self.key),), log=False)
        sockets = listening_sockets(settings)
        service = Service(hotcold.AsyncLLM(self._model), settings)
        server, stop = http_server(service, None, self._noting), asyncio.Event()
        serving = asyncio.create_task(server.serve(sockets, stop))
        self.url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        self._listening.set()
        loading = asyncio.create_task(service.load())
        try:
            while not self._stop.is_set() and not loading.done():
                await asyncio.wait((loading,), timeout=_LOOK_S)
            if loading.done():
                loading.result()  # UserError: the model cannot be loaded
                self._ready.set()
            while not self._stop.is_set():
                if service.state != "ready":
                    raise UserError(service.llm.error or "the engine has ended")
                await asyncio.sleep(_LOOK_S)
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            stop.set()
            await serving
            await service.llm.close()
            service.close()
            for listening in sockets:
                listening.close()

    def _noting(self, app: Any) -> Any:
        """The application, which also notes the time of the last request."""

        async def noting(scope: Any, receive: Any, send: Any) -> None:
            self.last = time.monotonic()
            await app(scope, receive, send)
            self.last = time.monotonic()

        return noting


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    try:
        with Server(args.model) as server:
            if args.show == "none":
                print(server.page, flush=True)
                server.ready()
                print("ready", flush=True)
                wait(server, float("inf"))
            elif args.show == "browser" or not show_web_view(server):
                show_browser(server, args.idle * 60)
    except KeyboardInterrupt:
        pass
    except (UserError, OSError) as error:
        print(f"{TITLE}: {error}", file=sys.stderr)
        return 2
    return 0


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model", metavar="FILE", help="GGUF file (default: the built-in model)")
    parser.add_argument(
        "--show",
        choices=("auto", "browser", "none"),
        default="auto",
        help="a web view or else a browser; a browser; or nothing but the page's address (default: auto)",
    )
    parser.add_argument(
        "--idle",
        type=float,
        default=60,
        metavar="MINUTES",
        help="end after so long without a request, where a browser's tab shows it (default: 60)",
    )
    return parser.parse_args(argv)


def show_web_view(server: Server) -> bool:
    """Shows the page in a window until that is closed; False if there is no web view on this machine."""
    try:
        import webview
        from webview.errors import WebViewException
    except ImportError:
        return False
    try:
        webview.create_window(TITLE, server.page, width=SIZE[0], height=SIZE[1])
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Python's own would wait until the toolkit returns
        webview.start()  # it needs the main thread
    except WebViewException:
        return False
    return True


def show_browser(server: Server, idle_s: float) -> None:
    """Shows the page in a browser, in a window of its own where that can be."""
    # Children of a browser that has ended may still write there while it is removed.
    with tempfile.TemporaryDirectory(prefix="hotcold-", ignore_cleanup_errors=True) as folder:
        # All users of a machine see the words of a command line; the key is in a file for this one only.
        door = Path(folder, "open.html")
        door.write_text(f'<!doctype html><meta http-equiv="refresh" content="0;url={server.page}">', "utf-8")
        browser = next(filter(None, map(shutil.which, BROWSERS)), None)
        if browser is None:
            with system_libraries():
                webbrowser.open(door.as_uri())
            wait(server, idle_s)
            return
        size = f"--window-size={SIZE[0]},{SIZE[1]}"
        command = [browser, f"--app={door.as_uri()}", f"--user-data-dir={folder}/profile", size]
        with system_libraries():
            window = subprocess.Popen([*command, "--no-first-run"], stderr=subprocess.DEVNULL)
        try:
            while window.poll() is None and not server.ended:
                time.sleep(_LOOK_S)
        finally:
            window.terminate()
            window.wait()


@contextlib.contextmanager
def system_libraries() -> Iterator[None]:
    """Takes a packed program's own libraries, which other programs must not load, out of the environment
    for a while. All else stays in it, since the server's thread starts processes meanwhile."""
    packed_libraries = os.environ.get(_LIBRARIES)
    if packed_libraries is None or not getattr(sys, "frozen", False):
        yield
        return
    os.environ[_LIBRARIES] = os.environ.get(f"{_LIBRARIES}_ORIG", "")
    try:
        yield
    finally:
        os.environ[_LIBRARIES] = packed_libraries


def wait(server: Server, idle_s: float) -> None:
    while not server.ended and time.monotonic() - server.last < idle_s:
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends the browser and the engine, too
    sys.exit(main())
