"""Rewrites the targets of requests, which clients write in several forms, to the form of the routes."""

import re
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

_ABSOLUTE = re.compile(r"https?://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)
_SLASHES = re.compile(r"//+")


class PlainTarget:
    """Reduces targets to a path without repeated slashes.

    A base URL that ends with a slash and a path that begins with one make ``//v1/models``. A proxy's client
    sends ``http://host/v1/models``; its host overrides ``Host`` (RFC 9112, 3.2.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, **_plain(scope)}
        await self._app(scope, receive, send)


def _plain(scope: Scope) -> dict[str, Any]:
    """Returns the entries of the scope that change."""
    changed: dict[str, Any] = {}
    raw = scope.get("raw_path", b"").decode("latin-1") or scope["path"]
    if match := _ABSOLUTE.fullmatch(raw):
        host, raw = match[1], match[2] or "/"
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"host"]
        changed = {"headers": [(b"host", host.encode("latin-1")), *headers], "path": unquote(raw)}
    path = str(changed.get("path", scope["path"]))
    if "//" in path:
        changed["path"] = _SLASHES.sub("/", path)
    if changed:
        changed["raw_path"] = _SLASHES.sub("/", raw).encode("latin-1")
    return changed
