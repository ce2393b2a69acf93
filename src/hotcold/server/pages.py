"""Serves the web page's files from memory, without a key. The page asks the API for all data."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

_FOLDER = Path(__file__).with_name("page")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
#: The page loads nothing from other servers, sends nothing to them, and runs only these files.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # text cannot become markup
        "trusted-types dompurify",  # except by DOMPurify, which keeps the markup that page/markdown.js lists
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # browsers may cache it, and must check its ETag
}


@dataclass(frozen=True)
class _File:
    content: bytes
    headers: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> "_File":
        content = path.read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        return cls(content, {**_HEADERS, "Content-Type": _TYPES[path.suffix], "ETag": tag})

    async def __call__(self, request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if self.headers["ETag"] in known or known.strip() == "*":
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


def _files() -> dict[str, _File]:
    paths = [path for path in sorted(_FOLDER.rglob("*")) if path.suffix in _TYPES]
    files = {f"/page/{path.relative_to(_FOLDER).as_posix()}": _File.read(path) for path in paths}
    files["/"] = files.pop("/page/index.html")
    files["/favicon.ico"] = files["/page/icon.svg"]  # browsers request it with every page
    return files


_FILES = _files()


async def _home(request: Request) -> Response:
    """Returns the page. Ollama's own clients get the text by which they recognise a server."""
    if request.headers.get("user-agent", "").startswith("ollama"):
        return Response("Ollama is running", media_type="text/plain")
    return await _FILES["/"](request)


def page_routes() -> list[BaseRoute]:
    """Returns the routes of ``/`` and the files that it loads."""
    files = {path: file.__call__ for path, file in _FILES.items()} | {"/": _home}
    return [Route(path, endpoint, methods=["GET"]) for path, endpoint in files.items()]


def is_page(path: str) -> bool:
    """Returns whether a path is a file of the page, which needs no key."""
    return path in _FILES
