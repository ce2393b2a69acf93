"""Conversations and tools as clients send them, to servers of models whose templates are particular."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from support import chat_models, made_up_llm
from support.chat_models import CHATML, names
from support.made_up_llm import MadeUpLLM

from hotcold.server.app import make_app
from hotcold.server.service import Service
from hotcold.server.settings import Settings
from hotcold.tokenizer.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
USER = {"role": "user", "content": "Weather in Paris?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}
CITY = '{"city": "Paris"}'
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": CITY}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}


class Server:
    """On a made-up model with a template, which says what a test decides."""

    def __init__(self, template: str, stack: ExitStack) -> None:
        self.llm = MadeUpLLM()
        self.llm.metadata = chat_models.bpe(template)
        self.llm.tokenizer = Tokenizer.from_metadata(self.llm.metadata)
        service = Service(self.llm, Settings(log=False))  # type: ignore[arg-type]
        asyncio.run(service.load())
        client = TestClient(make_app(service), base_url="http://localhost")
        self._client = stack.enter_context(client)
        stack.callback(service.close)

    def chat(self, *words: str, **body: Any) -> dict[str, Any]:
        """The answer's message, with the reason for its end; or why the request was refused."""
        self.llm.words = words or ("Fine.",)
        found = self._client.post("/v1/chat/completions", json={"messages": [USER], **body})
        if found.status_code != 200:
            return {"status": found.status_code, **found.json()["error"]}
        (choice,) = found.json()["choices"]
        return {**choice["message"], "reason": choice["finish_reason"]}

    def post(self, route: str, words: Iterable[str], body: dict[str, Any]) -> str:
        """Returns the text of the answer on any route."""
        self.llm.words = tuple(words)
        answer = self._client.post(route, json=body)
        assert answer.status_code == 200, answer.text
        return answer.text

    def deltas(self, *words: str, **body: Any) -> list[dict[str, Any]]:
        self.llm.words = words
        sent = {"messages": [USER], "stream": True, **body}
        lines = self._client.post("/v1/chat/completions", json=sent).text.split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        return [choice["delta"] for event in events for choice in event["choices"]]

    @property
    def prompt(self) -> str:
        return names(self.llm.tokenizer, list(self.llm.jobs[-1].prompt))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Server]]:
    monkeypatch.setattr(made_up_llm, "CONTEXT", 1 << 14)  # tools are long where every byte is a token
    with ExitStack() as stack:
        yield lambda template: Server(template, stack)


def of(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text("utf-8")


HARMONY = [
    "<|channel|>analysis<|message|>", "User says", " hi.", "<|end|><|start|>assistant", "<|channel|>final",
]  # fmt: skip
SHORT = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant{# <|channel|> #}"
)


@pytest.mark.parametrize("template", [SHORT, "gpt-oss"])
def test_channels_of_gpt_oss(server: Callable[[str], Server], template: str) -> None:
    found = server(template if template is SHORT else of(template))
    answer = found.chat(*HARMONY, "<|message|>", "Hello!")
    assert (answer["reasoning_content"], answer["content"], answer["reason"]) == (
        "User says hi.",
        "Hello!",
        "stop",
    )
    to = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    answer = found.chat(*HARMONY[:4], to, CITY, tools=[TOOL])
    assert answer["tool_calls"][0]["function"] == {"name": "weather", "arguments": CITY}
    assert (answer["content"], answer["reason"]) == (None, "tool_calls")
    deltas = found.deltas(to, CITY[:9], CITY[9:], tools=[TOOL])
    arguments = [call["function"]["arguments"] for each in deltas for call in each.get("tool_calls", ())]
    assert arguments == ["", CITY[:9], CITY[9:]]


def test_the_second_request_of_a_loop_of_tools(server: Callable[[str], Server]) -> None:
    """With the ids that the first one's answer had, and with those of another server."""
    found = server(of("mistral-nemo"))
    answer = found.chat(f'[TOOL_CALLS][{{"name": "weather", "arguments": {CITY}}}]', tools=[TOOL])
    (call,) = answer["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum()
    for calls in (answer, CALLS):
        id = calls["tool_calls"][0]["id"]
        loop = [USER, calls, {"role": "tool", "tool_call_id": id, "content": "sunny"}]
        assert found.chat(messages=loop, tools=[TOOL])["content"] == "Fine."
        assert ("sunny" in found.prompt) and (id in found.prompt) is (calls is answer)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (of("qwen3-coder"), "<tool_call>\n<function=weather>\n<parameter=city>Paris</parameter></function>"),
        (of("mistral-small-3.2"), f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{CITY}"),
        (of("gpt-oss"), f"<|channel|>commentary to=functions.weather<|message|>{CITY}"),
        (of("glm-4.6"), "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"),
        (CHATML, f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>'),
        ("{{ tools | tojson }} in a form of its own" + CHATML,
         f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>'),
    ],
    ids=["qwen3-coder", "mistral-small", "gpt-oss", "glm", "none", "other"],
)  # fmt: skip
def test_tools_of_every_format(server: Callable[[str], Server], template: str, words: str) -> None:
    found = server(template)
    answer = found.chat(*words, tools=[TOOL])
    assert [json.loads(each["function"]["arguments"]) for each in answer["tool_calls"]] == [{"city": "Paris"}]
    assert (answer["content"], answer["reason"]) == (None, "tool_calls")
    assert "weather" in found.prompt and found.llm.checks  # the grammar was checked
    assert found.chat("Fine.", tools=[TOOL])["content"] == "Fine."
    streamed = found.deltas(*words, tools=[TOOL])
    calls = [call["function"] for each in streamed for call in each.get("tool_calls", ())]
    assert json.loads("".join(call["arguments"] for call in calls)) == {"city": "Paris"}
    assert not any(each.get("content") for each in streamed)


HISTORIES = {
    "a null result": [USER, CALLS, {"role": "tool", "tool_call_id": "call_1", "content": None}],
    "a call that was cut off": [
        USER, {**CALLS, "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": '{"a": '}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ],
    "nothing": [USER, {"role": "assistant", "content": None}, USER],
    "nothing at the end": [USER, {"role": "assistant"}],
    "no parts": [USER, {"role": "assistant", "content": []}, USER],
}  # fmt: skip


@pytest.mark.parametrize("template", ["chatml", "qwen2.5", "mistral-nemo"])
def test_histories_as_clients_have_them(server: Callable[[str], Server], template: str) -> None:
    found = server(CHATML if template == "chatml" else of(template))
    for name, messages in HISTORIES.items():
        for tools in ([], [TOOL]):
            answer = found.chat(messages=messages, tools=tools)
            assert answer.get("content") == "Fine.", (name, answer)


REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"


DROPS = "{% set said = messages | rejectattr('role', 'equalto', 'system') %}" + CHATML.replace(
    "in messages", "in said"
)


@pytest.mark.parametrize("template", [REFUSES + CHATML, DROPS], ids=["refuses", "drops"])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_is_never_left_out(
    server: Callable[[str], Server], template: str, role: str
) -> None:
    found = server(template)
    for content in ("Be brief", [{"type": "text", "text": "Be brief"}]):
        assert found.chat(messages=[{"role": role, "content": content}, USER])["content"] == "Fine."
        assert "user\nBe brief\nWeather in Paris?" in found.prompt


def test_only_allowed_tools_are_called(server: Callable[[str], Server]) -> None:
    found = server(CHATML)
    other = {"type": "function", "function": {"name": "time"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [other]}}
    call = f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>'
    answer = found.chat(call, tools=[TOOL, other], tool_choice=choice)
    assert "tool_calls" not in answer and answer["content"] == call
    assert '"name": "weather"' in found.prompt and '"name": "time"' in found.prompt
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    assert found.chat(CITY, tools=[TOOL], response_format=format)["content"] == CITY
    assert found.chat(call, tools=[TOOL], response_format=format)["reason"] == "tool_calls"
    refused = found.chat(tools=[TOOL], grammar='root ::= "a"')
    assert (refused["status"], refused["param"]) == (400, "tools")


FENCED = f'```json\n{{\n  "name": "weather",\n  "arguments": {CITY}\n}}\n```'
FUNCTION = TOOL["function"]
assert isinstance(FUNCTION, dict)
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL]}),
    "responses": ("/v1/responses", {"input": "Weather?", "tools": [{"type": "function", **FUNCTION}]}),
    "anthropic": (
        "/v1/messages",
        {"messages": [USER], "max_tokens": 99, "tools": [{"name": "weather", "input_schema": SCHEMA}]},
    ),
    "ollama": ("/api/chat", {"model": "made-up", "messages": [USER], "tools": [TOOL]}),
}


def called(dialect: str, reply: Any) -> list[tuple[str, Any]]:
    """Names and arguments of a reply's calls."""
    if dialect == "chat":
        calls = reply["choices"][0]["message"].get("tool_calls") or []
        return [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in calls]
    if dialect == "responses":
        calls = [each for each in reply["output"] if each["type"] == "function_call"]
        return [(each["name"], json.loads(each["arguments"])) for each in calls]
    if dialect == "anthropic":
        calls = [each for each in reply["content"] if each["type"] == "tool_use"]
        return [(each["name"], each["input"]) for each in calls]
    calls = reply["message"].get("tool_calls") or []
    return [(each["function"]["name"], each["function"]["arguments"]) for each in calls]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_call_in_a_fence_in_every_dialect(server: Callable[[str], Server], dialect: str) -> None:
    found = server(of("qwen2.5"))
    route, body = DIALECTS[dialect]
    reply = json.loads(found.post(route, FENCED, {**body, "stream": False}))
    assert called(dialect, reply) == [("weather", {"city": "Paris"})]
    streamed = found.post(route, FENCED, {**body, "stream": True})
    assert "weather" in streamed and "`" not in streamed
    unknown = FENCED.replace("weather", "wind")
    reply = json.loads(found.post(route, unknown, {**body, "stream": False}))
    assert called(dialect, reply) == [] and json.dumps(unknown)[1:-1] in json.dumps(reply)


@pytest.mark.parametrize("dialect", ["chat", "responses", "anthropic"])
def test_without_a_choice_of_tools_they_stay_in_the_prompt(
    server: Callable[[str], Server], dialect: str
) -> None:
    found = server(of("qwen2.5"))
    route, body = DIALECTS[dialect]
    none = {"type": "none"} if dialect == "anthropic" else "none"
    found.post(route, FENCED, body)
    prompt, grammar = found.prompt, found.llm.jobs[-1].grammar
    reply = json.loads(found.post(route, FENCED, {**body, "tool_choice": none}))
    assert found.prompt == prompt and '"weather"' in prompt
    assert called(dialect, reply) == [] and json.dumps(FENCED)[1:-1] in json.dumps(reply)
    assert found.llm.jobs[-1].grammar not in (None, grammar)


def test_what_is_allowed_where_no_tool_may_be_called(server: Callable[[str], Server]) -> None:
    found = server(of("qwen2.5"))
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    assert found.chat(CITY, tools=[TOOL], tool_choice="none", response_format=format)["content"] == CITY
    assert found.chat("a", tools=[TOOL], tool_choice="none", grammar='root ::= "a"')["content"] == "a"
    found.chat(tool_choice="none")
    assert found.llm.jobs[-1].grammar is None
    continued = [USER, {"role": "assistant", "content": "Fi"}]
    channels = server(of("gpt-oss"))
    channels.chat(tools=[TOOL], tool_choice="none", messages=continued)
    assert channels.llm.jobs[-1].grammar is None  # the channel was chosen before
    channels.chat(*HARMONY, "<|message|>", "Hello!", tools=[TOOL], tool_choice="none")
    assert channels.llm.jobs[-1].grammar is not None and "weather" in channels.prompt
