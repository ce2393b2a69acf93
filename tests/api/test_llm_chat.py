"""LLM.chat: the prompt is the template's, the answer divided, and turns go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hotcold import LLM
from hotcold.chat.answer import Answer, ToolCall, answer_of, divided
from hotcold.chat.stream import ChatStream
from hotcold.chat.thinking import KNOWN
from hotcold.chat.tool_formats import HERMES
from hotcold.engine.generation import Piece
from hotcold.engine.request import Timings
from hotcold.errors import UserError
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions

FOX = [{"role": "user", "content": "Once upon a time there was a fox"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ '\n' }}{% endfor %}{{ words if words is defined }}"
    "{% if add_generation_prompt %}The answer:{% endif %}"
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as found:
        yield found


def with_template(template: str) -> LLM:
    model = load(None, LoadOptions())
    return LLM(replace(model, chat_metadata={"tokenizer.chat_template": template}))


def test_without_a_template_the_text_goes_on(llm: LLM) -> None:
    answer = llm.chat(FOX, seed=1, max_tokens=20)
    assert isinstance(answer, Answer)
    assert answer.text == llm.generate(FOX[0]["content"], seed=1, max_tokens=20).text == str(answer)
    assert answer.message == {"role": "assistant", "content": answer.text}
    assert (answer.reasoning, answer.tool_calls, answer.finish_reason) == ("", (), "length")
    messages = [*FOX, answer.message, {"role": "user", "content": "A bear came."}]
    text = f"{FOX[0]['content']}{answer.text}\n\nA bear came."
    second = llm.chat(messages, seed=2, max_tokens=20)
    assert second.text == llm.generate(text, seed=2, max_tokens=20).text
    more = llm.chat([*FOX, answer.message], seed=3, max_tokens=20, continue_last=True)
    assert more.text == llm.generate(FOX[0]["content"] + answer.text, seed=3, max_tokens=20).text


def test_pieces_are_the_answer(llm: LLM) -> None:
    options: Any = {"seed": 4, "max_tokens": 30, "stop": "the"}
    pieces = [*llm.stream_chat(FOX, **options)]
    whole = llm.chat(FOX, **options)
    assert "".join(map(str, pieces)) == whole.text and "the" not in whole.text
    assert pieces[-1].piece.finish_reason == whole.finish_reason
    assert tuple(id for each in pieces for id in each.piece.ids) == whole.ids


def test_leaving_the_loop_cancels(llm: LLM) -> None:
    pieces = llm.stream_chat(FOX, max_tokens=400, ignore_eos=True)
    next(pieces)
    assert llm.engine.scheduler.unfinished == 1
    pieces.close()
    assert llm.engine.scheduler.unfinished == 0


def test_the_models_template_is_used() -> None:
    with with_template(TEMPLATE) as llm:
        answer = llm.chat(FOX, seed=1, max_tokens=20, template_values={"words": "In short."})
        prompt = f"{FOX[0]['content']}\nIn short.The answer:"
        assert answer.text == llm.generate(prompt, seed=1, max_tokens=20).text
        assert llm.template.template == TEMPLATE
        with pytest.raises(UserError, match="tools is set by the server"):
            llm.chat(FOX, template_values={"tools": "x"})
    with pytest.raises(UserError, match="closed"):
        llm.chat(FOX)


def test_errors_come_before_the_first_piece(llm: LLM) -> None:
    with pytest.raises(UserError, match="role"):
        llm.stream_chat([{"role": "hacker", "content": "x"}])
    with pytest.raises(UserError, match=r"tools\[0\] is"):
        llm.stream_chat(FOX, tools=[{"type": "function"}])
    with pytest.raises(UserError, match="chat_template is set by the server"):
        llm.stream_chat(FOX, template_values={"chat_template": "x"})
    with pytest.raises(TypeError, match="unknown option 'max_length'"):
        llm.stream_chat(FOX, max_length=5)  # type: ignore[call-arg]
    with pytest.raises(UserError, match="context"):
        llm.stream_chat([{"role": "user", "content": "fox " * 10_000}])
    for budget in (-1, 1.5, True):
        with pytest.raises(UserError, match=f"thinking_budget is {budget}"):
            llm.chat(FOX, thinking_budget=budget)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="temperature"):
        llm.chat(FOX, temperature=-1)


def pieces_of(text: str) -> Iterator[Piece]:
    for i, character in enumerate(text):
        end = "stop" if i == len(text) - 1 else None
        yield Piece(character, (i,), (), end, None, False, 3, 5, Timings())  # type: ignore[arg-type]


def test_a_call_in_another_form_than_the_templates() -> None:
    call = '{{"name": "f", "parameters": {"a": 1}}}'
    for text, calls in (
        (f"```json\n{call}\n```", 1),
        (call, 1),
        (f"<tool_call>{call}</tool_call>", 1),
        ("x" + call, 0),
    ):
        stream = ChatStream(None, HERMES, tools={"f": {}})
        found = answer_of([*divided(pieces_of(text), stream)])  # type: ignore[arg-type]
        assert found.tool_calls == (ToolCall("call00000", "f", '{"a": 1}'),) * calls
        assert found.text == ("" if calls else text)


def test_an_answer_with_thinking_and_calls() -> None:
    text = "<think>\nHm.\n</think>\n\nLet me see.\n"
    text += '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    text += '<tool_call>{"name": "g"}</tool_call>'
    found = answer_of([*divided(pieces_of(text), ChatStream(KNOWN[0], HERMES))])  # type: ignore[arg-type]
    assert (found.text, found.reasoning) == ("Let me see.", "Hm.")
    assert found.ids == tuple(range(len(text))) and found.seed == 5
    assert found.tool_calls == (ToolCall("call00000", "f", '{"a": 1}'), ToolCall("call00001", "g", "{}"))
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert found.message["reasoning_content"] == "Hm." and found.message["tool_calls"][0] == call
