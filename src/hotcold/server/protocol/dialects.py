"""The form of errors in each dialect; a route's path says which dialect it speaks."""

import re
from typing import Any

from hotcold.server.protocol.errors import APIError

_ANTHROPIC = ("/messages", "/messages/count_tokens")
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: APIError, path: str) -> dict[str, Any]:
    """The JSON that a client of this path expects."""
    plain = path.removeprefix("/v1")
    if plain in _ANTHROPIC:
        return anthropic_error(error)
    if plain.startswith("/api/"):
        return ollama_error(error)
    return error.body()


_TOO_LONG = re.compile(r"(\d+) tokens and the context holds (\d+)")


def _in_anthropics_words(error: APIError) -> str:
    """The message; where a prompt is too long, after Anthropic's own words, by which Claude Code knows that
    it has to shorten its conversation."""
    if error.code != "context_length_exceeded":
        return error.message
    found = _TOO_LONG.search(error.message)
    counts = f"{found[1]} tokens > {int(found[2]) - 1} maximum: " if found else ""
    return f"prompt is too long: {counts}{error.message}"


def anthropic_error(error: APIError) -> dict[str, Any]:
    """The error as Anthropic's clients read it, in a reply or as an event."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else _ANTHROPIC_TYPES[400])
    return {"type": "error", "error": {"type": kind, "message": _in_anthropics_words(error)}}


def ollama_error(error: APIError) -> dict[str, Any]:
    """The error as Ollama's clients read it, in a reply or as a line of a stream."""
    return {"error": error.message}


def renamed(error: APIError, names: dict[str, str]) -> APIError:
    """The error of a translated request, by the names of the fields that the client sent."""
    known = next((name for name in names if error.param == name), None)
    if known is None:
        return error
    message = error.message.replace(known, names[known])
    return APIError(
        message,
        status=error.status,
        type=error.type,
        param=names[known],
        code=error.code,
        retry_after=error.retry_after,
    )
