"""Settings of a server: its address, access control, and limits."""

import contextlib
import hashlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotcold.errors import UserError
from hotcold.formats.files import RegularFile, naming

KEY_VARIABLE = "HOTCOLD_API_KEY"
MOST_KEYS = 10_000
BACKLOG = 1024  #: connections that wait to be accepted
LONGEST_FILE = 1 << 20  #: limit of a file of keys, in bytes
_KEY = re.compile(r"[!-~]{1,512}")
HOST_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_-]+)*\.?")


@dataclass(frozen=True)
class Settings:
    """The settings of a server. Times are in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    port: int = 8080  #: 0 takes a free one
    keys: tuple[bytes, ...] = ()  #: SHA-256 of each key; empty: any client that reaches the port may use it
    allow_hosts: tuple[str, ...] = ()  #: names in ``Host`` in addition to this machine's; ``*``: any
    #: origins of web pages that may use the server, in addition to this machine's; see
    #: :mod:`hotcold.server.origins`
    cors_origins: tuple[str, ...] = ()
    public_without_key: bool = False
    #: whether objects allow other properties by default, as in the JSON Schema standard
    open_schemas: bool = False
    hub_name: str = ""  #: name of the model on the Hugging Face hub, an alias for clients
    log: bool = True  #: whether each request is logged to stderr
    timeout_s: float = 600  #: limit of the wait in the queue, and of the time between two tokens
    deadline_s: float | None = None  #: limit of a whole request, queue included
    drain_s: float = 30  #: time for running requests to finish after SIGTERM
    connections: int = 512  #: limit of open connections
    body_bytes: int = 4 << 20  #: limit of a request's body
    body_s: float = 60  #: limit until a body has arrived
    head_s: float = 15  #: limit until a request's headers have arrived
    head_bytes: int = 32 << 10  #: limit of these headers
    idle_s: float = 60  #: time until a connection without a request is closed
    write_s: float = 60  #: limit of the wait for a client that does not read
    ping_s: float = 10  #: time until a silent stream sends a ping
    depth: int = 128  #: limit of nested arrays and objects
    #: defaults of requests, as fields of ``SamplingParams``
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None  #: default limit of an answer's tokens; None: the route's
    thinking_budget: int | None = None  #: default limit of an answer's thinking; None: none


def digest(key: str) -> bytes:
    """Returns the digest of a key. Digests have one length, so comparisons of them reveal nothing."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def api_keys(path: Path | None) -> tuple[bytes, ...]:
    """Returns digests of the keys in a file, or of the key in the environment. A file has one key per line;
    empty lines and lines that begin with ``#`` are ignored.

    Raises UserError if the file has no key, or a line that no client can send. Also raises it if the file is
    not regular: a pipe or a device may never end. Raises OSError if it cannot be opened."""
    if path is None:
        key = os.environ.get(KEY_VARIABLE, "").strip()
        return (_digest(key, f"${KEY_VARIABLE}"),) if key else ()
    with naming(path, UserError):
        text = _text_of_keys(RegularFile(path))
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    keys = [_digest(line, f"{path}:{number}") for number, line in lines if line and line[0] != "#"]
    if not keys:
        raise UserError(
            f"{path} has no key: write one per line, such as the output of `openssl rand -hex 24`"
        )
    if len(keys) > MOST_KEYS:
        raise UserError(f"{path} has {len(keys)} keys: at most {MOST_KEYS} are allowed")
    return tuple(keys)


def _text_of_keys(file: RegularFile) -> str:
    if file.size > LONGEST_FILE:
        raise UserError(
            f"{file.size} bytes: a file of keys has at most {LONGEST_FILE}, with one key per line"
        )
    return file.read(0, file.size).decode("utf-8-sig", "replace")


def _digest(key: str, place: str) -> bytes:
    if not _KEY.fullmatch(key):  # the message must not contain the key
        raise UserError(f"{place}: a key has 1 to 512 characters, printable ASCII without spaces")
    return digest(key)


def check_host(name: str) -> str:
    """Validates a name for ``--allow-host``, and returns it in lower case."""
    if name != "*" and not HOST_NAME.fullmatch(name):
        raise UserError(f"host {name!r:.80}: a name such as llm.example.org, without a port, or * for any")
    return name.lower().rstrip(".")


def listening_sockets(settings: Settings) -> list[socket.socket]:
    """Opens the sockets that listen at the address of ``settings``. Raises UserError for a public address
    without a key, an unknown name, or a port that is in use or not permitted."""
    host, port = settings.host, settings.port
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"host {host!r:.80}: {getattr(error, 'strerror', None) or 'not a host name'}"
        ) from None
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in infos))
    _check_public(settings, [str(address[0]) for _, address in addresses])
    sockets: list[socket.socket] = []
    try:
        for family, address in addresses:
            with contextlib.suppress(_Absent):
                sockets.append(_listen(family, (address[0], port, *address[2:])))
                port = port or sockets[0].getsockname()[1]
        if not sockets:
            raise UserError(f"host {host!r}: this machine has no such address")
        return sockets
    except BaseException:
        for opened in sockets:
            opened.close()
        raise


class _Absent(Exception):
    """Raised for an address that this machine does not have, such as ``::1`` without IPv6."""


def _listen(family: int, address: tuple[Any, ...]) -> socket.socket:
    """Opens a socket at an address, which has the zone of a link-local one as its last value. At ``::`` it
    accepts IPv4, too, as other servers do."""
    import errno

    host, port = address[:2]
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        listening = socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)
        # asyncio sends small writes at once (TCP_NODELAY) only if the socket names its protocol.
        return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, listening.detach())
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise _Absent from None
        if error.errno == errno.EADDRINUSE:
            fix = "stop the program that uses it, or choose another port with --port (0: any free one)"
            raise UserError(f"port {port} of {host} is in use: {fix}") from None
        if error.errno in (errno.EACCES, errno.EPERM):
            fix = "ports below 1024 are for the administrator: choose another port with --port"
            raise UserError(f"port {port} of {host} is not allowed for this user: {fix}") from None
        raise UserError(f"port {port} of {host}: {os.strerror(error.errno or 0)}") from None


def _check_public(settings: Settings, addresses: Sequence[str]) -> None:
    if settings.keys or settings.public_without_key:
        return
    for option, values in (("--cors-origin", settings.cors_origins), ("--allow-host", settings.allow_hosts)):
        if "*" in values:
            fix = f"give --api-key-file (or ${KEY_VARIABLE}), or --public-without-key if that is intended"
            raise UserError(f"{option} *: any web page could use the model without a key; {fix}")
    for address in addresses:
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            fix = f"give --api-key-file (or ${KEY_VARIABLE}), or --public-without-key if that is intended"
            raise UserError(
                f"host {settings.host!r}: other machines could use the model without a key; {fix}"
            )
