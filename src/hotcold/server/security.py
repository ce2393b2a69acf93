"""Controls access to the server by a request's host name, by the web page that sends it, and by the key.

A foreign web page may send requests to this machine through a visitor's browser. It cannot choose ``Origin``,
so pages that are not on the list are refused. If its own name was made to point here (DNS rebinding),
``Host`` has that name. A key protects against all other clients."""

import hmac
import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Mapping

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotcold.server.origins import Origins
from hotcold.server.protocol.errors import APIError
from hotcold.server.replies import error_reply
from hotcold.server.request_log import STRANGER
from hotcold.server.settings import HOST_NAME, Settings, digest

_MARKS = ("origin", "referer", "sec-fetch-site", "sec-fetch-mode")
_METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
_EXPOSED = "X-Request-Id, X-Hotcold-Left-Out, X-Hotcold-Not-Enforced, Retry-After"
_HOST = re.compile(r"(\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[^:\[\]]+))(:[0-9]+)?")
_BEARER = re.compile(rb"bearer +([!-~]+) *", re.IGNORECASE)
#: Names by which programs in containers call the machine that runs them. Public DNS has no ``.internal``, so
#: only a person who controls this machine's names could serve a page there. A request with the mark of a page
#: is still refused, unless a key is required.
_OF_CONTAINERS = frozenset(
    f"{name}.internal"
    for name in ("host.docker", "gateway.docker", "host.containers", "host.lima", "host.orb", "host.minikube")
)
_ALWAYS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}

#: Returns whether a path needs no key.
Public = Callable[[str], bool]


class Guard:
    """Passes allowed requests on, and refuses the others before it reads their bodies."""

    def __init__(self, app: ASGIApp, settings: Settings, public: Public) -> None:
        self._app = app
        self._keys = settings.keys
        self._public = public
        self._hosts = {"localhost", socket.gethostname().lower(), *settings.allow_hosts}
        self._hosts.add(settings.host.lower())
        self._origins = Origins(settings.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = _Headers(scope["headers"])
        origin = headers.get("origin")
        allowed = origin is not None and self._origin_allowed(origin, headers.get("host"))

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(scope=message)
                out.update(_ALWAYS)
                if self._origins or origin is not None:
                    out.add_vary_header("Origin")
                if allowed and origin is not None:
                    out["Access-Control-Allow-Origin"] = origin
                    out["Access-Control-Expose-Headers"] = _EXPOSED
            await send(message)

        reply = self._refusal(scope, headers, allowed)
        scope[STRANGER] = reply is not None or (bool(self._keys) and self._public(scope["path"]))
        await (reply or self._app)(scope, receive, with_headers)

    def _refusal(self, scope: Scope, headers: "_Headers", allowed: bool) -> Response | None:
        """Returns the answer to a refused request; None if the request is allowed."""
        try:
            if scope["http_version"] not in ("1.0", "1.1"):
                got = f"HTTP/{scope['http_version']} is not supported"
                raise APIError(f"{got}: send the request by HTTP/1.1", code="invalid_http")
            if scope["path"] not in ("/health", "/v1/health"):  # monitors use any name
                self._check_host(headers)
            if "origin" in headers and not allowed:
                fix = "the server's --cors-origin allows web pages"
                raise _forbidden(f"requests of this page are not allowed: {fix}", "origin_not_allowed")
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                return _preflight(headers)
            if self._keys and not self._public(scope["path"]):
                self._check_key(headers)
        except APIError as error:
            return error_reply(error, scope["path"])
        return None

    def _check_host(self, headers: "_Headers") -> None:
        host = headers.get("host")
        if host is None:  # HTTP/1.0, which no browser sends
            return
        name = host_name(host)
        if name is None:
            raise _forbidden(
                "the header Host must be `name`, `name:port` or `[address]:port`", "host_not_allowed"
            )
        if "*" in self._hosts or name in self._hosts or name.endswith(".localhost") or _is_address(name):
            return
        if name in _OF_CONTAINERS and (self._keys or not from_browser(headers)):
            return
        message = "the server does not accept the name in the header Host: --allow-host adds a name"
        raise _forbidden(message, "host_not_allowed")

    def _origin_allowed(self, origin: str, host: str | None) -> bool:
        if origin in self._origins:
            return True
        scheme, _, place = origin.partition("://")
        name = host_name(place)
        if name is None or scheme not in ("http", "https"):
            return False
        if name == "localhost" or name.endswith(".localhost") or _is_loopback(name):
            return True
        return host is not None and place.lower() == host.lower()  # the server's own page

    def _check_key(self, headers: "_Headers") -> None:
        given = []
        for name in ("authorization", "x-api-key"):
            values = headers.all(name)
            if len(values) > 1:
                raise _unauthorized(f"{len(values)} {name} headers: send one")
            given += values if name == "x-api-key" else [_bearer(value) for value in values]
        if not given:
            raise _unauthorized("no API key: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`")
        if not sum(self._is_key(each) for each in given):
            raise _unauthorized("the API key is wrong: send a key of the server")

    def _is_key(self, given: bytes) -> bool:
        """Compares with every key, so that the time reveals nothing about them."""
        hashed = digest(given.decode("latin-1"))
        return bool(sum([hmac.compare_digest(hashed, key) for key in self._keys]))


class _Headers(Mapping[str, str]):
    """Header fields by name in lower case, with the first value of repeated fields."""

    def __init__(self, raw: Iterable[tuple[bytes, bytes]]) -> None:
        self._values: dict[str, list[bytes]] = {}
        for name, value in raw:
            self._values.setdefault(name.decode("latin-1").lower(), []).append(value.strip())

    def __getitem__(self, name: str) -> str:
        return self._values[name][0].decode("latin-1")

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def all(self, name: str) -> list[bytes]:
        return self._values.get(name, [])


def from_browser(headers: Mapping[str, str]) -> bool:
    """Returns whether a request has a header that browsers, but not programs, add to requests of pages."""
    return any(name in headers for name in _MARKS)


def _bearer(value: bytes) -> bytes:
    match = _BEARER.fullmatch(value)
    if not match:
        raise _unauthorized("the header Authorization must be `Bearer KEY`")
    return match[1]


def _forbidden(message: str, code: str) -> APIError:
    return APIError(message, status=403, type="permission_error", code=code)


def _unauthorized(message: str) -> APIError:
    return APIError(message, status=401, type="authentication_error", code="invalid_api_key")


def _preflight(headers: _Headers) -> Response:
    allow = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": "600"}
    if asked := headers.get("access-control-request-headers"):
        names = [name.strip() for name in asked.split(",")]
        if all(re.fullmatch(r"[A-Za-z0-9_-]{1,100}", name) for name in names) and len(names) <= 50:
            allow["Access-Control-Allow-Headers"] = ", ".join(names)
    return Response(status_code=204, headers=allow)


def host_name(host: str) -> str | None:
    """Returns the name in ``name``, ``name:port`` or ``[address]:port``, in lower case and without a final
    dot; None if the text has another form."""
    match = _HOST.fullmatch(host)
    if match is None:
        return None
    name, address = match["name"], match["address"]
    valid = HOST_NAME.fullmatch(name) if address is None else ":" in address and _is_address(address)
    return (address or name.removesuffix(".")).lower() if valid else None


def _is_address(name: str) -> bool:
    """Returns whether a name is an address, which no DNS server can redirect."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return _is_address(name) and ipaddress.ip_address(name).is_loopback
