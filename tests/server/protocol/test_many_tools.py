"""Any number of tools, with names of up to 128 characters, in each dialect: clients of MCP send hundreds."""

from __future__ import annotations

from typing import Any

import pytest
from support.api_pieces import facts
from support.vocabulary_of_bytes import matches

from hotcold.server.protocol import anthropic, chat, ollama, responses
from hotcold.server.protocol.errors import APIError

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
USER = [{"role": "user", "content": "Hello"}]


def names(count: int, length: int = 128) -> list[str]:
    return [f"mcp__server-{i}__".ljust(length, "x") for i in range(count)]


def as_chat(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


def as_anthropic(name: str) -> dict[str, Any]:
    return {"name": name, "input_schema": SCHEMA}


def as_responses(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": SCHEMA}


DIALECTS = [
    (chat.parse, as_chat, {"messages": USER}),
    (ollama.parse_chat, as_chat, {"messages": USER}),
    (anthropic.parse, as_anthropic, {"messages": USER, "max_tokens": 4}),
    (responses.parse, as_responses, {"input": "Hello"}),
]


@pytest.mark.parametrize(
    ("parse", "tool", "body"), DIALECTS, ids=["chat", "ollama", "anthropic", "responses"]
)
def test_more_tools_than_any_client_has(parse: Any, tool: Any, body: dict[str, Any]) -> None:
    call = parse({**body, "tools": [tool(name) for name in names(2000)]}, facts())
    assert [each["function"]["name"] for each in call.callable] == names(2000)
    with pytest.raises(APIError, match="128"):
        parse({**body, "tools": [tool(name) for name in names(1, 129)]}, facts())
    with pytest.raises(APIError, match="2 functions"):
        parse({**body, "tools": [tool(name) for name in [*names(300), *names(1)]]}, facts())


def test_a_chosen_one_among_many() -> None:
    tools = [as_chat(name) for name in names(300)]
    last = names(300)[-1]
    one = {"type": "function", "function": {"name": last}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [one]}}
    for choice in (one, allowed):
        call = chat.parse({"messages": USER, "tools": tools, "tool_choice": choice}, facts())
        assert [each["function"]["name"] for each in call.callable] == [last]
    unknown = {"type": "function", "function": {"name": "telepathy"}}
    with pytest.raises(APIError, match="has the tool 'telepathy'"):
        chat.parse({"messages": USER, "tools": tools, "tool_choice": unknown}, facts())


def test_the_grammar_of_many_tools() -> None:
    """It allows a call of each, and of no other."""
    tools = [as_chat(name) for name in names(259, 40)]
    call = chat.parse({"messages": USER, "tools": tools, "tool_choice": "required"}, facts())
    assert call.job.grammar is not None
    for name, allowed in ((names(259, 40)[-1], True), ("telepathy", False)):
        text = f'<tool_call>\n{{"name": "{name}", "arguments": {{"path": "a"}}}}\n</tool_call>'
        assert matches(call.job.grammar.source, text) is allowed
