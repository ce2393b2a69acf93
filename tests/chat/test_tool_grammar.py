"""Answers that may or must call tools, by the formats of models."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from support.answers import read
from support.built_in import tokenizer
from support.vocabulary_of_bytes import check, compiler, ids_in, matches, tokens_of

from hotcold.chat.stream import ChatStream
from hotcold.chat.tool_formats import (
    HARMONY,
    HERMES,
    KIMI,
    LLAMA,
    MINIMAX,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN_XML,
    TaggedCall,
    ToolFormat,
)
from hotcold.chat.tool_grammar import tools_grammar, without_calls
from hotcold.engine.request import Grammar
from hotcold.grammar.constraint import Grammars
from hotcold.grammar.error import GrammarError
from hotcold.grammar.notations import lark_of

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "weather_now", "strict": False}},
]
CITY = '{"name": "weather", "arguments": {"city": "Köln", "days": 3}}'
NOW = '{"name": "weather_now", "arguments": {}}'


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def lark(
    choice: object, *, parallel: bool = True, form: ToolFormat = HERMES, ids: dict[str, int] | None = None
) -> str:
    grammar = tools_grammar(TOOLS, choice, parallel, form, ids)  # type: ignore[arg-type]
    assert isinstance(grammar, Grammar)
    return lark_of(grammar, ids or {})


WRONG_CALLS = [
    hermes('{"name": "wind", "arguments": {}}'),
    hermes(CITY.replace("3", "12")),
    hermes(CITY.replace('"city"', '"town"')),
    hermes('{"arguments": {}, "name": "weather_now"}'),
    hermes(NOW.replace("{}", '{"x": 1}')),
    hermes(CITY)[:-1],
    hermes(CITY) + "x",
    "<tool_call>",
]


def test_auto_is_text_and_then_perhaps_calls() -> None:
    text = ["", "It rains.", "a < b <tool_cal", '{"name": "weath', "\n\n"]
    right = [
        *text,
        hermes(CITY),
        hermes(NOW),
        "Let me see.\n" + hermes(CITY, NOW, CITY),
        hermes(CITY.replace(": {", ": {\n  ")),
    ]
    check(lark("auto"), right, [*WRONG_CALLS, "Hm <tool_call> x", hermes(CITY) + hermes(NOW)])


def test_required_is_calls_only() -> None:
    check(
        lark("required"), [hermes(CITY), hermes(NOW, CITY)], [*WRONG_CALLS, "", "Hm", "Hm\n" + hermes(CITY)]
    )


def test_a_named_tool_is_the_only_one() -> None:
    named = {"type": "function", "function": {"name": "weather_now"}}
    check(lark(named), [hermes(NOW)], [hermes(CITY), hermes(NOW, CITY), "Hm"])


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_one_call_where_they_are_not_parallel(choice: str) -> None:
    check(lark(choice, parallel=False), [hermes(CITY)], [hermes(CITY, NOW)])


def test_llamas_calls_begin_with_the_answer() -> None:
    call = CITY.replace("arguments", "parameters")
    marked = "<|python_tag|>" + call
    check(
        lark("auto", form=LLAMA),
        [call, "Hm.", "Hm. {x}", marked, "Hm" + marked],
        ["<|python_tag|>x", call[:-1]],
    )
    check(lark("required", form=LLAMA), [call], ["Hm.", call + call, f"{call}; {call}"])


@pytest.mark.parametrize("form", [QWEN_XML, MINIMAX], ids=lambda each: each.name)
def test_models_may_leave_out_the_marker_before_tags(form: ToolFormat) -> None:
    """Qwen3-Coder often begins with ``<function=``, and still writes the end of the mark."""
    kind = form.call
    assert isinstance(kind, TaggedCall)
    before, between, behind = kind.argument
    city = f"{kind.prefix}weather{kind.separator}{before}city{between}Rome{behind}{kind.suffix}"
    now = f"{kind.prefix}weather_now{kind.separator}{kind.suffix}"
    right = [city, city + form.after, f"Hm.\n{now}", '{"name": "x' + now, form.before + city + form.after,
             f"{now}{form.between}{city}{form.after}"]  # fmt: skip
    check(
        lark("auto", form=form),
        right,
        [now + "x", kind.prefix, f"{kind.prefix}wind{kind.separator}"],
    )
    assert not matches(lark("auto", form=form, parallel=False), f"{now}{form.between}{city}{form.after}")
    for text in right:
        found = read(
            ChatStream(None, form, tools={"weather": WEATHER, "weather_now": None}, sure=True), [*text]
        )
        assert len(found["calls"]) == text.count(kind.prefix)
        assert "<" not in found["content"]


def test_mistrals_calls_are_a_list() -> None:
    one, two = f"[TOOL_CALLS][{CITY}]", f"[TOOL_CALLS][{CITY}, {NOW}]"
    check(lark("auto", form=MISTRAL), ["Hm [x]", one, two, "Hm" + one], ["[TOOL_CALLS]", "[TOOL_CALLS]Hm"])
    check(lark("required", form=MISTRAL, parallel=False), [one], [two, ""])


def test_a_marker_that_is_a_control_token_is_that_token() -> None:
    """And its letters are no text either, which would look the same."""
    grammar = lark("auto", form=MISTRAL, ids={"[TOOL_CALLS]": 1})
    assert 1 not in tokenizer().stop_ids  # BOS plays its part
    matcher = compiler().compile(grammar).copy()
    assert 1 in ids_in(matcher.mask())
    assert matcher.consume([1, *tokens_of(f"[{CITY}]")]) and matcher.complete()
    assert not matches(grammar, f"[TOOL_CALLS][{CITY}]") and matches(grammar, "Hm [TOOL")


def test_free_text_has_room_for_other_control_tokens() -> None:
    """As a model has them around its thinking."""
    grammar = lark("auto", ids={"[THINK]": 0, "[/THINK]": 1})
    for tail, complete in (("Hm", True), (hermes(CITY), True), ("<tool_call>\n{", False), ("", True)):
        matcher = compiler().compile(grammar).copy()
        assert matcher.consume([0, *tokens_of("Let me <b>see"), 1, *tokens_of("\n"), 1, *tokens_of(tail)])
        assert matcher.complete() is complete
    matcher = compiler().compile(grammar).copy()
    assert matcher.consume(tokens_of("<tool_call>\n"))
    assert not {0, 1} & ids_in(matcher.mask())


def test_an_answer_has_so_many_calls_at_most() -> None:
    grammar = lark("required")
    assert matches(grammar, hermes(*[NOW] * 16)) and not matches(grammar, hermes(*[NOW] * 17))


@pytest.mark.parametrize(
    "form", [HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, QWEN_XML, KIMI, HARMONY], ids=lambda f: f.name
)
@pytest.mark.parametrize(
    ("content", "right", "wrong"),
    [
        (Grammar("json_object"), '{"a": [1]}', "[1]"),
        (Grammar("json_schema", '{"type": "array", "items": {"type": "integer"}}'), "[1, 2]", '["a"]'),
        (Grammar("regex", "[0-9]+/x"), "12/x", "x"),
    ],
    ids=lambda each: each.kind if isinstance(each, Grammar) else "",
)
def test_calls_or_content_of_a_format(form: ToolFormat, content: Grammar, right: str, wrong: str) -> None:
    call = {
        HERMES: hermes(NOW), LLAMA: NOW.replace("arguments", "parameters"), MISTRAL: f"[TOOL_CALLS][{NOW}]",
        MISTRAL_ARGS: "[TOOL_CALLS]weather_now[ARGS]{}",
        QWEN_XML: "<tool_call>\n<function=weather_now>\n</function>\n</tool_call>",
        KIMI: "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather_now:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        HARMONY: "<|channel|>commentary to=functions.weather_now<|message|>{}",
    }[form]  # fmt: skip
    before = "<|channel|>final<|message|>" if form is HARMONY else ""
    auto, required = (
        tools_grammar(TOOLS, choice, True, form, {}, content) for choice in ("auto", "required")
    )
    assert auto is not None and required is not None
    right, wrong = before + right, before + wrong
    check(lark_of(auto, {}), [call, right], [wrong, "", "Hm", f"Hm{call}", f"{right}{call}"])
    check(lark_of(required, {}), [call], [right, wrong, ""])


def test_content_of_a_format_alone_stands_between_the_marks_of_its_channel() -> None:
    content = Grammar("json_object")
    assert without_calls(content, HERMES, {}) is content
    gbnf = Grammar("gbnf", 'root ::= "a"')
    assert without_calls(gbnf, HARMONY, {}) is gbnf
    found = lark_of(without_calls(content, HARMONY, {}), {})
    final, think = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    check(
        found, [final + "{}", think + final + "{}"], ["{}", final, final + "[]", think, final + "{}<|end|>"]
    )


def test_marks_of_channels_that_are_tokens_are_these_tokens() -> None:
    """Two of them, for which BOS and another play the parts."""
    ids = {"<|channel|>": 0, "<|message|>": 1}
    for choice, tail, complete in (
        ("auto", [0, "final", 1, "Yes <b>"], True),
        ("auto", [0, "commentary to=functions.weather_now", 1, "{}"], True),
        ("required", [0, "final"], False),
        ("required", ["<|channel|>"], False),
    ):
        matcher = compiler().compile(lark(choice, form=HARMONY, ids=ids)).copy()
        tokens = [id for each in tail for id in ([each] if isinstance(each, int) else tokens_of(each))]
        ok = all(token in ids_in(matcher.mask()) and matcher.consume([token]) for token in tokens)
        assert ok is complete and (not ok or matcher.complete())


TAGGED = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "kind": {"type": "string", "enum": ["a", "b"]},
        "n": {"$ref": "#/$defs/n"},
    },
    "required": ["text"],
    "$defs": {"n": {"type": "integer"}},
}


def test_arguments_in_tags_match_their_schema() -> None:
    def written(*arguments: tuple[str, str]) -> str:
        inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
        return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"

    def grammar(parameters: Any) -> str:
        found = tools_grammar([tool("f", parameters=parameters)], "required", False, QWEN_XML, {})
        assert found is not None
        return lark_of(found, {})

    text = ("text", 'any "text"\n\n< </p>')
    right = [
        (text,),
        (("text", ""),),
        (text, ("kind", "a")),
        (text, ("n", "5")),
        (text, ("kind", "b"), ("n", "-5")),
    ]
    wrong = [
        (),
        (("kind", "a"),),
        (text, ("kind", "c")),
        (text, ("n", "five")),
        (("n", "5"), text),
        (text, ("x", "y")),
    ]
    check(grammar(TAGGED), [written(*each) for each in right], [written(*each) for each in wrong])
    auto = tools_grammar([tool("f", parameters=TAGGED)], "auto", False, QWEN_XML, {})
    assert auto is not None
    call = written(text)
    unmarked = call.replace("<tool_call>\n", "")
    check(
        lark_of(auto, {}),
        ["Hm", "Hm\n" + call, unmarked],
        ["Hm <function=f>", unmarked.replace("text", "x", 1)],
    )
    check(grammar({"type": "object"}), [written(), written(("x", "y"), ("z", "{}"))], [written(("", "y"))])


def test_where_no_tool_may_be_called_all_is_text_but_the_marks() -> None:
    assert tools_grammar(TOOLS, "none", True, HERMES) is None
    assert tools_grammar([], "auto", True, HERMES) is None
    free = lark_of(without_calls(None, HERMES, {}), {})
    check(free, ["", "It rains.", "<tool_cal", CITY, f"```json\n{NOW}\n```"], ["<tool_call>", hermes(CITY)])
    ids = {"[TOOL_CALLS]": 1, "[THINK]": 0}
    matcher = compiler().compile(lark_of(without_calls(None, MISTRAL, ids), ids)).copy()
    assert matcher.consume([0, *tokens_of("Hm")]) and matcher.complete()
    assert 0 in ids_in(matcher.mask()) and 1 not in ids_in(matcher.mask())
    channels = lark_of(without_calls(None, HARMONY, {}), {})
    call = "<|channel|>commentary to=functions.weather_now<|message|>{}"
    check(channels, ["<|channel|>final<|message|>Yes."], [call])


def tool(name: object, **more: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([tool("a", parameters={"type": "string"})], "not a schema of type 'object'"),
        ([tool("a", parameters="x")], "not a schema of type 'object'"),
        (
            [tool("a", parameters={"type": "object", "properties": {"p": {"type": "text"}}})],
            "the tool 'a': type at properties.p is 'text'",
        ),
        (
            [tool("a", parameters={"type": "object", "properties": {"p": {"not": {}}}}, strict=True)],
            "the tool 'a': not at properties.p cannot be enforced: remove it, or remove strict",
        ),
        ([tool("a", parameters={"type": "object", "title": "x" * 70_000})], "the tool 'a': .*65536"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_schemas_of_tools_that_are_wrong_are_refused(tools: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        tools_grammar(tools, "auto", True, HERMES)
    assert "\n" not in str(caught.value)


def test_many_tools_compile_and_every_call_is_for_one_of_them() -> None:
    tools = [tool(f"tool {i} \"'<é>", parameters=WEATHER) for i in range(128)]
    grammar = tools_grammar(tools, "required", False, HERMES)
    assert grammar is not None
    grammars = Grammars(tokenizer())
    grammars.check(grammar)
    grammars.close()
    matcher = compiler().compile(lark_of(grammar, {})).copy()
    draw = random.Random(0)
    output: list[int] = []
    while not (allowed := ids_in(matcher.mask())) & compiler().stops and len(output) < 400:
        quote = allowed & set(tokens_of('"}'))
        output.append(draw.choice(sorted(quote or allowed)))
        assert matcher.consume(output[-1:])
    text = b"".join(map(tokenizer().piece, output)).decode()
    call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    assert call["name"] in {each["function"]["name"] for each in tools} and "city" in call["arguments"]
