"""Requests that the server's own description allows, and neighbours of these that it does not: no answer is a
5xx, and each is what the description says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from support.changed_models import changed
from support.chat_models import CHATML, templated
from support.served import PATIENCE_S, Served, served

from hotcold.server.openapi import OPERATIONS, Operation

schemathesis = pytest.importorskip("schemathesis")

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of schemathesis and what it uses
]


MODEL = "tiny"
EXAMPLES = 10  # of each operation: 15 of them have bodies
WITH_TOOLS = (
    "{% if tools %}{{ tools[0].function.name }} "
    '<tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>.\n{% endif %}'
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    marks = {"fim_pre_token_id": 400, "fim_suf_token_id": 401, "fim_mid_token_id": 402}
    folder = tmp_path_factory.mktemp("model")
    model = templated(folder / "chat.gguf", WITH_TOOLS + CHATML, **marks)
    model = changed(model, folder / "vectors.gguf", {"bamboo.pooling_type": 3})
    options = ["-t", "1", "-c", "256", "--log-disable"]  # -c ends endless texts
    with served("-m", str(model), "--alias", MODEL, *options) as found:
        yield found


@pytest.fixture(scope="module")
def description(server: Served) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


MODES = {
    "allowed": schemathesis.GenerationMode.POSITIVE,
    "neighbours": schemathesis.GenerationMode.NEGATIVE,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.name)
def test_no_answer_is_a_server_error(operation: Operation, mode: str, description: Any) -> None:
    found = description[operation.path][operation.method]
    statuses: list[int] = []
    if mode == "neighbours" and not operation.body:
        return

    @given(case=found.as_strategy(generation_mode=MODES[mode]))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        phases=[Phase.generate],  # making an example smaller takes minutes
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any) -> None:
        if mode == "allowed":
            case.body = mended(case.body)
            if operation.path == "/api/pull":
                case.body["model"] = MODEL
        reply = case.call(timeout=PATIENCE_S)
        statuses.append(reply.status_code)
        check(reply, found, case)

    ask()
    if mode == "allowed" and operation.body:  # nearly all are, but no number is certain
        assert sum(status < 400 for status in statuses) >= EXAMPLES // 4, statuses


def check(reply: Any, found: Any, case: Any) -> None:
    """An answer is one that the description has."""
    assert reply.status_code < 500, (case.as_curl_command(), reply.text)
    (kind,) = reply.headers["content-type"]
    if reply.status_code >= 400:
        check_error(reply.json(), found.path)
    elif kind.startswith("text/event-stream"):  # which the checks of schemathesis take for JSON
        check_events(reply.text)
    elif kind.startswith("application/x-ndjson"):
        lines = [json.loads(line) for line in reply.text.splitlines()]
        if found.path == "/api/pull":
            assert lines[-1] == {"status": "success"}
        else:
            assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    else:
        found.validate_response(reply)


def check_error(body: Any, path: str) -> None:
    """It has the form of the route's dialect."""
    if "/messages" in path:
        assert set(body) == {"type", "error"} and set(body["error"]) == {"type", "message"}
    elif path.startswith("/api/"):
        assert set(body) == {"error"} and isinstance(body["error"], str)
    else:
        counts = {"n_prompt_tokens", "n_ctx"}  # llama.cpp's, of a prompt that is too long
        assert set(body["error"]) - counts == {"message", "type", "param", "code"}


def check_events(text: str) -> list[Any]:
    """Data of the events of a stream that went well. Where schemathesis read it, its end may be missing."""
    lines = [line for line in text.split("\n\n")[:-1] if not line.startswith(":")]
    if all(line.startswith("event: ") for line in lines):
        pairs = [line.split("\n", 1) for line in lines]
        assert [f"event: {json.loads(data[6:])['type']}" for _, data in pairs] == [name for name, _ in pairs]
        lines = [data for _, data in pairs]
    assert lines and all(line.startswith("data: ") and "\n" not in line for line in lines), text
    data = [line.removeprefix("data: ") for line in lines]
    events = [json.loads(each) for each in data if each != "[DONE]"]
    assert "[DONE]" not in data[:-1] and events
    assert not [each for each in events if "error" in each]
    return events


def mended(value: Any) -> Any:
    """The same body, with changes that a description cannot express: whole numbers are written as such, ids
    are in the vocabulary, messages have a text, options of streams come with one."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [each % 256 if type(each) is int else each for each in map(mended, value)]
    if not isinstance(value, dict):
        return value
    found = {name: mended(each) for name, each in value.items()}
    if found.get("stream_options"):
        found["stream"] = True
    if isinstance(found.get("max_tokens"), str):  # a number as text, whose bounds no pattern can say
        found["max_tokens"] = 9
    if "role" in found and not found.get("content"):
        found["content"] = "Once"
    for name in ("logit_bias", "samplers"):  # ids, and names in an order
        found.pop(name, None)
    return found


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}
TEXT = {"prompt": "Once upon a time", "max_tokens": 12}
ONE_CALL = {
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 150,
    "temperature": 0,
}
EXPLICIT = {
    "/v1/chat/completions": [
        {**CHAT},
        {**CHAT, "n": 3, "logprobs": True, "top_logprobs": 2},
        {**CHAT, "tools": [TOOL]},
        {**CHAT, **ONE_CALL},
        {**CHAT, "tools": [TOOL], "tool_choice": "none"},
        {**CHAT, "response_format": {"type": "json_object"}},
        {
            **CHAT,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        },
    ],
    "/v1/completions": [
        {**TEXT},
        {**TEXT, "n": 3, "logprobs": 2},
        {**TEXT, "prompt": ["Once", "The old man"], "n": 2},
        {**TEXT, "echo": True, "logprobs": 1, "max_tokens": 0},
        {**TEXT, "response_format": {"type": "json_object"}},
    ],
    "/completion": [{**TEXT}, {**TEXT, "n_probs": 2}, {**TEXT, "json_schema": SCHEMA}],
}
STREAMED = {"/v1/chat/completions": "chat.completion.chunk", "/v1/completions": "text_completion"}


CASES = [(path, body) for path, bodies in EXPLICIT.items() for body in bodies]


@pytest.mark.parametrize(("path", "body"), CASES)
def test_common_requests(path: str, body: dict[str, Any], description: Any) -> None:
    found = description[path]["POST"]
    case = found.Case(body=body, media_type="application/json")
    reply = case.call(timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    check(reply, found, case)
    if path in STREAMED:
        reasons = [choice["finish_reason"] for choice in reply.json()["choices"]]
        assert len(reasons) == choices(body)
        assert (set(reasons) == {"tool_calls"}) == (body.get("tool_choice") == "required")


@pytest.mark.parametrize(("path", "body"), CASES)
def test_common_requests_as_streams(path: str, body: dict[str, Any], server: Served) -> None:
    with server.client() as client:
        reply = client.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = check_events(reply.text)
    assert reply.text.endswith("data: [DONE]\n\n") == (path in STREAMED)
    if path in STREAMED:
        assert {each["object"] for each in events} == {STREAMED[path]}
        last = {c["index"]: c["finish_reason"] for each in events for c in each["choices"]}
        assert set(last) == set(range(choices(body))) and None not in last.values()
    else:
        assert [each["stop"] for each in events] == [False] * (len(events) - 1) + [True]


def choices(body: dict[str, Any]) -> int:
    """How many texts are asked for."""
    prompts = body.get("prompt")
    return body.get("n", 1) * (len(prompts) if isinstance(prompts, list) else 1)
