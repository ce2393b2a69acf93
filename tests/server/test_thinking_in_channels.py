"""gpt-oss thinks in a channel: budgets, stop strings and forms know it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.chain_model import EOS, Chain, chain
from support.thinking_styles import JSON, SCHEMA, TOOL, WORDS, parts_of, request, says

CONTROLS = (
    "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>",
)  # fmt: skip
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<|start|>{{ message.role }}"
    "<|message|>{{ message.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant"
    "{% endif %}{# <|channel|> #}"
)
TEXTS = (
    *WORDS,
    *JSON,
    "analysis",
    "final",
    "commentary",
    "assistant",
    " to=functions.f",
    "END",
    '{"a": ',
    "1",
)
THOUGHT = ("<|channel|>", "analysis", "<|message|>")
NEXT = ("<|end|>", "<|start|>", "assistant")
FINAL = ("<|channel|>", "final", "<|message|>")
CALL = ("<|channel|>", "commentary", " to=functions.f", "<|message|>", '{"a": ', "1", "}", EOS)
DIALECTS = ("chat", "responses", "anthropic", "ollama")


@pytest.fixture(scope="module")
def found() -> Iterator[Chain]:
    with chain(TEMPLATE, CONTROLS, TEXTS) as found:
        yield found


def asked(found: Chain, dialect: str, stream: bool, **fields: Any) -> Any:
    path, body = request(dialect, "x", stream=stream, **fields)
    return parts_of(dialect, found.client.post(path, json=body), stream)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
def test_each_kind(found: Chain, dialect: str, stream: bool) -> None:
    thought = (*THOUGHT, " w1", "END", " w2", *NEXT)
    found.llm.say(*thought, *FINAL, *JSON, EOS, drafts=stream)
    assert asked(found, dialect, stream, schema=SCHEMA) == (" w1END w2", '{"ok": true}', [])
    found.llm.say(*thought, *CALL)
    assert asked(found, dialect, stream, tools=[TOOL], required=True) == (" w1END w2", "", [("f", {"a": 1})])
    if dialect != "responses":
        found.llm.say(*thought, *FINAL, " w3", "END", " w4", EOS)
        for stop in ("END", "w4", "assistant", "final"):
            content = " w3END w4".partition(stop)[0]
            assert asked(found, dialect, stream, stop=[stop]) == (" w1END w2", content, [])
    found.llm.say(*FINAL, " w3", EOS)
    assert asked(found, dialect, stream) == ("", " w3", [])


@pytest.mark.parametrize("budget", [1, 2])
def test_budgets(found: Chain, budget: int) -> None:
    """No further thought begins; without the budget it would."""
    more = (*THOUGHT, " w4", *NEXT)
    for dialect in DIALECTS[:3]:
        for form in ({}, {"schema": SCHEMA}):
            found.llm.say(*THOUGHT, " w1", " w2", " w3", *NEXT, *FINAL, *JSON, EOS)
            expected = ("".join((" w1", " w2")[:budget]), '{"ok": true}', [])
            assert asked(found, dialect, budget == 1, budget=budget, **form) == expected
    found.llm.say(*THOUGHT, " w1", " w2", *NEXT, *more, *FINAL, *JSON, EOS)
    reasoning, _, _ = asked(found, "chat", False, schema=SCHEMA, budget=2, max_tokens=60)
    assert "w4" not in reasoning
    assert asked(found, "chat", False, schema=SCHEMA, budget=9) == (" w1 w2\n w4", '{"ok": true}', [])
    answer = found.llm.chat(says("x"), thinking_budget=1, stop="}")
    assert (answer.reasoning, answer.stop) == (" w1", "}")


def test_a_forbidden_thought_does_not_begin(found: Chain) -> None:
    """The model would think: it may begin no channel for that."""
    found.llm.say(*THOUGHT, " w1", *NEXT, *FINAL, *JSON, EOS)
    for dialect in DIALECTS:
        reasoning, _, _ = asked(found, dialect, False, thinks=False, schema=SCHEMA, max_tokens=60)
        assert reasoning == ""


def test_a_mark_in_a_thought_is_text(found: Chain) -> None:
    found.llm.say(*THOUGHT, " w1", "commentary", " to=functions.f", " w2", *NEXT, *FINAL, " w3", EOS)
    said = " w1commentary to=functions.f w2"
    for dialect in DIALECTS:
        assert asked(found, dialect, dialect == "chat", tools=[TOOL]) == (said, " w3", [])
