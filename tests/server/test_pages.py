"""The page's files as the server gives them: what they may load, and what they are allowed to do."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.testclient import TestClient

import hotcold.server
from hotcold.server.pages import is_page, page_routes

FOLDER = Path(hotcold.server.__file__).parent / "page"
FILES = sorted(path for path in FOLDER.rglob("*") if path.suffix not in (".md", ".LICENSE", ""))
OWN = [path for path in FILES if path.parent == FOLDER]
SCRIPTS = [path for path in OWN if path.suffix == ".js"]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(Starlette(routes=page_routes()), base_url="http://localhost") as client:
        yield client


class Markup(HTMLParser):
    """Collects what a document refers to, and what a strict policy forbids in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.forbidden: list[str] = []
        self.ids: list[str] = []
        self.labelled: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found: dict[str, Any] = dict(attrs)
        self.references += [found[name] for name in ("src", "href") if name in found]
        self.forbidden += [f"{tag} {name}" for name in found if name.startswith("on") or name == "style"]
        if (tag == "script" and "src" not in found) or tag in ("style", "iframe", "object", "embed", "base"):
            self.forbidden.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        for name in ("aria-labelledby", "aria-describedby", "for"):
            self.labelled += (found.get(name) or "").split()


def test_ollamas_clients_find_a_server(client: TestClient) -> None:
    """Any other program gets the page, and HEAD succeeds for all."""
    for agent, page in (("ollama/0.12 (amd64 linux)", False), ("ollama-python/0.6", False), ("curl/8", True)):
        reply = client.get("/", headers={"User-Agent": agent})
        assert reply.status_code == 200 and (reply.text == "Ollama is running") != page
        assert client.head("/", headers={"User-Agent": agent}).status_code == 200
    assert "Ollama is running" not in client.get("/page/app.js", headers={"User-Agent": "ollama/1"}).text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file_is_served_as_what_it_is(client: TestClient, path: Path) -> None:
    url = "/" if path.name == "index.html" else f"/page/{path.relative_to(FOLDER).as_posix()}"
    reply = client.get(url)
    assert reply.status_code == 200 and reply.content == path.read_bytes() and is_page(url)
    kinds = {".html": "text/html", ".css": "text/css", ".svg": "image/svg+xml"}
    assert reply.headers["content-type"].startswith(kinds.get(path.suffix, "text/javascript"))
    assert reply.headers["x-content-type-options"] == "nosniff"
    again = client.get(url, headers={"If-None-Match": reply.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    assert client.get(url, headers={"If-None-Match": '"other"'}).status_code == 200
    assert client.head(url).headers["content-length"] == str(len(reply.content))


def test_the_policy_allows_this_server_alone(client: TestClient) -> None:
    text = client.get("/").headers["content-security-policy"]
    policy = {name: values for name, *values in (part.split() for part in text.split(";"))}
    assert policy.pop("default-src") == ["'none'"]
    for name in ("script-src", "style-src", "img-src", "connect-src"):
        assert policy.pop(name) == ["'self'"]
    for name in ("base-uri", "frame-ancestors", "form-action"):
        assert policy.pop(name) == ["'none'"]
    assert policy == {"require-trusted-types-for": ["'script'"], "trusted-types": ["dompurify"]}


def test_what_others_wrote_is_as_they_wrote_it() -> None:
    """And each file has its licence beside it."""
    vendor = FOLDER / "vendor"
    rows = re.findall(
        r"^\| `([\w.]+)` .*`([\w.]+)` \| `(\w{64})` \|$", (vendor / "README.md").read_text(), re.M
    )
    assert {name for name, *_ in rows} == {path.name for path in FILES if path.parent == vendor}
    for name, licence, checksum in rows:
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == checksum
        assert len((vendor / licence).read_text(encoding="utf-8")) > 1000


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/index.html",
        "/page/vendor/README.md",
        "/page/../pages.py",
        "/page/%2e%2e/pages.py",
        "/x",
    ],
)
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404 and not is_page(path)


def test_the_document_keeps_to_the_policy() -> None:
    markup = Markup((FOLDER / "index.html").read_text(encoding="utf-8"))
    assert markup.forbidden == []
    for reference in markup.references:
        assert is_page(reference) or (reference[0] == "#" and reference[1:] in markup.ids)
    assert len(markup.ids) == len(set(markup.ids)) and set(markup.labelled) <= set(markup.ids)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_make_no_markup_of_text_and_load_only_each_other(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|https?:|//[a-z]+\."
    assert re.findall(unsafe, source) == []
    for imported in re.findall(r"""(?:from|import)\s+["']([^"']+)""", source):
        assert (FOLDER / imported).is_file()


def test_elements_that_scripts_ask_for_are_there() -> None:
    ids = set(Markup((FOLDER / "index.html").read_text(encoding="utf-8")).ids)
    for path in SCRIPTS:
        assert set(re.findall(r'\$\("([^"]+)"\)', path.read_text(encoding="utf-8"))) <= ids


def test_styles_load_nothing() -> None:
    assert not re.search(r"@import|url\(|@font-face", (FOLDER / "style.css").read_text(encoding="utf-8"))
