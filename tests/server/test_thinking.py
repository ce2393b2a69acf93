"""A model thinks, then answers in form: each marker style, each dialect, and `LLM.chat`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.async_engines import run
from support.chain_model import EOS, Chain, chain
from support.chat_models import templated
from support.thinking_styles import JSON, SCHEMA, STYLES, TOOL, Style, parts_of, request, says, texts_of

from hotcold import LLM, AsyncLLM, schema_grammar
from hotcold.chat.answer import Answer
from hotcold.engine.request import Grammar
from hotcold.engine.sampler import Allowed

DIALECTS = ("chat", "responses", "anthropic", "ollama")
THOUGHT = (" w1", " w2", "\n", " w3")
SAID = "w1 w2\n w3"
CALLS = [("f", {"a": 1})]
FENCED = ("```json\n", '{"name": "f", "arguments": ', '{"a": 1}', "}", "\n```")


@pytest.fixture(scope="module", params=STYLES)
def found(request: pytest.FixtureRequest) -> Iterator[Chain]:
    style = STYLES[request.param]
    with chain(
        style.template(), style.controls, texts_of(style, ("END", "\n\n", " E", "ND", *FENCED))
    ) as found:
        found.style = style
        yield found


def asked(found: Chain, dialect: str, stream: bool, said: str, **fields: Any) -> Any:
    path, body = request(dialect, said, stream=stream, **fields)
    return parts_of(dialect, found.client.post(path, json=body), stream)


def begun(style: Style, said: str) -> tuple[str, ...]:
    """Returns the tokens that begin the thought, where the template does not."""
    return style.start if said == "starts" else ()


EACH = pytest.mark.parametrize("said", ["opens", "starts"])


@EACH
def test_thinks_then_answers_in_form(found: Chain, said: str) -> None:
    style = found.style
    start = begun(style, said)
    for i, dialect in enumerate(DIALECTS):
        for behind in ((*style.end, "\n\n"), style.end, ("".join(style.end) + "\n\n",)):
            found.llm.say(*start, *THOUGHT, *behind, *JSON, EOS, drafts=i % 2 == 0)
            assert asked(found, dialect, i > 1, said, schema=SCHEMA) == (SAID, '{"ok": true}', [])
        found.llm.say(*start, *THOUGHT, *style.end, "\n\n", *style.call, EOS)
        if dialect != "ollama":
            assert asked(found, dialect, i < 2, said, tools=[TOOL], required=True) == (SAID, "", CALLS)
        assert asked(found, dialect, i < 2, said, tools=[TOOL]) == (SAID, "", CALLS)
    for grammar in (Grammar("regex", r'\{"ok": true\}'), Grammar("gbnf", 'root ::= "{\\"ok\\": true}"')):
        found.llm.say(*start, *THOUGHT, *style.end, *JSON, EOS)
        answer = found.llm.chat(says(said), grammar=grammar)
        assert (answer.reasoning, answer.text, answer.finish_reason) == (SAID, '{"ok": true}', "stop")


@EACH
def test_a_call_in_a_fence_begins_the_answer_behind_a_thought(found: Chain, said: str) -> None:
    start = begun(found.style, said)
    for i, dialect in enumerate(DIALECTS):
        found.llm.say(*start, *THOUGHT, *found.style.end, "\n\n", *FENCED, EOS, drafts=i % 2 == 0)
        assert asked(found, dialect, i > 1, said, tools=[TOOL]) == (SAID, "", CALLS)


def test_a_token_may_end_the_thought_and_begin_the_answer(found: Chain) -> None:
    """It must begin what the form allows; else it is not chosen, as the end mark of the budget is then."""
    end = "".join(found.style.end)
    found.llm.say(*THOUGHT, f'{end}\n{{"ok": ', *JSON[1:], EOS)
    assert asked(found, "chat", True, "opens", schema=SCHEMA) == (SAID, '{"ok": true}', [])
    found.llm.say(*THOUGHT, f"{end} no", *JSON, EOS)
    assert asked(found, "chat", True, "opens") == (SAID, 'no{"ok": true}', [])
    reasoning, content, _ = asked(found, "chat", False, "opens", schema=SCHEMA, budget=6)
    assert reasoning.startswith(SAID) and json.loads(content).keys() == {"ok"}


def test_whitespace_before_the_answer_is_bounded(found: Chain) -> None:
    found.llm.say(*THOUGHT, *found.style.end, *["\n\n"] * 50, *JSON, EOS)
    reasoning, content, _ = asked(found, "chat", True, "opens", schema=SCHEMA, max_tokens=60)
    assert reasoning == SAID and json.loads(content).keys() == {"ok"}


@EACH
def test_the_form_begins_at_once_without_a_thought(found: Chain, said: str) -> None:
    """The model would say more than its form allows."""
    found.llm.say(*JSON, " w1", EOS)
    for i, dialect in enumerate(DIALECTS):
        if said == "starts":
            assert asked(found, dialect, i > 1, said, schema=SCHEMA) == ("", '{"ok": true}', [])
        assert asked(found, dialect, i < 2, said, schema=SCHEMA, thinks=False) == ("", '{"ok": true}', [])
    values = {"enable_thinking": False}
    answer = found.llm.chat(says(said), grammar=Grammar("json_object"), template_values=values)
    found.llm.say(*found.style.start, " w1", *found.style.end, *JSON, EOS)  # a second thought
    reasoning, content, _ = asked(found, "chat", False, said, schema=SCHEMA, thinks=False, max_tokens=60)
    assert reasoning == "" and json.loads(content).keys() == {"ok"}
    assert (answer.reasoning, answer.text) == ("", '{"ok": true}')


@EACH
def test_an_answer_in_form_follows_a_thought_that_does_not_end(found: Chain, said: str) -> None:
    """The model ends its text within the thought."""
    style = found.style
    found.llm.say(*begun(style, said), *THOUGHT, EOS, *style.end, *JSON)
    reasoning, content, _ = asked(found, "chat", False, said, schema=SCHEMA, max_tokens=80, budget=20)
    assert reasoning.startswith(SAID) and content == '{"ok": true}'


@EACH
@pytest.mark.parametrize("budget", [1, 3])
def test_budgets(found: Chain, said: str, budget: int) -> None:
    style = found.style
    thought = (" w1", " w2", " w3", " w4")
    cut = "".join(thought[:budget]).strip()
    for dialect in DIALECTS[:3]:
        found.llm.say(*begun(style, said), *thought, *style.end, "\n\n", *JSON, EOS)
        reply = asked(found, dialect, budget == 1, said, schema=SCHEMA, budget=budget)
        assert reply == (cut, '{"ok": true}', [])
        assert asked(found, dialect, budget == 1, said, budget=budget) == (cut, '{"ok": true}', [])
    answer = found.llm.chat(says(said), thinking_budget=budget)
    assert (answer.reasoning, answer.text) == (cut, '{"ok": true}')
    assert asked(found, "chat", False, said, budget=5) == ("w1 w2 w3 w4", '{"ok": true}', [])


@EACH
def test_a_call_ends_a_thought(found: Chain, said: str) -> None:
    style = found.style
    for i, dialect in enumerate(DIALECTS):
        places = [(" w1", "\n"), (" w1", "\n\n")]
        if style.mark in style.controls:  # which no thought only mentions
            places.append((" w1",))
        for ahead in places:
            found.llm.say(*begun(style, said), *ahead, *style.call, EOS, drafts=i == 0)
            assert asked(found, dialect, i % 2 == 0, said, tools=[TOOL]) == ("w1", "", CALLS)
    found.llm.say(*begun(style, said), *style.call, EOS)
    assert asked(found, "chat", True, said, tools=[TOOL], required=True) == ("", "", CALLS)
    answer = found.llm.chat(says(said), tools=[TOOL])
    assert [(each.name, json.loads(each.arguments)) for each in answer.tool_calls] == CALLS


@EACH
def test_a_mark_in_a_sentence_is_text(found: Chain, said: str) -> None:
    style = found.style
    mark = style.mark
    mentions = ((" w1", mark, " w2"), (" w1", "\n", mark, " w2"), (" w1", mark, "\n", " w2"))
    if mark not in style.controls and style != STYLES["qwen-xml"]:  # whose calls need no mark
        mentions += ((" w1", *style.call, " w2"),)
    for i, mention in enumerate(mentions):
        for dialect in DIALECTS:
            found.llm.say(*begun(style, said), *mention, *style.end, "\n\n", " w3", EOS)
            expected = ("".join(mention).strip(), "w3", [])
            assert asked(found, dialect, i % 2 == 0, said, tools=[TOOL]) == expected
        answer = found.llm.chat(says(said), tools=[TOOL])
        assert (answer.reasoning, answer.text, answer.tool_calls) == (*expected[:2], ())


@EACH
def test_stop_strings_are_of_the_answer(found: Chain, said: str) -> None:
    style = found.style
    for i, dialect in enumerate(("chat", "anthropic", "ollama")):
        found.llm.say(*begun(style, said), " w1", "END", " w2", *style.end, " w3", "END", " w4", EOS)
        reply = asked(found, dialect, i % 2 == 0, said, stop=["END", "never"])
        assert reply == ("w1END w2", "w3", [])
    answer = found.llm.chat(says(said), stop="END")
    assert (answer.reasoning, answer.text, answer.stop) == ("w1END w2", "w3", "END")
    assert found.llm.chat(says(said), stop="w3").text == ""


def test_a_budget_cuts_no_character(found: Chain) -> None:
    found.llm.say(*(bytes([byte]) for byte in "🦊".encode()), " w2", *found.style.end, *JSON, EOS)
    assert asked(found, "chat", False, "opens", budget=1) == ("🦊", '{"ok": true}', [])


def test_a_stop_string_is_not_half_in_a_thought(found: Chain) -> None:
    """It begins in an answer, and its rest stands in a thought behind that, or the other way round."""
    start, end = found.style.start, found.style.end
    found.llm.say(" E", *end, "ND", EOS)
    for stream in (False, True):
        assert asked(found, "chat", stream, "opens", stop=["END"]) == ("E", "ND", [])
    if found.style == STYLES["gemma"]:  # which may think anywhere
        found.llm.say(" w1", "E", *start, "ND", *end, "ND", " w2", EOS)
        assert asked(found, "chat", True, "starts", stop=["END"]) == ("ND", " w1END w2", [])


def test_lengths_count_thinking_and_answer(found: Chain) -> None:
    end = found.style.end
    found.llm.say(*THOUGHT, *end, " w5", " w6", " w7", EOS)
    n = len(THOUGHT) + len(end) + 2
    body = {"messages": says("opens"), "max_tokens": n}
    reply = found.client.post("/v1/chat/completions", json=body).json()
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "length"
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (SAID, "w5 w6")
    details = reply["usage"]["completion_tokens_details"]
    assert reply["usage"]["completion_tokens"] == n and 4 <= details["reasoning_tokens"] <= 4 + len(end)
    assert asked(found, "anthropic", False, "opens", max_tokens=2) == ("w1 w2", "", [])


def test_a_template_that_always_opens_the_thought(found: Chain) -> None:
    """Where thinking is forbidden its end is inserted at once."""
    for i, dialect in enumerate(DIALECTS):
        found.llm.say(*THOUGHT, *found.style.end, "\n\n", *JSON, EOS)
        assert asked(found, dialect, i < 2, "always", schema=SCHEMA) == (SAID, '{"ok": true}', [])
        reply = asked(found, dialect, i > 1, "always", schema=SCHEMA, thinks=False)
        assert reply == ("", '{"ok": true}', [])
        assert asked(found, dialect, i > 1, "always", thinks=False) == ("", '{"ok": true}', [])


def test_a_forbidden_thought_that_the_model_begins_ends_at_once(found: Chain) -> None:
    """The template has closed an empty one, or knows nothing of it."""
    for i, dialect in enumerate(DIALECTS):
        for form in ({}, {"tools": [TOOL]}):
            found.llm.say(*found.style.start, *THOUGHT, *found.style.end, " w5", EOS, drafts=i % 2 == 0)
            assert asked(found, dialect, i < 2, "opens", thinks=False, **form) == ("", "w5", [])
            if form:
                found.llm.say(*found.style.start, *THOUGHT, *found.style.end, *FENCED, EOS)
                assert asked(found, dialect, i < 2, "opens", thinks=False, **form) == ("", "", CALLS)
                # The tool's grammar holds the arguments behind such a thought, too.
                found.llm.say(*found.style.start, " w1", *found.style.end, *FENCED[:2], *JSON, "}", EOS)
                reasoning, content, calls = asked(found, dialect, i < 2, "opens", thinks=False, **form)
                assert (reasoning, content) == ("", "")
                assert [(name, [*arguments]) for name, arguments in calls] == [("f", ["a"])]


def test_a_grammar_may_have_the_marks_in_it_where_thinking_is_forbidden(found: Chain) -> None:
    if found.style.controls:
        return
    start, end = "".join(found.style.start), "".join(found.style.end)
    found.llm.say(*found.style.start, " w1", *found.style.end, " w5", EOS)
    answer = found.llm.chat(
        says("opens"),
        grammar=Grammar("gbnf", f'root ::= "{start}" " w1" "{end}" " w5"'),
        template_values={"enable_thinking": False},
    )
    assert (answer.reasoning, answer.text, answer.finish_reason) == ("w1", "w5", "stop")


def test_a_mark_that_the_model_repeats_is_no_part_of_the_thought(found: Chain) -> None:
    for i, dialect in enumerate(DIALECTS):
        found.llm.say(*found.style.start, *THOUGHT, *found.style.end, *JSON, EOS)
        assert asked(found, dialect, i < 2, "opens", schema=SCHEMA) == (SAID, '{"ok": true}', [])


def test_a_call_in_a_thought_is_held_to_its_tool(found: Chain) -> None:
    """The model would give a text where the tool wants a number."""
    call = [*found.style.call]
    call[call.index("1")] = " w4"
    for said in ("opens", "starts"):
        found.llm.say(*begun(found.style, said), " w1", "\n", *call, EOS)
        path, body = request("chat", said, tools=[TOOL])
        reply = found.client.post(path, json={**body, "parallel_tool_calls": False})
        reasoning, content, calls = parts_of("chat", reply, False)
        assert (reasoning, content) == ("w1", "")
        assert calls
        for name, arguments in calls:
            assert name == "f" and arguments.keys() == {"a"} and type(arguments["a"]) is int


def test_a_call_of_an_unknown_tool_in_a_thought_is_text(found: Chain) -> None:
    other = {**TOOL, "function": {**TOOL["function"], "name": "g"}}
    found.llm.say(" w1", "\n", *found.style.call, "\n", *found.style.end, " w2", EOS)
    said = f"w1\n{''.join(found.style.call)}"
    for stream in (False, True):
        assert asked(found, "chat", stream, "opens", tools=[other]) == (said, "w2", [])


def test_a_call_that_its_grammar_does_not_take_is_read_when_it_is_whole(found: Chain) -> None:
    """One token has the name and a spelling of what follows that the grammar does not know."""
    for stream in (False, True):
        found.llm.say(" w1", "\n", *(found.style.tight or found.style.call), EOS)
        assert asked(found, "chat", stream, "opens", tools=[TOOL]) == ("w1", "", CALLS)


def test_a_beginning_of_a_call_that_is_none_is_text(found: Chain) -> None:
    """The thought continues after it, for any form of the answer."""
    thought = (" w1", "\n", *found.style.broken, " w2")
    found.llm.say(*thought, *found.style.end, "\n\n", *found.style.call, EOS)
    for stream in (False, True):
        reply = asked(found, "chat", stream, "opens", tools=[TOOL], required=True)
        assert reply == ("".join(thought).strip(), "", CALLS)


def test_a_form_that_the_call_cannot_take_leaves_it_in_the_thought(found: Chain) -> None:
    """Where the answer must be content, no call of the model's is one."""
    found.llm.say(" w1", "\n", *found.style.call, "\n", *found.style.end, *JSON, EOS)
    said = f"w1\n{''.join(found.style.call)}"
    assert asked(found, "chat", True, "opens", schema=SCHEMA) == (said, '{"ok": true}', [])


def test_a_beginning_of_an_answer_is_no_thought(found: Chain) -> None:
    last = {"role": "assistant", "content": "The answer: "}
    found.llm.say(*JSON, EOS)
    body = {"messages": [*says("opens"), last], "json_schema": SCHEMA}
    message = found.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["content"] == '{"ok": true}' and "reasoning_content" not in message


@pytest.mark.parametrize("budget", [None, 2])
def test_a_thought_that_the_last_message_begins_goes_on(found: Chain, budget: int | None) -> None:
    messages = continued(f"{''.join(found.style.start)}\nI think")
    said = " w1 w2" if budget else " w1 w2 w3"
    for form in ({}, {"json_schema": SCHEMA}):
        found.llm.say(" w1", " w2", " w3", *found.style.end, *JSON, EOS)
        body = {"messages": messages, "thinking_token_budget": budget, **form}
        message = found.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (said, '{"ok": true}')
    found.llm.say(" w1", " w2", " w3", *found.style.end, " w5", EOS)
    answer = found.llm.chat(messages, continue_last=True, thinking_budget=budget)
    assert (answer.reasoning, answer.text) == (said, "w5")


def test_an_answer_that_the_last_message_begins_goes_on(found: Chain) -> None:
    start, end = "".join(found.style.start), "".join(found.style.end)
    mention = () if found.style is STYLES["gemma"] else (f"The mark {start} means",)  # it thinks anywhere
    for beginning in (f"{start}I think{end}So", "So", *mention):
        found.llm.say(" w1", EOS)
        answer = found.llm.chat(continued(beginning), continue_last=True)
        assert (answer.reasoning, answer.text) == ("", " w1")


def continued(beginning: str) -> list[dict[str, Any]]:
    return [*says("opens"), {"role": "assistant", "content": beginning}]


def test_efforts_are_budgets(found: Chain) -> None:
    chat = found.llm.template
    ids = chat.ids(says("opens"))
    for effort, budget in (("minimal", 512), ("low", 1024), ("medium", 8192), ("high", 24576), ("max", None)):
        thought = chat.thought(ids, kwargs={"reasoning_effort": effort})
        assert thought is not None and thought.budget == budget
        thought = chat.thought(ids, kwargs={"reasoning_effort": effort}, budget=3)
        assert thought is not None and thought.budget == 3
    for values in ({"enable_thinking": False}, {"thinking": False}, {"reasoning_effort": "none"}):
        thought = chat.thought(ids, kwargs=values, budget=3)
        assert thought is not None and thought.budget == 0
    with pytest.raises(ValueError, match="thinking_budget is -1"):
        found.llm.chat(says("opens"), thinking_budget=-1)
    with pytest.raises(ValueError, match="a constraint are both given"):
        found.llm.chat(says("opens"), thinking_budget=3, constraint=lambda output: Allowed())


# --- the engine's process -----------------------------------------------------------------------------


def test_the_engines_process_thinks_as_the_library_does(tmp_path: Path) -> None:
    """The built-in model, whose vocabulary spells the marks in several tokens."""
    path = templated(tmp_path / "thinks.gguf", "{{ messages[0].content }}<think>\n{# </think> #}")
    options: dict[str, Any] = {"grammar": schema_grammar(SCHEMA), "thinking_budget": 5, "seed": 3}
    with LLM(path, threads=1) as llm:
        answer = llm.chat(says("Once upon a time"), **options)
        assert json.loads(answer.text).keys() == {"ok"} and answer.finish_reason == "stop"
        assert llm.tokenizer.decode(answer.ids[:5]).strip() == answer.reasoning.strip() != ""

    async def program() -> Answer:
        async with AsyncLLM(path, threads=1) as llm:
            return await llm.chat(says("Once upon a time"), **options)

    other = run(program())
    assert (other.reasoning, other.text, other.ids) == (answer.reasoning, answer.text, answer.ids)


# --- docs/chat.md -------------------------------------------------------------------------------------

_PAGE = (Path(__file__).resolve().parents[2] / "docs" / "chat.md").read_text(encoding="utf-8")
_SECTION = _PAGE.partition("## Thinking, and then an answer in form")[2].partition("\n## ")[0]
EXAMPLES = re.findall(r"curl localhost:8080(\S+) -d '(.*?)'\n```", _SECTION, re.DOTALL)


def test_each_dialect_has_an_example() -> None:
    chat = "/v1/chat/completions"
    assert [path for path, _ in EXAMPLES] == [chat, "/v1/responses", "/v1/messages", "/api/chat", chat]


@pytest.mark.parametrize(("path", "body"), EXAMPLES)
def test_documented_examples(path: str, body: str, found: Chain) -> None:
    """The model writes a thought, an answer in form, and more."""
    paths = {"/v1/responses": "responses", "/v1/messages": "anthropic", "/api/chat": "ollama"}
    dialect = paths.get(path, "chat")
    found.llm.say(*found.style.start, *THOUGHT, *found.style.end, "\n\n", *JSON, " w5", EOS)
    reply = found.client.post(path, json=json.loads(body))
    assert parts_of(dialect, reply, False) == (SAID, '{"ok": true}', [])
    thought = found.llm.jobs[-1].thought
    assert thought is not None and (thought.budget is not None) is (dialect != "ollama")
