"""Anthropic's dialect, event by event, as Anthropic's own client reads it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.api_pieces import Marked, Part, facts, piece, pieces_of

from hotcold.chat.messages import CUT_OFF
from hotcold.server.protocol import anthropic, chat
from hotcold.server.protocol.dialects import anthropic_error
from hotcold.server.protocol.errors import APIError
from tests.server.conftest import Application

BODY: dict[str, Any] = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
ALL = "<why>Hi [look {}][look [1]]"


def parse(**fields: Any) -> anthropic.MessagesCall:
    return anthropic.parse({**BODY, **fields}, facts())


def refused(**fields: Any) -> APIError:
    with pytest.raises(APIError) as caught:
        parse(**fields)
    return caught.value


def events_of(text: str, **more: Any) -> list[dict[str, Any]]:
    reply = parse(stream=True).reply(Marked)
    found = reply.first()
    for each in pieces_of(text, **more):
        found += reply.add(0, each)
    return found + reply.end()


def test_a_request_is_one_of_the_chat_route() -> None:
    call = parse(
        system=[{"type": "text", "text": "Be brief."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "nothing", "is_error": True},
                    {"type": "tool_result", "tool_use_id": "t1"},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        stop_sequences=["END", ""],
        temperature=0,
        top_k=3,
    )
    same = chat.parse(
        {
            "max_tokens": 5,
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {
                    "role": "assistant",
                    "content": "Let me look.",
                    "reasoning_content": "hm",
                    "tool_calls": [{"id": "t1", "function": {"name": "look", "arguments": {"at": 1}}}],
                },
                {"role": "tool", "tool_call_id": "t1", "content": "Error: nothing"},
                {"role": "tool", "tool_call_id": "t1", "content": ""},
                {"role": "user", "content": "And?"},
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
                }
            ],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "stop": ["END"],
            "temperature": 0,
            "top_k": 3,
        },
        call.facts,
    )
    assert vars(call) == vars(same)


def test_the_beginning_of_an_answer_is_continued() -> None:
    last = {"role": "assistant", "content": [{"type": "text", "text": "The answer is"}]}
    call = parse(messages=[*BODY["messages"], last])
    assert call.continue_last and call.messages[-1]["content"] == "The answer is"


def test_thinking_is_the_templates() -> None:
    assert parse().template_kwargs == {}
    for kind, wanted in (("enabled", True), ("adaptive", True), ("disabled", False)):
        assert parse(thinking={"type": kind}).template_kwargs == {"enable_thinking": wanted}
    named = {"type": "tool", "name": "look"}
    call = parse(thinking={"type": "enabled"}, tools=[TOOL], tool_choice=named)
    assert call.template_kwargs == {"enable_thinking": True} and call.thinking_budget is None
    assert parse(thinking={"type": "enabled", "budget_tokens": 9}).thinking_budget == 9
    assert parse(output_config={"effort": "low"}).template_kwargs == {"reasoning_effort": "low"}


def test_an_answer_that_matches_a_schema() -> None:
    format = {"type": "json_schema", "schema": {"type": "object"}}
    grammar = parse(output_config={"format": format}).job.grammar
    assert grammar is not None and grammar.kind != "gbnf"
    broken = {"type": "json_schema", "schema": {"type": "what"}}
    error = refused(output_config={"format": broken})
    assert error.param == "output_config" and "response_format" not in error.message


def test_what_is_not_supported_is_refused_by_name() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    error = refused(messages=[{"role": "user", "content": [image]}])
    assert error.param == "messages[0].content[0].type" and "reads text only" in error.message
    assert refused(tools=[{"type": "web_search_20250305", "name": "web_search"}]).param == "tools[0].type"
    assert refused(mcp_servers=[{"type": "url"}]).param == "mcp_servers"
    with pytest.raises(APIError, match="max_tokens is missing"):
        anthropic.parse({"messages": BODY["messages"]}, facts())


def test_a_stream_event_by_event() -> None:
    events = events_of(ALL, reused=4)
    assert [event["type"] for event in events if event["type"] != "content_block_delta"] == [
        "message_start",
        *["content_block_start", "content_block_stop"] * 4,
        "message_delta",
        "message_stop",
    ]
    begun = events[0]["message"]
    assert begun["usage"]["input_tokens"] == 5 and begun["usage"]["cache_read_input_tokens"] == 4
    kinds = {event["delta"]["type"] for event in events if event["type"] == "content_block_delta"}
    assert kinds == {"thinking_delta", "signature_delta", "text_delta", "input_json_delta"}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_a_stream_as_the_client_accumulates_it() -> None:
    """It becomes the message that is sent where nothing is streamed."""
    messages = pytest.importorskip("anthropic.lib.streaming._messages")
    types = pytest.importorskip("anthropic.types")
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for each in events_of("<why>Hi [look {}][look {}]"):
        kind = getattr(types, f"Raw{''.join(map(str.title, each['type'].split('_')))}Event")
        event = kind.model_validate(each)
        snapshot = messages.accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    reply = parse().reply(Marked)
    for one in pieces_of("<why>Hi [look {}][look {}]"):
        reply.add(0, one)
    whole = types.Message.model_validate(reply.whole())
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]

    def without_ids(message: Any) -> Any:
        plain = message.to_dict()
        for block in plain["content"]:
            block.pop("id", None)
        return plain["content"], plain["stop_reason"], plain["usage"]["output_tokens"]

    assert without_ids(snapshot) == without_ids(whole)


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ({"finish_reason": "length"}, ("max_tokens", None)),
        ({"finish_reason": "stop", "stop": "END"}, ("stop_sequence", "END")),
        ({"finish_reason": "stop"}, ("end_turn", None)),
    ],
)
def test_why_an_answer_ended(last: dict[str, Any], reason: tuple[str, str | None]) -> None:
    reply = parse().reply(Marked)
    reply.add(0, piece("a", [1], **last))
    whole = reply.whole()
    assert (whole["stop_reason"], whole["stop_sequence"]) == reason


@pytest.mark.parametrize("cut", ['{"a": ', "[1]", '{"a": 1e999}', '{"a": NaN}', "[" * 100_000])
def test_arguments_that_are_no_object(cut: str) -> None:
    class Calling(Marked):
        """Finds a call with these arguments, as a model may write them without a grammar."""

        def push(self, text: str) -> list[Part]:
            return [Part("call_start", name="look"), Part("call_arguments", cut)]

    reply = parse().reply(Calling)
    reply.add(0, piece("a", [1], "length"))
    (call,) = reply.whole()["content"]
    assert call["input"] == {CUT_OFF: cut}


def test_the_route(app: Application) -> None:
    for path in ("/v1/messages", "/messages", "/v1/messages?beta=true"):
        reply = app.client.post(path, json=BODY, headers={"anthropic-version": "2023-06-01"}).json()
        assert reply["content"] == [{"type": "text", "text": "a b c"}]
    count = app.client.post("/v1/messages/count_tokens", json={"messages": BODY["messages"]}).json()
    assert count == {"input_tokens": reply["usage"]["input_tokens"]}
    text = app.client.post("/v1/messages", json={**BODY, "stream": True}).text
    names = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
    data = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert names == [each["type"] for each in data] and names[-1] == "message_stop"


def test_errors_have_its_form(app_with: Any) -> None:
    app = app_with()
    for body, status, kind in (
        ({**BODY, "temperature": -1}, 400, "invalid_request_error"),
        ({**BODY, "messages": [{"role": "user", "content": "word " * 1000}]}, 400, "invalid_request_error"),
    ):
        reply = app.client.post("/v1/messages", json=body)
        assert reply.status_code == status and reply.json()["error"]["type"] == kind
        assert set(reply.json()) == {"type", "error"}
    assert app.client.get("/v1/messages").json()["type"] == "error"
    app.llm.fail_at = 1
    reply = app.client.post("/v1/messages", json=BODY)
    assert reply.status_code == 500 and reply.json()["error"]["type"] == "api_error"
    text = app.client.post("/v1/messages", json={**BODY, "stream": True}).text
    assert text.rstrip().split("\n\n")[-1].startswith('event: error\ndata: {"type":"error","error":{')
    assert app.llm.running == 0


def test_a_prompt_that_is_too_long_is_told_in_words_that_claude_code_knows(app: Application) -> None:
    """It shortens its conversation by this expression of its own."""
    with pytest.raises(APIError) as caught:
        facts(context=8).check_ids([1] * 9, "prompt")
    message = anthropic_error(caught.value)["error"]["message"]
    found = re.match(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", message)
    assert found and found.groups() == ("9", "7") and message.endswith(caught.value.message)
    body = {**BODY, "messages": [{"role": "user", "content": "word " * 1000}]}
    app.llm.checks.clear()
    for more in ({}, {"tools": [TOOL]}):
        error = app.client.post("/v1/messages", json=body | more).json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("prompt is too long: ")
    assert not app.llm.checks  # whose grammars would take longer


def test_a_client_that_waits_gets_events(app_with: Any) -> None:
    """Claude Code counts no pings as signs of life; Anthropic's library makes the same message of them."""
    app = app_with(ping_s=0.02)
    app.llm.pace_s = 0.2
    text = app.client.post("/v1/messages", json={**BODY, "stream": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    types = [event["type"] for event in events]
    assert types[:2] == ["message_start", "message_delta"] and types.count("message_start") == 1
    assert events[1]["delta"] == {"stop_reason": None, "stop_sequence": None}
    assert events[-2]["delta"]["stop_reason"] == "end_turn" and events[-2]["usage"]["input_tokens"] > 0
    messages = pytest.importorskip("anthropic.lib.streaming._messages")
    kinds = pytest.importorskip("anthropic.types").RawMessageStreamEvent
    adapter = pytest.importorskip("pydantic").TypeAdapter(kinds)
    snapshot: Any = None
    for each in events:
        event = adapter.validate_python(each)
        snapshot = messages.accumulate_event(event=event, current_snapshot=snapshot, json_bufs={})
    assert snapshot.content[0].text == "a b c" and snapshot.stop_reason == "end_turn"
    assert snapshot.usage.input_tokens == events[-2]["usage"]["input_tokens"]


_BILLING = "x-anthropic-billing-header: cc_version=2.1.100.f2a; cc_entrypoint=cli; cch={};"


def _blocks(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts]


@pytest.mark.parametrize("mark", ["0a1b2", "9f8e7"])
@pytest.mark.parametrize(
    ("system", "same"),
    [
        (_blocks(_BILLING, "Be brief.", "Be kind."), _blocks("Be brief.", "Be kind.")),
        (_blocks(_BILLING, "Be brief."), "Be brief."),
        (_blocks(f"{_BILLING}\n", "\nBe brief."), "\nBe brief."),
        (_blocks(f"{_BILLING}\r\nBe brief.\n"), "Be brief.\n"),
        (_blocks("Be brief.", _BILLING, "Be kind."), _blocks("Be brief.", "Be kind.")),
        (_blocks(_BILLING, f"{_BILLING}\nBe brief."), "Be brief."),
        (f"{_BILLING}\nBe brief.\n\nBe kind.", "Be brief.\n\nBe kind."),
        (f"{_BILLING}\n\nBe brief.", "\nBe brief."),
        (_BILLING.removesuffix(";"), None),
        (_blocks(_BILLING), None),
    ],
)
def test_the_billing_line_of_claude_code_is_left_out(system: Any, same: Any, mark: str) -> None:
    """It differs in each request, also where tokens are only counted."""
    written = json.loads(json.dumps(system).replace("{}", mark))
    for read in (anthropic.parse, anthropic.parse_count):
        body = BODY if read is anthropic.parse else {"messages": BODY["messages"]}
        assert read({**body, "system": written}, facts()) == read({**body, "system": same}, facts())


@pytest.mark.parametrize(
    "system",
    [
        f"Leave out this line:\n{_BILLING}",
        f" {_BILLING}\nBe brief.",
        f"{_BILLING} What does it say?",
        "x-anthropic-billing-header: what is it?",
        "x-anthropic-billing-header: cch=5 is what I see. Why?\nBe brief.",
        "x-anthropic-billing-header:\nBe brief.",
        "x-anthropic-billing-header is a line of Claude Code.",
        _blocks("Be brief.", f"{_BILLING}\nBe kind."),
        _blocks(f"Be brief.\n{_BILLING}"),
    ],
)
def test_text_about_the_billing_line_stays(system: Any) -> None:
    texts = [system] if isinstance(system, str) else [block["text"] for block in system]
    content = parse(system=system).messages[0]["content"]
    assert ([content] if isinstance(content, str) else [part["text"] for part in content]) == texts


def test_only_the_system_prompt_loses_its_billing_line() -> None:
    messages = [{"role": role, "content": f"{_BILLING}\nHello"} for role in ("system", "user")]
    assert [each["content"] for each in parse(messages=messages).messages] == [f"{_BILLING}\nHello"] * 2


def test_calls_without_results_are_told_in_anthropics_words(app: Application) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [call]}]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        error = app.client.post(path, json={**BODY, "messages": messages}).json()["error"]
        assert "add a tool_result of each, in a message of role user" in error["message"], error


HOSTILE = [
    {"messages": []},
    {"messages": [{"role": "user", "content": []}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user", "content": [None]}]},
    {"messages": [{"role": "user", "content": [{"type": ["text"], "text": "a"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
    {
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "", "name": "a", "input": {}}]}
        ]
    },
    {"messages": [{"role": "robot", "content": "a"}]},
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": 10**30},
    {"system": 5},
    {"system": [{"type": "image"}]},
    {"tools": [{}]},
    {"tools": [TOOL, TOOL]},
    {"tools": [{**TOOL, "input_schema": {"$ref": "#"}}], "tool_choice": {"type": "any"}},
    {"tools": [{**TOOL, "input_schema": {"type": "what"}}], "tool_choice": {"type": "any"}},
    {"tool_choice": {"type": "any"}},
    {"tool_choice": {"type": "tool", "name": "nobody"}, "tools": [TOOL]},
    {"thinking": {"type": "enabled", "budget_tokens": -5}},
    {"output_config": {"format": {"type": "json_schema", "schema": {"type": "what"}}}},
    {"stop_sequences": ["a"] * 1000},
    {"stream": "yes"},
]


@pytest.mark.parametrize("fields", HOSTILE, ids=lambda fields: json.dumps(fields)[:60])
def test_hostile_bodies(app: Application, fields: dict[str, Any]) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = json.dumps({**BODY, **fields}).encode()
        reply = app.client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert reply.status_code < 500, reply.text
        assert path.endswith("tokens") or reply.status_code >= 400 or "$ref" in json.dumps(fields), reply.text
        assert reply.status_code < 400 or set(reply.json()) == {"type", "error"}
    assert app.llm.running == 0
