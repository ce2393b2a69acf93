"""Random mixtures of thinking, budgets, forms, calls, stop strings, dialects and streaming, against a parser
that knows only texts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.chain_model import EOS, Chain, chain
from support.thinking_styles import (
    JSON,
    SCHEMA,
    STYLES,
    TOOL,
    WORDS,
    Style,
    parts_of,
    request,
    says,
    texts_of,
)

from hotcold.engine.request import Grammar

MIXTURES = 2000  #: of all styles together, with ``--full``; else a twentieth


@dataclass(frozen=True)
class Mixture:
    said: str  #: by the user; what the template does
    dialect: str
    stream: bool
    drafts: bool
    tokens: tuple[str, ...]  #: that the model says
    budget: int | None
    forbidden: bool
    form: str  #: "", schema, tools or required
    stop: tuple[str, ...]
    max_tokens: int


def mixture(style: Style, draw: random.Random) -> Mixture:
    said = draw.choice(["opens", "starts", "always"])
    dialect = draw.choice(["chat", "responses", "anthropic", "ollama", "python"])
    form = draw.choice(["", "schema", "tools", "required"])
    if form == "required" and dialect in ("ollama", "python"):
        form = "tools"
    forbidden = draw.random() < 0.2
    thinks = said != "starts" or draw.random() < 0.8
    words = iter(draw.sample(WORDS, len(WORDS)))
    thought = [next(words) for _ in range(draw.randrange(1, 5))]
    if draw.random() < 0.3:
        thought.insert(draw.randrange(len(thought) + 1), "END")
    if draw.random() < 0.3:  # a mark that is only mentioned
        thought.insert(draw.randrange(1, len(thought) + 1), style.mark)
    if draw.random() < 0.3:
        thought.insert(draw.randrange(1, len(thought)) if len(thought) > 1 else 1, "\n")
    calls = form == "required" or (form == "tools" and draw.random() < 0.6)
    if calls:
        answer = [*style.call]
    elif form == "schema" or draw.random() < 0.2:
        answer = [*JSON]
    else:
        answer = [next(words), "END", next(words)] if draw.random() < 0.5 else [next(words), next(words)]
    behind = draw.choice([[*style.end, "\n\n"], [*style.end]])
    if calls and not forbidden and draw.random() < 0.3:  # the call ends the thought
        thought, behind = [each for each in thought if each != style.mark], ["\n"]
    begin = [*style.start] if said == "starts" else []
    if (forbidden and said != "always") or not thinks:
        begin, thought, behind = [], [], []
    budget = draw.choice([None, None, 1, 2, 3, 9]) if dialect != "ollama" and not forbidden else None
    if behind == ["\n"]:
        budget = None  # the model would say more of its thought as its answer
    stops = form != "schema" and not calls and dialect != "responses" and draw.random() < 0.5
    cut = form in ("", "tools") and not calls and draw.random() < 0.2
    return Mixture(
        said,
        dialect,
        draw.random() < 0.5,
        draw.random() < 0.3,
        (*begin, *thought, *behind, *answer, EOS),
        budget,
        forbidden,
        form,
        ("END", "never") if stops else (),
        draw.randrange(1, 8) if cut else 200,
    )


def expected(style: Style, each: Mixture) -> tuple[str, str, list[Any]]:
    """The parts of the answer: what the model says, token by token, then its text."""
    start, end, call = "".join(style.start), "".join(style.end), "".join(style.call)
    opened = each.said == "always" or (each.said == "opens" and not each.forbidden)
    budget = 0 if each.forbidden else each.budget
    text, spent, place, said = "", 0, 0, 0
    while said < each.max_tokens:
        thinks = (opened or text.startswith(start)) and end not in text and not calls_in(style, text)
        if thinks and budget is not None and spent >= budget:
            begun = max(n for n in range(len(style.end)) if text.endswith("".join(style.end[:n])))
            token = style.end[begun]
            text, said = text + token, said + 1
            if token in each.tokens[place:]:
                place = each.tokens.index(token, place) + 1
            continue
        if place == len(each.tokens) or each.tokens[place] == EOS:
            break
        spent += thinks
        text, place, said = text + each.tokens[place], place + 1, said + 1
    if not opened and text.startswith(start):
        text, opened = text.removeprefix(start), True
    reasoning, content = "", text
    if opened and (at := calls_in(style, text)) and end not in text[:at]:
        reasoning, content = text[:at], text[at:]
    elif opened:
        reasoning, _, content = text.partition(end)
        content = content.lstrip()
    for stop in each.stop:
        content = content.partition(stop)[0]
    calls = []
    if each.form in ("tools", "required") and call in content:
        content, calls = content.partition(call)[0].rstrip(), [("f", {"a": 1})]
    return reasoning.strip(), content, calls


def calls_in(style: Style, text: str) -> int:
    """Where a call begins a line."""
    found = re.search(rf"(?<=\n){re.escape(''.join(style.call))}", text)
    return found.start() if found else 0


@pytest.fixture(scope="module", params=STYLES)
def found(request: pytest.FixtureRequest) -> Iterator[Chain]:
    style = STYLES[request.param]
    with chain(style.template(), style.controls, texts_of(style, ("END", "\n\n"))) as found:
        found.style = style
        yield found


def answered(found: Chain, each: Mixture) -> tuple[str, str, list[Any]]:
    found.llm.say(*each.tokens, drafts=each.drafts)
    tools = [TOOL] if each.form in ("tools", "required") else []
    if each.dialect == "python":
        return in_python(found, each, tools)
    fields: dict[str, Any] = {"schema": SCHEMA} if each.form == "schema" else {}
    if tools:
        fields |= {"tools": tools, "required": each.form == "required"}
    if each.stop:
        fields["stop"] = list(each.stop)
    fields |= {"budget": each.budget, "thinks": False if each.forbidden else None}
    path, body = request(each.dialect, each.said, max_tokens=each.max_tokens, stream=each.stream, **fields)
    return parts_of(each.dialect, found.client.post(path, json=body), each.stream)


def in_python(found: Chain, each: Mixture, tools: list[Any]) -> tuple[str, str, list[Any]]:
    answer = found.llm.chat(
        says(each.said),
        tools=tools,
        stop=each.stop,
        max_tokens=each.max_tokens,
        thinking_budget=each.budget,
        template_values={"enable_thinking": False} if each.forbidden else {},
        grammar=Grammar("json_schema", json.dumps(SCHEMA)) if each.form == "schema" else None,
    )
    calls = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
    return answer.reasoning, answer.text, calls


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 20))])
def test_mixtures(found: Chain, part: int) -> None:
    name = next(name for name, style in STYLES.items() if style == found.style)
    for index in range(MIXTURES // 20 // len(STYLES) + 1):
        each = mixture(found.style, random.Random(f"{name} {part} {index}"))
        assert answered(found, each) == expected(found.style, each), each
