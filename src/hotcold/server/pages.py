"""Serves the web page's files from memory, without a key: they ask the API for what they show."""

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
#: The page loads nothing from elsewhere, sends nothing elsewhere, and runs only these files.
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
        "require-trusted-types-for 'script'",  # so that no text can become markup
        "trusted-types dompurify",  # but through this, which lets through what page/markdown.js lists
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # browsers may keep it, and check it by its tag
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
    found = {f"/page/{path.relative_to(_FOLDER).as_posix()}": _File.read(path) for path in paths}
    found["/"] = found.pop("/page/index.html")
    found["/favicon.ico"] = found["/page/icon.svg"]  # browsers ask for it with any page
    return found


_FILES = _files()


async def _home(request: Request) -> Response:
    """The page; for Ollama's own clients the text by which they find a server."""
    if request.headers.get("user-agent", "").startswith("ollama"):
        return Response("Ollama is running", media_type="text/plain")
    return await _FILES["/"](request)


def page_routes() -> list[BaseRoute]:
    """Routes of ``/`` and the files that it loads."""
    files = {path: file.__call__ for path, file in _FILES.items()} | {"/": _home}
    return [Route(path, endpoint, methods=["GET"]) for path, endpoint in files.items()]


def is_page(path: str) -> bool:
    """True for a path of these files, which need no key."""
    return path in _FILES
