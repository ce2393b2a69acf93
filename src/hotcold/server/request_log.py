"""Logs one line per request to stderr: time, route, status, duration; never the content."""

import queue
import re
import secrets
import sys
import threading
import time
import traceback
from typing import TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotcold.server.connections import refused_status
from hotcold.server.metrics import Metrics
from hotcold.server.protocol.errors import APIError
from hotcold.server.rare_lines import RareLines
from hotcold.server.replies import error_reply
from hotcold.values import printable

#: Keys in a request's scope: its id, and additional facts for its log line.
REQUEST_ID, NOTES = "hotcold.id", "hotcold.notes"
STRANGER = "hotcold.stranger"  #: true in the scope of a request that was refused, or that needed no key
LEFT_OUT = "left_out"  #: the note on characters of a prompt that no token can encode
NOT_ENFORCED = "not_enforced"  #: the note on parts of schemas that are not enforced
#: Notes that are also sent as headers.
_HEADERS = {LEFT_OUT: b"x-hotcold-left-out", NOT_ENFORCED: b"x-hotcold-not-enforced"}
_MOST_WAITING = 10_000
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
#: Routes that programs call every few seconds.
_QUIET = ("/health", "/v1/health", "/metrics")


class RequestLog:
    """Writes lines in a thread, so that a stalled reader of stderr does not delay requests. Lines beyond the
    queue's limit are dropped and counted."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="hotcold log", daemon=True)
        self._thread.start()

    def line(self, *words: object) -> None:
        """Adds a line of words; see :func:`line_of`."""
        self.text(line_of(*words))

    def text(self, line: str) -> None:
        """Adds a line unchanged."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def close(self, timeout_s: float = 1) -> None:
        """Writes the remaining lines, if the reader accepts them in time."""
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            if self._dropped:
                line = f"{line}\n(and {self._dropped} lines were dropped, since stderr was not read in time)"
                self._dropped = 0
            try:
                print(line, file=self._stream or sys.stderr, flush=True)
            except (OSError, ValueError):  # stderr is full or closed; requests continue
                return


class Logged:
    """The outermost layer: gives every request an id, a log line, and an answer even after a defect."""

    def __init__(self, app: ASGIApp, log: RequestLog | None, metrics: Metrics, rare: RareLines) -> None:
        self._app = app
        self._log = log
        self._metrics = metrics
        self._rare = rare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        request_id = _request_id(scope)
        scope[REQUEST_ID] = request_id
        notes: dict[str, object] = {}
        scope[NOTES] = notes
        status, complete = 0, False

        async def with_id(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [(b"x-request-id", request_id.encode())]
                added += [(_HEADERS[name], str(notes[name]).encode()) for name in _HEADERS if name in notes]
                message["headers"] = [*message["headers"], *added]
            else:
                complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, with_id)
        except Exception as error:
            failure = defect(error, scope)
            if status and not complete:
                raise _Ended from None  # closes the connection: the answer must not look complete
            if not complete:
                await error_reply(failure, scope["path"])(scope, receive, with_id)
        finally:
            seconds = time.perf_counter() - start
            status = refused_status(scope) or int(str(notes.pop("status", status or 499)))
            self._metrics.request(_route(scope), status, seconds)
            if self._log is not None and not (scope["path"] in _QUIET and status < 500):
                added = [
                    f'{name}="{value}"' if " " in str(value) else f"{name}={value}"
                    for name, value in notes.items()
                ]
                words = (request_id, scope["method"], scope["path"], status, f"{seconds:.3f}s", *added)
                if scope.get(STRANGER):
                    cause = f"a rejected request was answered with status {status}"
                    self._rare.add(cause, line_of(*words))
                else:
                    self._log.line(*words)


def line_of(*words: object) -> str:
    """Returns a line of words with the time. Control characters are escaped, so that no word can forge
    another line or move a terminal's cursor."""
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime())
    return " ".join([moment, *(printable(str(word), 300) for word in words)])


class _Ended(Exception):
    """Raised for an answer that was cut off; the log has the reason."""


def _request_id(scope: Scope) -> str:
    """Returns the client's id of the request, if it is short and plain, or a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ID.fullmatch(given := value.decode("latin-1")):
            return str(given)
    return f"req_{secrets.token_hex(12)}"


def _route(scope: Scope) -> str:
    """Returns the path of the route. The path of the request would have any number of values."""
    return str(getattr(scope.get("route"), "path", "other"))


def defect(error: Exception, scope: Scope) -> APIError:
    """Returns the client's error for an internal failure; the log has its kind and place."""
    scope[NOTES]["error"] = _where(error)
    if sys.flags.dev_mode:
        traceback.print_exception(error)
    message = f"the server failed because of a defect: see its log, request {scope[REQUEST_ID]}"
    return APIError(message, status=500, type="server_error", code="internal_error")


def _where(error: Exception) -> str:
    """Returns the kind and place of an error. Its message is left out, because it may quote the request."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename.rpartition('hotcold/')[2]}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__}@{place}"
