"""Open WebUI end to end: started beside a server, and asked by its own HTTP API.

    pip install open-webui                     # in an environment of its own, with Python 3.11 or 3.12
    python benchmarks/serving/open_webui.py -m SmolLM2-135M-Instruct.Q4_1.gguf --program VENV/bin/open-webui

It is connected by OpenAI's API, then by Ollama's. Each time it begins with an empty folder: a first user
signs up and logs in, the models are listed, and a chat streams. Its settings exclude its own models (for
documents, speech), so that it needs no network. The last line of stdout is a JSON object: what it
showed, and what it asked the server for."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.server import serving

PERSON = {"name": "Ada", "email": "ada@example.org", "password": "engine-of-1843"}
QUESTION = "Say hello to Ada in one sentence."
ALIAS = "smollm2"
_PATIENCE_S = 900  # it loads hundreds of modules, and makes its tables

#: Open WebUI loads no models from elsewhere, and sends no reports.
QUIET = {
    "OFFLINE_MODE": "true",
    "HF_HUB_OFFLINE": "1",
    "RAG_EMBEDDING_ENGINE": "openai",
    "ENABLE_VERSION_UPDATE_CHECK": "false",
    "ANONYMIZED_TELEMETRY": "false",
    "DO_NOT_TRACK": "true",
    "SCARF_NO_ANALYTICS": "true",
    "WEBUI_SECRET_KEY": "only-for-this-run",
    # Titles and tags would be asked for by further requests.
    **{f"ENABLE_{what}_GENERATION": "false" for what in ("TITLE", "TAGS", "FOLLOW_UP")},
}
#: By which API it asks: what its environment says of the server at ``url``.
CONNECTIONS = {
    "openai": lambda url: {
        "ENABLE_OLLAMA_API": "false",
        "OPENAI_API_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
    },
    "ollama": lambda url: {"ENABLE_OPENAI_API": "false", "OLLAMA_BASE_URL": url},
}


class Site:
    """Open WebUI's API at an address."""

    def __init__(self, url: str) -> None:
        self.url, self.token = url, ""

    def open(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        return urllib.request.urlopen(request, timeout=_PATIENCE_S)

    def ask(self, path: str, body: Any = None) -> Any:
        with self.open(path, body) as answer:
            return json.load(answer)

    def chat(self, model: str) -> Iterator[str]:
        """The pieces of an answer, as they come."""
        body = {"model": model, "stream": True, "messages": [{"role": "user", "content": QUESTION}]}
        with self.open("/api/chat/completions", body | {"temperature": 0, "max_tokens": 40}) as answer:
            for line in answer:
                event = line.decode().strip().removeprefix("data: ")
                if event and event != "[DONE]":
                    for choice in json.loads(event).get("choices", ()):
                        yield choice["delta"].get("content") or ""


@contextmanager
def running(program: Path, environment: dict[str, str], folder: Path) -> Iterator[Site]:
    """Open WebUI with an empty folder of its own, until the body ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Nothing of this user's settings or keys comes along.
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    variables = kept | {"HOME": str(folder), "DATA_DIR": str(folder)} | QUIET | environment
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(program), "serve", "--host", "127.0.0.1", "--port", str(port)],
            cwd=folder,
            env=variables,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    site = Site(f"http://127.0.0.1:{port}")
    end = time.monotonic() + _PATIENCE_S
    try:
        while True:
            try:
                site.ask("/health")
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"it does not start:\n{log.read_text()[-3000:]}") from None
                time.sleep(0.5)
        yield site
    finally:
        process.terminate()
        process.wait()


def use(site: Site) -> dict[str, Any]:
    """Signs up, logs in, lists models and chats; prints what comes."""
    version = site.ask("/api/config")["version"]
    print(f"Open WebUI {version}")
    first = site.ask("/api/v1/auths/signup", PERSON)
    print(f"signed up: {first['name']}, {first['role']}")
    login = {name: PERSON[name] for name in ("email", "password")}
    site.token = site.ask("/api/v1/auths/signin", login)["token"]
    models = [each["id"] for each in site.ask("/api/models")["data"]]
    print(f"models: {', '.join(models)}")
    print(f"> {QUESTION}")
    pieces = []
    name = next((each for each in models if each.startswith(ALIAS)), "")
    for piece in site.chat(name):
        print(piece, end="", flush=True)
        pieces.append(piece)
    print()
    return {
        "version": version,
        "models": models,
        "pieces": len([*filter(None, pieces)]),
        "text": "".join(pieces),
    }


def asked(url: str) -> dict[str, int]:
    """How many answers the server gave, by route and status."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    counts = re.findall(r'requests_total\{route="([^"]+)",status="(\d+)"\} ([\d.]+)', text)
    ignored = ("/health", "/metrics")
    return {f"{route} {status}": int(float(count)) for route, status, count in counts if route not in ignored}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-m", "--model", type=Path, required=True, help="GGUF file with a chat template")
    add(
        "--program", type=Path, default=Path("open-webui"), help="Open WebUI's command (default: on the path)"
    )
    add("--only", nargs="+", choices=CONNECTIONS, default=[*CONNECTIONS])
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in options.only:
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            serving(["-m", str(options.model), "--alias", ALIAS], Path(folder) / "server") as server,
        ):
            server.wait_until_ready()
            print(f"--- by the API of {name}", flush=True)
            home = Path(folder) / "home"
            home.mkdir()
            with running(options.program, CONNECTIONS[name](server.url), home) as site:
                results[name] = use(site) | {"asked": asked(server.url)}
            print(json.dumps(results[name]), flush=True)
    print(json.dumps(results))
    return 0 if all(each["pieces"] > 1 for each in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
