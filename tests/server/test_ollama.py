"""Ollama's dialect, line by line, as Ollama's own client reads it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from support.api_pieces import Marked, facts, pieces_of

from hotcold.server.protocol import chat, native, ollama, ollama_models
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.ollama import OllamaChat, RawCall
from tests.server.conftest import Application

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
OPTIONS = {"num_predict": 7, "temperature": 0, "top_k": 3, "seed": 5, "stop": ["END"], "num_ctx": 99}


def parse(**fields: Any) -> OllamaChat:
    found = ollama.parse_chat({"messages": HELLO, **fields}, facts())
    assert isinstance(found, OllamaChat)
    return found


def same_but_for_the_key(call: OllamaChat, other: chat.ChatCall) -> bool:
    return {name: value for name, value in vars(call).items() if name != "key"} == vars(other)


def test_a_request_is_one_of_the_chat_route() -> None:
    call = parse(
        messages=[
            *HELLO,
            {
                "role": "assistant",
                "thinking": "hm",
                "tool_calls": [{"function": {"name": "look", "arguments": {"at": 1}}}],
            },
            {"role": "tool", "tool_name": "look", "content": "nothing"},
        ],
        tools=[TOOL],
        options=OPTIONS,
    )
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"function": {"name": "look", "arguments": {"at": 1}}}],
        },
        {"role": "tool", "name": "look", "content": "nothing"},
    ]
    options = {"max_tokens": 7, "temperature": 0, "top_k": 3, "seed": 5, "stop": ["END"]}
    body = {"messages": messages, "tools": [TOOL], "stream": True, **options}
    assert same_but_for_the_key(call, chat.parse(body, call.facts))


def test_a_text_is_what_a_user_says_or_the_whole_prompt() -> None:
    call = ollama.parse_generate({"prompt": "Hello", "system": "Brief.", "stream": False}, facts())
    assert isinstance(call, OllamaChat)
    messages = [{"role": "system", "content": "Brief."}, *HELLO]
    assert same_but_for_the_key(call, chat.parse({"messages": messages}, call.facts))
    raw = ollama.parse_generate({"prompt": "Hello", "raw": True, "options": OPTIONS}, facts())
    assert isinstance(raw, RawCall)
    options = {"n_predict": 7, "temperature": 0, "top_k": 3, "seed": 5, "stop": ["END"]}
    expected = native.parse({"prompt": "Hello", "stream": True, **options}, raw.facts)
    assert vars(raw) == {**vars(expected), "suffix": ""}


@pytest.mark.parametrize("most", [0, -1, -2])
def test_a_length_that_is_none(most: int) -> None:
    assert parse(options={"num_predict": most}).job.max_tokens == (1 << 31) - 1


def test_thinking_and_formats() -> None:
    assert parse(think=False).template_kwargs == {"enable_thinking": False}
    assert parse(think="low").template_kwargs == {"enable_thinking": True, "reasoning_effort": "low"}
    held = parse(think=True, format="json")
    assert held.template_kwargs == {"enable_thinking": True} and held.job.grammar is not None
    assert parse(format={"type": "object"}).job.grammar is not None
    assert parse(format="").job.grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "a", "images": ["aa"]}]}, "messages[0].images"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"format": {"type": "what"}}, "format"),
        ({"logprobs": True}, "logprobs"),
        ({"think": "sometimes"}, "think"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(APIError) as caught:
        parse(**fields)
    assert caught.value.param == param and "response_format" not in caught.value.message


def test_a_stream_and_a_whole_answer_as_the_client_reads_them() -> None:
    library = pytest.importorskip("ollama")
    text = "<why>Hi [look {}][look {}]"
    reply, other = parse().reply(Marked), parse(stream=False).reply(Marked)
    lines = reply.first()
    for one in pieces_of(text):
        lines += reply.add(0, one)
        other.add(0, one)
    lines += reply.end()
    parts = [library.ChatResponse.model_validate(line) for line in lines]
    whole = library.ChatResponse.model_validate(other.whole())
    assert "".join(part.message.content for part in parts) == whole.message.content == "Hi "
    assert "".join(part.message.thinking or "" for part in parts) == whole.message.thinking == "why"
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert calls == whole.message.tool_calls and [call.function.arguments for call in calls] == [{}, {}]
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    last = parts[-1]
    assert (last.total_duration, last.prompt_eval_duration, last.eval_duration) == (
        2_500_000_000,
        500_000_000,
        2_000_000_000,
    )
    assert last.prompt_eval_count == 9 and last.eval_count == whole.eval_count and last.done_reason == "stop"


def test_the_facts_of_a_file() -> None:
    """Numbers are whole, and names are those of llama.cpp's file types; an array is none of these."""
    known = ollama_models.show(facts(context=1 << 20), {"general.file_type": np.array([1, 2])}, "", False)
    assert {"num_ctx 1048576", "temperature 0.8", "top_k 40"} <= {*known["parameters"].split("\n")}
    assert known["details"]["quantization_level"] == "unknown"
    gguf = pytest.importorskip("gguf")
    for each in gguf.LlamaFileType:
        name = each.name.removeprefix("MOSTLY_").removeprefix("ALL_").removesuffix("_MOE")
        wanted = {"GUESSED": ""}.get(name, name)
        assert ollama_models.quantisation({"general.file_type": each.value}) == wanted


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_the_routes(app: Application) -> None:
    reply = app.client.post("/api/chat", json={"messages": HELLO})
    assert reply.headers["content-type"] == "application/x-ndjson"
    lines = lines_of(reply.text)
    assert "".join(line["message"]["content"] for line in lines) == "a b c" and lines[-1]["done"]
    for more in ({}, {"raw": True}):
        body = {"prompt": "Hello", "stream": False, **more}
        assert app.client.post("/api/generate", json=body).json()["response"] == "a b c"
    assert app.client.post("/api/chat", json={"model": "m"}).json()["done_reason"] == "load"
    assert app.client.post("/api/generate", json={"model": "m", "prompt": ""}).json()["response"] == ""
    (model,) = app.client.get("/api/tags").json()["models"]
    assert model["name"] == "made-up" and len(model["digest"]) == 64
    assert app.client.get("/api/ps").json()["models"][0]["context_length"] == 256
    shown = app.client.post("/api/show", json={"model": "any"}).json()
    assert shown["model_info"]["general.architecture"] == shown["details"]["family"]
    assert not [name for name in shown["model_info"] if name.startswith("tokenizer")]
    assert app.client.get("/api/version").json()["version"]


def test_errors_are_texts(app_with: Any) -> None:
    app = app_with()
    reply = app.client.post("/api/chat", json={"messages": HELLO, "options": {"top_p": 5}})
    assert reply.status_code == 400 and reply.json() == {"error": "options.top_p is 5: allowed are 0 to 1"}
    app.llm.fail_at = 1
    assert lines_of(app.client.post("/api/chat", json={"messages": HELLO}).text)[-1] == {"error": "it broke"}
    reply = app.client.post("/api/generate", json={"prompt": "a", "stream": False})
    assert reply.status_code == 500 and reply.json() == {"error": "it broke"}
    assert app.llm.running == 0


HOSTILE = [
    {"messages": [None]},
    {"messages": [{"role": "user", "content": ["a"]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]}]},
    {"messages": HELLO, "tools": [{}]},
    {"messages": HELLO, "options": []},
    {"messages": HELLO, "options": {"num_predict": 10**40}},
    {"messages": HELLO, "format": "xml"},
    {"messages": HELLO, "format": {"type": "what"}},
    {"prompt": "a", "messages": [{"role": "\ud800"}], "raw": "maybe"},
    {"prompt": "\ud800", "messages": HELLO, "think": 5},
    {"prompt": "a", "messages": 5, "suffix": "b"},
    {"prompt": "a", "messages": 5, "context": [1]},
    {"prompt": "word " * 1000, "messages": [{"role": "user", "content": "word " * 1000}]},
]


@pytest.mark.parametrize("body", HOSTILE, ids=lambda body: json.dumps(body)[:60])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/show"])
def test_hostile_bodies(app: Application, body: dict[str, Any], path: str) -> None:
    sent = json.dumps(body).encode()
    reply = app.client.post(path, content=sent, headers={"Content-Type": "application/json"})
    assert reply.status_code < 500, reply.text
    assert path != "/api/chat" or reply.status_code >= 400, reply.text
    assert reply.status_code < 400 or isinstance(reply.json()["error"], str)
    assert app.llm.running == 0
