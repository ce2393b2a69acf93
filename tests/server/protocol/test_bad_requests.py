"""Wrong requests: each gets an APIError with four keys, on one line, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.api_pieces import facts
from support.built_in import tokenizer

from hotcold.engine.request import RequestError
from hotcold.server.protocol import chat, completion, native, tokens
from hotcold.server.protocol.errors import APIError, from_job

HELLO = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f"}}
NAN = float("nan")


def allowed(*tools: dict[str, Any], mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def text(part: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": part}]


#: Fields of a chat request beside a good rest, and the field that the error names.
CHATS: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": [HELLO] * 100_000}, "messages"),
    ({"messages": [{"role": "hacker", "content": "a"}]}, "messages[0].role"),
    ({"messages": [HELLO, {"content": "a"}]}, "messages[1].role"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role"),
    ({"messages": text(None)}, "messages[0].content"),
    ({"messages": text(5)}, "messages[0].content"),
    ({"messages": text([{"type": "image_url", "image_url": {"url": "x"}}])}, "messages[0].content[0].type"),
    ({"messages": text([{"type": "input_audio"}])}, "messages[0].content[0].type"),
    ({"messages": text(["a"])}, "messages[0].content[0]"),
    ({"messages": text([{"type": "text", "text": "a"}] * 1000)}, "messages[0].content"),
    ({"messages": text("a\ud800")}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": [TOOL]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}, HELLO]}, "messages[0].tool_calls[0]"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_tokens": "0"}, "max_tokens"),
    ({"max_tokens": "05"}, "max_tokens"),
    ({"max_tokens": " 5"}, "max_tokens"),
    ({"n_predict": 0}, "n_predict"),
    ({"n_predict": -2}, "n_predict"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_tokens": 1e308}, "max_tokens"),
    ({"max_tokens": "5.5"}, "max_tokens"),
    ({"max_tokens": "1e999"}, "max_tokens"),
    ({"temperature": "101"}, "temperature"),
    ({"temperature": "NaN"}, "temperature"),
    ({"temperature": ""}, "temperature"),
    ({"stream": "True"}, "stream"),
    ({"stream": "1"}, "stream"),
    ({"max_completion_tokens": 2.5}, "max_completion_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e9}, "temperature"),
    ({"temperature": NAN}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**40}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": 10**400}, "n"),
    ({"stop": ["a"] * 257}, "stop"),
    ({"stop": ["a" * 1025]}, "stop[0]"),
    ({"stop": "a" * 1_000_000}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": {"a": 1}}, "stop"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**64)}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"logit_bias": {"9999999": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1e9}}, "logit_bias[5]"),
    ({"logit_bias": {"-5": 1}}, "a token of logit_bias"),
    ({"logit_bias": {"hello": 1}}, "a token of logit_bias"),
    ({"logit_bias": {"٣": 1}}, "a token of logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(100_000)}}, "logit_bias"),
    ({"logit_bias": [1, 2]}, "logit_bias"),
    ({"logit_bias": 5}, "logit_bias"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"n_discard": -1, "n": 0}, "n"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
    ),
    ({"json_schema": {"enum": ["x" * 10] * 100_000}}, "json_schema"),
    ({"json_schema": deep(1000)}, None),
    ({"regex": "a" * 100_000}, "regex"),
    ({"regex": "a", "grammar": "root ::= x"}, "regex"),
    ({"tools": [TOOL] * 10_000}, "tools"),
    ({"tools": [tool("a name")]}, "tools[0].function.name"),
    ({"tools": [tool("")]}, "tools[0].function.name"),
    ({"tools": [tool("a" * 129)]}, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type"),
    ({"tools": [TOOL], "tool_choice": tool("missing")}, "tool_choice"),
    ({"tool_choice": tool("f")}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": [TOOL], "tool_choice": allowed(tool("missing"))}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": allowed()}, "tool_choice.allowed_tools.tools"),
    ({"tools": [TOOL], "tool_choice": allowed(TOOL, mode="none")}, "tool_choice.allowed_tools.mode"),
    ({"tools": [TOOL], "grammar": 'root ::= "a"'}, "tools"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"model": 5}, "model"),
    ({"model": "x" * 513}, "model"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"__class__": 1}}, "a name of chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": []}}, "chat_template_kwargs.a"),
    ({"chat_template_kwargs": {"a": NAN}}, "chat_template_kwargs.a"),
    ({"chat_template_kwargs": {str("a" * i): 1 for i in range(1, 40)}}, "chat_template_kwargs"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"mirostat": 2}, "mirostat"),
    ({"guided_json": {}}, "guided_json"),
    ({"hotcold": 5}, "hotcold"),
    ({"hotcold": {"picture": 1}}, "hotcold.picture"),
    ({"unknown": deep(100)}, None),
]  # fmt: skip


def refusal(parse: Any, body: Any) -> APIError:
    with pytest.raises(APIError) as caught:
        parse(body, facts())
    return caught.value


def check(error: APIError) -> None:
    body = error.body()
    assert list(body) == ["error"] and list(body["error"]) == ["message", "type", "param", "code"]
    api_error = json.loads(json.dumps(body, allow_nan=False))["error"]
    assert 400 <= error.status < 500 and api_error["type"] == "invalid_request_error" and api_error["code"]
    assert api_error["message"].isprintable() and 10 < len(api_error["message"]) < 500


@pytest.mark.parametrize(
    ("fields", "param"), CHATS, ids=lambda value: ",".join(value) if isinstance(value, dict) else ""
)
def test_each_is_told_which_field_is_wrong(fields: dict[str, Any], param: str | None) -> None:
    error = refusal(chat.parse, {"model": "fable", "messages": [HELLO], **fields})
    check(error)
    assert error.param == param
    if param is not None and "[" not in param:
        assert param.split(".")[-1] in error.message


@pytest.mark.parametrize("body", [None, [], {}, "a", 5, True, [[]], NAN])
@pytest.mark.parametrize(
    "parse",
    [chat.parse, completion.parse, native.parse, tokens.parse_tokenize, tokens.parse_detokenize],
    ids=lambda function: function.__module__.rsplit(".", 1)[1],
)
def test_a_body_is_an_object_with_what_is_required(parse: Any, body: Any) -> None:
    error = refusal(parse, body)
    check(error)
    assert error.code == "missing_required_parameter" if body == {} else "object" in error.message


def test_an_error_names_the_value_seen_and_those_allowed() -> None:
    error = refusal(chat.parse, {"messages": [HELLO], "temperature": -1})
    assert error.message == "temperature is -1: allowed are 0 to 100 (0 is greedy)"
    error = refusal(chat.parse, {"messages": [{"role": "x\nx\nx\nx", "content": "a"}]})
    roles = "system, developer, user, assistant, tool"
    assert error.message == "messages[0].role is " + r"'x\nx\nx\nx'" + f": allowed are {roles}"
    error = refusal(chat.parse, {"messages": [HELLO], "n": 10**400})
    assert error.message == "n is an integer of 1329 bits: allowed are the whole numbers 1 to 16"


KEYS = ["role", "content", "type", "text", "function", "name", "schema", "1", "tool_calls"]
JSON: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(codec=None), max_size=8),
        st.sampled_from(["user", "assistant", "text", "function", "json_schema", "auto"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=3)), inner, max_size=4),
    ),
    max_leaves=12,
)  # fmt: skip


@pytest.mark.parametrize(
    ("parse", "table", "base"),
    [
        (chat.parse, chat.FIELDS, {"messages": [HELLO]}),
        (completion.parse, completion.FIELDS, {"prompt": "a"}),
        (native.parse, native.FIELDS, {"prompt": "a"}),
        (tokens.parse_tokenize, tokens.TOKENIZE, {"content": "a"}),
        (tokens.parse_detokenize, tokens.DETOKENIZE, {"tokens": [1]}),
    ],
    ids=["chat", "completion", "native", "tokenize", "detokenize"],
)
@settings(max_examples=100)
@given(data=st.data())
def test_any_json_is_taken_or_refused(parse: Any, table: Any, base: dict[str, Any], data: Any) -> None:
    """And what is taken makes jobs that the engine's own checks accept."""
    own = data.draw(st.dictionaries(st.sampled_from(sorted(table)), JSON, max_size=3))
    body = data.draw(st.one_of(JSON, st.just({**base, **own})))
    try:
        call = parse(body, facts())
        if hasattr(call, "answer"):
            call.answer()
        elif hasattr(call, "encode"):
            jobs = call.jobs(call.encode())
            assert all(0 <= id < tokenizer().vocab_size for job in jobs for id in job.prompt)
        else:
            assert len(call.jobs([1])) == call.n
    except APIError as error:
        assert error.message.isprintable()
        assert json.dumps(error.body(), allow_nan=False)


@pytest.mark.parametrize(
    ("code", "retry", "status", "type"),
    [
        ("queue_full", 3.2, 429, "rate_limit_error"),
        ("not_ready", 1, 503, "unavailable_error"),
        ("closed", None, 503, "unavailable_error"),
        ("deadline", None, 408, "timeout_error"),
        ("context_length_exceeded", None, 400, "invalid_request_error"),
        ("invalid_request", None, 400, "invalid_request_error"),
        ("invalid_grammar", None, 400, "invalid_request_error"),
        ("engine_failed", None, 500, "server_error"),
        ("engine_failed", 0.2, 503, "server_error"),
        ("cancelled", None, 503, "unavailable_error"),
        ("something new", None, 500, "server_error"),
    ],
)
def test_errors_of_jobs(code: str, retry: float | None, status: int, type: str) -> None:
    error = from_job(RequestError("why", code, retry))
    assert (error.status, error.type, error.message) == (status, type, "why")
    assert error.retry_after == (None if retry is None else max(1, round(retry)))


def test_a_job_that_is_too_long_names_the_field_that_its_prompt_came_in() -> None:
    error = RequestError("too long", "context_length_exceeded")
    assert (from_job(error).param, from_job(error, "prompt").param) == ("messages", "prompt")
    assert from_job(RequestError("full", "queue_full"), "prompt").param is None
