"""Calls in other forms than the template's own, against a parser that reads whole texts."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.answers import cut, read
from support.vocabulary_of_bytes import compiler, matches, tokens_of

from hotcold.chat import tool_formats
from hotcold.chat.call_forms import SHAPES, WRAPPERS, CallForms, regex
from hotcold.chat.stream import ChatStream, Part
from hotcold.chat.thinking import KNOWN
from hotcold.chat.tool_formats import GENERAL, GLM, HERMES, KIMI, LLAMA, MISTRAL, QWEN_XML, ToolFormat
from hotcold.chat.tool_grammar import tools_grammar
from hotcold.engine.request import Grammar
from hotcold.grammar.compiler import Matcher
from hotcold.grammar.notations import lark_of

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = {"weather": CITY, "weather_now": NOTHING, 'an "é"': NOTHING}
PARIS = '{"city": "Paris } ] ``` \\"", "days": 3}'

# --- a parser of whole texts ----------------------------------------------------------------------

AROUND = {
    "```": "```", "<tool_call>": "</tool_call>", "<tool_calls>": "</tool_calls>", "<tools>": "</tools>",
    "<tool>": "</tool>", "<function_call>": "</function_call>", "<response>": "</response>",
    "<json>": "</json>", "<JSON>": "</JSON>", "<xml>": "</xml>", "<|python_tag|>": "<|eom_id|>",
    "<|python_start|>": "<|python_end|>", "[TOOL_CALLS]": "[/TOOL_CALLS]", "[tool_call]": "[/tool_call]",
    '{ "tool_calls":': "}", "[": "]", "{": "}",
}  # fmt: skip
OBJECTS = (
    r'\{\s*"name"', r'\{\s*"type"\s*:\s*"function"\s*,\s*"name"', r'\{\s*"function"',
    r'\{\s*"type"\s*:\s*"function"\s*,\s*"function"\s*:\s*\{\s*"name"',
    r'\{\s*"function"\s*:\s*\{\s*"name"', r'\{\s*"tool"\s*:\s*\{\s*"name"',
)  # fmt: skip


def wrappers(own: ToolFormat) -> dict[str, str]:
    return {text: end for text, end in AROUND.items() if text not in (own.marker, *own.tokens)}


def pattern(text: str) -> str:
    if text == "```":
        return r"```[\w+-]*"
    return re.escape(text).replace(r"\ ", r"\s*").replace(":", r"\s*:")


def reference(text: str, own: ToolFormat) -> tuple[str, list[list[Any]]]:
    """The content and the calls of an answer in which the format's own mark does not occur."""
    around = wrappers(own)
    opening = "|".join(map(pattern, around))
    plain = {} if "<function=" in own.marks else {"<function=": "</function>"}  # arguments alone
    closings = sorted({*around.values(), *plain.values()}, key=len, reverse=True)
    closing = "|".join(map(re.escape, closings))
    names = "|".join(re.escape(json.dumps(name, ensure_ascii=False)) for name in TOOLS)
    tags = (
        "|".join(f"<function=(?P<tag>{'|'.join(map(re.escape, TOOLS))})>" for _ in plain) or "(?P<tag>(?!))"
    )
    objects = rf"(?:{'|'.join(OBJECTS)})\s*:\s*(?P<name>{names})"
    head = rf"\s*((?:(?:{opening})\s*){{0,4}})(?:{objects}|{tags})"
    calls: list[list[Any]] = []
    left: Counter[str] = Counter()  # closing texts that are due
    at = 0
    while True:
        before = rf"(?P<closed>(?:{closing}|[\s,;]){{0,16}}?)" if calls else "(?P<closed>)"
        found = re.compile(before + head, re.ASCII).match(text, at)
        rest = text[found.end() :] if found else ""
        parsed = found and (parsed_arguments(rest) if found["tag"] else parsed_call(found["name"], rest))
        if found is None or parsed is None:
            break
        calls.append([found["tag"] or json.loads(found["name"]), parsed[0]])
        opened = found[0][len(found["closed"]) :]
        left.subtract(re.findall(closing, found["closed"]))
        tokens = re.findall("|".join(map(pattern, AROUND)), opened)
        left.update(
            "```" if each[:3] == "```" else "}" if each[0] == "{" else AROUND[each] for each in tokens
        )
        left["</function>" if found["tag"] else "}"] += 1 if found["tag"] else -1
        at = found.end() + parsed[1]
    if calls and re.fullmatch(rf"(?:{closing}|[,;\s]){{1,16}}", text[at:], re.ASCII):
        return "", calls
    while calls and (found := re.compile(rf"\s*({closing})").match(text, at)) and left[found[1]] > 0:
        left[found[1]] -= 1
        at = found.end()
    return (text[at:].lstrip() if calls else text), calls


def parsed_arguments(rest: str) -> tuple[Any, int] | None:
    """The object at the beginning of a text, and where it ends."""
    spaces = len(rest) - len(rest.lstrip())
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(rest, spaces)
    except ValueError:
        return None
    return (value, end) if isinstance(value, dict) else None


def parsed_call(name: str, rest: str) -> tuple[Any, int] | None:
    """The arguments of a call, if the text behind the name ends one, and how much of it that is."""
    begin = f'{{"name": {name}'
    pairs: list[tuple[str, Any]] = []
    try:
        _, end = json.JSONDecoder(strict=False, object_pairs_hook=lambda found: found).raw_decode(
            begin + rest
        )
        json.JSONDecoder(
            strict=False, object_pairs_hook=lambda found: pairs.__setitem__(slice(None), found) or dict(found)
        ).raw_decode(begin + rest)
    except ValueError:
        return None
    keys = ["arguments" if key in ("arguments", "parameters", "args") else key for key, _ in pairs]
    if len({*keys}) < len(keys) or not {*keys} <= {"name", "type", "id", "arguments"}:
        return None
    arguments = dict(zip(keys, (value for _, value in pairs), strict=True)).get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False) if arguments.strip() else {}
        except ValueError:
            return None
    arguments = {} if arguments is None else arguments
    return (arguments, end - len(begin)) if isinstance(arguments, dict) else None


def answer(pieces: list[str], own: ToolFormat, *, sure: bool = False) -> tuple[str, list[list[Any]]]:
    found = read(ChatStream(None, own, tools=TOOLS, sure=sure), pieces)
    return found["content"], [[name, json.loads(arguments)] for name, arguments in found["calls"]]


def allows(lark: str, text: str) -> bool:
    """Answers as ``matches`` does, for many texts."""
    matcher, tokens = compiled(lark).copy(), tokens_of(text)
    return matcher.possible(tokens) == len(tokens) and matcher.consume(tokens) and matcher.complete()


@cache
def compiled(lark: str) -> Matcher:
    return compiler().compile(lark)


@cache
def grammar(own: ToolFormat = HERMES, *, parallel: bool = True, content: Grammar | None = None) -> str:
    tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in TOOLS.items()]
    found = tools_grammar(tools, "auto", parallel, own, {}, content)
    assert found is not None
    return lark_of(found, {})


# --- each form ------------------------------------------------------------------------------------


def texts(name: str, arguments: str) -> list[str]:
    """A call in every form."""
    shapes = (
        '{"name": NAME, "arguments": ARGS}', '{\n  "name": NAME,\n  "parameters": ARGS\n}',
        '{"type": "function", "name": NAME, "args": ARGS}', '{"function": NAME, "arguments": ARGS}',
        '{"type": "function", "function": {"name": NAME, "arguments": ARGS}}',
        '{"function": {"name": NAME, "arguments": ARGS}}', '{"tool": {"name":NAME,"arguments":ARGS} }',
    )  # fmt: skip
    calls = [each.replace("NAME", json.dumps(name)).replace("ARGS", arguments) for each in shapes]
    wrapped = [
        f"{opening}{calls[0]}{closing}" for opening, closing in AROUND.items() if opening != "<tool_call>"
    ]
    more = [
        f"<function={name}>{arguments}</function>",
        f"```\n<function={name}>\n  {arguments}\n</function>\n<function={name}>{arguments}</function>\n```",
        f"\n ```json\n{calls[1]}\n```\n", f"```\n<tools>[{calls[0]}, {calls[0]}]</tools>\n```",
        f"{calls[0]}\n{calls[0]}", f"```json\n{calls[0]}\n```\n\n```json\n{calls[4]}\n```",
        f"{calls[0]}; {calls[3]}", f'<tools>\n{{"tool_calls": [{calls[4]}]}}</tools>',
        f"[{calls[0]},\n {calls[2]}]",
    ]  # fmt: skip
    return [*calls, *wrapped, *more]


@pytest.mark.parametrize("text", texts("weather", PARIS))
def test_a_call_in_any_form_wherever_the_text_is_cut(text: str) -> None:
    expected = reference(text, HERMES)
    assert (
        expected[0] == "" and len(expected[1]) in (1, 2) and expected[1][0] == ["weather", json.loads(PARIS)]
    )
    pieces = [[text[:i], text[i:]] for i in range(len(text) + 1)]
    assert all(answer(each, HERMES) == expected for each in [*pieces, [*text]])
    assert answer([*text], HERMES, sure=True) == answer([text], HERMES, sure=True) == expected
    assert allows(grammar(), text)


@pytest.mark.parametrize(
    ("name", "arguments", "allowed"),
    [
        ("wind", PARIS, True),
        ("weather_", PARIS, True),
        ("weather", '{"town": "Paris"}', False),
        ("weather", '{"city": "Paris", "days": "x"}', False),
        ("weather", "[1]", False),
        ("weather", '{"city": }', False),
        ("weather_now", '{"city": "Paris"}', False),
    ],
)
def test_unknown_names_stay_text_and_arguments_must_match(name: str, arguments: str, allowed: bool) -> None:
    for text in texts(name, arguments):
        expected = reference(text, HERMES)
        assert answer([*text], HERMES) == answer([text], HERMES) == expected
        assert (expected == (text, [])) is (name not in TOOLS or arguments[0] != "{" or ": }" in arguments)
    lark = grammar()
    assert {allows(lark, text) for text in texts(name, arguments)} == {allowed}


@pytest.mark.parametrize("text", texts("weather", PARIS)[::4])
def test_a_call_that_is_cut_off(text: str) -> None:
    """Without a grammar it is text; with one it is a call from its arguments on."""
    first = text.index(PARIS)
    for end in range(len(text)):
        head = text[:end]
        assert answer([*head], HERMES) == reference(head, HERMES)
        found = read(ChatStream(None, HERMES, tools=TOOLS, sure=True), [*head])
        if end <= first:
            assert (found["content"], found["calls"]) == (head, [])
        else:
            assert found["content"] == "" and found["calls"][0] == ["weather", PARIS[: end - first]]


ORDINARY = [
    '```json\n{"name": "Mary", "age": 3}\n```',
    '{"name": "weather station", "arguments": {}}',
    '```python\nprint("weather")\n```',
    '{"title": "weather", "name": "weather"}',
    'Here: {"name": "weather", "arguments": {"city": "x"}}',
    '[1, 2, {"name": "weather"}]',
    '{"na',
    "```",
    "",
    "{{{{{{",
    '{"name": ""}',
    "<function=wind>{}</function>",
    "<function=weather_>{}</function>",
    "<function>weather</function>",
    '{"name": "weath\\u0065r", "arguments": {}}',
]


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    own: ToolFormat
    for own in (HERMES, LLAMA, MISTRAL, QWEN_XML, GLM, KIMI, GENERAL):
        assert answer([*text], own) == answer([text], own) == reference(text, own) == (text, [])
        assert allows(grammar(own), text) or (own.tag and own.tag in text)  # its mark begins a call


def test_text_is_held_back_until_it_is_decided() -> None:
    stream = ChatStream(None, HERMES, tools=TOOLS, sure=True)
    assert [stream.push(each) for each in ("```js", "on\n{", '"name": "wea')] == [[], [], []]
    assert stream.push("k") == [Part("content", '```json\n{"name": "weak')]
    stream = ChatStream(None, HERMES, tools=TOOLS, sure=True)
    assert stream.push('```json\n{"name": "weather", "argu') == []
    assert stream.push('ments": {"ci') == [Part("call_start", name="weather"), Part("call_arguments", '{"ci')]
    assert ChatStream(None, HERMES, tools=TOOLS).push("``` is") == [Part("content", "``` is")]


NOW = '{"name": "weather_now", "arguments": {}}'


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"{NOW}] x", "] x"),
        (f"{NOW}}} x", "} x"),
        (f"[{NOW}]] x", "] x"),
        (f"[{NOW}, {NOW}] x", "x"),
        (f"{NOW}}}]</tools>", ""),
        (f"{NOW}</tools> x", "</tools> x"),
        (f"```\n{NOW}\n```\n\nDone.", "Done."),
        ("<function=weather_now>{}</function> x", "x"),
        ("<function=weather_now>{}} x", "} x"),
        (f"{NOW}</function> x", "</function> x"),
        (f"```\n{NOW}\n```\n```\ncode\n```", "```\ncode\n```"),
        (f"{NOW}\n```js\ncode\n```", "```js\ncode\n```"),
        (f'{NOW}\n{{"name": "wind"}}', '{"name": "wind"}'),
        (f"```json\n{NOW}\n```\n```json\n{{}}", "```json\n{}"),
        (f'{{"tool_calls": [{NOW}]}} x', "x"),
        ('{"function": {"name": "weather_now", "arguments": {}}}} x', "} x"),
    ],
)
def test_what_only_closes_a_call_is_no_content(text: str, content: str) -> None:
    found, calls = answer([*text], HERMES)
    assert (found, calls) == reference(text, HERMES)
    assert (found, {name for name, _ in calls}) == (content, {"weather_now"})
    # A grammar lets a model go on a little, rather than bend what it writes into another call.
    assert allows(grammar(), text) and answer([*text], HERMES, sure=True) == ("", calls)
    assert not allows(grammar(), text + 130 * "x")


def test_wrappers_within_each_other_and_names_that_are_not_ascii() -> None:
    call = '{"name": "an \\"é\\"", "arguments": {}}'
    text, deeper = f"```\n<tools>\n[{{{call}}}]</tools>\n```", f"```<xml><tools>[{{{call}}}]</tools></xml>```"
    assert answer([*text], HERMES) == ("", [['an "é"', {}]]) and allows(grammar(), text)
    assert answer([*deeper], HERMES) == (deeper, []) and allows(grammar(), deeper)


def test_a_call_behind_a_thought() -> None:
    text = f'<think>Hm {{"name": "weather", </think>\n\n```json\n{texts("weather", PARIS)[0]}\n```'
    for pieces in ([text], [*text]):
        found = read(ChatStream(KNOWN[0], HERMES, tools=TOOLS), pieces)
        assert found == {"content": "", "reasoning": 'Hm {"name": "weather",', "calls": [["weather", PARIS]]}


def test_the_formats_own_mark_is_read_behind_text_that_looked_like_a_form() -> None:
    call = '<tool_call>\n{"name": "weather_now", "arguments": {}}\n</tool_call>'
    for text in ("{", '```xml\n{"name": "x', "```xml\n"):
        assert matches(grammar(), text + call)
        assert answer([*(text + call)], HERMES, sure=True) == (text.rstrip(), [["weather_now", {}]])


def test_one_call_where_they_are_not_parallel() -> None:
    one, two = texts("weather", PARIS)[0], "[" + ", ".join([texts("weather", PARIS)[0]] * 2) + "]"
    for lark in (grammar(parallel=False), grammar(LLAMA)):
        assert matches(lark, one) and matches(lark, f"```json\n{one}\n```") and not matches(lark, two)
    assert matches(grammar(), two)


@pytest.mark.parametrize("own", [HERMES, LLAMA, QWEN_XML], ids=lambda each: each.name)
def test_a_form_or_content_that_matches_a_schema(own: ToolFormat) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}}
    lark = grammar(own, content=Grammar("json_schema", json.dumps(schema)))
    call = '{"name": "weather", "arguments": {"city": "Paris"}}'
    for text in (call, f"```json\n{call}\n```", call.replace(": ", " : ").replace("arguments", "parameters")):
        assert matches(lark, text), text
        assert answer([*text], own, sure=True) == ("", [["weather", {"city": "Paris"}]])
    for text in ('{"name": "weather", "n": 3}', '{"name": "weather"}', '{\n  "n": 3\n}'):
        assert matches(lark, text), text
        assert answer([*text], own, sure=True) == (text, [])
    assert not any(matches(lark, text) for text in ("```json\n{}\n```", "Hm", call.replace("city", "x")))


# --- any text -------------------------------------------------------------------------------------

PIECES = st.lists(
    st.sampled_from([
        *AROUND, *AROUND.values(), "```json\n", '{"name": "weather"', ', "arguments": {"city": "x"}}', "}",
        '{"name": "weather_now", "arguments": {}}', '"name"', ":", '"weather"', '"', "{", " ", "\n", ",", ";",
        "<function=", "weather_now>{}", "</function>", "weather>",
        '{"name": "wind", "arguments": {}}', '{"type": "function", "function": ', '{"name": "', "weather",
        "_now", "text",
    ]), max_size=9,
).map("".join)  # fmt: skip


@given(PIECES, st.data(), st.sampled_from([HERMES, LLAMA, MISTRAL, GENERAL]))
@example('{"name": "weather_now", "arguments": {}}\n```json\n{"name": "wind"}\n```', None, HERMES)
@example('```{"name": "weather_now", "arguments": {}}```\n```\ncode\n```', None, HERMES)
def test_any_text_against_the_parser_of_whole_texts(text: str, data: Any, own: ToolFormat) -> None:
    if own.marker in text:
        return
    content, calls = expected = reference(text, own)
    for pieces in ([text], [*text], [text] if data is None else data.draw(cut(text))):
        found = answer(pieces, own)
        assert found[1] == calls and found[0].strip() == content.strip(), expected
    if not calls:
        assert answer([text], own) == (text, [])


@given(PIECES)
def test_a_grammar_and_a_stream_read_any_text_in_the_same_way(text: str) -> None:
    """A text that begins no call is always allowed; what is allowed is read as without a grammar."""
    if HERMES.marker in text:
        return
    lark = grammar()
    expected = reference(text, HERMES)
    head, _ = CallForms(HERMES, TOOLS).first(text)
    if head is None:
        assert allows(lark, text)
    elif allows(lark, text):
        assert expected[1] and answer([*text], HERMES, sure=True) == ("", expected[1])


@given(PIECES)
def test_what_stands_before_a_name_begins_nothing_longer(text: str) -> None:
    for own in (HERMES, LLAMA):
        before = re.compile(regex(CallForms(own, TOOLS).before, re.escape))
        assert len([end for end in range(len(text) + 1) if before.fullmatch(text, 0, end)]) <= 1


def test_each_row_has_its_example_and_stands_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "chat.md").read_text("utf-8")
    for wrapper in WRAPPERS:
        opening = "".join(each if isinstance(each, str) else "" for each in wrapper.opening)
        assert wrapper.source.startswith("https://") and wrapper.source.split("github.com/")[1] in page, (
            opening
        )
        assert opening.replace("|", r"\|") in page
    assert all(shape.source.split("github.com/")[1] in page for shape in SHAPES)


def test_no_form_has_the_marks_of_the_formats_own_calls() -> None:
    formats = [each for each in vars(tool_formats).values() if isinstance(each, ToolFormat)]
    assert len(formats) > 15
    for own in formats:
        for mark in filter(None, own.marks):
            assert CallForms(own, TOOLS).first(f'{mark}{{"name": "weather"') == (None, False)


def test_spaces_within_a_call_end() -> None:
    """A model that finds no way on writes spaces where it may; a grammar must not let it do so for ever."""
    before, behind = NOW.split(", ")
    name, value = behind.split(" ")
    for parts in ((before, f",{behind}"), (f"{before},", behind), (f"{before}, {name[:-1]}", f": {value}"),
                  (f"{before}, {name}", value), (NOW[:-1], "}")):  # fmt: skip
        assert all(allows(grammar(), space.join(parts)) for space in ("", " ", "\n    ", "\n\t"))
        assert not any(allows(grammar(), (20 * space).join(parts)) for space in (" ", "\t", "\n"))


def test_many_tools_cost_no_more_than_a_few() -> None:
    """As many as clients of MCP send."""
    tools = [
        {"type": "function", "function": {"name": f"server_{i}_tool_{i}", "parameters": CITY}}
        for i in range(259)
    ]
    found = tools_grammar(tools, "auto", True, HERMES, {})
    assert found is not None
    matcher = compiler().compile(lark_of(found, {})).copy()
    for first, second in pairwise(
        tokens_of('```json\n{"name": "server_7_tool_7", "arguments": {"city": "x"}}')
    ):
        matcher.mask()  # within the limits of a step
        assert matcher.consume([first]), second
