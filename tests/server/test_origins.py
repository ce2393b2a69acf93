"""The web pages that `--cors-origin` means. An accepted pattern matches something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hotcold.errors import UserError
from hotcold.server.origins import Origins, check_origin

EXTENSION = "chrome-extension://mgijmajocgfcbeboacabfgobmjgjcoja"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("https://chat.example.org", "https://chat.example.org"),
        ("HTTPS://Chat.Example.org", "https://chat.example.org"),
        ("https://chat.example.org:443", "https://chat.example.org"),  # browsers leave it out
        ("http://a:1", "http://a:1"),
        ("http://a:080", "http://a"),
        ("http://[fe80::1]:3000", "http://[fe80::1]:3000"),
        ("*", "*"),
        ("app://obsidian.md", "app://obsidian.md"),
        ("capacitor://localhost", "capacitor://localhost"),
        (EXTENSION, EXTENSION),
        ("chrome-extension://*", "chrome-extension://*"),
        ("http://10.0.0.7:*", "http://10.0.0.7:*"),
        ("https://*.example.org", "https://*.example.org"),
        ("https://*.example.org:*", "https://*.example.org:*"),
    ],
)
def test_origins(given: str, kept: str) -> None:
    assert check_origin(given) == kept == check_origin(kept)


@pytest.mark.parametrize(
    "origin",
    [
        "", "chat.example.org", "https://a/", "https://a b", "https://", "https://a:0", "https://a:65536",
        "https://a:b", "https://a*", "https://a.*", "https://*a.org", "https://a.*.org", "https://*.", "h*://a",
        "*://a", "**", "https://me@a", "null", "file://x", "https://*", "http://*:3000", "app://*:1",
        "https://münchen.de", "https://a,https://b", "https://a?b", "https://a#b", "localhost:3000",
    ],
)  # fmt: skip
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(UserError, match="origin"):
        check_origin(origin)


PAGES = [
    ("chrome-extension://*", EXTENSION, True),
    ("chrome-extension://*", "moz-extension://mgijmajocgfcbeboacabfgobmjgjcoja", False),
    ("chrome-extension://*", "https://chrome-extension", False),
    (EXTENSION, EXTENSION, True),
    (EXTENSION, EXTENSION[:-1], False),
    ("http://10.0.0.7:*", "http://10.0.0.7", True),
    ("http://10.0.0.7:*", "http://10.0.0.7:5173", True),
    ("http://10.0.0.7:*", "https://10.0.0.7:5173", False),
    ("http://10.0.0.7:*", "http://10.0.0.70:5173", False),
    ("http://10.0.0.7", "http://10.0.0.7:5173", False),
    ("https://*.example.org", "https://chat.example.org", True),
    ("https://*.example.org", "https://a.b.example.org", True),
    ("https://*.example.org", "https://example.org", False),
    ("https://*.example.org", "https://evil-example.org", False),
    ("https://*.example.org", "https://chat.example.org:8443", False),
    ("https://*.example.org", "https://chat.example.org.evil.com", False),
    ("https://*.example.org:*", "https://chat.example.org:8443", True),
    ("https://*.example.org:*", "https://*.example.org:*", False),
    ("app://obsidian.md", "app://obsidian.md", True),
    ("https://chat.example.org", "null", False),
    ("https://chat.example.org", "https://chat.example.org/", False),
    ("*", "null", True),
]


@pytest.mark.parametrize(("pattern", "origin", "allowed"), PAGES)
def test_which_pages_a_pattern_means(pattern: str, origin: str, allowed: bool) -> None:
    assert (origin in Origins([check_origin(pattern)])) is allowed


def test_a_page_of_a_pattern_is_answered(app_with: Callable[..., Any]) -> None:
    client = app_with(cors_origins=("chrome-extension://*", "https://*.example.org")).client
    for origin, status in ((EXTENSION, 200), ("https://a.example.org", 200), ("https://example.com", 403)):
        reply = client.post("/v1/completions", json={"prompt": "a"}, headers={"Origin": origin})
        assert reply.status_code == status
        assert reply.headers.get("access-control-allow-origin") == (origin if status == 200 else None)
