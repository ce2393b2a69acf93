"""Targets of requests as clients and proxies write them, and names that containers call a machine by."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from hotcold.server.settings import digest
from tests.server.conftest import Live

BODY = json.dumps({"prompt": "Once", "max_tokens": 1}).encode()


def status(live: Live, target: str, host: str = "localhost", *, body: bytes = b"", more: str = "") -> int:
    """Returns the status of the answer to a request that is sent as it stands here."""
    head = f"{'POST' if body else 'GET'} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{more}"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", live.port), 10) as connection:
        connection.sendall(head.encode() + b"\r\n" + body)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return int(answer.split(b" ", 2)[1])


TARGETS = [
    ("//v1/models", 200),
    ("/v1//models", 200),
    ("///v1///models?x=//", 200),
    ("http://localhost/v1/models", 200),
    ("HTTP://127.0.0.1:8080//v1/models?x=1", 200),
    ("https://localhost/v1/models", 200),
    ("http://localhost", 200),  # the page
    ("http://evil.com/v1/models", 403),
    ("http://localhost@evil.com/v1/models", 403),
    ("http:///v1/models", 403),
    ("http://localhost:80@evil/v1/models", 403),
    ("http://[::1]evil.com/v1/models", 403),
    ("http://user@localhost/v1/models", 403),
    ("ftp://localhost/v1/models", 404),
    ("/http://localhost/v1/models", 404),
    ("//evil.com/v1/models", 404),
]


def test_targets(live: Callable[..., Live]) -> None:
    server = live()
    found = [(target, status(server, target)) for target, _ in TARGETS]
    assert found == TARGETS


def test_the_host_of_an_absolute_target_is_the_one_that_counts(live: Callable[..., Live]) -> None:
    server = live()
    assert status(server, "http://localhost/v1/models", "evil.com") == 200  # as RFC 9112, 3.2.2 has it
    assert status(server, "http://evil.com/v1/models", "localhost") == 403
    page = "Origin: http://evil.com\r\n"
    assert status(server, "http://evil.com/v1/completions", body=BODY, more=page) == 403


def test_a_key_is_needed_for_every_form(live: Callable[..., Live]) -> None:
    server = live(keys=(digest("key"),))
    for target in ("//v1/models", "http://localhost/v1/models", "/health//../v1/models", "//health/x"):
        assert status(server, target) == 401
    assert status(server, "//health") == 200


def test_bodies_come_with_every_form(live: Callable[..., Live]) -> None:
    server = live()
    for path in ("//v1/completions", "/v1//completions", "http://localhost/v1/completions"):
        assert status(server, path, body=BODY) == 200


CONTAINERS = ["host.docker.internal", "host.docker.internal:8080", "Host.Containers.Internal"]


@pytest.mark.parametrize("host", CONTAINERS)
def test_programs_in_containers_reach_the_machine_by_the_name_that_it_has_there(
    app_with: Callable[..., Any], host: str
) -> None:
    """This name cannot be registered. If a page has it nevertheless, its browser sends it."""
    client = app_with().client
    asked = {"Host": host}
    assert client.post("/v1/completions", json={"prompt": "a"}, headers=asked).status_code == 200
    page = {**asked, "Origin": f"http://{host.lower()}"}
    for marks in (page, {**asked, "Referer": f"http://{host}/"}, {**asked, "Sec-Fetch-Site": "same-origin"}):
        refused = client.post("/v1/completions", json={"prompt": "a"}, headers=marks)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")
    with_key = app_with(keys=(digest("key"),)).client
    given = {**page, "Authorization": "Bearer key"}
    assert with_key.post("/v1/completions", json={"prompt": "a"}, headers=given).status_code == 200
    assert with_key.post("/v1/completions", json={"prompt": "a"}, headers=page).status_code == 401


@pytest.mark.parametrize(
    "host", ["evil.internal", "host.docker.internal.evil.com", "x.host.docker.internal", "host.docker.evil"]
)
def test_names_like_those_of_containers_are_refused(app_with: Callable[..., Any], host: str) -> None:
    for keys in ((), (digest("key"),)):
        reply = app_with(keys=keys).client.get("/v1/models", headers={"Host": host})
        assert reply.status_code == 403
