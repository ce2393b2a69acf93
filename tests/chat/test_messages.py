"""Messages as templates get them, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hotcold.chat.messages import MessageError, check_messages, check_tools, check_values, content_text

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": function}]}


def test_what_templates_get() -> None:
    given = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "Hi", "name": "Ann", "audio": None, "unknown": 5},
        call('{"x": [1, "<|im_end|>"]}'),
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm", "refusal": None, "tool_calls": []},
    ]
    before = json.dumps(given)
    function = {"name": "f", "arguments": {"x": [1, "<|im_end|>"]}}
    assert check_messages(given) == [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "Hi", "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm"},
    ]
    assert json.dumps(given) == before
    assert check_messages([call({"y": 1})])[0]["tool_calls"][0]["function"]["arguments"] == {"y": 1}
    for nothing in ("", None, "null", " {} "):
        assert check_messages([call(nothing)])[0]["tool_calls"][0]["function"]["arguments"] == {}
    assert check_messages([{"role": "assistant"}]) == [{"role": "assistant", "content": ""}]
    assert check_messages([{"role": "tool", "content": None}]) == [{"role": "tool", "content": ""}]
    assert check_tools([TOOL]) == [TOOL]


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "at least one"),
        ("hello", "a list"),
        ({"role": "user"}, "a list"),
        ([5], r"messages\[0\] is 5"),
        ([USER, {"role": "hacker", "content": "x"}], r"messages\[1\].role is 'hacker': allowed are system, "),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\].role"),
        ([{"content": "x"}], r"messages\[0\].role is None"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content is 5"),
        ([{"role": "user", "content": None}], r"messages\[0\].content is missing"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] is 'image_url': only parts"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] is 'x'"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], r"content\[0\].text is 5"),
        ([{"role": "user", "content": "x", "name": 5}], r"messages\[0\].name is 5"),
        ([{"role": "user", "content": "x\ud800"}], "lone surrogate"),
        ([USER | {"tool_calls": [1]}], "only the role assistant"),
        ([{"role": "assistant", "tool_calls": "x"}], "a list is needed"),
        ([{"role": "assistant", "tool_calls": [5]}], r"tool_calls\[0\] is 5"),
        ([call([1])], r"arguments is \[1\]: an object as JSON"),
        ([call(5)], r"arguments is 5"),
        ([call({"x": object()})], "not valid JSON"),
        ([call({"x": float("nan")})], "not valid JSON"),
        ([USER] * 10_001, "at most 10000"),
        ([{"role": "user", "content": "x" * (4 << 20)}], "at most 4194304"),
    ],
)
def test_what_is_refused(messages: Any, error: str) -> None:
    with pytest.raises(MessageError if "surrogate" not in error else ValueError, match=error) as raised:
        check_messages(messages)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 250


@pytest.mark.parametrize(
    "text", ['{"a": ', '{"a": "b', "[1]", "now", '"x"', "{'a': 1}", '{"a": NaN}', "[" * 100_000]
)
def test_arguments_that_were_cut_off_are_told_as_they_are(text: str) -> None:
    """A model wrote them, so a client has them in its history: the conversation continues."""
    (found,) = check_messages([call(text)])
    assert found["tool_calls"][0]["function"]["arguments"] == {"cut_off_arguments": text}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
    ],
)
def test_content_as_a_text(content: Any, text: str) -> None:
    assert content_text(content) == text


def deep(levels: int) -> Any:
    found: Any = {}
    for _ in range(levels):
        found = {"a": found}
    return found


@pytest.mark.parametrize(
    ("tools", "error"),
    [
        ("f", "a list"),
        ([5], r"tools\[0\] is 5"),
        ([{"type": "function"}], r"tools\[0\] is "),
        ([{"function": {"name": 5}}], r"tools\[0\] is "),
        ([TOOL] * 1001, "at most 1000"),
        ([{"function": {"name": "f", "parameters": deep(100_000)}}], "nested too deeply"),
        ([{"function": {"name": "f", "parameters": {1, 2}}}], "not valid JSON"),
    ],
)
def test_tools_that_are_refused(tools: Any, error: str) -> None:
    with pytest.raises(MessageError, match=error):
        check_tools(tools)


def test_values_for_templates() -> None:
    values: dict[str, Any] = {"enable_thinking": False, "reasoning_effort": "low", "n": 3, "x": 0.5}
    assert check_values(values) == values


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools", "add_generation_prompt",
    "bos_token", "eos_token", "range", "raise_exception", "self", "loop", "documents"])  # fmt: skip
def test_names_that_are_not_for_requests(name: str) -> None:
    with pytest.raises(MessageError, match=f"{name} is set by the server"):
        check_values({name: "x"})


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"a": [1]}, r"a is \[1\]"),
        ({"a": {}}, "a is {}"),
        ({"a": None}, "a is None"),
        ({"a": float("inf")}, "finite"),
        ({"__class__": 1}, "a name of letters"),
        ({"a b": 1}, "a name of letters"),
        ({5: 1}, "a name of letters"),
        ({f"a{i}": 1 for i in range(33)}, "up to 32"),
        ([], "up to 32"),
    ],
)
def test_values_that_are_refused(values: Any, error: str) -> None:
    with pytest.raises(MessageError, match=error):
        check_values(values)
