"""Custom tools of the Responses route, tools that run elsewhere, and items of both, as Codex sends them."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api_pieces import Marked, facts, pieces_of

from hotcold.server.protocol import responses
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.responses_tools import HOSTED, InputText

LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /.+/'}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": LARK}
SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": None}
USER = {"role": "user", "content": "Mend it."}


def parse(**fields: Any) -> responses.ResponsesCall:
    return responses.parse({"input": "Hello", **fields}, facts())


def function(call: responses.ResponsesCall, name: str) -> dict[str, Any]:
    (found,) = (each["function"] for each in call.tools if each["function"]["name"] == name)
    return dict(found)


def test_a_custom_tool_is_a_function_with_one_text() -> None:
    plain = {"type": "custom", "name": "note"}
    regex = {"type": "grammar", "syntax": "regex", "definition": "[ab]+"}
    call = parse(
        tools=[
            PATCH,
            plain,
            {**plain, "name": "free", "format": {"type": "text"}},
            {**plain, "name": "letters", "format": regex},
            {"type": "namespace", "name": "files", "description": "On files.", "tools": [PATCH]},
        ],
        tool_choice={"type": "custom", "name": "apply_patch"},
    )
    patch = function(call, "apply_patch")
    assert patch["description"].startswith("Edits files.\n") and LARK["definition"] in patch["description"]
    assert patch["parameters"]["required"] == ["input"]
    assert patch["parameters"]["properties"]["input"]["type"] == "string"
    assert "description" not in function(call, "note") and "description" not in function(call, "free")
    assert function(call, "letters")["description"].endswith("[ab]+")
    assert function(call, "files__apply_patch")["description"].startswith("On files.\nEdits files.\n")
    assert call.tool_choice["function"]["name"] == "apply_patch"
    allowed = {"type": "allowed_tools", "tools": [{"type": "custom", "name": "note"}]}
    names = [each["function"]["name"] for each in parse(tools=[plain, SHELL], tool_choice=allowed).callable]
    assert names == ["note"]


@pytest.mark.parametrize("kind", [*HOSTED, "web_search_preview_2025_03_11", "web_search_2025_08_26"])
def test_tools_that_run_elsewhere_are_left_out(kind: str) -> None:
    hosted = {"type": kind, "external_web_access": False, "server_label": "a", "container": "b"}
    call = parse(tools=[hosted, SHELL])
    assert [each["function"]["name"] for each in call.tools] == ["shell"]
    assert call.repeated["tools"] == [{**SHELL, "description": None}]
    assert call.left_out and kind.startswith(call.left_out)
    assert parse(tools=[hosted]).tools == [] and parse(tools=[hosted]).tool_choice == "none"
    with pytest.raises(APIError, match=r"tool_choice\.type"):
        parse(tools=[hosted, SHELL], tool_choice={"type": kind})


def test_the_reply_names_the_tools_that_are_left_out(app_with: Any) -> None:
    app = app_with()
    tools = [{"type": "web_search"}, SHELL, {"type": "local_shell"}]
    reply = app.client.post("/v1/responses", json={"input": "Hello", "tools": tools})
    assert reply.headers["X-Hotcold-Left-Out"] == "web_search, local_shell"
    assert "X-Hotcold-Left-Out" not in app.client.post("/v1/responses", json={"input": "Hello"}).headers


ELSEWHERE: list[dict[str, Any]] = [
    {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "q"}},
    {"type": "file_search_call", "id": "fs_1", "queries": ["q"], "status": "completed", "results": None},
    {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "aGk="},
    {"type": "local_shell_call", "call_id": "c9", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "id": "c9", "output": "a"},
    {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []},
    {"type": "tool_search_call", "execution": "client", "arguments": {}},
    {"type": "tool_search_output", "tools": []},
    {"type": "compaction", "encrypted_content": "x"},
]


@pytest.mark.parametrize("item", ELSEWHERE, ids=lambda item: str(item["type"]))
def test_items_of_tools_elsewhere_are_left_out(item: dict[str, Any]) -> None:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    after = {"role": "user", "content": "And?"}
    with_it, without = ([USER, *more, said, after] for more in ([item], []))
    assert parse(input=with_it).messages == parse(input=without).messages
    assert parse(input=[USER, item]).messages == parse(input=[USER]).messages


def test_calls_of_custom_tools_in_the_conversation() -> None:
    called = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": 'a "b"\n'}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"}
    call = parse(input=[USER, called, result, {**USER, "content": "And?"}], tools=[PATCH])
    (first,) = call.messages[1]["tool_calls"]
    assert first["function"]["name"] == "apply_patch"
    assert json.loads(first["function"]["arguments"]) == {"input": 'a "b"\n'}
    assert call.messages[2] == {"role": "tool", "tool_call_id": "c1", "content": "ok"}
    with pytest.raises(APIError, match="'c1': add a custom_tool_call_output"):
        parse(input=[USER, called])


def test_an_input_without_items_needs_instructions() -> None:
    assert [each["role"] for each in parse(input=[], instructions="Be brief.").messages] == ["system"]
    for nothing in ([], [ELSEWHERE[0]]):
        with pytest.raises(APIError) as caught:
            parse(input=nothing)
        assert caught.value.param == "input"


def reply_to(text: str, reason: str = "stop", **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of a stream, and the whole response."""
    reply = parse(stream=True, tools=[PATCH, SHELL], **fields).reply(Marked)
    events = reply.first()
    for one in pieces_of(text, reason=reason):
        events += reply.add(0, one)
    return events + reply.end(), reply.whole()


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_call_of_a_custom_tool_as_the_client_reads_it(reason: str) -> None:
    text = 'x "y"\n\\ é'
    arguments = json.dumps({"input": text})
    cut = arguments[: arguments.index("\\\\")] if reason == "length" else arguments
    events, whole = reply_to(f"[shell {{}}][apply_patch {cut}", reason)
    item = whole["output"][1]
    expected_input = 'x "y"\n' if reason == "length" else text
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", expected_input)
    deltas = [each["delta"] for each in events if each["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == expected_input and len(deltas) > 2
    types = pytest.importorskip("openai.types.responses")
    adapter = pytest.importorskip("pydantic").TypeAdapter(types.ResponseStreamEvent)
    read = [adapter.validate_python(event) for event in events]
    assert [event.type for event in read] == [event["type"] for event in events]
    (done,) = [each for each in read if each.type == "response.custom_tool_call_input.done"]
    assert done.input == expected_input and read[-1].response.output[1].input == expected_input
    assert types.Response.model_validate(whole).tools[0].format.definition == LARK["definition"]


@given(st.text(), st.booleans(), st.integers(1, 7))
def test_an_input_in_pieces(text: str, ascii: bool, size: int) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii)
    reader = InputText()
    pieces = [reader.push(arguments[at : at + size]) for at in range(0, len(arguments), size)]
    assert "".join(pieces) == text
    for piece in pieces:
        piece.encode()  # no half characters


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\ud83d', "a"),
        ('{"input": "a\\ud83db"}', "a\ud83db"),
        ('{"input": "a\\ud83d\\n"}', "a\ud83d\n"),
        ('{"input": "\\ud83d\\u0041"}', "\ud83dA"),
        ('{"input": "\\ude00b"}', "\ude00b"),
        ('{"input": "\\u00', ""),
        ('{ "input" :"a', "a"),
        ('{"inp', ""),
    ],
)
def test_inputs_that_are_cut_off_or_odd(arguments: str, text: str) -> None:
    assert InputText().push(arguments) == text


def types_in(kind: Any) -> set[str]:
    """The values of ``type`` in a union of OpenAI's typed dictionaries."""
    if isinstance(kind, str):
        return {kind}
    if hasattr(kind, "__total__"):  # a typed dictionary, of whichever library
        return types_in(typing.get_type_hints(kind).get("type"))
    return set().union(*map(types_in, typing.get_args(kind)))


def test_every_type_of_openai_is_known() -> None:
    """No item and no tool of OpenAI's description ends a session."""
    items = pytest.importorskip("openai.types.responses.response_input_item_param").ResponseInputItemParam
    tools = pytest.importorskip("openai.types.responses.tool_param").ToolParam
    known = {"message", "function_call", "item_reference"}
    assert known < types_in(items) and {"function", "custom", "web_search"} < types_in(tools)
    assert types_in(items) <= set(responses._ITEM.shapes)
    for kind in types_in(tools) - {"function", "custom", "namespace"}:
        assert parse(tools=[{"type": kind}]).tools == []
