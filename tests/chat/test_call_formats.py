"""Formats of calls, against the templates of the models: what a template writes of a call in a history is
what its model was trained to write, so that must be read back, and the grammar must allow it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import chat_models
from support.answers import read, steps
from support.chat_models import chat_of
from support.vocabulary_of_bytes import check, matches

from hotcold.chat.chat import Chat
from hotcold.chat.harmony import HarmonyStream
from hotcold.chat.messages import check_messages
from hotcold.chat.rendering import TemplateProcess
from hotcold.chat.stream import ChatStream
from hotcold.chat.tool_formats import (
    DEEPSEEK,
    DEEPSEEK_R1,
    GEMMA4,
    GENERAL,
    GLM,
    GLM_TIGHT,
    HARMONY,
    HERMES,
    KIMI,
    LFM2,
    LLAMA,
    MINIMAX,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_IDS,
    NEMOTRON,
    QWEN_XML,
    ToolFormat,
)
from hotcold.chat.tool_grammar import tools_grammar
from hotcold.grammar.notations import lark_of

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
FORMATS = {
    "gpt-oss": HARMONY, "qwen2.5": HERMES, "qwen3-coder": QWEN_XML, "mistral-nemo": MISTRAL,
    "mistral-small-3.2": MISTRAL_IDS, "glm-4.6": GLM, "deepseek-r1": DEEPSEEK_R1, "kimi-k2": KIMI,
    "deepseek-v3.1": DEEPSEEK, "qwen3.5": QWEN_XML, "glm-4.7-flash": GLM_TIGHT, "minimax-m2": MINIMAX,
    "ministral-3": MISTRAL_ARGS, "lfm2": LFM2, "lfm2.5": LFM2, "gemma-4": GEMMA4, "nemotron-v2": NEMOTRON,
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "places": {"type": "array", "items": {"type": "string"}},
        "more": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        "warm": {"type": "boolean"},
    },
    "required": ["city"],
}
ARGUMENTS = {
    "city": 'Pa"ris\n <b> 5 [x]', "days": 3, "places": ["a", "<c>"], "more": {"x": None}, "warm": True,
}  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip
USER = [{"role": "user", "content": "Hello"}]
ENDS = (
    "<|im_end|>", "<|end|>", "<|call|>", "<｜end▁of▁sentence｜>", "[e~[", "<|tool_response>", "<turn|>",
    "<SPECIAL_12>",
)  # fmt: skip


def asked(*calls: tuple[str, dict[str, Any]], content: str | None = None) -> dict[str, Any]:
    found = [
        {"id": f"id{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": found}


def rendered(chat: Chat, messages: list[dict[str, Any]], generate: bool = True) -> str:
    thinks = {"enable_thinking": True}
    return chat.text(check_messages(messages), TOOLS, kwargs=thinks, add_generation_prompt=generate)


def written(chat: Chat, message: dict[str, Any]) -> str:
    """Returns what the template writes for an answer, up to the tokens that end it."""
    bare, full = rendered(chat, USER), rendered(chat, [*USER, message], False)
    if not full.startswith(bare):
        bare = bare.rstrip().removesuffix("<think>")
    assert full.startswith(bare), "the prompt has begun something else"
    found = full[len(bare) :].rstrip()
    for end in ENDS:
        found = found.removesuffix(end).rstrip()
    found = found.lstrip("\n").removeprefix("<think>").lstrip("\n")
    return found.removeprefix("</think>").lstrip("\n")


_shared = TemplateProcess()  # starting one for each template would take long


@pytest.fixture(scope="session", autouse=True)  # a worker may run other modules between tests of this one
def _process() -> Iterator[None]:
    yield
    _shared.close()


@pytest.fixture(scope="module", params=FORMATS)
def native(request: pytest.FixtureRequest) -> Iterator[tuple[str, Chat]]:
    chat, _ = chat_of(chat_models.bpe((TEMPLATES / f"{request.param}.jinja").read_text("utf-8")))
    chat._process = _shared
    yield request.param, chat


@pytest.mark.parametrize(
    "calls",
    [
        [("weather", ARGUMENTS)],
        [("now", {})],
        [("weather", {"city": ""}), ("weather", {"city": "5", "places": []})],
    ],
)
def test_what_templates_write_is_read(
    native: tuple[str, Chat], calls: list[tuple[str, dict[str, Any]]]
) -> None:
    name, chat = native
    assert chat.tool_format is FORMATS[name]
    calls = calls[:1] if chat.tool_format is HARMONY else calls  # its template has one call a message
    text = written(chat, asked(*calls))
    for sure in (False, True):
        for step in (1, 7, len(text)):
            found = read(chat.stream(False, TOOLS, sure=sure), steps(text, step))
            assert found["content"].strip() == found["reasoning"] == ""
            assert [(name, json.loads(arguments)) for name, arguments in found["calls"]] == calls
    grammar = tools_grammar(TOOLS, "required", True, chat.tool_format, {})
    assert grammar is not None
    lark = lark_of(grammar, {})
    assert matches(lark, text), text
    assert not matches(lark, text.replace("weather", "wind").replace("now", "then"))
    auto = tools_grammar(TOOLS, "auto", True, chat.tool_format, {})
    assert auto is not None and matches(lark_of(auto, {}), text)


CITIES = ("weather", {"city": "Rome"}), ("weather", {"city": "5", "places": [], "warm": False})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lfm2.5", "<|tool_call_start|>[weather(city='Rome'), weather(city='5', places=[], warm=False)]"
         "<|tool_call_end|>"),
        ("gemma-4", '<|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|><|tool_call>call:weather'
         '{city:<|"|>5<|"|>,places:[],warm:false}<tool_call|>'),
        ("nemotron-v2", '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "weather", '
         '"arguments": {"city": "5", "places": [], "warm": false}}]</TOOLCALL>'),
    ],
)  # fmt: skip
def test_templates_of_ours_write_what_the_publishers_do(name: str, text: str) -> None:
    """The texts are what the published templates made of these calls."""
    chat, _ = chat_of(chat_models.bpe((TEMPLATES / f"{name}.jinja").read_text("utf-8")))
    chat._process = _shared
    assert written(chat, asked(*CITIES)) == text


def test_what_is_cut_off_is_text(native: tuple[str, Chat]) -> None:
    _, chat = native
    text = written(chat, asked(("weather", ARGUMENTS)))
    end = text.index("Pa") + 5
    found = read(chat.stream(False, TOOLS), steps(text[:end], 3))
    assert not found["calls"] and found["content"].strip().endswith(text[end - 5 : end].strip())


def test_calls_of_tools_that_there_are_not_are_text(native: tuple[str, Chat]) -> None:
    _, chat = native
    text = written(chat, asked(("weather", {"city": "Rome"})))
    found = read(chat.stream(False, TOOLS[1:]), steps(text, 4))
    assert not found["calls"] and "weather" in found["content"] and "Rome" in found["content"]


def test_nothing_of_a_loop_of_tools_is_left_out(native: tuple[str, Chat]) -> None:
    """Ids of another server, several calls in a message, null and parts of content."""
    _, chat = native
    messages = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "Hello there"}]},
        asked(("weather", {"city": "Rome"}), ("weather", {"city": "Oslo"})),
        {"role": "tool", "tool_call_id": "id0", "content": "sunny"},
        {"role": "tool", "tool_call_id": "id1", "content": None},
        {"role": "assistant", "content": "Fine."},
        {"role": "user", "content": "Thanks"},
    ]
    found = rendered(chat, messages)
    for each in ("Be brief", "Hello there", "Rome", "sunny", "Oslo", "Fine.", "Thanks"):
        assert found.count(each) == 1, each
    assert found.index("Rome") < found.index("sunny") < found.index("Fine.")
    assert "None" not in found and "'text'" not in found


W, CITY = "weather", '{"city": "Rome"}'


@pytest.mark.parametrize(
    ("format", "text", "content", "calls"),
    [
        (MISTRAL_ARGS, f"Ok.[TOOL_CALLS]{W}[ARGS]{CITY}[TOOL_CALLS]now[ARGS]{{}}", "Ok.",
         [[W, CITY], ["now", "{}"]]),
        (MISTRAL_ARGS, f"[TOOL_CALLS]{W}[ARGS]{CITY[:-1]}", f"[TOOL_CALLS]{W}[ARGS]{CITY[:-1]}", []),
        (MISTRAL_ARGS, f"[TOOL_CALLS]{W}[ARGS][1]", f"[TOOL_CALLS]{W}[ARGS][1]", []),
        (MISTRAL_ARGS, "[TOOL_CALLS] is a mark", "[TOOL_CALLS] is a mark", []),
        (MISTRAL_IDS, f"[TOOL_CALLS]{W}[CALL_ID]a1b2c3d4e[ARGS]{CITY}", "", [[W, CITY]]),
        (MISTRAL_IDS, f"[TOOL_CALLS]{W}[ARGS]{CITY}", "", [[W, CITY]]),
        (QWEN_XML, f"Ok.\n<tool_call>\n<function={W}><parameter=city>Rome</parameter></function></tool_call>",
         "Ok.", [[W, CITY]]),
        (QWEN_XML, f"<tool_call>\n<function={W}>\n<parameter=city>\n</parameter> x </function>\n</parameter>"
         "\n</function>\n</tool_call> done", "done", [[W, '{"city": "</parameter> x </function>"}']]),
        (QWEN_XML, f"<tool_call>\n<function={W}>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\nsix"
         "\n</parameter>\n</function>", "", [[W, '{"city": "Rome", "days": "six"}']]),
        (QWEN_XML, f"Ok.\n\n<function={W}>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
         "Ok.", [[W, CITY]]),
        (QWEN_XML, "<function=now>\n</function>\n<function=now>\n</function>", "", [["now", "{}"]] * 2),
        (QWEN_XML, "Ok. <function=", "Ok. <function=", []),
        (QWEN_XML, "Ok.\n<function=x> is XML", "Ok.\n<function=x> is XML", []),
        (QWEN_XML, "<tool_call> <function=\n", "<tool_call> <function=\n", []),
        (QWEN_XML, "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
        (GLM, f"<tool_call>{W}<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>", "",
         [[W, CITY]]),
        (GLM, "<tool_call>now</tool_call><tool_call>now\n</tool_call>", "", [["now", "{}"]] * 2),
        (GLM, "<tool_call> a tag </tool_call>", "<tool_call> a tag </tool_call>", []),
        (KIMI, f"<|tool_calls_section_begin|><|tool_call_begin|>{W}<|tool_call_argument_begin|>{CITY}"
         "<|tool_call_end|><|tool_calls_section_end|>", "", [[W, CITY]]),
        (DEEPSEEK, f"Ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{W}<｜tool▁sep｜>{CITY}<｜tool▁call▁end｜>"
         "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "Ok",
         [[W, CITY], ["now", "{}"]]),
        (LLAMA, f'{{"name": "{W}", "arguments": {CITY}}}', "", [[W, CITY]]),
        (GENERAL, f'<tool_call>{{"name": "{W}", "parameters": {CITY}}}</tool_call>', "", [[W, CITY]]),
    ],
)  # fmt: skip
def test_what_models_write_otherwise(
    format: ToolFormat, text: str, content: str, calls: list[list[str]]
) -> None:
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
    for step in (1, 5, len(text)):
        found = read(ChatStream(None, format, tools=schemas), steps(text, step))
        assert (found["content"], found["calls"]) == (content, calls)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({"type": "number"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "boolean"}, "true", True),
        ({"type": "array"}, "[1", "[1"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/s"}]}, "true", "true"),
        ({"$ref": "#/$defs/s"}, "5", "5"),
        ({"enum": ["5", "6"]}, "5", "5"),
        ({"const": 5}, "5", 5),
        ({}, "5", 5),
        ({}, "Rome", "Rome"),
        ({}, '"Rome"', '"Rome"'),
        ({}, "NaN", "NaN"),
    ],
)
def test_values_between_tags_have_the_types_of_their_schema(schema: Any, text: str, value: Any) -> None:
    root = {"properties": {"a": schema}, "$defs": {"s": {"type": "string"}}}
    written = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    found = read(ChatStream(None, QWEN_XML, tools={"f": root}), steps(written, 9))
    (_, arguments), *_ = found["calls"]
    assert json.loads(arguments) == {"a": value} and type(json.loads(arguments)["a"]) is type(value)


# --- Harmony --------------------------------------------------------------------------------------

A, F, C = (f"<|channel|>{name}<|message|>" for name in ("analysis", "final", "commentary"))
NEXT = "<|end|><|start|>assistant"
TO = f"<|channel|>commentary to=functions.{W} <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"{A}Hm.{NEXT}{F}Yes.", "Hm.", "Yes.", []),
        (f"{A}Hm.{NEXT}{F}Yes.<|return|>", "Hm.", "Yes.", []),
        (f"{A}Hm.{NEXT}{A}So.{NEXT}{C}I look.{NEXT}{TO}{CITY}<|call|>", "Hm.\nSo.", "I look.", [[W, CITY]]),
        (f"{TO}{CITY}", "", "", [[W, CITY]]),
        (f" to=functions.{W}<|channel|>commentary json<|message|>{CITY}", "", "", [[W, CITY]]),
        (f"<|channel|>analysis to=functions.{W}<|message|>{CITY}", "", "", [[W, CITY]]),
        (f"<|channel|>commentary<|channel|>analysis<|message|>Hm.{NEXT}{F}Yes.", "Hm.", "Yes.", []),
        (f'{TO}{{"city": "a\nb"}}', "", "", [[W, '{"city": "a\\nb"}']]),
        (f"{A}Hm", "Hm", "", []),
        (f"{A}Hm.{NEXT}", "Hm.", "<|start|>assistant", []),
        (f"{TO}{CITY[:-2]}", "", f"{TO}{CITY[:-2]}", []),
        (TO, "", TO, []),
        (TO.replace(W, "wind") + CITY, "", TO.replace(W, "wind") + CITY, []),
        ("No marks <|at all", "", "No marks <|at all", []),
        ("to be or not", "", "to be or not", []),
        (f"{F}a <| b <|en", "", "a <| b <|en", []),
        ("", "", "", []),
    ],
)  # fmt: skip
def test_channels(text: str, reasoning: str, content: str, calls: list[list[str]]) -> None:
    expected = {"content": content, "reasoning": reasoning, "calls": calls}
    for step in (1, 2, 9, len(text) or 1):
        assert read(HarmonyStream({W: SCHEMA}), steps(text, step)) == expected


def test_a_call_in_a_channel_comes_as_it_is_written() -> None:
    stream = HarmonyStream({W: SCHEMA}, sure=True)
    assert [part.name for part in stream.push(TO)] == [W]
    assert [part.text for part in stream.push('{"city": ')] == ['{"city": ']
    assert stream.finish() == [] and stream.calls == 1


def test_without_tools_a_call_is_text() -> None:
    assert read(HarmonyStream(), steps(TO + CITY, 3)) == {"content": TO + CITY, "reasoning": "", "calls": []}


@pytest.mark.parametrize("parallel", [True, False])
def test_answers_in_channels_match_their_grammar(parallel: bool) -> None:
    auto, required = (lark_of(found, {}) for choice in ("auto", "required")
                      if (found := tools_grammar(TOOLS, choice, parallel, HARMONY, {})))  # fmt: skip
    content = [f"{F}Yes.", F, f"{A}Hm.{NEXT}{F}Yes.", f"{A}Hm.{NEXT}{C}I look.{NEXT}{F}Yes"]
    other_order = f" to=functions.{W}<|channel|>commentary json<|message|>{CITY}"
    calls = [TO + CITY, f"{A}Hm.{NEXT}{TO}{CITY}", other_order]
    wind = TO.replace(W, "wind") + CITY
    wrong = [TO, TO + "{}", wind, f"{TO}{CITY}{NEXT}", "Yes.", f"{F}a<|end|>b", f"{A}Hm."]
    check(auto, content + calls, wrong)
    check(required, calls, content + wrong)
