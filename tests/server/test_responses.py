"""OpenAI's Responses, event by event, as OpenAI's own client reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.api_pieces import Marked, facts, pieces_of

from hotcold.server.protocol import chat, responses
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.kept import Kept
from tests.server.conftest import Application

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": None}


def parse(**fields: Any) -> responses.ResponsesCall:
    return responses.parse({"input": "Hello", **fields}, facts())


def test_a_request_is_one_of_the_chat_route() -> None:
    call = parse(
        instructions="Brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            {
                "type": "reasoning",
                "id": "rs",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "nothing"},
            {"role": "user", "content": "And?"},
        ],
        tools=[TOOL],
        tool_choice={"type": "function", "name": "look"},
        max_output_tokens=7,
        temperature=0,
        reasoning={"effort": "low", "summary": "auto"},
    )
    function = {"name": "look", "parameters": {"type": "object"}}
    same = chat.parse(
        {
            "messages": [
                {"role": "system", "content": "Brief."},
                {"role": "user", "content": "Hello"},
                {
                    "role": "assistant",
                    "content": "I look.",
                    "reasoning_content": "hm",
                    "tool_calls": [{"id": "c1", "function": {"name": "look", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "nothing"},
                {"role": "user", "content": "And?"},
            ],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
            "max_tokens": 7,
            "temperature": 0,
            "reasoning_effort": "low",
        },
        call.facts,
    )
    own = ("repeated", "names", "kept")
    assert {name: value for name, value in vars(call).items() if name not in own} == vars(same)


CUSTOM = {"type": "custom", "name": "patch", "description": "Edits files."}
NAMESPACE = {"type": "namespace", "name": "mcp__eyes", "description": "Eyes.", "tools": [TOOL]}


def test_functions_of_a_namespace() -> None:
    """Codex gives its tools of agents and of MCP servers so; a call has both names, wherever it stands."""
    shut = {**TOOL, "name": "shut", "description": "Shuts them."}
    called = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    call = parse(
        input=[
            {"role": "user", "content": "Look."},
            {**called, "namespace": "mcp__eyes"},
            {**called, "call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "a"},
            {"type": "function_call_output", "call_id": "c2", "output": "b"},
        ],
        tools=[TOOL, {**NAMESPACE, "tools": [TOOL, shut]}],
        tool_choice={"type": "function", "name": "shut"},
    )
    functions = {each["function"]["name"]: each["function"].get("description") for each in call.tools}
    assert functions == {"look": None, "mcp__eyes__look": "Eyes.", "mcp__eyes__shut": "Shuts them."}
    assert call.tool_choice["function"]["name"] == "mcp__eyes__shut"
    names = [each["function"]["name"] for each in call.messages[1]["tool_calls"]]
    assert names == ["mcp__eyes__look", "look"]
    reply = call.reply(Marked)
    for one in pieces_of("[mcp__eyes__shut {}][look {}]"):
        reply.add(0, one)
    first, second = reply.whole()["output"]
    assert (first["name"], first["namespace"]) == ("shut", "mcp__eyes")
    assert second["name"] == "look" and "namespace" not in second
    openai = pytest.importorskip("openai.types.responses")
    read = openai.Response.model_validate(reply.whole())
    assert read.tools[1].tools[1].name == "shut" and read.output[0].namespace == "mcp__eyes"


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_only_the_last_item_is_cut_off(reason: str, status: str) -> None:
    reply = parse().reply(Marked)
    for one in pieces_of("<why>Hi [look {}][look {}", reason=reason):
        reply.add(0, one)
    whole = reply.whole()
    assert [item["status"] for item in whole["output"]] == ["completed"] * 3 + [status]
    assert whole["status"] == status


def answered(known: Any, **fields: Any) -> list[dict[str, Any]]:
    """Items of an answer with everything that items can be."""
    reply = responses.parse({"input": "Hello", **fields}, known).reply(Marked)
    for one in pieces_of("<why>Hi [look {}]"):
        reply.add(0, one)
    items: list[dict[str, Any]] = reply.whole()["output"]
    return items


def test_a_reference_stands_for_an_item_of_an_answer_before() -> None:
    """Vercel's SDK refers to what was thought and said, where store is not false."""
    known = facts()
    items = answered(known)
    result = {"type": "function_call_output", "call_id": items[2]["call_id"], "output": "nothing"}
    references = [{"type": "item_reference", "id": item["id"]} for item in items]
    by_reference = responses.parse({"input": [*references, result]}, known)
    in_full = responses.parse({"input": [*items, result], "store": False}, known)
    assert by_reference.messages == in_full.messages and len(by_reference.messages) == 2
    with pytest.raises(APIError, match=r"id is 'rs_.*', as in input\[0\]: refer to an item once") as caught:
        responses.parse({"input": [*references, result, references[0]]}, known)
    assert caught.value.param == "input[4].id"
    (forgotten, *_) = answered(known, store=False)
    with pytest.raises(APIError, match="not among the items that are kept") as caught:
        responses.parse({"input": [{"type": "item_reference", "id": forgotten["id"]}]}, known)
    assert caught.value.param == "input[0].id"


def test_few_texts_are_kept() -> None:
    kept = Kept(most_bytes=100, most=3)
    for number in range(4):
        kept.add(str(number), b"a", b"b")
    assert [kept.find(str(number)) for number in range(4)] == [None, *[(b"a", b"b")] * 3]
    kept.add("long", b"a" * 96)  # 100 bytes with one of the others
    assert [kept.find(str(number)) for number in range(4)] == [None, None, (b"a", b"b"), (b"a", b"b")]
    kept.add("longer", b"a" * 97)
    assert kept.find("3") is None and kept.find("long") is None and kept.find("longer") is not None
    kept.add("too long", b"a" * 101)
    assert kept.find("longer") is None and kept.find("too long") is None
    kept.add("last", b"a" * 100)
    assert kept.remove("last") and not kept.remove("last") and kept.find("last") is None
    kept.add("again", b"a" * 100)
    assert kept.find("again") is not None


def messages(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return parse(input=[{"role": "user", "content": "a"}, *items]).messages[1:]


def thought(*texts: str) -> dict[str, Any]:
    parts = [{"type": "summary_text", "text": text} for text in texts]
    return {"type": "reasoning", "summary": parts, "encrypted_content": "kept elsewhere"}


def test_thoughts_before_each_part_of_an_answer() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "b"}
    said = {"type": "message", "role": "assistant", "content": "c"}
    first, second, tool = messages(thought("x"), thought("y"), said, thought("z"), call, result)
    assert (first["reasoning_content"], first["content"]) == ("x\ny", "c") and "tool_calls" not in first
    assert (second["reasoning_content"], second["content"]) == ("z", None)
    assert second["tool_calls"][0]["id"] == "c1" and tool["role"] == "tool"
    assert messages(thought()) == []  # OpenAI's own thoughts cannot be read: they begin no answer


def test_a_call_without_its_output_says_what_is_missing() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    with pytest.raises(APIError, match="'c1': add a function_call_output"):
        messages(call)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"tools": [{"type": "telepathy"}]}, "tools[0].type"),
        ({"tools": [TOOL, {**NAMESPACE, "tools": [{"type": "web_search"}]}]}, "tools[1].tools[0].type"),
        ({"tools": [{**NAMESPACE, "name": "a" * 123}]}, "tools[0].tools[0].name"),
        ({"tools": [{**CUSTOM, "format": {"type": "grammar", "syntax": "ebnf"}}]}, "tools[0].format.syntax"),
        ({"tool_choice": {"type": "web_search"}, "tools": [TOOL]}, "tool_choice.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "what"}}}}, "text.format"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(APIError) as caught:
        parse(**fields)
    assert caught.value.param == param and "response_format" not in caught.value.message


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_stream_event_by_event_as_the_client_reads_it(reason: str) -> None:
    """Each event is one of OpenAI's types, strictly; the last one has the whole response."""
    types = pytest.importorskip("openai.types.responses")
    pydantic = pytest.importorskip("pydantic")
    reply, other = parse(stream=True).reply(Marked), parse().reply(Marked)
    events = reply.first()
    for one in pieces_of("<why>Hi [look {}][look {}]", reason=reason):
        events += reply.add(0, one)
        other.add(0, one)
    events += reply.end()
    adapter = pydantic.TypeAdapter(types.ResponseStreamEvent)
    read = [adapter.validate_python(event) for event in events]
    assert [event.type for event in read] == [event["type"] for event in events]
    assert [event.sequence_number for event in read] == list(range(len(read)))
    whole = types.Response.model_validate(other.whole())
    last = read[-1].response
    assert events[-1]["type"] == f"response.{'incomplete' if reason == 'length' else 'completed'}"
    assert last.status == whole.status and last.usage == whole.usage
    assert last.output_text == whole.output_text == "Hi "
    assert [item.type for item in last.output] == ["reasoning", "message", "function_call", "function_call"]
    done = [event.item for event in read if event.type == "response.output_item.done"]
    assert done == last.output
    for kind in ("response.output_text", "response.reasoning_text", "response.function_call_arguments"):
        text = "".join(event.delta for event in read if event.type == f"{kind}.delta")
        ends = [event for event in read if event.type == f"{kind}.done"]
        assert text == "".join(getattr(end, "text", None) or getattr(end, "arguments", "") for end in ends)


def test_a_stream_as_the_client_puts_it_together() -> None:
    """Its snapshot becomes the response that is sent where nothing is streamed."""
    library = pytest.importorskip("openai.lib.streaming.responses._responses")
    openai = pytest.importorskip("openai")
    pydantic = pytest.importorskip("pydantic")
    reply = parse(stream=True).reply(Marked)
    events = reply.first()
    for one in pieces_of("<why>Hi [look {}][look {}]"):
        events += reply.add(0, one)
    events += reply.end()
    adapter = pydantic.TypeAdapter(pytest.importorskip("openai.types.responses").ResponseStreamEvent)
    state = library.ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    read = [found for event in events for found in state.handle_event(adapter.validate_python(event))]
    snapshots = [event.snapshot for event in read if event.type == "response.output_text.delta"]
    assert snapshots == ["H", "Hi", "Hi "]
    assert read[-1].type == "response.completed" and read[-1].response.output_text == "Hi "
    assert [item.type for item in read[-1].response.output[2:]] == ["function_call"] * 2


def test_the_route(app_with: Any) -> None:
    app = app_with()
    reply = app.client.post("/v1/responses", json={"input": "Hello"}).json()
    assert reply["status"] == "completed" and reply["output"][0]["content"][0]["text"] == "a b c"
    text = app.client.post("/v1/responses", json={"input": "Hello", "stream": True}).text
    names = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
    data = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert names == [each["type"] for each in data] and names[-1] == "response.completed"
    app.llm.fail_at = 1
    text = app.client.post("/v1/responses", json={"input": "Hello", "stream": True}).text
    assert text.rstrip().split("\n\n")[-2].startswith("event: error\n") and app.llm.running == 0


HOSTILE = [
    {"input": []},
    {"input": None},
    {"input": [None]},
    {"input": [{"role": "user"}]},
    {"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "{}"}]},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "\ud800"}]}]},
    {"max_output_tokens": 0},
    {"tools": [TOOL, TOOL]},
    {"tools": [NAMESPACE, NAMESPACE]},
    {"tools": [{**NAMESPACE, "tools": []}]},
    {"tools": [{**NAMESPACE, "tools": [NAMESPACE]}]},
    {"tool_choice": {"type": "function", "name": "nobody"}},
    {"text": {"format": {"type": "json_schema", "schema": 5}}},
    {"reasoning": {"effort": "much"}},
    {"input": "word " * 1000},
]


@pytest.mark.parametrize("fields", HOSTILE, ids=lambda fields: json.dumps(fields)[:60])
def test_hostile_bodies(app: Application, fields: dict[str, Any]) -> None:
    body = json.dumps({"input": "Hello", **fields}).encode()
    reply = app.client.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    assert 400 <= reply.status_code < 500, reply.text
    counts = {"n_prompt_tokens", "n_ctx"}  # llama.cpp's, of a prompt that is too long
    assert (
        set(reply.json()["error"]) - counts == {"message", "type", "param", "code"} and app.llm.running == 0
    )
