"""The form of errors in each dialect. A route's path determines its dialect."""

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
    """Returns the JSON of an error for clients of this path."""
    plain = path.removeprefix("/v1")
    if plain in _ANTHROPIC:
        return anthropic_error(error)
    if plain.startswith("/api/"):
        return ollama_error(error)
    if plain in _LLAMA_CPP:
        return llama_cpp_error(error)
    return error.body()


#: The beginning of each dialect's message about a prompt that is too long. Clients shorten a conversation
#: only if they find it. ``most`` is the limit of a prompt's tokens; ``excess`` counts the tokens above it.
_TOO_LONG = {
    "anthropic": "prompt is too long: {tokens} tokens > {most} maximum",
    "ollama": "prompt too long; exceeded max context length by {excess} tokens",
    "ollama input": "the input length exceeds the context length",
    "llama.cpp": "request ({tokens} tokens) exceeds the available context size ({context} tokens), "
    "try increasing it",
}


def _message(error: APIError, dialect: str) -> str:
    """Returns the message; for a prompt that is too long, after the dialect's text."""
    if (long := error.too_long) is None:
        return error.message
    limit = long.context - 1
    counts = {"tokens": long.tokens, "context": long.context, "most": limit, "excess": long.tokens - limit}
    return f"{_TOO_LONG[dialect].format(**counts)}: {error.message}"


def anthropic_error(error: APIError) -> dict[str, Any]:
    """Returns the error in Anthropic's form, for a reply or an event."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else _ANTHROPIC_TYPES[400])
    return {"type": "error", "error": {"type": kind, "message": _message(error, "anthropic")}}


def ollama_error(error: APIError) -> dict[str, Any]:
    """Returns the error in Ollama's form, for a reply or a line of a stream."""
    return {"error": _message(error, "ollama input" if error.param == "input" else "ollama")}


def llama_cpp_error(error: APIError) -> dict[str, Any]:
    """Returns the error for llama.cpp's own routes: OpenAI's form, except for a prompt that is too long."""
    body = error.body()
    if error.too_long is not None:
        body["error"] |= {"message": _message(error, "llama.cpp"), "type": "exceed_context_size_error"}
    return body


_Call = TypeVar("_Call", ChatCall, NativeCall)


def translated(
    parse: Callable[[object, Facts], _Call], body: object, facts: Facts, names: Mapping[str, str]
) -> _Call:
    """Returns the call that another route's parser makes of a translated request. ``names`` maps the parser's
    fields to the fields that the client sent, for error messages."""
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
