"""Bad requests to a real server: each gets an error in its dialect, and harms no other request."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import pytest
from support.served import Served, served

from tests.server.protocol.test_bad_requests import CHATS

CONTEXT = 256  # of the built-in model
JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "Hello"}]
#: Two that parse bodies differently, for all bodies.
POSTS = ["/v1/chat/completions", "/tokenize"]
#: The others parse them like one of these; each gets some.
LIKE_THESE = [
    pytest.param("/v1/completions", marks=pytest.mark.full),
    pytest.param("/completion", marks=pytest.mark.full),
    pytest.param("/infill", marks=pytest.mark.full),
    pytest.param("/apply-template", marks=pytest.mark.full),
    pytest.param("/v1/responses", marks=pytest.mark.full),
    pytest.param("/detokenize", marks=pytest.mark.full),
    pytest.param("/v1/embeddings", marks=pytest.mark.full),
    pytest.param("/v1/messages", marks=pytest.mark.full),
    pytest.param("/api/chat", marks=pytest.mark.full),
    pytest.param("/api/generate", marks=pytest.mark.full),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("-t", "1") as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[httpx.Client]:
    """Gives a client, and checks afterwards that the server answers as before."""
    with server.client() as found:
        before = story(found)
        yield found
        assert found.get("/health").status_code == 200
        assert story(found) == before
        assert server.metric("hotcold_requests_running") == server.metric("hotcold_requests_waiting") == 0
    assert not [line for line in server.errors if " 5" in line.split("s ")[0] and "error=" in line]


def story(client: httpx.Client) -> str:
    body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
    return str(client.post("/v1/completions", json=body).json()["choices"][0]["text"])


def check_error(reply: httpx.Response, *statuses: int) -> dict[str, Any]:
    assert reply.status_code in (statuses or range(400, 500)), reply.text[:300]
    path = reply.request.url.path
    if path.startswith("/api/"):
        error = reply.json()
        assert list(error) == ["error"] and error["error"].isprintable()
        return dict(error)
    if path == "/v1/messages":
        error = reply.json()["error"]
        assert reply.json()["type"] == "error" and list(error) == ["type", "message"]
        assert error["message"].isprintable() and 5 < len(error["message"]) < 600
        return dict(error)
    (error,) = reply.json().values()
    counts = [error.pop(key) for key in ("n_prompt_tokens", "n_ctx") if key in error]  # llama.cpp's
    assert len(counts) == 2 * (error["code"] == "context_length_exceeded") and all(counts)
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"].isprintable() and 5 < len(error["message"]) < 600
    assert all(error[key] is None or isinstance(error[key], str) for key in error)
    assert error["code"] and reply.headers["x-request-id"].startswith("req_")
    return dict(error)


BODIES = {
    "none": b"",
    "spaces": b"  \n",
    "object": b"{}",
    "array": b"[]",
    "null": b"null",
    "number": b"5",
    "text": b'"prompt"',
    "cut": b'{"prompt": "a',
    "NaN": b'{"prompt": "a", "messages": [], "content": "a", "tokens": [1], "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "messages": [], "content": "a", "tokens": [1], "temperature": Infinity}',
    "1e999": b'{"prompt": "a", "messages": [], "content": "a", "tokens": [1], "temperature": 1e999}',
    "digits": b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
    "deep": b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "twice": b'{"prompt": "a", "prompt": "b", "content": "a", "content": "b"}',
    "surrogate": b'{"prompt": "\\ud800", "content": "\\ud800", "messages": [], "tokens": [1]}',
    "not UTF-8": b'{"prompt": "\xff"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "form": b"prompt=a&max_tokens=5",
}


@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_are_no_request(client: httpx.Client, path: str) -> None:
    for body in BODIES.values():
        check_error(client.post(path, content=body, headers=JSON), 400)


@pytest.mark.parametrize("path", LIKE_THESE)
def test_every_route_refuses_such_bodies(client: httpx.Client, path: str) -> None:
    """One that each part of the reading refuses: no JSON, too deep, no object, a number that is none."""
    for name in ("none", "cut", "not UTF-8", "deep", "array", "NaN", "twice"):
        check_error(client.post(path, content=BODIES[name], headers=JSON), 400)
    if not path.startswith("/api/"):  # Ollama's clients ask so whether the model is loaded
        check_error(client.post(path, content=BODIES["object"], headers=JSON), 400)
    check_error(client.post(path, content=b"{}", headers={"Content-Type": "text/html"}), 415)
    page = {"Content-Type": "text/plain", "Origin": "http://localhost:3000"}
    check_error(client.post(path, content=b"{}", headers=page), 415)
    check_error(client.post(path, content=b"{}", headers={**page, "Origin": "https://evil.com"}), 403)
    check_error(client.post(path, content=b"{}", headers={**JSON, "Content-Encoding": "gzip"}), 400)
    check_error(client.post(path, content=b"{}", headers={**JSON, "Content-Encoding": "br"}), 415)
    check_error(client.post(path, content=bomb(), headers={**JSON, "Content-Encoding": "gzip"}), 413)


@cache
def bomb() -> bytes:
    """A few bytes that unpack to 20 MB."""
    return gzip.compress(b"[" + b"0," * 10_000_000 + b"0]")


@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_are_no_json(client: httpx.Client, path: str) -> None:
    body = json.dumps({"prompt": "a"}).encode()
    for kind in ("multipart/form-data", "application/jsonx", "text/html", "text/plainer", "application/xml"):
        check_error(client.post(path, content=body, headers={"Content-Type": kind}), 415)
    # A page's browser sends these without asking the server first, whether the page is allowed or not.
    for kind in ("", "text/plain", "application/x-www-form-urlencoded", "text/plain;charset=UTF-8"):
        for mark, value in (
            ("Origin", "http://localhost:3000"),
            ("Referer", "http://localhost:3000/"),
            ("Sec-Fetch-Site", "same-origin"),
            ("Sec-Fetch-Mode", "no-cors"),
        ):
            reply = client.post(path, content=body, headers={"Content-Type": kind, mark: value})
            check_error(reply, 415)
        foreign = {"Content-Type": kind, "Origin": "https://evil.com"}
        check_error(client.post(path, content=body, headers=foreign), 403)
    for encoding in ("br", "zstd", "identity, gzip"):
        check_error(client.post(path, content=bomb(), headers={**JSON, "Content-Encoding": encoding}), 415)


def test_types_of_json_that_are_accepted(client: httpx.Client) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    for kind in ("application/json", "application/json; charset=utf-8", "Application/JSON;charset=UTF-8"):
        assert client.post("/v1/completions", content=body, headers={"Content-Type": kind}).status_code == 200


def test_types_that_programs_send_without_being_told(client: httpx.Client) -> None:
    """curl -d, Python's urllib, Node's fetch of a string, and requests without one."""
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    for kind in ("application/x-www-form-urlencoded", "text/plain;charset=UTF-8", "text/plain", ""):
        headers = {"Content-Type": kind} if kind else {}
        assert client.post("/v1/completions", content=body, headers=headers).status_code == 200
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    reply = client.post("/v1/completions", content=b"prompt=a&max_tokens=1", headers=form)
    assert check_error(reply, 400)["code"] == "invalid_json"


def test_a_byte_order_mark_before_a_body_is_passed_over(client: httpx.Client) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/tokenize", {"content": "a"}),
    ):
        marked = b"\xef\xbb\xbf" + json.dumps(body).encode()
        assert client.post(path, content=marked, headers=JSON).status_code == 200


@pytest.mark.parametrize("path", [*POSTS, *LIKE_THESE])
def test_bodies_that_are_too_large(client: httpx.Client, path: str) -> None:
    text = b"a" * (17 << 20)
    check_error(client.post(path, content=b'{"prompt": "' + text + b'"}', headers=JSON), 413)


def dumped(value: Any) -> bytes:
    """Also what is deeper than the interpreter's limit allows by itself."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return json.dumps(value).encode()
    finally:
        sys.setrecursionlimit(before)


SOME = CHATS[::7]


@pytest.mark.parametrize(
    "chats",
    [SOME, pytest.param([each for each in CHATS if each not in SOME], marks=pytest.mark.full)],
    ids=["some", "rest"],
)
def test_chat_requests_that_are_wrong(client: httpx.Client, chats: list[tuple[Any, str | None]]) -> None:
    """Some requests of protocol/test_bad_requests.py, here through a real server."""
    for fields, param in chats:
        body = dumped({"messages": HELLO, **fields})
        error = check_error(client.post("/v1/chat/completions", content=body, headers=JSON), 400, 404, 413)
        assert error["param"] == param or error["code"] in ("invalid_json", "request_too_large"), error


COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": None},
    {"prompt": []},
    {"prompt": {}},
    {"prompt": [[]]},
    {"prompt": [-1]},
    {"prompt": [4096]},
    {"prompt": [2**40]},
    {"prompt": [1.5]},
    {"prompt": ["a", 1]},
    {"prompt": ["a"] * 1000},
    {"prompt": "a", "max_tokens": -2},
    {"prompt": "a", "max_tokens": 1e308},
    {"prompt": "a", "n": 10**9},
    {"prompt": "a", "best_of": 10**9},
    {"prompt": "a", "logprobs": 21},
    {"prompt": "a", "suffix": "b"},
    {"prompt": "a", "stream": 1},
    {"prompt": "a", "model": ["another"]},
    {"prompt": [5] * CONTEXT},
    {"prompt": [5] * (CONTEXT + 1)},
    {"prompt": [5] * 10 * CONTEXT},
    {"prompt": "word " * 100_000},
    {"prompt": "a", "regex": "("},
    {"prompt": "a", "regex": "(a+)+b", "grammar": "root ::= x"},
    {"prompt": "a", "json_schema": {"$ref": "http://example.org/schema"}},
    {"prompt": "a", "json_schema": {"$ref": "#/nowhere"}},
    {"prompt": "a", "json_schema": {"type": "none"}},
    {"prompt": "a", "response_format": {"type": "xml"}},
]


@pytest.mark.parametrize("stream", [False, True])
def test_completions_that_are_wrong(client: httpx.Client, stream: bool) -> None:
    for body in COMPLETIONS:
        fields = {"max_tokens": 2, "stream": stream, **body}
        check_error(client.post("/v1/completions", json=fields), 400, 404)


def test_prompts_as_long_as_the_context(client: httpx.Client) -> None:
    reply = client.post("/v1/completions", json={"prompt": [5] * (CONTEXT - 1), "max_tokens": 9}).json()
    assert reply["choices"][0]["finish_reason"] in ("length", "stop")
    assert reply["usage"]["completion_tokens"] <= 1
    error = check_error(client.post("/v1/completions", json={"prompt": [5] * CONTEXT}), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
    long = [{"role": "user", "content": "word " * 1000}]
    error = check_error(client.post("/v1/chat/completions", json={"messages": long}), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"


TEXTS = [
    "\0",
    "\u202e\u05d0\u05d1",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "<|im_start|>system",
    "</s>",
    "\n" * 99,
]


def test_texts_that_are_strange_and_right(client: httpx.Client) -> None:
    for text in TEXTS:
        for path, body in (
            ("/v1/completions", {"prompt": f"a{text}"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"a{text}"}]}),
            ("/completion", {"prompt": f"a{text}"}),
        ):
            reply = client.post(path, json={**body, "max_tokens": 2, "no_such_field": text})
            assert reply.status_code == 200, reply.text
        ids = client.post("/tokenize", json={"content": text, "parse_special": False}).json()["tokens"]
        assert ids and 2 not in ids  # no end of text
        assert client.post("/detokenize", json={"tokens": ids}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/no/such/path", 404),
        ("GET", "//v1//no//such", 404),
        ("GET", "/v1/models/another", 404),
        ("GET", "/v1/models/%2e%2e", 404),
        ("GET", "/v1/%2e%2e/%2e%2e/etc/passwd", 404),
        ("GET", "/page/%2e%2e/app.py", 404),
        ("GET", "/page/..%2fapp.py", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/tokenize", 405),
        ("TRACE", "/health", 405),
        ("HEAD", "/v1/completions", 405),
        ("BREW", "/health", 405),
    ],
)
def test_paths_and_methods(client: httpx.Client, method: str, path: str, status: int) -> None:
    reply = client.request(method, f"{str(client.base_url).rstrip('/')}{path}")
    assert reply.status_code == status
    if method != "HEAD":
        check_error(reply, status)
    if status == 405:
        assert "OPTIONS" in reply.headers["allow"] and method not in reply.headers["allow"].split(", ")


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/health", "/v1/completions", "/"])
def test_options_names_the_methods(client: httpx.Client, path: str) -> None:
    reply = client.options(path)
    assert reply.status_code == 204 and not reply.content
    assert ("POST" if "completions" in path else "GET") in reply.headers["allow"]


def test_allow_names_every_method_of_a_path(client: httpx.Client) -> None:
    """The document of the routes is the truth."""
    for path, operations in client.get("/openapi.json").json()["paths"].items():
        methods = {"OPTIONS", *map(str.upper, operations)} | ({"HEAD"} if "get" in operations else set())
        for method in ("OPTIONS", "PUT"):
            reply = client.request(method, path.replace("{", "").replace("}", ""))
            assert set(reply.headers["allow"].split(", ")) == methods, path
        assert reply.status_code == 405 and reply.headers["allow"] in reply.text


def test_head_is_get_without_its_body(client: httpx.Client) -> None:
    get, head = client.get("/v1/models"), client.head("/v1/models")
    assert head.status_code == 200 and not head.content
    assert head.headers["content-length"] == str(len(get.content))


def test_a_lot_of_a_query(client: httpx.Client) -> None:
    assert client.get("/health", params={"q": "x" * 20_000}).status_code == 200
    assert client.get("/health", params={"q": "x" * 60_000}).status_code == 431
