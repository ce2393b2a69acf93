"""Arguments as Python or Gemma 4 writes them: read, held to schemas, and put into prompts."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import chat_models
from support.answers import cut, read, steps
from support.chat_models import chat_of, names
from support.vocabularies import CONTROL
from support.vocabulary_of_bytes import check, compiler, ids_in, tokens_of

from hotcold.chat.chat import Chat
from hotcold.chat.literals import GEMMA, PYTHON, written_call
from hotcold.chat.messages import check_messages
from hotcold.chat.rendering import TemplateProcess
from hotcold.chat.stream import ChatStream
from hotcold.chat.thinking import KNOWN
from hotcold.chat.tool_formats import GEMMA4, LFM2, NEMOTRON, ToolFormat
from hotcold.chat.tool_grammar import tools_grammar
from hotcold.grammar.error import GrammarError
from hotcold.grammar.notations import lark_of

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
S, E = "<|tool_call_start|>", "<|tool_call_end|>"
Q = '<|"|>'


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text("utf-8")


@pytest.mark.parametrize(
    ("format", "text", "content", "calls"),
    [
        (LFM2, f"{S}[special(a=1)]{E}", "", [["special", {"a": 1}]]),
        (LFM2, f'{S}[toggle(on=True, off=false, x=None, y=null, z=-1.5e3)]{E}', "",
         [["toggle", {"on": True, "off": False, "x": None, "y": None, "z": -1500.0}]]),
        (LFM2, f'{S}[Cal.new(title="demo", who=["Al", \'Bo\'], meta={{"p": {{\'q\': True}}}})]{E}', "",
         [["Cal.new", {"title": "demo", "who": ["Al", "Bo"], "meta": {"p": {"q": True}}}]]),
        (LFM2, f'{S}[python(code="def f():\\n    print(\'hey\')\\t\\"\\x41\\u00e9\\q\\")]{E}") ]{E}', "",
         [["python", {"code": f"def f():\n    print('hey')\t\"A\xe9\\q\")]{E}"}]]),
        (LFM2, f"{S}[say(text='it's, he said', more=\"a\nb\")]{E}", "",
         [["say", {"text": "it's, he said", "more": "a\nb"}]]),
        (LFM2, f"Let me see.{S}[a(), b(x=[1,2 , ], )]{E} Done.", "Let me see.Done.",
         [["a", {}], ["b", {"x": [1, 2]}]]),
        (LFM2, f"{S}a(){E}{S}b(){E}", "", [["a", {}], ["b", {}]]),
        *((LFM2, text, text, []) for text in (
            "Use [text](url).", f"{S} is a mark", f"{S}[special(a=", f"{S}[special(1)]{E}",
            f"{S}[special]{E}",
            f"{S}[special(a=b)]{E}", f"{S}[special(a={'[' * 70}{']' * 70})]{E}", f"{S}[special(a=1 2)]{E}",
            f"{S}[(a=1)]{E}", f"{S}[special(a={{1: 2}})]{E}")),
        (GEMMA4, f"<|tool_call>call:f{{a:{Q}x<|y{Q}, b:[1,{{c:{Q}{Q}}}] }}<tool_call|>", "",
         [["f", {"a": "x<|y", "b": [1, {"c": ""}]}]]),
        (GEMMA4, f"Hm.<|tool_call>call:f{{{Q}a b{Q}:null}}<tool_call|><|tool_call>call:g{{}}<tool_call|>",
         "Hm.", [["f", {"a b": None}], ["g", {}]]),
        *((GEMMA4, text, text, []) for text in (
            "<|tool_call>f{}", "<|tool_call>call:f(a)", f"<|tool_call>call:f{{a:{Q}x",
            "<|tool_call>call:f{a:x}", "<|tool_call>call")),
        (NEMOTRON, '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]</TOOLCALL>', "",
         [["f", {"a": 1}], ["g", {}]]),
    ],
)  # fmt: skip
def test_calls_that_models_write(format: ToolFormat, text: str, content: str, calls: list[list[Any]]) -> None:
    for step in (1, 4, len(text)):
        found = read(ChatStream(None, format), steps(text, step))
        assert found["content"] == content
        assert [[name, json.loads(arguments)] for name, arguments in found["calls"]] == calls


def test_arguments_come_as_they_are_written() -> None:
    stream = ChatStream(None, LFM2, sure=True)
    given_out = [
        [part.text for part in stream.push(each)] for each in (f"{S}[f(", 'a="b', "c", '", d=T', "rue)]")
    ]
    assert given_out == [["", "{"], ['"a": "b'], ["c"], ['", "d": '], ["true}"]]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("ab'\"\\\n ,:)]}é<|>", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abc_", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b_c", "d"]), VALUES)


@given(arguments=ARGUMENTS, data=st.data(), sure=st.booleans())
def test_what_is_written_is_read_by_us_and_by_python(
    arguments: dict[str, Any], data: Any, sure: bool
) -> None:
    text = written_call("f", arguments, PYTHON)
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert {each.arg: ast.literal_eval(each.value) for each in call.keywords} == arguments
    pieces = data.draw(cut(f"{S}[{text}]{E}"))
    ((name, found),) = read(ChatStream(None, LFM2, sure=sure), pieces)["calls"]
    assert name == "f" and json.loads(found) == arguments


@given(arguments=ARGUMENTS, data=st.data())
def test_what_gemma_writes_is_read(arguments: dict[str, Any], data: Any) -> None:
    text = f"<|tool_call>call:{written_call('f', arguments, GEMMA)}<tool_call|>"
    ((name, found),) = read(ChatStream(None, GEMMA4), data.draw(cut(text)))["calls"]
    assert name == "f" and json.loads(found) == arguments


# --- grammars -------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "kind": {"enum": ["a", "b", 5]},
        "n": {"$ref": "#/$defs/n"},
        "list": {"type": "array", "items": {"type": ["string", "null"]}, "minItems": 1, "maxItems": 2},
        "tree": {
            "type": "object",
            "properties": {
                "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]},
                "on": {"type": "boolean"},
            },
            "required": ["on"],
        },
        "any": {},
    },
    "required": ["text"],
    "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
}  # fmt: skip


def lark(form: ToolFormat, choice: str = "required", schema: object = SCHEMA, **ids: int) -> str:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    found = tools_grammar([tool], choice, True, form, ids)
    assert found is not None
    return lark_of(found, ids)


def test_pythons_calls_match_their_schema() -> None:
    right = [
        "text='x'", 'text=""', 'text="a\\n\\"", kind=\'b\'', "text='x', kind=5, n=9", "text='x', list=['a']",
        "text='x', list=[None, \"b\"]", "text='x', tree={'on': True}",
        'text="x", tree={"next": null, "on": false}',
        "text='x', tree={'next': 3, 'on': True}", "text='x', any=[1, {\"a\": 'b'}, None, [], {}]",
    ]  # fmt: skip
    wrong = [
        "", "kind='a'", "text=5", "text='x', kind='c'", "text='x', n=10", "text='x', list=[]",
        "n=1, text='x'", "text='x', list=['a', 'b', 'c']", "text='x', tree={}", "text='x', other=1",
        "text='x',", "text='x' kind='a'",
    ]  # fmt: skip
    check(lark(LFM2), *([f"{S}[f({each})]{E}" for each in some] for some in (right, wrong)))
    two = f"{S}[f(text='x'), f(text='y')]{E}"
    check(lark(LFM2, "auto"), ["Hm [f](x)", two, f"Hm.{two}"], [f"Hm {S}x", two[:-1]])


def test_gemmas_calls_match_their_schema() -> None:
    x = f"text:{Q}x{Q}"
    right = [
        f"{x}", f"text:{Q}{Q}", f"kind:{Q}b{Q},{x}", f"kind:5,n:9,{x}", f"list:[{Q}a{Q},null],{x}",
        f"{x},tree:{{on:true}}", f"{x},tree:{{next:null,on:false}}", f"any:[1,{{a:{Q}b{Q}}},{{}}],{x}",
    ]  # fmt: skip
    wrong = [
        "",
        f"{x},kind:{Q}b{Q}",
        f"kind:{Q}c{Q},{x}",
        f"n:10,{x}",
        f"list:[],{x}",
        "text:x",
        f"{x},tree:{{}}",
    ]
    check(
        lark(GEMMA4),
        *([f"<|tool_call>call:f{{{each}}}<tool_call|>" for each in some] for some in (right, wrong)),
    )
    two = f"<|tool_call>call:f{{{x}}}<tool_call|>" * 2
    check(lark(GEMMA4, "auto"), ["Hm", two, f"Hm.{two}"], ["Hm<|tool_call>x", two[:-1]])
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    check(
        lark(GEMMA4, schema=nothing),
        ["<|tool_call>call:f{}<tool_call|>"],
        ["<|tool_call>call:f{a:1}<tool_call|>"],
    )
    check(
        lark(GEMMA4, schema={"type": "object"}),
        ["<|tool_call>call:f{a:1}<tool_call|>"],
        ["<|tool_call>call:f{1}"],
    )


def test_quotes_that_are_a_control_token_are_that_token() -> None:
    grammar = lark(GEMMA4, **{Q: 0})
    matcher = compiler().compile(grammar).copy()
    tokens = [
        *tokens_of("<|tool_call>call:f{text:"),
        0,
        *tokens_of('a <|"|> b'),
        0,
        *tokens_of("}<tool_call|>"),
    ]
    assert all(id in ids_in(matcher.mask()) and matcher.consume([id]) for id in tokens)
    assert matcher.complete()


def test_schemas_that_refer_to_themselves_and_to_several() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    both = {
        "type": "object",
        "allOf": [{"properties": {"a": {"type": "null"}}}, {"properties": {"b": {"type": "null"}}}],
    }
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/node"}, "y": both},
        "$defs": {"node": node},
    }
    right = ["x={'next': {'next': {}}}", "y={'a': None, 'b': None}", ""]
    check(
        lark(LFM2, schema=schema), [f"{S}[f({each})]{E}" for each in right], [f"{S}[f(x={{'next': 1}})]{E}"]
    )


def test_schemas_that_contain_themselves_by_way_of_several() -> None:
    """As pydantic writes them: a reference within ``allOf``."""
    child = {"allOf": [{"$ref": "#/$defs/node"}, {"properties": {"q": {"type": "null"}}}]}
    schema = {
        "type": "object",
        "properties": {"x": child},
        "$defs": {"node": {"type": "object", "properties": {"next": child}}},
    }
    right = ["x={}", "x={'next': {'next': {'q': None}}, 'q': None}"]
    wrong = ["x={'q': 1}", "x={'next': {'q': 1}}", "x=1"]
    check(lark(LFM2, schema=schema), *([f"{S}[f({each})]{E}" for each in some] for some in (right, wrong)))
    many = 600
    chain = {
        f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(many)
    }
    chain[f"d{many}"] = {"type": "null"}
    assert lark(LFM2, schema={"type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": chain})
    doubled = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}", "required": [f"{n}{i}"]} for n in "xy"]}
        for i in range(25)
    }
    doubled["d25"] = {"type": "object"}
    with pytest.raises(GrammarError, match="the schema is too large: too many schemas refer to each other"):
        lark(LFM2, schema={"type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": doubled})


def test_what_stands_beside_options_counts_too() -> None:
    numbers = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    options = {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    one = {"type": "object", "properties": {"x": numbers | options}}
    right, wrong = ["x={'a': 1}", "x={'b': 1}", "x={'a': 1, 'b': 2}"], ["x={}", "x={'a': None}", "x={'c': 1}"]
    check(lark(LFM2, schema=one), *([f"{S}[f({each})]{E}" for each in some] for some in (right, wrong)))
    for whole in (
        numbers | options,
        {"allOf": [numbers, options]},
        {"$ref": "#/$defs/n", "$defs": {"n": numbers | options}},
    ):
        check(
            lark(LFM2, schema=whole),
            [f"{S}[f(a=1, b=2)]{E}", f"{S}[f(b=2)]{E}"],
            [f"{S}[f()]{E}", f"{S}[f(a=None)]{E}"],
        )
    counts = {
        "type": "object",
        "properties": {"x": {"type": "object", "additionalProperties": {"type": "integer"}}},
    }
    check(lark(LFM2, schema=counts), [f"{S}[f(x={{'a': 1, \"b\": 2}})]{E}"], [f"{S}[f(x={{'a': 'b'}})]{E}"])


def test_names_that_are_no_words_have_quotes() -> None:
    schema = {"type": "object", "properties": {"a b": {"type": "object", "properties": {"c:d": {}}}}}
    arguments = {"a b": {"c:d": 5}}
    for form, notation in ((LFM2, PYTHON), (GEMMA4, GEMMA)):
        call = written_call("f", arguments, notation)
        text = f"{S}[{call}]{E}" if form is LFM2 else f"<|tool_call>call:{call}<tool_call|>"
        check(lark(form, schema=schema), [text], [text.replace("d", "e")])
        ((name, found),) = read(ChatStream(None, form, sure=True), [text])["calls"]
        assert name == "f" and json.loads(found) == arguments


def test_what_gemmas_strings_are_not_held_to_is_said() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a+$"}}}
    function: dict[str, Any] = {"name": "f", "parameters": schema}
    for format, notes in ((GEMMA4, ("tool 'f': pattern of strings",)), (LFM2, ())):
        grammar = tools_grammar([{"type": "function", "function": function}], "auto", True, format)
        assert grammar is not None and grammar.notes == notes
    check(lark(LFM2, schema=schema), [f'{S}[f(a="aa")]{E}'], [f'{S}[f(a="ab")]{E}', f"{S}[f(a='ab')]{E}"])
    strict = {"type": "function", "function": {**function, "strict": True}}
    with pytest.raises(GrammarError, match="the tool 'f': pattern of strings cannot be enforced: remove it"):
        tools_grammar([strict], "auto", True, GEMMA4)


# --- prompts --------------------------------------------------------------------------------------

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "<|tool_call_end|>"}'}}
LOOP = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Ok.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


_shared = TemplateProcess()  # starting one for each template would take long


@pytest.fixture(scope="session", autouse=True)  # a worker may run other modules between tests of this one
def _process() -> Iterator[None]:
    yield
    _shared.close()


def prompt(source: str, messages: list[dict[str, Any]], *special: str, **values: Any) -> str:
    """The prompt, with a tool where the template knows any."""
    metadata = chat_models.vocabularies.bpe("gpt-2", "user", [(each, CONTROL) for each in special])
    chat, tokenizer = chat_of(metadata | {"tokenizer.chat_template": source})
    chat._process = _shared
    return names(tokenizer, chat.ids(check_messages(messages), [TOOL] * ("tool" in source), kwargs=values))


def test_calls_are_written_for_a_template_that_leaves_them_out() -> None:
    """Between the tokens themselves; what spells one in an argument stays text."""
    found = prompt(template("lfm2"), LOOP, S, E)
    assert f'\nOk.«{S}»[f(a="{E}")]«{E}»<|im_end|>' in found and found.count(f"«{E}»") == 1
    assert "<|tool_response_start|>42<|tool_response_end|>" in found


def test_arguments_with_as_many_levels_as_there_may_be() -> None:
    for name in ("lfm2", "gemma-4"):
        for levels, found in ((62, "[" * 62), (900, "cut_off_arguments")):
            nested = f'{{"a": {"[" * levels}{"]" * levels}}}'
            call = {**CALL, "function": {"name": "f", "arguments": nested}}
            assert found in prompt(
                template(name), [LOOP[0], {**LOOP[1], "tool_calls": [call]}, LOOP[2]], S, E
            )


def test_no_character_of_a_user_becomes_a_mark() -> None:
    """Noncharacters; some of them stand for marks until the template has been rendered."""
    for continued in (False, True):
        text = "".join(map(chr, range(0xFDD0, 0xFDF0)))
        answer = {**LOOP[1], "content": text} if not continued else {"role": "assistant", "content": text}
        loop = [{"role": "user", "content": text}, answer, LOOP[2]][: 2 if continued else 3]
        metadata = chat_models.vocabularies.bpe("gpt-2", "user", [(each, CONTROL) for each in (S, E)])
        chat, tokenizer = chat_of(metadata | {"tokenizer.chat_template": template("lfm2")})
        chat._process = _shared
        found = names(tokenizer, chat.ids(check_messages(loop), continue_last=continued))
        assert found.count(text) == 2 and found.count("«<|tool") == (0 if continued else 2)
        assert not continued or found.endswith(text)


def test_thinking_goes_where_a_template_looks_for_it() -> None:
    assert "<think>Hm.</think>Ok." in prompt(template("lfm2.5"), LOOP)
    assert "[THINK]Hm.[/THINK]Ok.[TOOL_CALLS]f[ARGS]" in prompt(template("ministral-3"), LOOP)
    assert "<|channel>thought\nHm.\n<channel|><|tool_call>call:f{" in prompt(template("gemma-4"), LOOP)


def test_results_go_into_answers_for_the_first_template_of_gemma() -> None:
    first = template("gemma-4").replace("other.tool_call_id", "none")
    more = [
        {**each}
        for each in (*LOOP, {"role": "assistant", "content": "Fine."}, {"role": "user", "content": "So"})
    ]
    found, newer = prompt(first, more), prompt(template("gemma-4"), more)
    assert f"<tool_call|><|tool_response>response:f{{value:{Q}42{Q}}}<tool_response|>" in found
    assert found.index("42") < found.index("Fine.") < found.index("So") and "tool\n" not in found
    assert newer.count("42") == 1 and newer.index("42") < newer.index("Fine.")


def test_deepseeks_template_leaves_tools_to_us() -> None:
    found = prompt(template("deepseek-v3.1"), LOOP)
    assert "### f\nDescription: \n\nParameters: {" in found and "ALWAYS adhere to this exact format" in found
    assert '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "<|tool_call_end|>"}<｜tool▁call▁end｜>' in found
    off, on = (prompt("{% if thinking %}T{% endif %}{{ messages[0].content }}", LOOP[:1], **values)
               for values in ({"enable_thinking": False}, {"enable_thinking": True}))  # fmt: skip
    assert (off, on) == ("Hi", "THi")


def test_a_queue_of_a_template() -> None:
    queue = (
        "{% set q = [] %}{% for m in messages %}{% set _ = q.append(m.content) %}{% endfor %}{{ q.pop(0) }}"
    )
    assert prompt(queue, LOOP[:1]) == "Hi"


# --- Gemma's thinking -----------------------------------------------------------------------------

THOUGHT = next(each for each in KNOWN if each.anywhere)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes.", 0),
        ("<|channel>thought\n<channel|>Yes.<|channel>thought\nSo.<channel|>", "So.", "Yes.", 0),
        ("Yes.<channel|>", "", "Yes.", 0),
        ("<|channel>thought\nHm.<channel|><|tool_call>call:f{}<tool_call|>", "Hm.", "", 1),
        ("<|tool_call>call:f{}<tool_call|><|channel>thought\nHm.<channel|>Yes.", "Hm.", "Yes.", 1),
        ("a <|channel b", "", "a <|channel b", 0),
        ("<|channel>thought\nHm", "Hm", "", 0),
    ],
)
def test_thinking_may_come_anywhere(text: str, reasoning: str, content: str, calls: int) -> None:
    for step in (1, 3, len(text)):
        for format in (GEMMA4, None)[: 1 + (not calls)]:
            found = read(ChatStream(THOUGHT, format), steps(text, step))
            assert (found["reasoning"], found["content"], len(found["calls"])) == (reasoning, content, calls)


def test_the_tokens_of_gemmas_marks_are_shown() -> None:
    special = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", Q, "<turn|>")
    metadata = chat_models.vocabularies.bpe("gpt-2", "user", [(each, CONTROL) for each in special])
    chat, tokenizer = chat_of(metadata | {"tokenizer.chat_template": template("gemma-4")})
    assert isinstance(chat, Chat) and chat.thinks and chat.tool_format is GEMMA4
    assert sorted(tokenizer.control_names[id] for id in chat.shown) == sorted(special[:-1])
