"""Tools and their results in the forms that clients send, beside the plain one."""

from __future__ import annotations

from typing import Any

import pytest
from support.api_pieces import facts

from hotcold.server.protocol import anthropic, chat, ollama, responses
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.messages import TOOLS

USER = {"role": "user", "content": "Go"}


def chat_schema(schema: Any) -> Any:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return chat.parse({"messages": [USER], "tools": [tool]}, facts()).tools


def ollama_schema(schema: Any) -> Any:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return ollama.parse_chat({"messages": [USER], "tools": [tool]}, facts()).tools  # type: ignore[union-attr]


def responses_schema(schema: Any) -> Any:
    tool = {"type": "function", "name": "f", "parameters": schema}
    return responses.parse({"input": "Go", "tools": [tool]}, facts()).tools


def anthropic_schema(schema: Any) -> Any:
    tool = {"name": "f", "input_schema": schema}
    return anthropic.parse({"max_tokens": 4, "messages": [USER], "tools": [tool]}, facts()).tools


DIALECTS = [chat_schema, ollama_schema, responses_schema, anthropic_schema]
#: A schema with null keywords, and the schema without them.
NULLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "object", "properties": None, "required": None}, {"type": "object"}),
    (
        {"type": "object", "properties": {"a": {"type": "string", "enum": None, "description": None}}},
        {"type": "object", "properties": {"a": {"type": "string"}}},
    ),
    (
        {"type": "object", "properties": {"a": {"items": {"type": "integer", "minimum": None}}}},
        {"type": "object", "properties": {"a": {"items": {"type": "integer"}}}},
    ),
    (
        {"type": "object", "properties": {"a": {"anyOf": [{"const": None}, {"pattern": None}]}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"const": None}, {}]}}},
    ),
    (
        {"type": "object", "$defs": {"x": {"required": None}}, "properties": {"a": {"$ref": "#/$defs/x"}}},
        {"type": "object", "$defs": {"x": {}}, "properties": {"a": {"$ref": "#/$defs/x"}}},
    ),
]  # fmt: skip
#: Schemas in which each null is a value, or a name is a keyword's.
UNCHANGED: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"const": None}}},
    {"type": "object", "properties": {"a": {"type": ["string", "null"], "default": None}}},
    {"type": "object", "properties": {"a": {"enum": [None, {"required": None}]}}},
    {"type": "object", "properties": {"properties": {"type": "string"}, "required": {"type": "integer"}}},
    {"type": "object", "properties": {"a": {"examples": [{"b": None}], "type": "object"}}},
]


@pytest.mark.parametrize("read", DIALECTS)
@pytest.mark.parametrize(("given", "plain"), [*NULLS, *((each, each) for each in UNCHANGED)])
def test_null_is_the_same_as_an_absent_keyword(read: Any, given: Any, plain: Any) -> None:
    (tool,) = read(given)
    assert tool["function"]["parameters"] == plain


@pytest.mark.parametrize("read", DIALECTS)
def test_a_property_needs_a_schema(read: Any) -> None:
    with pytest.raises(APIError, match="schema"):
        read({"type": "object", "properties": {"a": None}})


@pytest.mark.parametrize("type", [{}, {"type": None}, {"type": "function"}])
def test_a_tool_needs_no_type(type: dict[str, Any]) -> None:
    tool = {**type, "function": {"name": "f"}}
    for body in (
        chat.parse({"messages": [USER], "tools": [tool]}, facts()),
        ollama.parse_chat({"messages": [USER], "tools": [tool]}, facts()),
    ):
        assert [each["function"]["name"] for each in body.callable] == ["f"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "tool", [{"name": "f"}, {"type": "custom", "function": {"name": "f"}}, {"type": None}]
)
def test_other_tools_are_refused(tool: dict[str, Any]) -> None:
    with pytest.raises(APIError, match=r"tools\[0\].type is"):
        TOOLS.read([tool], "tools")


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_a_list_without_parts_is_an_empty_text(role: str) -> None:
    message = {"role": role, "content": [], "tool_call_id": "t1"}
    assert chat.parse({"messages": [message, USER]}, facts()).messages[0]["content"] == ""


BLOCKS = [
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
    {"type": "mcp_tool_use", "id": "m", "name": "x", "server_name": "s", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": []},
    {"type": "container_upload", "file_id": "x"},
]


@pytest.mark.parametrize("block", BLOCKS, ids=[str(each["type"]) for each in BLOCKS])
def test_tools_that_ran_at_anthropic_are_left_out_of_the_history(block: dict[str, Any]) -> None:
    def messages(*blocks: dict[str, Any]) -> Any:
        history = [USER, {"role": "assistant", "content": [*blocks]}, USER]
        return anthropic.parse({"max_tokens": 4, "messages": history}, facts()).messages

    text = {"type": "text", "text": "It rains."}
    assert messages(block, text) == messages(text)
    assert messages(block)[1]["content"] is None
    with pytest.raises(APIError, match="allowed are"):
        messages({"type": "hologram"})
    with pytest.raises(APIError, match="allowed are"):
        anthropic.parse({"max_tokens": 4, "messages": [{"role": "user", "content": [block]}]}, facts())


def test_a_reference_to_a_tool_in_a_result() -> None:
    block = {"type": "tool_reference", "tool_name": "f"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [block]}
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": [result]}]}
    (message,) = anthropic.parse(body, facts()).messages
    assert message["content"] == "[tool reference left out: this model reads text]"
