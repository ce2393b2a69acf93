"""Responses that the server keeps: continued, read and forgotten."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.api_pieces import Marked, facts, pieces_of

from hotcold.server.protocol import responses
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from tests.server.conftest import Application

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def answered(known: Facts, text: str = "<why>Hi ", **fields: Any) -> dict[str, Any]:
    reply = responses.parse({"input": "Hello", **fields}, known).reply(Marked)
    for one in pieces_of(text):
        reply.add(0, one)
    return reply.whole()


def test_a_response_continues_another_as_the_whole_conversation_does() -> None:
    known = facts()
    items: list[dict[str, Any]] = [{"role": "user", "content": "Look."}]
    first = answered(known, "<why>Hi [look {}]", input="Look.", tools=[TOOL], instructions="Be kind.")
    assert first["store"] is True and first["previous_response_id"] is None
    items += first["output"]
    result = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "a"}
    second = answered(known, "Done. ", input=[result], previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    items += [result, *second["output"], {"role": "user", "content": "Thanks."}]
    third = responses.parse({"input": "Thanks.", "previous_response_id": second["id"]}, known)
    same = responses.parse({"input": items}, known)
    assert third.messages == same.messages and len(third.messages) == 5
    assert [each["role"] for each in third.messages] == ["user", "assistant", "tool", "assistant", "user"]
    known.kept_responses.remove(first["id"])  # each has the whole conversation
    assert responses.parse({"input": "Thanks.", "previous_response_id": second["id"]}, known).messages


def test_branches_and_whatever_is_in_a_conversation() -> None:
    known = facts()
    picture = [{"type": "input_image", "image_url": "data:image/png;base64,aGk="}]
    items = [
        {"role": "user", "content": "Look."},
        {"type": "web_search_call"},
        {"type": "custom_tool_call", "call_id": "c", "name": "eye", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": picture},
    ]
    first = answered(known, "Hi ", input=items)
    branches = [
        responses.parse({"input": text, "previous_response_id": first["id"]}, known).messages
        for text in ("A", "B", "A")
    ]
    assert branches[0] == branches[2] and branches[0][:-1] == branches[1][:-1]
    assert "picture left out" in branches[0][2]["content"]


def test_what_is_not_kept() -> None:
    known = facts()
    for id in (answered(known, store=False)["id"], "resp_0", "x" * 256):
        with pytest.raises(APIError, match="not found") as caught:
            responses.parse({"input": "And?", "previous_response_id": id}, known)
        error = caught.value
        assert (error.status, error.code) == (400, "previous_response_not_found")
        assert error.param == "previous_response_id" and "send the whole conversation" in error.message
    calling = answered(known, "[look {}]", tools=[TOOL])
    with pytest.raises(APIError, match="add a function_call_output"):
        responses.parse({"input": [], "previous_response_id": calling["id"]}, known)
    other = answered(known)  # a failed request would keep nothing of it
    assert known.kept_responses.response(other["id"]) == other


@pytest.mark.parametrize("stream", [False, True])
def test_the_routes(app_with: Any, stream: bool) -> None:
    app: Application = app_with()
    body = {"input": "Hello", "instructions": "Be brief.", "stream": stream}
    reply = app.client.post("/v1/responses", json=body)
    if stream:
        last = [line for line in reply.text.splitlines() if line.startswith("data: ")][-1]
        whole = json.loads(last[6:])["response"]
    else:
        whole = reply.json()
    path = f"/v1/responses/{whole['id']}"
    assert app.client.get(path).json() == whole
    assert app.client.get(path, params={"stream": "true"}).status_code == 400
    more = app.client.post("/v1/responses", json={"input": "And?", "previous_response_id": whole["id"]})
    assert more.json()["previous_response_id"] == whole["id"]
    gone = {"id": whole["id"], "object": "response", "deleted": True}
    assert app.client.delete(path).json() == gone
    for ask in (app.client.get, app.client.delete):
        error = ask(path)
        assert error.status_code == 404 and whole["id"] in error.json()["error"]["message"]
    assert app.client.get("/v1/responses").status_code == 405


def test_an_answer_that_fails_is_not_kept(app_with: Any) -> None:
    app: Application = app_with()
    app.llm.fail_at = 1
    text = app.client.post("/v1/responses", json={"input": "Hello", "stream": True}).text
    id = text.partition('"id":"')[2].partition('"')[0]
    assert id.startswith("resp_") and app.client.get(f"/v1/responses/{id}").status_code == 404


def test_a_client_that_waits_gets_events(app_with: Any) -> None:
    """Codex counts no comments as signs of life; OpenAI's library makes the same response of the events."""
    app: Application = app_with(ping_s=0.02)
    app.llm.pace_s = 0.2
    text = app.client.post("/v1/responses", json={"input": "Hello", "stream": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    types = [event["type"] for event in events]
    assert types[0] == "response.created" and types.count("response.in_progress") > 1 and ": ping" not in text
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    library = pytest.importorskip("openai.lib.streaming.responses._responses")
    openai = pytest.importorskip("openai")
    kinds = pytest.importorskip("openai.types.responses").ResponseStreamEvent
    adapter = pytest.importorskip("pydantic").TypeAdapter(kinds)
    state = library.ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    read = [found for event in events for found in state.handle_event(adapter.validate_python(event))]
    assert read[-1].response.output_text == "a b c"
