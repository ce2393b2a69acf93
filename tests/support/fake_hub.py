"""A Hugging Face hub on this machine: as much of its HTTP as downloads use, and what goes wrong with it."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMITS = ("a" * 40, "b" * 40)


class FakeHub:
    """``files[repo][path]`` is what a repository has; the rest makes it fail. Requests are noted."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.commit = COMMITS[0]  #: what ``main`` means
        self.private: set[str] = set()  #: need the token ``secret``
        self.gated: set[str] = set()
        self.cut_after: int | None = None  #: bytes of a body, and then the connection ends; once
        self.down_after_cut = True
        self.cut_again = False  #: not once, but every time
        self.down = False  #: answers 503 to everything from then on
        self.damage: set[str] = set()  #: paths with a wrong byte in their content
        self.no_checksum = False
        self.page: bytes | None = None  #: comes instead of a repository's description
        self.ignore_ranges = False
        self.hold: threading.Event | None = None  #: bodies wait for it after their first half
        self.started = threading.Event()  #: a body has begun
        self.bodies: list[tuple[str, int]] = []  #: path and first byte of each body that was sent
        self.tokens: list[str | None] = []  #: of requests to the CDN, which must not see one
        self.requests = 0
        self.url = ""

    def add(self, repo: str, **files: bytes) -> None:
        self.files.setdefault(repo, {}).update(files)


class _Answer(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, unquote(self.path)
        hub.requests += 1
        if hub.down:
            self._error(503)
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/?]+)(?:/revision/([^?]+))?(?:\?.*)?", path):
            self._repository(found[1], found[2])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(found[1], found[2], found[3])
        elif found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            self._body(found[2], hub.files[found[1]][found[2]])
        else:
            self._error(404)

    def _refused(self, repo: str) -> bool:
        token = self.headers.get("Authorization")
        if repo in self.hub.gated:
            self._error(403, "GatedRepo")
        elif repo not in self.hub.files or (repo in self.hub.private and token != "Bearer secret"):
            self._error(401, "RepoNotFound")  # the hub does not say which of the two
        else:
            return False
        return True

    def _repository(self, repo: str, revision: str | None) -> None:
        if self._refused(repo):
            return
        if revision not in (None, "main", "v1", *COMMITS):
            self._error(404, "RevisionNotFound")
            return
        commit = revision if revision in COMMITS else self.hub.commit
        if self.hub.page is not None:
            self._send(200, self.hub.page)
            return
        siblings = [self._sibling(name, data) for name, data in self.hub.files[repo].items()]
        self._send(200, json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode())

    def _sibling(self, name: str, data: bytes) -> dict[str, object]:
        """As the hub describes a file where it is asked for more than names."""
        about: dict[str, object] = {"rfilename": name, "size": len(data)}
        if "blobs=" in self.path and not self.hub.no_checksum:
            sha256 = hashlib.sha256(data).hexdigest()
            about["blobId"] = hashlib.sha1(sha256.encode()).hexdigest()  # of a pointer in git
            about["lfs"] = {"size": len(data), "sha256": sha256, "pointerSize": 134}
        return about

    def _resolve(self, repo: str, revision: str, file: str) -> None:
        if self._refused(repo):
            return
        data = self.hub.files[repo].get(file)
        if data is None:
            self._error(404, "EntryNotFound")
            return
        headers = {
            "X-Repo-Commit": revision if revision in COMMITS else self.hub.commit,
            "X-Linked-Size": str(len(data)),
            "Location": f"{self.hub.url.replace('127.0.0.1', 'localhost')}/cdn/{repo}/{file}",
        }
        if not self.hub.no_checksum:
            headers["X-Linked-Etag"] = f'"{hashlib.sha256(data).hexdigest()}"'
        self._send(302, b"", headers)

    def _body(self, file: str, data: bytes) -> None:
        hub = self.hub
        hub.tokens.append(self.headers.get("Authorization"))
        if file in hub.damage:
            data = data[:-1] + bytes([data[-1] ^ 1])
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if hub.ignore_ranges:
            asked = None
        first, whole = int(asked[1]) if asked else 0, len(data)
        if asked and asked[2]:
            data = data[: int(asked[2]) + 1]
        hub.bodies.append((file, first))
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{whole}")
        self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        if hub.cut_after is not None:
            self.wfile.write(data[first : first + hub.cut_after])
            if not hub.cut_again:
                hub.cut_after, hub.down = None, hub.down_after_cut
            self.close_connection = True
            return
        half = (first + len(data)) // 2
        self.wfile.write(data[first:half])
        self.wfile.flush()
        hub.started.set()
        if hub.hold is not None:
            hub.hold.wait(30)
        self.wfile.write(data[half:])

    def _error(self, status: int, code: str = "") -> None:
        self._send(status, b"{}", {"X-Error-Code": code} if code else {})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    answer = type("Answer", (_Answer,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), answer)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        if hub.hold is not None:
            hub.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()
