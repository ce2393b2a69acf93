"""Stands between a client and a server and writes down what the client sends."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

#: Headers of this connection, or that are a secret.
OWN = (
    "accept-encoding",
    "authorization",
    "connection",
    "content-length",
    "host",
    "transfer-encoding",
    "date",
    "server",
)


@contextmanager
def recorded(target: str, path: Path) -> Iterator[str]:
    """The address of a server that passes on to ``target``. Of each request ``path`` gets a line."""

    class Between(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass_on()

        def do_POST(self) -> None:
            self._pass_on()

        def log_message(self, *_: object) -> None: ...

        def _pass_on(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items() if name.lower() not in OWN}
            line = {"path": self.path, "headers": headers, "body": json.loads(sent) if sent else None}
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            reply = httpx.request(self.command, target + self.path, headers=headers, content=sent, timeout=90)
            self.send_response(reply.status_code)
            for name, value in reply.headers.items():
                if name not in (*OWN, "content-encoding"):
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Between) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
