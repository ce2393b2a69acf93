"""Decides which web pages may use the server: ``--cors-origin`` is one origin, or a pattern of many."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hotcold.errors import UserError

#: The allowed forms, for messages.
FORMS = (
    "https://chat.example.org, http://chat.example.org:* (any port), https://*.example.org (names below it), "
    "chrome-extension://* (any of another scheme than http), or * for any"
)
_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\*|(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|\[[0-9a-f:.]+\])"
    r"(:(?P<port>[0-9]{1,5}|\*))?"
)
_WEB = {"http": 80, "https": 443}


@dataclass(frozen=True)
class _Pattern:
    scheme: str
    host: str
    port: str  #: empty if it is the scheme's default

    @classmethod
    def of(cls, text: str) -> "_Pattern | None":
        found = _ORIGIN.fullmatch(text.lower())
        if found is None:
            return None
        port = found["port"] or ""
        if port not in ("", "*"):
            port = "" if int(port) == _WEB.get(found["scheme"]) else str(int(port))
        return cls(found["scheme"], found["host"], port)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}" + (f":{self.port}" if self.port else "")

    def holds(self, other: "_Pattern") -> bool:
        """True if the pattern covers this origin, which has no stars."""
        if self.scheme != other.scheme or self.port not in ("*", other.port):
            return False
        if self.host == "*":
            return True
        return other.host.endswith(self.host[1:]) if self.host[0] == "*" else self.host == other.host


def check_origin(text: str) -> str:
    """A value of ``--cors-origin`` as browsers write origins: lower case, without the scheme's default port.
    UserError: no page has such an origin, or the form of the pattern is unknown."""
    if text == "*":
        return text
    found = _Pattern.of(text)
    if found is None or (found.port.isdigit() and not 0 < int(found.port) < 65536):
        raise UserError(f"origin {text!r:.80} is not valid: allowed are {FORMS}; leave out paths")
    if found.scheme == "file":
        raise UserError(f"origin {text!r:.80}: browsers give pages from files no origin; serve them by HTTP")
    if found.host == "*" and (found.scheme in _WEB or found.port):
        raise UserError(f"origin {text!r:.80} means too many pages: allowed are {FORMS}")
    return str(found)


class Origins:
    """The allowed origins, which :func:`check_origin` has checked."""

    def __init__(self, allowed: Iterable[str]) -> None:
        allowed = tuple(allowed)
        self.any = "*" in allowed
        self._patterns = [pattern for each in allowed if (pattern := _Pattern.of(each)) is not None]

    def __bool__(self) -> bool:
        return self.any or bool(self._patterns)

    def __contains__(self, origin: str) -> bool:
        """True if a page of this origin may use the server."""
        if self.any:
            return True
        found = _Pattern.of(origin)
        if found is None or "*" in origin:
            return False
        return any(pattern.holds(found) for pattern in self._patterns)
