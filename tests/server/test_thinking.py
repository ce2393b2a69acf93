"""A model thinks, then answers in form: each marker style, each dialect, and `LLM.chat`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.chain_model import EOS, Chain, chain
from support.thinking_styles import JSON, MESSAGES, SCHEMA, STYLES, TOOL, WORDS, Style, parts_of, request, texts_of

from hotcold.engine.request import Grammar

DIALECTS = ("chat", "responses", "anthropic", "ollama")
THOUGHT = (" w1", " w2", "\n", " w3")
SAID = "w1 w2\n w3"
CALLS = [("f", {"a": 1})]
_MODELS: dict[tuple[str, bool], Any] = {}


@pytest.fixture(scope="module", autouse=True)
def closing() -> Iterator[None]:
    yield
    for context in _MODELS.values():
        context[0].__exit__(None, None, None)
    _MODELS.clear()


def model(name: str, opens: bool) -> Chain:
    """The model of a style, one for all tests."""
    if (name, opens) not in _MODELS:
        style = STYLES[name]
        context = chain(style.template(opens), style.controls, texts_of(style, ("END", "\n\n")))
        _MODELS[name, opens] = context, context.__enter__()
    found: Chain = _MODELS[name, opens][1]
    return found


def asked(found: Chain, dialect: str, stream: bool, **fields: Any) -> Any:
    path, body = request(dialect, stream=stream, **fields)
    return parts_of(dialect, found.client.post(path, json=body), stream)


def begun(style: Style, opens: bool) -> tuple[str, ...]:
    """What the model says before its thought."""
    return () if opens else style.start


EACH = pytest.mark.parametrize(
    ("name", "opens"), [(name, opens) for name in STYLES for opens in (True, False)]
)


@EACH
def test_thinks_then_answers_in_form(name: str, opens: bool) -> None:
    style, found = STYLES[name], model(name, opens)
    start = begun(style, opens)
    for i, dialect in enumerate(DIALECTS):
        for behind in ((*style.end, "\n\n"), style.end):
            found.llm.say(*start, *THOUGHT, *behind, *JSON, EOS, guesses=i % 2 == 0)
            assert asked(found, dialect, i > 1, schema=SCHEMA) == (SAID, '{"ok": true}', [])
        found.llm.say(*start, *THOUGHT, *style.end, "\n\n", *style.call, EOS)
        if dialect != "ollama":
            assert asked(found, dialect, i < 2, tools=[TOOL], required=True) == (SAID, "", CALLS)
        assert asked(found, dialect, i < 2, tools=[TOOL]) == (SAID, "", CALLS)
    for grammar in (Grammar("regex", r'\{"ok": true\}'), Grammar("gbnf", 'root ::= "{\\"ok\\": true}"')):
        found.llm.say(*start, *THOUGHT, *style.end, *JSON, EOS)
        answer = found.llm.chat(MESSAGES, grammar=grammar)
        assert (answer.reasoning, answer.text, answer.finish_reason) == (SAID, '{"ok": true}', "stop")


@EACH
def test_the_form_begins_at_once_without_a_thought(name: str, opens: bool) -> None:
    """The model would say more than its form allows."""
    found = model(name, opens)
    found.llm.say(*JSON, " w1", EOS)
    for i, dialect in enumerate(DIALECTS):
        if not opens:
            assert asked(found, dialect, i > 1, schema=SCHEMA) == ("", '{"ok": true}', [])
        assert asked(found, dialect, i < 2, schema=SCHEMA, thinks=False) == ("", '{"ok": true}', [])
    values = {"enable_thinking": False}
    answer = found.llm.chat(MESSAGES, grammar=Grammar("json_object"), template_values=values)
    assert (answer.reasoning, answer.text) == ("", '{"ok": true}')


@EACH
def test_an_answer_in_form_follows_a_thought_that_does_not_end(name: str, opens: bool) -> None:
    """The model ends its text within the thought."""
    style, found = STYLES[name], model(name, opens)
    found.llm.say(*begun(style, opens), *THOUGHT, EOS, *style.end, *JSON)
    reasoning, content, _ = asked(found, "chat", False, schema=SCHEMA, max_tokens=80, budget=20)
    assert reasoning.startswith(SAID) and content == '{"ok": true}'


@EACH
@pytest.mark.parametrize("budget", [1, 3])
def test_budgets(name: str, opens: bool, budget: int) -> None:
    style, found = STYLES[name], model(name, opens)
    thought = (" w1", " w2", " w3", " w4")
    said = "".join(thought[:budget]).strip()
    for dialect in DIALECTS[:3]:
        found.llm.say(*begun(style, opens), *thought, *style.end, "\n\n", *JSON, EOS)
        reply = asked(found, dialect, budget == 1, schema=SCHEMA, budget=budget)
        assert reply == (said, '{"ok": true}', [])
        assert asked(found, dialect, budget == 1, budget=budget) == (said, '{"ok": true}', [])
    answer = found.llm.chat(MESSAGES, thinking_budget=budget)
    assert (answer.reasoning, answer.text) == (said, '{"ok": true}')
    assert asked(found, "chat", False, budget=5) == ("w1 w2 w3 w4", '{"ok": true}', [])


@EACH
def test_a_call_ends_a_thought(name: str, opens: bool) -> None:
    style, found = STYLES[name], model(name, opens)
    for i, dialect in enumerate(DIALECTS):
        for ahead in ((" w1", "\n"), (" w1", "\n\n")):
            found.llm.say(*begun(style, opens), *ahead, *style.call, EOS, guesses=i == 0)
            assert asked(found, dialect, i % 2 == 0, tools=[TOOL]) == ("w1", "", CALLS)
    found.llm.say(*begun(style, opens), *style.call, EOS)
    assert asked(found, "chat", True, tools=[TOOL], required=True) == ("", "", CALLS)
    answer = found.llm.chat(MESSAGES, tools=[TOOL])
    assert [(each.name, json.loads(each.arguments)) for each in answer.tool_calls] == CALLS


@EACH
def test_a_mark_in_a_sentence_is_text(name: str, opens: bool) -> None:
    style, found = STYLES[name], model(name, opens)
    mentions = ((" w1", style.mark, " w2"), (" w1", "\n", style.mark, " w2"), (" w1", style.mark, "\n", " w2"))
    if style.mark not in style.controls and name != "qwen-xml":  # whose calls need no mark
        mentions += ((" w1", *style.call, " w2"),)
    for i, mention in enumerate(mentions):
        for dialect in DIALECTS:
            found.llm.say(*begun(style, opens), *mention, *style.end, "\n\n", " w3", EOS)
            expected = ("".join(mention).strip(), "w3", [])
            assert asked(found, dialect, i % 2 == 0, tools=[TOOL]) == expected
        answer = found.llm.chat(MESSAGES, tools=[TOOL])
        assert (answer.reasoning, answer.text, answer.tool_calls) == (*expected[:2], ())


@EACH
def test_stop_strings_are_of_the_answer(name: str, opens: bool) -> None:
    style, found = STYLES[name], model(name, opens)
    for i, dialect in enumerate(("chat", "anthropic", "ollama")):
        found.llm.say(*begun(style, opens), " w1", "END", " w2", *style.end, " w3", "END", " w4", EOS)
        reply = asked(found, dialect, i % 2 == 0, stop=["END", "never"])
        assert reply == ("w1END w2", "w3", [])
    answer = found.llm.chat(MESSAGES, stop="END")
    assert (answer.reasoning, answer.text, answer.stop) == ("w1END w2", "w3", "END")
    assert found.llm.chat(MESSAGES, stop="w3").text == ""


def test_lengths_count_thinking_and_answer() -> None:
    found = model("think", True)
    found.llm.say(*THOUGHT, "</think>", " w5", " w6", " w7", EOS)
    assert asked(found, "chat", False, max_tokens=7) == (SAID, "w5 w6", [])
    assert asked(found, "anthropic", False, max_tokens=3) == ("w1 w2", "", [])
    reply = found.client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 7}).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    details = reply["usage"]["completion_tokens_details"]
    assert reply["usage"]["completion_tokens"] == 7 and 4 <= details["reasoning_tokens"] <= 5
