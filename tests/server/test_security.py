"""Access to the server: keys, names in Host, web pages."""

from __future__ import annotations

import socket
import string
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotcold.server.security import host_name
from hotcold.server.settings import digest

KEYS = (digest("first-key"), digest("second-key"))
COMPLETION = {"prompt": "Once", "max_tokens": 3}
EVERY_ROUTE = [
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/models"),
    ("GET", "/v1/models/made-up"),
    ("GET", "/openapi.json"),
    ("GET", "/props"),
    ("GET", "/no/such/path"),
    ("GET", "//v1/models"),
    ("GET", "/health/"),
    ("GET", "/health/../v1/models"),
    ("GET", "/%2e%2e/v1/models"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/completions"),
    ("POST", "/completion"),
    ("POST", "/infill"),
    ("POST", "/apply-template"),
    ("POST", "/v1/responses"),
    ("GET", "/slots"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("TRACE", "/v1/models"),
    ("OPTIONS", "/v1/models"),
]


def check_error(reply: Any, status: int, code: str | None = None) -> None:
    """The four keys of OpenAI's errors, and no more than a line."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"] and "Traceback" not in error["message"]
    assert code is None or error["code"] == code


@pytest.mark.parametrize(("method", "path"), EVERY_ROUTE)
def test_every_route_needs_the_key(app_with: Callable[..., Any], method: str, path: str) -> None:
    client = app_with(keys=KEYS).client
    reply = client.request(method, path)
    check_error(reply, 401, "invalid_api_key")
    assert reply.headers["www-authenticate"] == "Bearer"


def test_health_is_for_everybody(app_with: Callable[..., Any]) -> None:
    client = app_with(keys=KEYS).client
    for path in ("/health", "/v1/health"):
        assert client.get(path).json() == {"status": "ok"}


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer first-key"},
        {"Authorization": "bearer   second-key "},
        {"x-api-key": "first-key"},
        {"X-API-Key": "second-key"},
        {"Authorization": "Bearer of-another-server", "x-api-key": "first-key"},
    ],
)
def test_keys_that_are_right(app_with: Callable[..., Any], headers: dict[str, str]) -> None:
    assert app_with(keys=KEYS).client.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "Bearer")],
        [("Authorization", "Bearer ")],
        [("Authorization", "")],
        [("Authorization", "first-key")],
        [("Authorization", "Basic first-key")],
        [("Authorization", "Bearer first-key x")],
        [("Authorization", "Bearer first-ke")],
        [("Authorization", "Bearer first-keyy")],
        [("Authorization", "Bearer FIRST-KEY")],
        [("Authorization", "Bearer first-key\nsecond-key")],
        [("Authorization", "Bearer first-key"), ("Authorization", "Bearer first-key")],
        [("Authorization", "Bearer wrong"), ("Authorization", "Bearer first-key")],
        [("x-api-key", "first-key"), ("x-api-key", "first-key")],
        [("x-api-key", "")],
        [("x-api-key", "Bearer first-key")],
        [("x-api-key", "ключ".encode())],
    ],
)
def test_keys_that_are_wrong(app_with: Callable[..., Any], headers: list[tuple[str, Any]]) -> None:
    client = app_with(keys=KEYS).client
    raw = [(name.encode(), value if isinstance(value, bytes) else value.encode()) for name, value in headers]
    check_error(client.get("/v1/models", headers=raw), 401, "invalid_api_key")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8080", 200),
        ("LocalHost:1", 200),
        ("chat.localhost", 200),
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("192.168.0.7:8080", 200),
        ("allowed.example.org", 200),
        ("Allowed.Example.org:443", 200),
        ("evil.com", 403),
        ("evil.com:8080", 403),
        ("localhost.evil.com", 403),
        ("evil-localhost", 403),
        ("127.0.0.1.evil.com", 403),
        ("127.0.0.1@evil.com", 403),
        ("[evil]", 403),
        ("", 403),
        ("localhost.", 200),
        ("localhost:80@evil", 403),
        ("localhost:80@evil.com:80", 403),
        ("localhost:", 403),
        ("localhost:80:80", 403),
        ("localhost:8o", 403),
        ("localhost:80/", 403),
        ("localhost/evil.com", 403),
        ("localhost evil.com", 403),
        ("evil.com,localhost", 403),
        ("evil.com@x.localhost", 403),
        ("x..localhost", 403),
        ("[::1]evil.com", 403),
        ("[::1]evil.com:80", 403),
        ("[::1", 403),
        ("::1", 403),
        ("[::1%eth0]", 403),
        ("[127.0.0.1]", 403),
        ("127.0.0.1:80@evil", 403),
    ],
)
def test_names_that_the_server_answers_to(app_with: Callable[..., Any], host: str, status: int) -> None:
    client = app_with(allow_hosts=("allowed.example.org",)).client
    reply = client.get("/v1/models", headers={"Host": host})
    assert reply.status_code == status
    if status == 403:
        check_error(reply, 403, "host_not_allowed")
    assert client.get("/health", headers={"Host": host}).status_code == 200


def test_any_name_where_that_is_wanted(app_with: Callable[..., Any]) -> None:
    client = app_with(allow_hosts=("*",)).client
    assert client.get("/v1/models", headers={"Host": "evil.com"}).status_code == 200
    assert client.get("/v1/models", headers={"Host": "evil.com:80@localhost"}).status_code == 403


def name_in(host: str) -> str | None:
    """The name in Host, found without patterns."""
    if host.startswith("["):
        inner, bracket, port = host[1:].partition("]")
        try:
            socket.inet_pton(socket.AF_INET6, inner)
        except (OSError, UnicodeError, ValueError):
            return None
        name = inner if bracket else ""
    else:
        name, colon, rest = host.partition(":")
        port = colon + rest
        name = name.removesuffix(".")
        letters = set(string.ascii_letters + string.digits + "-_")
        if not all(label and letters >= set(label) for label in name.split(".")):
            return None
    if port and (port[0] != ":" or not port[1:] or not set(port[1:]) <= set(string.digits)):
        return None
    return name.lower() or None


PIECES = [
    "localhost",
    "[::1]",
    "[2001:DB8::7]",
    "127.0.0.1",
    "x.y",
    "A",
    "1",
    ":80",
    ":",
    "@",
    ".",
    "[",
    "]",
    "%",
    " ",
]
PIECES += ["/", "#", "\\", ",", "\t", "é", "²"]


@given(st.lists(st.sampled_from(PIECES), max_size=6).map("".join))
@example("localhost:80@evil")
@example("[::1]evil.com")
@example("[::1]:80")
@example("localhost.")
@example("localhost..")
def test_hosts_are_read_as_strictly_as_their_grammar(host: str) -> None:
    assert host_name(host) == name_in(host)


PAGES = [
    ("http://localhost", True),
    ("http://localhost:3000", True),
    ("https://127.0.0.1:8443", True),
    ("http://[::1]:5173", True),
    ("https://chat.example.org", True),
    ("http://llm.example.org:8080", True),  # of the server itself, by its own name
    ("https://evil.com", False),
    ("https://localhost.evil.com", False),
    ("https://chat.example.org.evil.com", False),
    ("http://127.0.0.1.evil.com", False),
    ("http://localhost@evil.com", False),
    ("ftp://localhost", False),
    ("null", False),
    ("", False),
    ("http://localhost:port", False),
    ("http://localhost/", False),
    ("http://localhost:80@evil", False),
    ("http://[::1]evil.com", False),
    ("http://evil.com@x.localhost", False),
    ("http://llm.example.org:8080@evil.com", False),
]


@pytest.mark.parametrize(("origin", "allowed"), PAGES)
def test_web_pages(app_with: Callable[..., Any], origin: str, allowed: bool) -> None:
    made = app_with(cors_origins=("https://chat.example.org",), allow_hosts=("llm.example.org",))
    headers = {"Origin": origin, "Host": "llm.example.org:8080"}
    reply = made.client.post("/v1/completions", json=COMPLETION, headers=headers)
    preflight = made.client.options(
        "/v1/completions",
        headers={
            **headers,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, content-type",
        },
    )
    assert "origin" in reply.headers["vary"].lower()
    if allowed:
        assert reply.status_code == 200 and len(made.llm.jobs) == 1
        assert reply.headers["access-control-allow-origin"] == origin
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-headers"] == "authorization, content-type"
        assert "POST" in preflight.headers["access-control-allow-methods"]
    else:
        check_error(reply, 403, "origin_not_allowed")
        check_error(preflight, 403, "origin_not_allowed")
        assert not made.llm.jobs
        assert "access-control-allow-origin" not in {*reply.headers, *preflight.headers}
    assert "access-control-allow-credentials" not in {*reply.headers, *preflight.headers}


def test_a_preflight_has_no_key_and_needs_none(app_with: Callable[..., Any]) -> None:
    client = app_with(keys=KEYS).client
    headers = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    assert client.options("/v1/completions", headers=headers).status_code == 204
    reply = client.post("/v1/completions", json=COMPLETION, headers={"Origin": "http://localhost:3000"})
    check_error(reply, 401)
    assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"  # so that the page sees it


def test_a_preflight_reflects_no_nonsense(app_with: Callable[..., Any]) -> None:
    headers = {
        "Origin": "http://localhost",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "a b, <x>",
    }
    reply = app_with().client.options("/v1/completions", headers=headers)
    assert "access-control-allow-headers" not in reply.headers


def test_request_ids(app_with: Callable[..., Any]) -> None:
    client = app_with().client
    assert client.get("/health", headers={"X-Request-Id": "abc-1._Z"}).headers["x-request-id"] == "abc-1._Z"
    for bad in ("", "a b", "x" * 65, "a\tb", "ü".encode(), "<script>"):
        given = client.get("/health", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert given.startswith("req_") and len(given) == 28


@pytest.mark.parametrize("path", ["/v1/completions", "/completion", "/v1/chat/completions"])
def test_a_stream_has_its_own_headers_alone(app_with: Callable[..., Any], path: str) -> None:
    """Neither the id of another request nor what another page was allowed."""
    client = app_with(cors_origins=("https://chat.example.org",)).client
    body = {"prompt": "Once", "messages": [{"role": "user", "content": "Once"}], "stream": True}
    for number in range(3):
        headers = {"X-Request-Id": f"number-{number}"} | (
            {"Origin": "https://chat.example.org"} if number == 1 else {}
        )
        reply = client.post(path, json=body, headers=headers)
        assert reply.status_code == 200
        assert reply.headers.get_list("x-request-id") == [f"number-{number}"]
        assert ("access-control-allow-origin" in reply.headers) == (number == 1)
