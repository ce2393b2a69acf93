"""Web pages that may use the server. ``--cors-origin`` is one origin, or a pattern of origins."""

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
    def from_text(cls, text: str) -> "_Pattern | None":
        match = _ORIGIN.fullmatch(text.lower())
        if match is None:
            return None
        port = match["port"] or ""
        if port not in ("", "*"):
            port = "" if int(port) == _WEB.get(match["scheme"]) else str(int(port))
        return cls(match["scheme"], match["host"], port)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}" + (f":{self.port}" if self.port else "")

    def holds(self, other: "_Pattern") -> bool:
        """Returns whether the pattern covers this origin, which has no wildcard."""
        if self.scheme != other.scheme or self.port not in ("*", other.port):
            return False
        if self.host == "*":
            return True
        return other.host.endswith(self.host[1:]) if self.host[0] == "*" else self.host == other.host


def check_origin(text: str) -> str:
    """Returns a value of ``--cors-origin`` as browsers write origins: lower case, without the scheme's
    default port. Raises UserError if no page has such an origin, or if the form of the pattern is unknown."""
    if text == "*":
        return text
    pattern = _Pattern.from_text(text)
    if pattern is None or (pattern.port.isdigit() and not 0 < int(pattern.port) < 65536):
        raise UserError(f"origin {text!r:.80} is not valid: allowed are {FORMS}; leave out paths")
    if pattern.scheme == "file":
        raise UserError(f"origin {text!r:.80}: browsers give pages from files no origin; serve them by HTTP")
    if pattern.host == "*" and (pattern.scheme in _WEB or pattern.port):
        raise UserError(f"origin {text!r:.80} means too many pages: allowed are {FORMS}")
    return str(pattern)


class Origins:
    """The allowed origins, which :func:`check_origin` has validated."""

    def __init__(self, allowed: Iterable[str]) -> None:
        allowed = tuple(allowed)
        self.any = "*" in allowed
        self._patterns = [pattern for each in allowed if (pattern := _Pattern.from_text(each)) is not None]

    def __bool__(self) -> bool:
        return self.any or bool(self._patterns)

    def __contains__(self, origin: str) -> bool:
        """Returns whether a page of this origin may use the server."""
        if self.any:
            return True
        page = _Pattern.from_text(origin)
        if page is None or "*" in origin:
            return False
        return any(pattern.holds(page) for pattern in self._patterns)
