"""Where a server listens, and its keys."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hotcold.errors import UserError
from hotcold.server import settings
from hotcold.server.settings import Settings, listening_sockets


def test_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of Ada\n first-key \n\nsecond-key\n")
    assert settings.api_keys(file) == tuple(
        hashlib.sha256(key).digest() for key in (b"first-key", b"second-key")
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no key"),
        ("# nothing\n", "no key"),
        ("two words\n", "keys:1: a key has"),
        ("good\nschlüssel\n", "keys:2: a key has"),
        ("k" * 513, "keys:1: a key has"),
        ("k\n" * 10_001, "10001 keys"),
        ("k" * (1 << 21), "2097152 bytes: a file of keys has at most 1048576"),
    ],
)
def test_files_of_keys_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        settings.api_keys(file)
    assert "schlüssel" not in str(caught.value)


def test_a_file_of_keys_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none: cannot be opened: No such file"):
        settings.api_keys(tmp_path / "none")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="POSIX files")
def test_what_may_never_end_is_no_file_of_keys(tmp_path: Path) -> None:
    """A file that would make its reader wait, or read for ever, is refused."""
    os.mkfifo(tmp_path / "pipe")
    files = {"/dev/urandom": "a device", "/dev/stdin": "is a", ".": "a directory", "pipe": "a FIFO"}
    program = "import sys; from hotcold.commands.cli import main\nfor name in sys.argv[1:]: "
    program += "assert main(['serve', '--port', '0', '--api-key-file', name]) == 2"
    done = subprocess.run(
        [sys.executable, "-c", program, *(str(tmp_path / name) for name in files)],
        stdin=subprocess.PIPE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout == "", done.stderr
    for line, file in zip(done.stderr.splitlines(), files.values(), strict=True):
        assert file in line and line.endswith(": a regular file is needed")


def test_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOTCOLD_API_KEY", "")
    assert settings.api_keys(None) == ()
    monkeypatch.setenv("HOTCOLD_API_KEY", "secret")
    assert settings.api_keys(None) == (hashlib.sha256(b"secret").digest(),)
    (tmp_path / "keys").write_text("other")
    assert settings.api_keys(tmp_path / "keys") == (hashlib.sha256(b"other").digest(),)


def closed(sockets: list[socket.socket]) -> list[str]:
    names = [each.getsockname()[0] for each in sockets]
    for each in sockets:
        each.close()
    return names


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_addresses_of_this_machine_need_no_key(host: str) -> None:
    assert set(closed(listening_sockets(Settings(host, 0)))) <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_public_addresses_need_a_key_or_to_be_meant(host: str) -> None:
    with pytest.raises(UserError, match="without a key"):
        listening_sockets(Settings(host, 0))
    if host != "::":
        assert closed(listening_sockets(Settings(host, 0, keys=(b"",))))
        assert closed(listening_sockets(Settings(host, 0, public_without_key=True)))


@pytest.mark.parametrize("values", [{"cors_origins": ("*",)}, {"allow_hosts": ("a", "*")}])
def test_all_web_pages_need_a_key_or_to_be_meant(values: Any) -> None:
    with pytest.raises(UserError, match="any web page"):
        listening_sockets(Settings(port=0, **values))
    assert closed(listening_sockets(Settings(port=0, keys=(b"",), **values)))
    assert closed(listening_sockets(Settings(port=0, public_without_key=True, **values)))


@pytest.mark.parametrize("host", ["", "no.such.host.invalid", "a" * 300, "127.0.0.1.1", "\0"])
def test_hosts_that_are_none(host: str) -> None:
    with pytest.raises(UserError, match="host"):
        listening_sockets(Settings(host, 0))


def test_an_address_of_another_machine() -> None:
    with pytest.raises(UserError, match="no such address"):
        listening_sockets(Settings("192.0.2.1", 0, keys=(b"",)))


def test_a_link_local_address_keeps_its_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the zone the system does not know the network of the address."""
    info = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", 0, 0, 7))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: [info])
    bound: list[Any] = []

    def create_server(address: Any, **options: Any) -> None:
        bound.append(address)
        raise OSError(errno.EINVAL, "Invalid argument (while attempting to bind on address)")

    monkeypatch.setattr(socket, "create_server", create_server)
    with pytest.raises(UserError, match=r"^port 0 of fe80::1: Invalid argument$"):
        listening_sockets(Settings("fe80::1%eth0", 0, keys=(b"",)))
    assert bound == [("fe80::1", 0, 0, 7)]


@pytest.mark.parametrize(("host", "both"), [("::", True), ("::1", False), ("0.0.0.0", False)])
def test_all_addresses_of_ipv6_are_those_of_ipv4_too(
    host: str, both: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for llama.cpp and Ollama: otherwise clients that know an IPv4 address get no answer."""
    asked: list[bool] = []

    def create_server(address: Any, *, dualstack_ipv6: bool, **options: Any) -> None:
        asked.append(dualstack_ipv6)
        raise OSError(errno.EINVAL, "")

    monkeypatch.setattr(socket, "create_server", create_server)
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
    with pytest.raises(UserError, match="Invalid argument"):
        listening_sockets(Settings(host, 0, keys=(b"",)))
    assert asked == [both]


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1 is in use"):
            listening_sockets(Settings("127.0.0.1", port))


@pytest.mark.parametrize("name", ["example.org", "A-b.c", "*", "under_score", "example.org."])
def test_host_names(name: str) -> None:
    assert settings.check_host(name) == name.lower().rstrip(".")


@pytest.mark.parametrize("name", ["", "a b", "example.org:80", "http://x", "-a", "a\n"])
def test_what_is_no_host_name(name: str) -> None:
    with pytest.raises(UserError, match="host"):
        settings.check_host(name)


def test_a_byte_order_mark_before_keys_is_no_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbfsecret\n")
    assert settings.api_keys(file) == (hashlib.sha256(b"secret").digest(),)
