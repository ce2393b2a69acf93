"""A prompt that is too long is refused in the words of each dialect, by which clients know that they must
shorten a conversation. The expressions are theirs: pi's ``overflow.ts``, Claude Code's, LiteLLM's
``exception_mapping_utils.py`` and llama.cpp's ``format_error_response``."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.server.conftest import Application

LONG = "word " * 400
MESSAGES = [{"role": "user", "content": LONG}]
#: Of pi's list, the expressions for OpenAI, Anthropic, llama.cpp and Ollama.
OPENAI = r"maximum context length is \d+ tokens"
ANTHROPIC = r"^prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)"
LLAMA_CPP = r"exceeds the available context size"
OLLAMA = r"prompt too long; exceeded (?:max )?context length"
LITELLM = r"^this model's maximum context length is"
COUNTS = r"^This model's maximum context length is 256 tokens\. However, your \w+ resulted in (\d+) tokens"
#: Routes, bodies, and the expressions that must be in the message.
ROUTES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}, [OPENAI, LITELLM, COUNTS]),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG * 50}]}, [OPENAI, COUNTS]),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}, [OPENAI, COUNTS]),
    ("/v1/responses", {"input": LONG}, [OPENAI, LITELLM, COUNTS]),
    ("/v1/completions", {"prompt": LONG}, [OPENAI, LITELLM, COUNTS]),
    ("/v1/completions", {"prompt": [5] * 300}, [OPENAI, COUNTS]),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}, [ANTHROPIC, OPENAI]),
    ("/api/chat", {"messages": MESSAGES}, [OLLAMA, OPENAI]),
    ("/api/generate", {"prompt": LONG}, [OLLAMA, OPENAI]),
    ("/completion", {"prompt": LONG}, [LLAMA_CPP, OPENAI]),
    ("/completion", {"prompt": [5] * 300}, [LLAMA_CPP, OPENAI]),
]


@pytest.mark.parametrize(("path", "body", "expressions"), ROUTES, ids=lambda value: str(value)[:40])
def test_the_words_of_each_dialect(
    app: Application, path: str, body: dict[str, Any], expressions: list[str]
) -> None:
    reply = app.client.post(path, json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    for expression in expressions:
        assert re.search(expression, message, re.IGNORECASE), message
    if path not in ("/v1/messages", "/api/chat", "/api/generate"):
        assert error["code"] == "context_length_exceeded" and error["param"] == next(iter(body))
        assert error["n_ctx"] == 256 and f"{error['n_prompt_tokens']} tokens" in message
        native = path == "/completion"
        assert error["type"] == ("exceed_context_size_error" if native else "invalid_request_error")


def test_the_counts_are_those_of_the_prompt(app: Application) -> None:
    """Where it was encoded they are exact; else they are a lower bound, and the message says so."""
    tokens = len(app.client.post("/tokenize", json={"content": LONG * 50}).json()["tokens"])
    for prompt, exact in (([5] * 256, True), ([5] * 300, True), (LONG * 50, False)):
        error = app.client.post("/v1/completions", json={"prompt": prompt}).json()["error"]
        assert ("tokens or more." not in error["message"]) == exact
        if exact:
            assert error["n_prompt_tokens"] == len(prompt)
        else:
            assert 256 <= error["n_prompt_tokens"] <= tokens
    message = app.client.post("/api/generate", json={"prompt": "a", "raw": True}).text
    assert "too long" not in message
