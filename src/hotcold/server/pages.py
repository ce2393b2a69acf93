"""The page's files, from memory. Each is for everybody: what they show, they ask the API for."""

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
    ".svg": "image/svg+xml",
}
#: Nothing is taken from elsewhere, sent elsewhere, or run but these files.
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
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # it may be kept, and is asked for by its tag
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
    found = {f"/page/{path.name}": _File.read(path) for path in sorted(_FOLDER.iterdir()) if path.is_file()}
    found["/"] = found.pop("/page/index.html")
    found["/favicon.ico"] = found["/page/icon.svg"]  # browsers ask for it beside any other file
    return found


_FILES = _files()


def page_routes() -> list[BaseRoute]:
    """``/`` and what it loads."""
    return [Route(path, file.__call__, methods=["GET"]) for path, file in _FILES.items()]


def is_page(path: str) -> bool:
    """Whether it is one of these files: nobody needs a key for them."""
    return path in _FILES
