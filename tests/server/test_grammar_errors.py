"""Errors of grammars in each dialect: they name the field that the grammar came in, whenever they occur."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hotcold.grammar.error import GrammarError

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
TEXT = {"prompt": "Hi", "max_tokens": 4}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
TOOL = {"name": "f", "parameters": SCHEMA}
TOOLS = {"tools": [{"type": "function", "function": TOOL}]}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {**CHAT, "response_format": FORMAT}, "response_format"),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, "response_format"),
    ("/v1/chat/completions", {**CHAT, "json_schema": SCHEMA}, "json_schema"),
    ("/v1/chat/completions", {**CHAT, "grammar": 'root ::= "a"'}, "grammar"),
    ("/v1/chat/completions", {**CHAT, "regex": "a+"}, "regex"),
    ("/v1/chat/completions", {**CHAT, **TOOLS}, "tools"),
    ("/v1/chat/completions", {**CHAT, **TOOLS, "regex": "a+"}, "tools"),
    ("/v1/chat/completions", {**CHAT, **TOOLS, "regex": "a+", "tool_choice": "none"}, "regex"),
    ("/v1/completions", {**TEXT, "json_schema": SCHEMA}, "json_schema"),
    ("/v1/completions", {**TEXT, "n": 2, "regex": "a+"}, "regex"),
    ("/completion", {**TEXT, "grammar": 'root ::= "a"'}, "grammar"),
    ("/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_object"}}}, "text.format"),
    (
        "/v1/responses",
        {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
        "text.format",
    ),
    ("/v1/responses", {"input": "Hi", "tools": [{"type": "function", **TOOL}]}, "tools"),
    (
        "/v1/messages",
        {**CHAT, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "output_config",
    ),
    ("/v1/messages", {**CHAT, "tools": [{"name": "f", "input_schema": SCHEMA}]}, "tools"),
    ("/api/chat", {**CHAT, "format": "json"}, "format"),
    ("/api/chat", {**CHAT, "format": SCHEMA}, "format"),
    ("/api/chat", {**CHAT, **TOOLS}, "tools"),
    ("/api/generate", {"prompt": "Hi", "format": SCHEMA}, "format"),
    ("/api/generate", {"prompt": "Hi", "raw": True, "format": "json"}, "format"),
]


@pytest.mark.parametrize("when", ["checked", "answered"])
@pytest.mark.parametrize("stream", [True, False])
def test_errors_name_the_field_of_the_grammar(app_with: Callable[..., Any], when: str, stream: bool) -> None:
    made = app_with()
    error = GrammarError("the grammar cannot continue: too many items")
    if when == "checked":
        made.llm.refusal = error
    else:
        made.llm.fail_at, made.llm.failure = 1, error
    for path, body, param in CASES:
        response = made.client.post(path, json={**body, "stream": stream})
        assert response.status_code == (200 if stream and when == "answered" else 400), (path, response.text)
        message = f"{param}: {error}"
        assert message in response.text, (path, response.text)
        if response.status_code == 400 and path not in ("/v1/messages", "/api/chat", "/api/generate"):
            body = response.json()["error"]
            assert (body["param"], body["code"], body["message"]) == (param, "invalid_grammar", message)


def test_a_prompt_that_is_too_long_is_no_error_of_the_grammar(app_with: Callable[..., Any]) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "Once " * 400}], "regex": "a+"}
    error = app_with().client.post("/v1/chat/completions", json=body).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_one_grammar_that_comes_in_two_fields_is_checked_once(app_with: Callable[..., Any]) -> None:
    made = app_with()
    for body in ({"json_schema": SCHEMA}, {"response_format": FORMAT}):
        made.client.post("/v1/chat/completions", json={**CHAT, **body})
    first, second = made.llm.checks
    assert first == second and hash(first) == hash(second)  # by which checks are remembered
    assert (first.param, second.param) == ("json_schema", "response_format")
