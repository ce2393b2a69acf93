"""Requests and replies against OpenAI's own description of its interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.api_pieces import Marked, facts, likely, piece, pieces_of

from hotcold.server.protocol import chat, completion, models, responses
from hotcold.server.protocol.errors import APIError

jsonschema_rs = pytest.importorskip("jsonschema_rs", reason="validates with OpenAI's schemas")
yaml = pytest.importorskip("yaml", reason="reads OpenAI's schemas")


def nullable(node: Any) -> Any:
    """The document says 3.1 and yet marks what may be null in the way of 3.0."""
    if isinstance(node, list):
        return [nullable(each) for each in node]
    if not isinstance(node, dict):
        return node
    found = {key: nullable(value) for key, value in node.items() if key not in ("nullable", "example")}
    return {"anyOf": [found, {"type": "null"}]} if node.get("nullable") is True else found


class Schemas:
    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        all = yaml.load(text, Loader=yaml.CSafeLoader)["components"]["schemas"]
        self._schemas: dict[str, Any] = {}
        self._validators: dict[str, Any] = {}
        self._take(all, "CreateChatCompletionRequest")
        for name in (
            "CreateChatCompletionResponse", "CreateChatCompletionStreamResponse", "CreateCompletionRequest",
            "CreateCompletionResponse", "ListModelsResponse", "Model", "ErrorResponse", "CreateResponse",
            "Response", "ResponseStreamEvent",
        ):  # fmt: skip
            self._take(all, name)
        # The first token of an echo has no log-probability, in OpenAI's replies as well as here.
        choice = self._schemas["CreateCompletionResponse"]["properties"]["choices"]["items"]
        columns = choice["properties"]["logprobs"]["anyOf"][0]["properties"]
        for name in ("token_logprobs", "top_logprobs"):
            columns[name]["items"] = {"anyOf": [columns[name]["items"], {"type": "null"}]}

    def _take(self, all: dict[str, Any], name: str) -> None:
        """A schema and the schemas that it refers to."""
        if name in self._schemas:
            return
        self._schemas[name] = nullable(all[name])
        for other in references(all[name]):
            self._take(all, other)

    def __getitem__(self, name: str) -> Any:
        if name not in self._validators:
            document = {"components": {"schemas": self._schemas}, "$ref": f"#/components/schemas/{name}"}
            self._validators[name] = jsonschema_rs.validator_for(document)
        return self._validators[name]

    def event(self, type: str) -> Any:
        """The schema of the events of one type in the stream of a response."""
        for each in self._schemas["ResponseStreamEvent"]["anyOf"]:
            name = each["$ref"].rsplit("/", 1)[1]
            if self._schemas[name]["properties"]["type"]["enum"] == [type]:
                return self[name]
        raise KeyError(type)

    def field(self, name: str, field: str) -> dict[str, Any]:
        """How a field of a request is described: its bounds and its default."""
        schema = self._schemas[name]
        if field in schema.get("properties", {}):
            found = schema["properties"][field]
            return {**found, **found["anyOf"][0]} if "anyOf" in found else dict(found)
        for each in schema["allOf"]:
            other = each["$ref"].rsplit("/", 1)[1] if "$ref" in each else None
            if field in each.get("properties", {}):
                self._schemas["_"] = each
                return self.field("_", field)
            if other:
                try:
                    return self.field(other, field)
                except KeyError:
                    continue
        raise KeyError(field)


def references(node: Any) -> set[str]:
    if isinstance(node, list):
        return {name for each in node for name in references(each)}
    if not isinstance(node, dict):
        return set()
    own = {node["$ref"].rsplit("/", 1)[1]} if isinstance(node.get("$ref"), str) else set()
    return own.union(*(references(each) for each in node.values()))


@pytest.fixture(scope="module")
def openai(test_data: Path) -> Schemas:
    return Schemas(test_data / "golden" / "openapi.yaml")


USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "fable", "messages": [USER], **fields}


CHATS = [
    {},
    {"temperature": 0, "top_p": 1, "max_completion_tokens": 5, "seed": 7, "user": "me", "store": False},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stop": ["a", "b"], "n": 2, "logit_bias": {"5": -100}},
    {"stop": "a", "logprobs": True, "top_logprobs": 20},
    {"frequency_penalty": -2, "presence_penalty": 2, "max_tokens": None, "logit_bias": None},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"reasoning_effort": "low", "metadata": {"a": "b"}, "service_tier": "auto", "verbosity": "low"},
    {"messages": [{"role": "developer", "content": "a"}, {"role": "system", "content": "b"}, USER]},
    {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                  {"role": "tool", "content": "x", "tool_call_id": "c"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, USER]},
    {"modalities": ["text"]},
]  # fmt: skip


@pytest.mark.parametrize("fields", CHATS, ids=lambda fields: ",".join(fields) or "none")
def test_bodies_that_openai_describes_are_taken(openai: Schemas, fields: dict[str, Any]) -> None:
    body = chat_body(**fields)
    openai["CreateChatCompletionRequest"].validate(body)
    assert chat.parse(body, facts()).messages


BAD_CHATS = [
    {"messages": []}, {"messages": "hello"}, {"messages": [{"role": "hacker", "content": "a"}]},
    {"messages": [{"role": "user"}]}, {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"temperature": "hot"}, {"temperature": -1}, {"top_p": 1.1}, {"n": 0}, {"n": 1.5}, {"max_tokens": "five"},
    {"frequency_penalty": 2.5}, {"presence_penalty": -3}, {"top_logprobs": 21}, {"stream": "yes"},
    {"stop": 5}, {"logprobs": 1}, {"tools": [{"type": "function"}]}, {"tool_choice": "maybe"},
    {"response_format": {"type": "yaml"}}, {"logit_bias": {"5": "a lot"}}, {"seed": "x"},
    {"stream_options": {"include_usage": "yes"}, "stream": True}, {"reasoning_effort": "some"},
]  # fmt: skip


@pytest.mark.parametrize("fields", BAD_CHATS, ids=str)
def test_what_openai_describes_as_wrong_is_refused(openai: Schemas, fields: dict[str, Any]) -> None:
    body = chat_body(**fields)
    assert not openai["CreateChatCompletionRequest"].is_valid(body)
    with pytest.raises(APIError) as caught:
        chat.parse(body, facts())
    assert caught.value.status == 400
    openai["ErrorResponse"].validate(caught.value.body())


@pytest.mark.parametrize("kind", ["CreateChatCompletionRequest", "CreateCompletionRequest"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "frequency_penalty", "presence_penalty"])
def test_the_whole_range_is_taken(openai: Schemas, kind: str, field: str) -> None:
    """Defaults are the operator's, the model's or llama.cpp's: OpenAI's are for large models."""
    table = chat.FIELDS if kind == "CreateChatCompletionRequest" else completion.FIELDS
    described = openai.field(kind, field)
    for bound in (described["minimum"], described["maximum"]):
        assert table[field].kind.read(bound, field) == bound


def test_replies_of_the_chat_route(openai: Schemas) -> None:
    for fields in ({}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"tools": [TOOL]}):
        call = chat.parse(chat_body(**fields), facts())
        reply = call.reply(Marked)
        for each in pieces_of("<hm>well[f {}]", logprobs=(likely(300),)):
            for i in range(call.n):
                reply.add(i, each)
        whole = reply.whole()
        openai["CreateChatCompletionResponse"].validate(whole)
        assert len(whole["choices"]) == call.n


def test_events_of_the_chat_route(openai: Schemas) -> None:
    schema = openai["CreateChatCompletionStreamResponse"]
    usage = {"include_usage": True}
    body = chat_body(stream=True, stream_options=usage, logprobs=True, top_logprobs=2, tools=[TOOL])
    reply = chat.parse(body, facts()).reply(Marked)
    events = reply.first()
    for each in pieces_of("<hm>well[f {}]", logprobs=(likely(300),)):
        events += reply.add(0, each)
    events += reply.end()
    assert len(events) > 10
    for event in events:
        schema.validate(event)
    assert not schema.is_valid({**events[0], "choices": [{"index": 0}]})


COMPLETIONS = [
    {}, {"prompt": ["a", "b"], "n": 2}, {"prompt": [5, 6]}, {"prompt": [[5], [6]]}, {"max_tokens": 0},
    {"echo": True, "logprobs": 5, "max_tokens": 0},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"suffix": None, "best_of": 1, "user": "me", "seed": 3, "stop": ["a"]},
]  # fmt: skip


@pytest.mark.parametrize("fields", COMPLETIONS, ids=str)
def test_completions(openai: Schemas, fields: dict[str, Any]) -> None:
    body = {"model": "fable", "prompt": "Once", **fields}
    openai["CreateCompletionRequest"].validate(body)
    call = completion.parse(body, facts())
    prompts = call.encode()
    reply = call.reply(prompts)
    events = reply.first()
    for i, job in enumerate(call.jobs(prompts)):
        known = (None, *(likely(id) for id in job.prompt[1:])) if job.echo else ()
        found = (likely(300),) if job.logprobs is not None else ()
        events += reply.add(i, piece("x", [300], "length", logprobs=found, prompt_logprobs=known))
    events += reply.end()
    replies = events if call.stream else [reply.whole()]
    for each in replies:
        if each["choices"] or not call.stream:
            # Unlike that of the chat route, usage may not be null here, though it is in OpenAI's streams.
            openai["CreateCompletionResponse"].validate({k: v for k, v in each.items() if v is not None})
    assert replies


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
ITEMS = [
    {"role": "user", "content": "a"},  # parts match two branches of its oneOf
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
    {"type": "message", "role": "user", "content": "b"},
]
RESPONSES = [
    {}, {"input": ITEMS, "tools": [FUNCTION], "tool_choice": "auto", "parallel_tool_calls": False},
    {"temperature": 0, "top_p": 1, "max_output_tokens": 16, "instructions": "Brief.", "store": False},
    {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}}},
    {"text": {"format": {"type": "json_object"}, "verbosity": "low"}, "reasoning": {"effort": "low"}},
    {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}, "include": [], "user": "me"},
    {"tools": [FUNCTION], "metadata": {"a": "b"}, "truncation": "disabled", "background": False},
    {"tools": [FUNCTION], "tool_choice": {
        "type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}},
]  # fmt: skip


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("fields", RESPONSES, ids=lambda fields: ",".join(fields) or "none")
def test_responses(openai: Schemas, fields: dict[str, Any], reason: str) -> None:
    """Whole ones, and each event of a stream by the schema of its type."""
    body = {"model": "fable", "input": "Hello", **fields}
    openai["CreateResponse"].validate(body)
    reply = responses.parse({**body, "stream": True}, facts()).reply(Marked)
    events = reply.first()
    for each in pieces_of("<hm>well[f {}]", reason=reason):
        events += reply.add(0, each)
    events += reply.end()
    assert len(events) > 15
    for event in [*events, *reply.fail(APIError("no", status=500))]:
        openai.event(event["type"]).validate(event)
    openai["Response"].validate(reply.whole())


BAD_RESPONSES = [
    {"input": 5}, {"input": [{"role": "robot", "content": "a"}]}, {"temperature": -1}, {"top_p": 1.1},
    {"max_output_tokens": "many"}, {"tools": [{"type": "function"}]}, {"tool_choice": "maybe"},
    {"text": {"format": {"type": "yaml"}}}, {"reasoning": {"effort": "some"}}, {"stream": "yes"},
]  # fmt: skip


@pytest.mark.parametrize("fields", BAD_RESPONSES, ids=str)
def test_what_is_wrong_with_a_response_is_refused(openai: Schemas, fields: dict[str, Any]) -> None:
    body = {"model": "fable", "input": "Hello", **fields}
    assert not openai["CreateResponse"].is_valid(body)
    with pytest.raises(APIError) as caught:
        responses.parse(body, facts())
    assert (caught.value.param or "").startswith(next(iter(fields)))


def test_models_and_errors(openai: Schemas) -> None:
    openai["ListModelsResponse"].validate(models.listing(facts()))
    openai["Model"].validate(models.one(facts(), "fable"))
    with pytest.raises(APIError) as caught:
        models.one(facts(), "x")
    openai["ErrorResponse"].validate(caught.value.body())
