"""The form of errors in each dialect; a route's path says which dialect it speaks."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from hotcold.server.protocol.chat import ChatCall
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.native import NativeCall

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


_Call = TypeVar("_Call", ChatCall, NativeCall)


def translated(
    parse: Callable[[object, Facts], _Call], body: object, facts: Facts, names: Mapping[str, str]
) -> _Call:
    """Returns the call that another route's parser makes of a translated request. Errors name the fields that
    the client sent: ``names`` has these by the names that the parser knows."""
    try:
        call = parse(body, facts)
    except APIError as error:
        if (param := error.param) is not None and param in names:
            error.message, error.param = error.message.replace(param, names[param]), names[param]
        raise
    grammar = call.job.grammar
    if grammar is None or grammar.param not in names:
        return call
    return replace(call, job=replace(call.job, grammar=replace(grammar, param=names[grammar.param])))
