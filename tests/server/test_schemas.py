"""Schemas in requests: notes name omitted parts; broken or strict parts are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support import made_up_llm

from hotcold.server.reading import header_text

HEADER = "X-Hotcold-Not-Enforced"
MESSAGES = [{"role": "user", "content": "Hi"}]
SET = {"type": "object", "properties": {"tägs": {"type": "array", "uniqueItems": True}}}


@pytest.fixture(autouse=True)
def room_for_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_up_llm, "CONTEXT", 1 << 20)


def tools(strict: bool = False) -> list[dict[str, Any]]:
    """An odd tool among thirty."""
    found = [{"name": f"f{i}", "parameters": {"type": "object"}} for i in range(29)]
    found.insert(7, {"name": "odd", "parameters": SET, "strict": strict})
    return [{"type": "function", "function": each} for each in found]


def body(strict: bool = False, **more: Any) -> dict[str, Any]:
    format = {"type": "json_schema", "json_schema": {"name": "s", "schema": SET, "strict": strict}}
    return {"messages": MESSAGES, "max_tokens": 4, "response_format": format, **more}


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_not_enforced_is_in_a_header(app_with: Callable[..., Any], stream: bool) -> None:
    client = app_with().client
    reply = client.post("/v1/chat/completions", json=body(stream=stream))
    assert reply.status_code == 200
    assert reply.headers[HEADER] == "response_format: uniqueItems at properties['t\\xe4gs']"
    reply = client.post(
        "/v1/completions", json={"prompt": "Hi", "max_tokens": 4, "json_schema": SET, "stream": stream}
    )
    assert reply.headers[HEADER].startswith("json_schema: uniqueItems at ")
    reply = client.post(
        "/v1/completions", json={"prompt": "Hi", "max_tokens": 4, "json_schema": {"type": "object"}}
    )
    assert reply.status_code == 200 and HEADER not in reply.headers


def test_an_odd_tool_fails_no_request(app_with: Callable[..., Any]) -> None:
    client = app_with().client
    request = {"messages": MESSAGES, "max_tokens": 4}
    for choice in ("auto", "required"):
        reply = client.post("/v1/chat/completions", json={**request, "tools": tools(), "tool_choice": choice})
        assert reply.status_code == 200, reply.text
        assert reply.headers[HEADER] == "tool 'odd': uniqueItems at properties['t\\xe4gs']"
    error = client.post("/v1/chat/completions", json={**request, "tools": tools(strict=True)}).json()["error"]
    assert error["param"] == "tools" and error["code"] == "invalid_grammar"
    assert error["message"].startswith(
        "the tool 'odd': uniqueItems at properties['t\\xe4gs'] cannot be enforced"
    )


@pytest.mark.parametrize(
    ("schema", "strict", "message"),
    [
        (SET, True, "uniqueItems at properties['t\\xe4gs'] cannot be enforced: remove it, or"),
        ({"properties": {"a": {"type": "text"}}}, False, "type at properties.a is 'text': allowed are null"),
        ({"items": {"$ref": "#/$defs/x"}}, False, "$ref '#/$defs/x' does not exist in the schema"),
    ],
)
def test_what_is_refused_names_the_place(
    app_with: Callable[..., Any], schema: Any, strict: bool, message: str
) -> None:
    request = body(strict)
    request["response_format"]["json_schema"]["schema"] = schema
    reply = app_with().client.post("/v1/chat/completions", json=request)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == "response_format"
    assert error["code"] == "invalid_grammar" and error["message"].startswith(f"response_format: {message}")
    assert "%json" not in error["message"] and "x-guidance" not in error["message"]


def test_the_letter_of_the_standard_is_an_operators_choice(app_with: Callable[..., Any]) -> None:
    for open in (True, False):
        made = app_with(open_schemas=open)
        for request in (body(), {"messages": MESSAGES, "tools": tools(), "max_tokens": 4}):
            assert made.client.post("/v1/chat/completions", json=request).status_code == 200
        rests = ['"additionalProperties": true' in grammar.source for grammar in made.llm.checks]
        assert rests == [open, open]


def test_many_notes_are_cut_and_none_breaks_the_header() -> None:
    assert header_text(["a: b\r\nX-Other: c", "ü"]) == "a: b  X-Other: c; \\xfc"
    long = header_text([f"tool 'f{i}': uniqueItems at properties.{'x' * 400}" for i in range(20)])
    assert len(long) < 1100 and long.endswith("; and 17 more") and long.isascii()
