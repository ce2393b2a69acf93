"""Fuzz target: bodies of requests to the server. Anything but APIError is a failure, and so is a job that
does not fit the model.

An input has an object of JSON a line, which together are the body; lines that are no JSON are left out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

from hotcold.chat.tool_formats import HERMES
from hotcold.demo import model_path
from hotcold.formats.gguf import open_gguf
from hotcold.server.protocol import anthropic, chat, completion, native, responses, tokens
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.json_parts import json_parts
from hotcold.tokenizer.tokenizer import Tokenizer

CORPUS = "client_requests"

with open_gguf(model_path()) as file:
    TOKENIZER = Tokenizer.from_metadata(file.metadata)
FACTS = Facts("fable", TOKENIZER, context=256, tool_format=HERMES)
PARSERS: list[Callable[..., Any]] = [
    chat.parse,
    completion.parse,
    native.parse,
    responses.parse,
    anthropic.parse,
    tokens.parse_tokenize,
    tokens.parse_detokenize,
]


def one_input(data: bytes) -> bool:
    """True if some route accepts it."""
    body: dict[str, Any] = {}
    for line in data.splitlines():
        with contextlib.suppress(ValueError, RecursionError):  # the server's reader says so before
            found = json.loads(line)
            if not isinstance(found, dict):
                taken_by_any(found)
            else:
                body |= found
    return taken_by_any(body)


def taken_by_any(body: Any) -> bool:
    return sum(taken(parse, body) for parse in PARSERS) > 0


def taken(parse: Callable[..., Any], body: Any) -> bool:
    try:
        call = parse(body, FACTS)
        if isinstance(call, tokens.TokenizeCall | tokens.DetokenizeCall):
            json.loads(b"".join(json_parts(call.answer())))
            return True
        jobs = call.jobs([1]) if isinstance(call, chat.ChatCall) else call.jobs(call.encode())
    except APIError as error:
        assert 400 <= error.status < 500 and error.message.isprintable()
        json.dumps(error.body(), allow_nan=False)
        return False
    assert 1 <= len(jobs) <= 64
    for job in jobs:
        assert all(0 <= id < TOKENIZER.vocab_size for id in job.prompt) and job.max_tokens >= 0
    return True
