"""Answers divided into content, thinking and calls, however they are cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.answers import cut, parts_of, read

from hotcold.chat.harmony import HarmonyStream
from hotcold.chat.stream import ChatStream, Part
from hotcold.chat.thinking import KNOWN, opens_thinking, thinking_of
from hotcold.chat.tool_formats import (
    DEEPSEEK,
    DEEPSEEK_R1,
    GEMMA4,
    GENERAL,
    GLM,
    GLM_TIGHT,
    HERMES,
    KIMI,
    LFM2,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_IDS,
    QWEN_XML,
    JSONCall,
    ToolFormat,
    tool_format,
)

THINK = KNOWN[0]
ARGUMENTS = '{"city": "Rome \\" }]</tool_call>", "n": [1, {"a": null}]}'
CALL = '{"name": "weather", "arguments": ' + ARGUMENTS + "}"
OTHER = '{"name": "time", "arguments": {}}'
LLAMA_CALL = CALL.replace("arguments", "parameters")


def whole(pieces: list[str], *args: Any, **more: Any) -> dict[str, Any]:
    return read(ChatStream(*args, **more), pieces)


WEATHER, TIME = ["weather", ARGUMENTS], ["time", "{}"]


@pytest.mark.parametrize(
    ("format", "text", "content", "calls"),
    [
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", [WEATHER]),
        (HERMES, f"Let me see.\n\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{OTHER}</tool_call>",
         "Let me see.", [WEATHER, TIME]),
        (HERMES, f"<tool_call>{OTHER}</tool_call>\n\nDone. <b>", "Done. <b>", [TIME]),
        (HERMES, f"<tool_call>{CALL}", "", [WEATHER]),
        (HERMES, "<tool_call> is a tag", "<tool_call> is a tag", []),
        (HERMES, '<tool_call>\n{"city": 5}\n</tool_call>', '<tool_call>\n{"city": 5}\n</tool_call>', []),
        (HERMES, f"{OTHER} <tool", f"{OTHER} <tool", []),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "time"}</tool_call>', "",
         [["time", '{"a": 1}']]),
        (HERMES, '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
         [["time", '{"a": 1}']]),
        (HERMES, '<tool_call>{"name": "time"}</tool_call>', "", [TIME]),
        (HERMES, '<tool_call>{"name": "time", "arguments": null}</tool_call>', "", [TIME]),
        (HERMES, '<tool_call>{"name": "ti', '<tool_call>{"name": "ti', []),
        (HERMES, '<tool_call>{"name": "time", "arguments": {"a": ',
         '<tool_call>{"name": "time", "arguments": {"a": ', []),
        (HERMES, '<tool_call>{"name": "time", "parameters": {"a": 1}}</tool_call>', "",
         [["time", '{"a": 1}']]),
        (HERMES, '<tool_call>{"name": "time", "arguments": {"a": "x\ny\t"}}</tool_call>', "",
         [["time", '{"a": "x\\ny\\t"}']]),
        (HERMES, '<tool_call>{"name": "time", "arguments": "{\\"a\\": \\"x\ny\\"}"}</tool_call>', "",
         [["time", '{"a": "x\\ny"}']]),
        *((HERMES, text, text, [])
          for each in ("[1]", "5", '"now"', "{a: 1}", '{"a": NaN}', '{"a": 1,}', '{"a": 1} {}', '{"a" 1}')
          for text in [f'<tool_call>{{"name": "time", "arguments": {each}}}</tool_call>']),
        (HERMES, '<tool_call>{"name": "time", "arguments": {}, "parameters": {}}</tool_call>',
         '<tool_call>{"name": "time", "arguments": {}, "parameters": {}}</tool_call>', []),
        (HERMES, f'<tool_call>{OTHER}</tool_call>\n<tool_call>{{"name": "time", "arguments": {{"a"',
         '<tool_call>{"name": "time", "arguments": {"a"', [TIME]),
        (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>x',
         '<tool_call>{"name": 5, "arguments": {}}</tool_call>x', []),
        (LLAMA, LLAMA_CALL, "", [WEATHER]),
        (LLAMA, CALL, "", [WEATHER]),
        (LLAMA, f"<|python_tag|>{LLAMA_CALL}; {LLAMA_CALL}", "", [WEATHER, WEATHER]),
        (LLAMA, '{"temperature": 5}', '{"temperature": 5}', []),
        (LLAMA, ' {"name": "weather"', ' {"name": "weather"', []),
        (LLAMA, f"Here: {LLAMA_CALL}", f"Here: {LLAMA_CALL}", []),
        (LLAMA, '<|python_tag|>print("x")', '<|python_tag|>print("x")', []),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}, {OTHER}]", "", [WEATHER, TIME]),
        (MISTRAL, f"I look [1].[TOOL_CALLS][{OTHER}]", "I look [1].", [TIME]),
        (MISTRAL, '[TOOL_CALLS][{"name": "time", "arguments": {}, "id": "abcdefghi"}]', "", [TIME]),
        (MISTRAL, f"[{OTHER}]", f"[{OTHER}]", []),
    ],
)  # fmt: skip
def test_calls(format: ToolFormat, text: str, content: str, calls: list[list[str]]) -> None:
    expected = {"content": content, "reasoning": "", "calls": calls}
    # Llama's calls have no mark, so the names of tools must be known.
    tools = {"weather": None, "time": None} if format is LLAMA else None
    assert whole([text], THINK, format, tools=tools) == expected
    assert whole([*text], None, format, tools=tools) == expected
    thought = f"<think>\nHm <tool_call> [TOOL_CALLS] {{\n</think>\n\n{text}"
    found = whole([*thought], THINK, format, tools=tools)
    assert found["reasoning"] == "Hm <tool_call> [TOOL_CALLS] {"
    assert found["calls"] == expected["calls"]
    assert found["content"].strip() == expected["content"].strip()


def test_only_calls_of_known_tools_count() -> None:
    text = f"<tool_call>{OTHER}</tool_call><tool_call>{CALL}</tool_call>"
    assert whole([*text], None, HERMES, tools={"time": {}, "weather": {}})["calls"] == [
        TIME,
        WEATHER,
    ]
    found = whole([*LLAMA_CALL], None, LLAMA, tools={"time": None})
    assert found == {"content": LLAMA_CALL, "reasoning": "", "calls": []}


def test_without_tools_nothing_is_a_call() -> None:
    text = f"<tool_call>{CALL}</tool_call> [TOOL_CALLS]"
    assert parts_of(ChatStream(), [text]) == [Part("content", text)]


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nLet me see.\n</think>\n\nYes.", False, "Let me see.", "Yes."),
        ("\n <think>a</think>b", False, "a", "b"),
        ("Let me see.\n</think>\n\nYes.", True, "Let me see.", "Yes."),
        ("<think>\n\n</think>\n\nYes.\n", False, "", "Yes.\n"),
        ("Yes, <think>is</think> a tag.", False, "", "Yes, <think>is</think> a tag."),
        (" Yes.\n", False, "", " Yes.\n"),
        ("<think>Let me </thi", False, "Let me </thi", ""),
        ("<thin", False, "", "<thin"),
        ("  ", False, "", "  "),
        ("a</think>", False, "", "a</think>"),
        ("a</think> b </think> c", True, "a", "b </think> c"),
        ("", True, "", ""),
    ],
)
def test_thinking(text: str, opened: bool, reasoning: str, content: str) -> None:
    expected = {"content": content, "reasoning": reasoning, "calls": []}
    assert whole([text], THINK, opened=opened) == expected
    assert whole([*text], THINK, HERMES, opened=opened) == expected
    other = KNOWN[2]

    def renamed(text: str) -> str:
        return text.replace(THINK.start, other.start).replace(THINK.end, other.end)

    expected = {"content": renamed(content), "reasoning": renamed(reasoning), "calls": []}
    assert whole([*renamed(text)], other, opened=opened) == expected


WORDS = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", CALL, OTHER,
         LLAMA_CALL, " ", "\n", "text", "<", "{", "}", "[", "]", ";", ",", '"', "</", "<tool", "[TOOL"]
    ), max_size=12,
).map("".join)  # fmt: skip


def plainly(text: str, opened: bool) -> tuple[str, str]:
    """Thinking and content of a whole answer."""
    if text.lstrip().startswith("<think>"):
        text = text.lstrip().removeprefix("<think>")
    elif not opened:
        return "", text
    thinking, _, content = text.partition("</think>")
    return thinking.strip(), content.lstrip()


FORMATS = [HERMES, LLAMA, MISTRAL, MISTRAL_IDS, QWEN_XML, GLM, KIMI, DEEPSEEK, DEEPSEEK_R1]
PIECES = st.lists(
    st.sampled_from(
        [format.before for format in FORMATS]
        + [format.between or "" for format in FORMATS]
        + [format.after for format in FORMATS]
        + ["f", "[ARGS]", "[CALL_ID]", "a1b2c3d4e", "<function=", ">\n", "<parameter=a>\n",
           "\n</parameter>\n", "</function>", "\n", "<arg_key>", "</arg_key>", "<arg_value>",
           "</arg_value>\n", "functions.f:0",
           "<|tool_call_argument_begin|>", "<｜tool▁sep｜>", "```json\n", "```",
           '{"a": 1}', "{}", '{"a": "x\ny', " "]
    ), max_size=12,
).map("".join)  # fmt: skip


@given(PIECES, st.data(), st.sampled_from(FORMATS), st.booleans())
def test_where_any_format_is_cut_does_not_matter(
    text: str, data: Any, format: ToolFormat, sure: bool
) -> None:
    pieces = data.draw(cut(text))
    at_once = whole([text], THINK, format, sure=sure)
    assert whole(pieces, THINK, format, sure=sure) == at_once
    assert whole([*text], THINK, format, sure=sure) == at_once
    if not sure:  # what is no call is all there, spaces at the edges of calls aside
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in at_once["calls"])
        if not at_once["calls"]:
            assert at_once["content"].split() == text.split() or "<think>" in text


CHANNELS = st.lists(
    st.sampled_from(
        ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "assistant", "<|call|>", "<|return|>", "final",
         "analysis", "commentary", " to=functions.f", " to=python", "{}", '{"a": 1', " ", "text",
         "<|constrain|>"]
    ), max_size=14,
).map("".join)  # fmt: skip


@given(CHANNELS, st.data(), st.booleans())
def test_where_channels_are_cut_does_not_matter(text: str, data: Any, sure: bool) -> None:
    ways = (data.draw(cut(text)), [text], [*text])
    one, *others = (read(HarmonyStream({"f": {}}, sure=sure), pieces) for pieces in ways)
    assert others == [one, one]


@given(WORDS, st.data(), st.sampled_from([None, HERMES, LLAMA, MISTRAL]), st.booleans())
@example(f"<tool_call>{OTHER} x", None, HERMES, False)
def test_where_text_is_cut_does_not_matter(
    text: str, data: Any, format: ToolFormat | None, opened: bool
) -> None:
    pieces = [text] if data is None else data.draw(cut(text))
    at_once = whole([text], THINK, format, opened=opened)
    assert whole(pieces, THINK, format, opened=opened) == at_once
    assert whole([*text], THINK, format, opened=opened) == at_once
    if format is None:
        assert (at_once["reasoning"], at_once["content"]) == plainly(text, opened)


def test_what_a_grammar_holds_comes_as_it_is_written() -> None:
    stream = ChatStream(None, HERMES, sure=True)
    parts = [
        part
        for piece in (f"Ok <tool_call>{CALL[:40]}", CALL[40:45], CALL[45:])
        for part in stream.push(piece)
    ]
    assert parts[:2] == [Part("content", "Ok"), Part("call_start", name="weather")]
    texts = [part.text for part in parts[2:]]
    assert len(texts) == 3 and "".join(texts) == ARGUMENTS and json.loads(ARGUMENTS)
    cut = whole([f"Ok <tool_call>{CALL[:60]}"], None, HERMES, sure=True)
    assert cut == {"content": "Ok", "reasoning": "", "calls": [["weather", ARGUMENTS[: 60 - 33]]]}


def test_half_a_marker_is_never_shown() -> None:
    stream = ChatStream(THINK, HERMES)
    assert stream.push("Yes <tool_c") == [Part("content", "Yes")]
    assert stream.push("ats>") == [Part("content", " <tool_cats>")]
    stream = ChatStream(THINK)
    assert stream.push("<thi") == []
    assert stream.push("nk>a</th") == [Part("reasoning", "a")]
    assert stream.push("ink") == []
    assert stream.push("> b") == [Part("content", "b")]


# --- what a template asks for ---------------------------------------------------------------------

HERMES_TEMPLATE = (
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>'
)
LLAMA_TEMPLATE = (
    """<|start_header_id|>{% if tools %}{"name": the name, "parameters": {}}{% endif %}"""
    """{{ '"parameters": ' }}"""
)


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (HERMES_TEMPLATE, HERMES),
        (HERMES_TEMPLATE + "<function=", GENERAL),
        (HERMES_TEMPLATE + "<arg_key>", GENERAL),
        (HERMES_TEMPLATE.replace("arguments", "args"), GENERAL),
        (HERMES_TEMPLATE.replace('"', '\\"'), HERMES),
        (HERMES_TEMPLATE.replace("tools", "users"), GENERAL),
        ("<tool_call>", GENERAL),
        ("{{ tools }}", GENERAL),
        ("{{ message.tool_calls }}[TOOL_CALLS]", GENERAL),
        ("{{ tools }}{{ '[TOOL_CALLS] [' }}", MISTRAL),
        ("{{ tools }}[TOOL_CALLS]name[ARGS]", MISTRAL_ARGS),
        ("{{ tools }}[TOOL_CALLS]name[CALL_ID]id[ARGS]", MISTRAL_IDS),
        ("{{ tools }}<tool_call><function=f><parameter=p>", QWEN_XML),
        ("{{ tools }}<tool_call>f<arg_key>a</arg_key>\n<arg_value>", GLM),
        ("{{ tools }}<tool_call>f<arg_key>a</arg_key><arg_value>", GLM_TIGHT),
        ("{{ tools }}<|tool_call_start|>[", LFM2),
        ('{{ "List of tools: [" + tools }}', LFM2),
        ("{{ tools }}<|tool_call>call:", GEMMA4),
        ("{{ message.tool_calls }}<｜tool▁sep｜>", DEEPSEEK),
        ("{{ tools }}<|tool_calls_section_begin|><|tool_call_argument_begin|>", KIMI),
        ("{{ tools }}<｜tool▁calls▁begin｜><｜tool▁sep｜>", DEEPSEEK),
        ("{{ tools }}<｜tool▁calls▁begin｜><｜tool▁sep｜>```json", DEEPSEEK_R1),
        (LLAMA_TEMPLATE, LLAMA),
        (LLAMA_TEMPLATE.replace("<|start_header_id|>", ""), GENERAL),
    ],
)
def test_formats_of_templates(template: str, format: ToolFormat | None) -> None:
    assert tool_format(template) == format


@pytest.mark.parametrize("format", [HERMES, LLAMA, MISTRAL])
def test_an_answer_put_together_as_the_format_says_is_read(format: ToolFormat) -> None:
    assert isinstance(format.call, JSONCall)
    call = '{"name": "time", "' + format.call.key + '": {"a": 1}}'
    many = 1 if format.between is None else 3
    text = format.before + (format.between or "").join([call] * many) + format.after
    found = whole([*text], None, format, tools={"time": None})
    assert found == {"content": "", "reasoning": "", "calls": [["time", '{"a": 1}']] * many}


def test_thinking_of_templates() -> None:
    assert thinking_of("no such thing") is None
    assert thinking_of("{{ content.split('</think>')[-1] }}") == THINK
    assert thinking_of("[THINK]{{ x }}[/THINK]") == KNOWN[1]
    assert opens_thinking("<|assistant|><think>\n", THINK) and not opens_thinking(
        "<think>\n\n</think>", THINK
    )
    assert not opens_thinking("<think>", None)
