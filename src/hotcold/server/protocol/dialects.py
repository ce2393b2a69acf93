"""The form of errors in each dialect; a route's path says which dialect it speaks."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from hotcold.server.protocol.chat import ChatCall
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.native import NativeCall

_ANTHROPIC = ("/messages", "/messages/count_tokens")
_LLAMA_CPP = ("/completion", "/infill")
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
    if plain in _LLAMA_CPP:
        return llama_cpp_error(error)
    return error.body()


#: How each dialect begins the message about a prompt that is too long. Clients shorten a conversation only
#: where they find these words. ``most`` is the most tokens of a prompt, ``excess`` counts those beyond it.
_TOO_LONG = {
    "anthropic": "prompt is too long: {tokens} tokens > {most} maximum",
    "ollama": "prompt too long; exceeded max context length by {excess} tokens",
    "ollama input": "the input length exceeds the context length",
    "llama.cpp": "request ({tokens} tokens) exceeds the available context size ({context} tokens), "
    "try increasing it",
}


def _message(error: APIError, dialect: str) -> str:
    """The message; where a prompt is too long, after the words of the dialect."""
    if (long := error.too_long) is None:
        return error.message
    most = long.context - 1
    counts = {"tokens": long.tokens, "context": long.context, "most": most, "excess": long.tokens - most}
    return f"{_TOO_LONG[dialect].format(**counts)}: {error.message}"


def anthropic_error(error: APIError) -> dict[str, Any]:
    """The error as Anthropic's clients read it, in a reply or as an event."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else _ANTHROPIC_TYPES[400])
    return {"type": "error", "error": {"type": kind, "message": _message(error, "anthropic")}}


def ollama_error(error: APIError) -> dict[str, Any]:
    """The error as Ollama's clients read it, in a reply or as a line of a stream."""
    return {"error": _message(error, "ollama input" if error.param == "input" else "ollama")}


def llama_cpp_error(error: APIError) -> dict[str, Any]:
    """The error as clients of llama.cpp's own routes read it: OpenAI's form, but for a prompt that is too
    long."""
    body = error.body()
    if error.too_long is not None:
        body["error"] |= {"message": _message(error, "llama.cpp"), "type": "exceed_context_size_error"}
    return body


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
