"""Requests in legal forms that few clients send, in each dialect, on a model that says a given chain. Each
stream ends with its end event and equals the whole reply. No reason of an end hides a failure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.chain_model import EOS, Chain, chain
from support.thinking_styles import JSON, SCHEMA, STYLES, TOOL, says, texts_of

STYLE = STYLES["think"]
THOUGHT = ("<think>", " w1", "END", "</think>", "\n\n")
CHAINS = {
    "nothing": (),
    "text": (" w1", "END", " w2"),
    "call": STYLE.call,
    "calls": (*STYLE.call, "\n", *STYLE.call),
    "json": JSON,
    "thought and text": (*THOUGHT, " w2", "END", " w3"),
    "thought and call": (*THOUGHT, *STYLE.call),
}
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "ollama": "/api/chat",
}


@dataclass
class Choice:
    """One answer of a reply. ``calls`` has the arguments as text."""

    reason: str | None = None
    thinking: str = ""
    text: str = ""
    calls: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


@pytest.fixture(scope="module")
def model() -> Iterator[Chain]:
    with chain(STYLE.template(), STYLE.controls, texts_of(STYLE, ("END", "\n\n"))) as model:
        yield model


def body_of(dialect: str, **fields: Any) -> dict[str, Any]:
    """A request with a tool."""
    function = TOOL["function"]
    if dialect == "responses":
        plain = {"input": "Go", "max_output_tokens": 60, "tools": [{"type": "function", **function}]}
    elif dialect == "anthropic":
        tool = {"name": "f", "input_schema": function["parameters"]}
        plain = {"messages": says("Go"), "max_tokens": 60, "tools": [tool]}
    else:
        plain = {"messages": says("Go"), "tools": [TOOL]}
        plain |= {"options": {"num_predict": 60}} if dialect == "ollama" else {"max_tokens": 60}
    return {**plain, **fields}


def answers(model: Chain, dialect: str, tokens: Iterable[str], body: dict[str, Any]) -> list[Choice]:
    """The choices of the whole reply, which a stream says, too."""
    found = []
    for stream in (False, True):
        model.llm.say(*tokens, EOS)
        reply = model.client.post(PATHS[dialect], json={**body, "stream": stream})
        assert reply.status_code == 200, reply.text
        found.append(_STREAMS[dialect](reply.text) if stream else _WHOLES[dialect](reply.json()))
    assert found[0] == found[1]
    return found[0]


def _chat_whole(reply: dict[str, Any]) -> list[Choice]:
    return [
        Choice(
            each["finish_reason"],
            each["message"].get("reasoning_content", ""),
            each["message"]["content"] or "",
            [call["function"]["arguments"] for call in each["message"].get("tool_calls", ())],
            (each["logprobs"] or {"content": []})["content"],
        )
        for each in reply["choices"]
    ]


def _chat_stream(text: str) -> list[Choice]:
    *events, end = (line[6:] for line in text.splitlines() if line)
    assert end == "[DONE]"
    choices: dict[int, Choice] = {}
    for each in (each for event in events for each in json.loads(event)["choices"]):
        choice, delta = choices.setdefault(each["index"], Choice()), each["delta"]
        assert choice.reason is None
        choice.reason = each["finish_reason"]
        choice.thinking += delta.get("reasoning_content", "")
        choice.text += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            choice.calls += [""] if call["index"] == len(choice.calls) else []
            choice.calls[call["index"]] += call["function"]["arguments"]
        choice.logprobs += (each["logprobs"] or {"content": []})["content"]
    return [choice for _, choice in sorted(choices.items())]


def _responses_whole(reply: dict[str, Any]) -> list[Choice]:
    output = reply["output"]
    texts = {
        kind: "".join(part["text"] for each in output if each["type"] == kind for part in each["content"])
        for kind in ("reasoning", "message")
    }
    calls = [each["arguments"] for each in output if each["type"] == "function_call"]
    return [Choice(reply["status"], texts["reasoning"], texts["message"], calls)]


def _responses_stream(text: str) -> list[Choice]:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [each["sequence_number"] for each in events] == [*range(len(events))]
    last = events[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    assert done == last["response"]["output"]
    return _responses_whole(last["response"])


def _anthropic_whole(reply: dict[str, Any]) -> list[Choice]:
    blocks = reply["content"]
    texts = {name: "".join(each.get(name, "") for each in blocks) for name in ("thinking", "text")}
    calls = [_arguments(each["input"]) for each in blocks if each["type"] == "tool_use"]
    return [Choice(reply["stop_reason"], texts["thinking"], texts["text"], calls)]


def _arguments(input: dict[str, Any]) -> str:
    """The arguments of a call; a whole reply shows incomplete arguments as a text. No call of these tests is
    complete without arguments."""
    if not input:
        return ""
    return str(input["cut_off_arguments"]) if "cut_off_arguments" in input else json.dumps(input)


def _anthropic_stream(text: str) -> list[Choice]:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    choice, kinds, ended = Choice(), [], []
    for each in events:
        if each["type"] == "content_block_start":
            assert each["index"] == len(kinds) == len(ended)
            kinds.append(each["content_block"]["type"])
            choice.calls += [""] if kinds[-1] == "tool_use" else []
        elif each["type"] == "content_block_delta":
            delta = each["delta"]
            choice.text += delta.get("text", "")
            choice.thinking += delta.get("thinking", "")
            if "partial_json" in delta:
                choice.calls[-1] += delta["partial_json"]
        elif each["type"] == "content_block_stop":
            ended.append(each["index"])
        elif each["type"] == "message_delta":
            choice.reason = each["delta"]["stop_reason"]
    assert ended == [*range(len(kinds))]
    return [choice]


def _ollama_whole(reply: dict[str, Any]) -> list[Choice]:
    return _ollama([reply])


def _ollama_stream(text: str) -> list[Choice]:
    return _ollama([json.loads(line) for line in text.splitlines()])


def _ollama(lines: list[dict[str, Any]]) -> list[Choice]:
    assert [each["done"] for each in lines] == [*[False] * (len(lines) - 1), True]
    messages = [each["message"] for each in lines]
    calls = [call["function"]["arguments"] for each in messages for call in each.get("tool_calls", ())]
    return [
        Choice(
            lines[-1]["done_reason"],
            "".join(each.get("thinking", "") for each in messages),
            "".join(each["content"] for each in messages),
            [_arguments(each) for each in calls],
        )
    ]


_WHOLES: dict[str, Any] = {
    "chat": _chat_whole,
    "responses": _responses_whole,
    "anthropic": _anthropic_whole,
    "ollama": _ollama_whole,
}
_STREAMS: dict[str, Any] = {
    "chat": _chat_stream,
    "responses": _responses_stream,
    "anthropic": _anthropic_stream,
    "ollama": _ollama_stream,
}
CUT_OFF = ("length", "incomplete", "max_tokens")  #: reasons of answers that the limit of tokens ended
#: The reasons of answers that ended to call tools.
CALLED = {"chat": "tool_calls", "anthropic": "tool_use"}


def is_whole(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("name", ["text", "calls", "thought and call"])
@pytest.mark.parametrize("stop", ["}", "END", "a", "</think>", ', "arg', '{"a'])
@pytest.mark.parametrize("dialect", ["chat", "anthropic", "ollama"])
def test_a_stop_string_hides_no_call_that_it_cuts_off(
    model: Chain, dialect: str, stop: str, name: str
) -> None:
    field = {
        "chat": {"stop": stop},
        "anthropic": {"stop_sequences": [stop]},
        "ollama": {"options": {"stop": stop}},
    }
    (choice,) = answers(model, dialect, CHAINS[name], body_of(dialect, **field[dialect]))
    if dialect == "ollama":
        assert choice.reason == "stop"  # it has no other reason
        assert all(map(is_whole, choice.calls))  # a client runs each call that it gets
    else:
        complete = bool(choice.calls) and all(map(is_whole, choice.calls))
        assert (choice.reason == CALLED[dialect]) is complete
    if dialect == "anthropic" and choice.calls and not is_whole(choice.calls[-1]):
        assert choice.reason == "stop_sequence"


@pytest.mark.parametrize("name", [name for name in STYLES if STYLES[name] != STYLE])
def test_a_stop_string_in_calls_of_other_formats(name: str) -> None:
    style = STYLES[name]
    fields = {"chat": "stop", "anthropic": "stop_sequences"}
    with chain(style.template(), style.controls, texts_of(style)) as model:
        for stop, dialect in itertools.product(dict.fromkeys(style.call), fields):
            if not stop.strip():
                continue
            (choice,) = answers(model, dialect, style.call, body_of(dialect, **{fields[dialect]: [stop]}))
            complete = bool(choice.calls) and all(map(is_whole, choice.calls))
            assert (choice.reason == CALLED[dialect]) is complete, (stop, choice)


@pytest.mark.parametrize("name", ["calls", "thought and call", "thought and text"])
@pytest.mark.parametrize("dialect", PATHS)
def test_a_limit_of_tokens_hides_no_call_that_it_cuts_off(model: Chain, dialect: str, name: str) -> None:
    limits = {"chat": "max_tokens", "responses": "max_output_tokens", "anthropic": "max_tokens"}
    for limit in (1, 3, 5, 7, 9):
        field = {limits[dialect]: limit} if dialect != "ollama" else {"options": {"num_predict": limit}}
        (choice,) = answers(model, dialect, CHAINS[name], body_of(dialect, **field))
        if not all(map(is_whole, choice.calls)):
            assert choice.reason in CUT_OFF and dialect != "ollama"
        elif choice.calls and dialect in CALLED:
            assert choice.reason in (CALLED[dialect], *CUT_OFF)


def test_ollama_shows_a_call_that_is_cut_off_as_text(model: Chain) -> None:
    for options in ({"stop": "1"}, {"num_predict": STYLE.call.index("1")}):
        (choice,) = answers(model, "ollama", STYLE.call, body_of("ollama", options=options))
        assert not choice.calls and choice.text == '{"name": "f", "arguments": {"a": ', choice


@pytest.mark.parametrize("name", CHAINS)
def test_several_answers_with_tools_and_logprobs(model: Chain, name: str) -> None:
    for n, top in itertools.product((1, 3), (None, 0, 2)):
        fields = {"n": n} if top is None else {"n": n, "logprobs": True, "top_logprobs": top}
        choices = answers(model, "chat", CHAINS[name], body_of("chat", **fields))
        assert len(choices) == n
        for each in choices:
            assert (each.reason == "tool_calls") is bool(each.calls)
            assert [len(token["top_logprobs"]) for token in each.logprobs] == [top] * len(each.logprobs)
            if top is not None:
                said = "".join(token["token"] for token in each.logprobs)
                assert said.startswith("".join(CHAINS[name]))


NAMED = {"type": "function", "name": "f"}


def allowed(mode: str) -> dict[str, Any]:
    """The chat route's list of allowed tools."""
    return {"mode": mode, "tools": [TOOL]}


AUTO: dict[str, Any] = {
    "chat": [None, "auto", {"type": "allowed_tools", "allowed_tools": allowed("auto")}],
    "responses": [None, "auto", {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}],
    "anthropic": [None, {"type": "auto"}],
}
ALWAYS: dict[str, Any] = {
    "chat": [
        "required",
        {"type": "function", "function": {"name": "f"}},
        {"type": "allowed_tools", "allowed_tools": allowed("required")},
    ],
    "responses": ["required", NAMED, {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}],
    "anthropic": [{"type": "any"}, {"type": "tool", "name": "f"}],
}
NEVER: dict[str, Any] = {"chat": ["none"], "responses": ["none"], "anthropic": [{"type": "none"}]}


@pytest.mark.parametrize("dialect", AUTO)
@pytest.mark.parametrize("name", ["text", "calls", "thought and call"])
@pytest.mark.parametrize("parallel", [None, False])
def test_each_form_of_tool_choice(model: Chain, dialect: str, name: str, parallel: bool | None) -> None:
    for choices, called in ((AUTO, "call" in name), (ALWAYS, True), (NEVER, False)):
        for choice in choices[dialect]:
            body = body_of(dialect, tool_choice=choice)
            if dialect != "anthropic":
                body["parallel_tool_calls"] = parallel
            elif parallel is not None:
                given = choice or {"type": "auto"}
                body["tool_choice"] = {**given, "disable_parallel_tool_use": not parallel}
            (answer,) = answers(model, dialect, CHAINS[name], body)
            # The model may think until the limit, since it says no call by itself.
            assert bool(answer.calls) is called or (called and answer.reason in CUT_OFF), choice
            assert all(map(is_whole, answer.calls)), choice
            assert parallel is not False or len(answer.calls) < 2, choice


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("name", ["call", "json", "text", "thought and call"])
def test_a_format_with_tools(model: Chain, dialect: str, name: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    field: dict[str, Any] = {
        "chat": {"response_format": form},
        "responses": {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        "anthropic": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "ollama": {"format": SCHEMA},
    }
    (answer,) = answers(model, dialect, CHAINS[name], body_of(dialect, **field[dialect]))
    assert answer.calls or answer.reason in CUT_OFF or is_whole(answer.text)


@pytest.mark.parametrize("given", [{"a": "b"}, {}, None])
def test_a_response_repeats_its_metadata(model: Chain, given: Any) -> None:
    model.llm.say(" w1", EOS)
    first = model.client.post("/v1/responses", json={"input": "Go", "metadata": given}).json()
    assert first["metadata"] == (given or {})
    assert model.client.get(f"/v1/responses/{first['id']}").json()["metadata"] == (given or {})
