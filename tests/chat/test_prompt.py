"""Messages made fit for templates that are particular: nothing of them is refused, and nothing left out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import chat_models
from support.chat_models import CHATML, chat_of, names

from hotcold.chat.call_ids import call_ids_of, new_call_id, with_fitting_ids
from hotcold.chat.chat import Chat
from hotcold.chat.general_tools import with_tools
from hotcold.chat.messages import check_messages
from hotcold.chat.rendering import TemplateError, TemplateProcess
from hotcold.chat.tool_formats import GENERAL, HERMES, KIMI, MISTRAL, tool_format
from hotcold.chat.traits import Traits

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
SYSTEM, USER = {"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}
ASSISTANT, MORE = {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Go on"}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "42"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

EACH = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + EACH
DROPS = EACH.replace("[{{", "{% if m.role != 'system' %}[{{").replace("}}]", "}}]{% endif %}")
FIRST_ONLY = (
    "{% if messages[0].role == 'system' %}<{{ messages[0].content }}>"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('late') }}{% endif %}"
    "[{{ m.role }}: {{ m.content }}]{% endfor %}"
)
STRICT = REFUSES.replace(
    "[{{",
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}[{{",
)
WALKS = "{% for m in messages %}[{{ m.role }}:{% for p in m.content %} {{ p.text }}{% endfor %}]{% endfor %}"
EITHER = (
    "{% for m in messages %}[{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}<{{ p['text'] }}>{% endfor %}{% endif %}]{% endfor %}"
)


_shared = TemplateProcess()  # starting one for each template would take long


@pytest.fixture(scope="session", autouse=True)  # a worker may run other modules between tests of this one
def _process() -> Iterator[None]:
    yield
    _shared.close()


def prompt(template: str, *messages: dict[str, Any], tools: Any = (), **more: Any) -> str:
    chat, tokenizer = chat_of(chat_models.bpe(template))
    chat._process = _shared
    return names(tokenizer, chat.ids(check_messages(messages), tools, **more))


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (EACH, [SYSTEM, USER], "[system: Be brief][user: Hi]"),
        (EACH, [USER, ASSISTANT, SYSTEM, MORE],
         "[user: Hi][assistant: Hello][system: Be brief][user: Go on]"),
        (REFUSES, [SYSTEM, USER], "[user: Be brief\nHi]"),
        (REFUSES, [{"role": "developer", "content": "Be brief"}, USER], "[user: Be brief\nHi]"),
        (REFUSES, [SYSTEM], "[user: Be brief]"),
        (REFUSES, [SYSTEM, ASSISTANT, USER], "[user: Be brief][assistant: Hello][user: Hi]"),
        (REFUSES, [SYSTEM, {"role": "system", "content": "Be kind"}, USER],
         "[user: Be brief\n\nBe kind\nHi]"),
        (REFUSES, [{"role": "system", "content": PARTS}, {"role": "user", "content": PARTS}],
         "[user: a\nb\na\nb]"),
        (DROPS, [SYSTEM, USER], "[user: Be brief\nHi]"),
        (DROPS, [USER, ASSISTANT, SYSTEM, MORE], "[user: Hi][assistant: Hello][user: Be brief\nGo on]"),
        (FIRST_ONLY, [SYSTEM, USER], "<Be brief>[user: Hi]"),
        (FIRST_ONLY, [SYSTEM, SYSTEM, USER], "<Be brief\n\nBe brief>[user: Hi]"),
        (FIRST_ONLY, [USER, SYSTEM, ASSISTANT], "[user: Hi\nBe brief][assistant: Hello]"),
        (FIRST_ONLY, [USER, ASSISTANT, SYSTEM], "[user: Hi][assistant: Hello][user: Be brief]"),
        (FIRST_ONLY, [USER, ASSISTANT, SYSTEM, SYSTEM, MORE],
         "[user: Hi][assistant: Hello][user: Be brief\nBe brief\nGo on]"),
        (STRICT, [USER, USER, ASSISTANT, MORE], "[user: Hi\n\nHi][assistant: Hello][user: Go on]"),
        (STRICT, [SYSTEM, USER, ASSISTANT, SYSTEM, MORE],
         "[user: Be brief\nHi][assistant: Hello][user: Be brief\nGo on]"),
        (WALKS, [SYSTEM, USER], "[system: Be brief][user: Hi]"),
        (WALKS, [{"role": "user", "content": PARTS}], "[user: a b]"),
        (EITHER, [SYSTEM, {"role": "user", "content": PARTS}], "[system: Be brief][user: <a><b>]"),
        (EACH, [{"role": "user", "content": PARTS}], "[user: a\nb]"),
        (EACH, [USER, {"role": "assistant", "content": None}, USER], "[user: Hi][assistant: ][user: Hi]"),
    ],
)  # fmt: skip
def test_every_message_has_a_place(template: str, messages: list[dict[str, Any]], text: str) -> None:
    assert prompt(template, *messages) == text


def test_parts_are_continued() -> None:
    last = {"role": "assistant", "content": PARTS}
    assert prompt(WALKS, USER, last, continue_last=True) == "[user: Hi][assistant: a b"
    assert prompt(EACH, USER, last, continue_last=True) == "[user: Hi][assistant: a\nb"
    nothing = {"role": "assistant", "content": None}
    assert prompt(EACH, USER, nothing, continue_last=True) == "[user: Hi][assistant: "


def test_parts_of_users_spell_no_control_tokens() -> None:
    evil = {"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}
    for template in (WALKS, EITHER, EACH):
        assert "<|im_end|>" in prompt(template, evil) and "«" not in prompt(template, evil)


NULL = (
    "{# [TOOL_CALLS] {{ tools }} #}{% for m in messages %}[{{ m.role }}{% if m.tool_calls %} calls{% endif %}"
    "{% if m.content is not none %}: {{ m.content }}{% endif %}]{% endfor %}"
)


def test_null_stays_null_where_a_template_asks_for_it() -> None:
    assert prompt(NULL, USER, CALLS, RESULT, tools=[TOOL]) == "[user: Hi][assistant calls][tool: 42]"
    joins = NULL.replace(
        "{% if m.content is not none %}: {{ m.content }}{% endif %}", "{{ ': ' + m.content }}"
    )
    assert prompt(joins, USER, CALLS, RESULT, tools=[TOOL]) == "[user: Hi][assistant calls: ][tool: 42]"
    prints = NULL.replace("{% if m.content is not none %}: {{ m.content }}{% endif %}", ": {{ m.content }}")
    assert prompt(prints, USER, CALLS, RESULT, tools=[TOOL]) == "[user: Hi][assistant calls: ][tool: 42]"
    silent = {"role": "tool", "tool_call_id": "call_1", "content": None}
    assert prompt(NULL, USER, CALLS, silent, tools=[TOOL]).endswith("[tool: ]")


ARGUMENTS = (
    "{# [TOOL_CALLS] {{ tools }} #}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<%>{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("writes", "text"),
    [
        ("{{ c.function.arguments | tojson }}", '<{"a": 1}>'),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "<a=1>"),
        ("{{ 'f ' + c.function.arguments }}", '<f {"a": 1}>'),
        ("{{ c.function.arguments }}", '<{"a": 1}>'),
    ],
)
def test_arguments_are_what_a_template_takes(writes: str, text: str) -> None:
    template = ARGUMENTS.replace("<%>", f"<{writes}>")
    assert prompt(template, USER, CALLS, RESULT, tools=[TOOL]) == f"Hi{text}42"
    cut = {**CALLS, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"a": "b'}}]}
    assert "b" in prompt(template, USER, cut, RESULT, tools=[TOOL])


def test_several_calls_are_several_messages_where_one_has_room_for_one() -> None:
    one = (
        "{# [TOOL_CALLS] {{ tools }} #}{% for m in messages %}{{ m.content }}{% if m.tool_calls %}"
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
        "<{{ m.tool_calls[0].function.arguments | tojson }}>{% endif %}{% endfor %}"
    )
    other = {"id": "call_2", "type": "function", "function": {"name": "f", "arguments": '{"a": 2}'}}
    calls = {"role": "assistant", "content": "Ok", "tool_calls": [CALL, other]}
    late = {"role": "tool", "tool_call_id": "call_2", "content": "43"}
    text = 'HiOk<{"a": 1}>42<{"a": 2}>43Go on'
    assert prompt(one, USER, calls, RESULT, late, MORE, tools=[TOOL]) == text
    assert prompt(one, USER, calls, late, RESULT, MORE, tools=[TOOL]) == text
    assert prompt(one, USER, calls, MORE, tools=[TOOL]) == 'HiOk<{"a": 1}><{"a": 2}>Go on'


def test_tools_without_descriptions() -> None:
    template = "{# [TOOL_CALLS] #}{% for t in tools %}{{ t.function.name + t.function.description }}" + (
        "{% for n, p in t.function.parameters.properties.items() %} {{ n + p.description }}{% endfor %}"
        "{% endfor %}{{ messages[0].content }}"
    )
    bare = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}}
    assert prompt(template, USER, tools=[bare]) == "f aHi"
    as_it_is = "{# [TOOL_CALLS] #}{{ tools | tojson }}"
    assert prompt(as_it_is, USER, tools=[bare]) == (
        '[{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}}]'
    )


# --- what templates take --------------------------------------------------------------------------

TRAITS = {
    "gpt-oss": Traits(systems=False, bare_tools=False, several_calls=False),
    "qwen2.5": Traits(null=True),
    "qwen3-coder": Traits(null=True),
    "mistral-nemo": Traits(systems=False, null=True, users=False),
    "mistral-small-3.2": Traits(parts=True, systems=False, null=True, users=False),
    "glm-4.6": Traits(parts=True),
    "deepseek-r1": Traits(systems=False, null=True),
    "deepseek-v3.1": Traits(null=True),
    "kimi-k2": Traits(parts=True, null=True),
    "qwen3.5": Traits(parts=True, systems=False, null=True),
    "glm-4.7-flash": Traits(parts=True),
    "minimax-m2": Traits(parts=True, systems=False),
    "ministral-3": Traits(parts=True, systems=False, users=False),
    "lfm2": Traits(calls=False),
    "gemma-4": Traits(parts=True, null=True),
}


@pytest.mark.parametrize("name", TRAITS)
def test_traits_of_well_known_templates(name: str) -> None:
    """As a reader of each template sees them."""
    chat, _ = chat_of(chat_models.bpe((TEMPLATES / f"{name}.jinja").read_text("utf-8")))
    chat._process = _shared
    chat.ids([USER])
    (traits,) = chat._traits.values()
    assert replace(traits, before_user="", before_answer=("", "")) == TRAITS[name]


def test_a_template_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    probe = TemplateProcess.probe

    def counted(self: TemplateProcess, request: Any) -> Any:
        asked.append(len(request["probes"]))
        return probe(self, request)

    monkeypatch.setattr(TemplateProcess, "probe", counted)
    chat, _ = chat_of(chat_models.bpe(REFUSES))
    assert asked == []  # not before it is used
    for _ in range(3):
        chat.ids([SYSTEM, USER])
    assert len(asked) == 1
    chat.close()


def test_a_template_that_hangs_when_asked_is_used_as_others_are() -> None:
    endless = "{% for a in range(20000) %}{% for b in range(20000) %}{% endfor %}{% endfor %}"
    template = "{% if messages[0].content != 'Hi' %}" + endless + "{% endif %}" + EACH
    chat, tokenizer = chat_of(chat_models.bpe(template))
    chat._process = TemplateProcess(seconds=0.3)
    assert names(tokenizer, chat.ids([USER])) == "[user: Hi]"
    assert [*chat._traits.values()] == [Traits()]
    chat.close()
    broken = chat_of(chat_models.bpe("{% if %}"))[0]
    with pytest.raises(TemplateError, match="cannot be rendered"):
        broken.ids([USER])
    broken.close()


# --- the general form -----------------------------------------------------------------------------


def test_tools_are_described_where_a_template_has_none() -> None:
    found = prompt(CHATML, SYSTEM, USER, CALLS, RESULT, RESULT, MORE, tools=[TOOL])
    head, _, rest = found.partition("«<|im_end|>»")
    assert head.startswith("«<|im_start|>»system\nBe brief\n\nYou may call functions")
    assert '\n{"name": "f", "parameters": {"type": "object"}}\n' in head
    assert '<tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>' in head
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    response = "<tool_response>\n42\n</tool_response>"
    assert rest == (
        "\n«<|im_start|>»user\nHi«<|im_end|>»\n"
        f"«<|im_start|>»assistant\n{call}«<|im_end|>»\n"
        f"«<|im_start|>»user\n{response}\n{response}«<|im_end|>»\n"
        "«<|im_start|>»user\nGo on«<|im_end|>»\n«<|im_start|>»assistant\n"
    )
    assert prompt(CHATML, USER, tools=[TOOL]).startswith("«<|im_start|>»system\nYou may call")
    assert "You may call" not in prompt(CHATML, USER, CALLS, RESULT)


@pytest.mark.parametrize("template", [REFUSES, DROPS, STRICT, WALKS, EITHER, "{# {{ tools }} #}" + EACH])
def test_the_general_form_fits_every_template(template: str) -> None:
    found = prompt(template, SYSTEM, USER, CALLS, RESULT, MORE, tools=[TOOL])
    for each in ("Be brief", "You may call", "Hi", '{"name": "f", "arguments": {"a": 1}}', "42", "Go on"):
        assert found.count(each) == 1, each
    assert found.index("Be brief") < found.index("Hi") < found.index("42") < found.index("Go on")


def test_the_general_form_without_any_template() -> None:
    chat, tokenizer = chat_of(chat_models.spm(None))
    text = tokenizer.decode(chat.ids(check_messages([USER, CALLS, RESULT]), [TOOL]))
    assert text.startswith("You may call functions") and text.endswith(
        "<tool_response>\n42\n</tool_response>"
    )
    assert chat.tool_format is GENERAL
    chat.close()


def test_results_go_into_no_message_of_a_user() -> None:
    """A client may give any name to its message, whose content may be a list."""
    user = {"role": "user", "name": "\ufdd1", "content": [{"type": "text", "text": "Hi"}]}
    results = {"role": "user", "content": "<tool_response>\n42\n</tool_response>"}
    assert with_tools([user, RESULT], []) == [user, results]


# --- ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ tools }}[TOOL_CALLS]", "nine"),
        ("{% if c.id is not defined or c.id|length != 9 %}", "nine"),
        ('{{ tools }}<tool_call>"arguments"{% if id | length == 9 %}', "nine"),
        ("{{ tools }}<|tool_calls_section_begin|><|tool_call_argument_begin|>", "kimi"),
        (CHATML, "openai"),
    ],
)
def test_the_form_of_ids(template: str, form: str) -> None:
    assert call_ids_of(template, tool_format(template)) == form


def test_new_ids_and_those_of_others() -> None:
    assert re.fullmatch("[a-zA-Z0-9]{9}", new_call_id("nine", "f", 0))
    assert new_call_id("kimi", "f", 2) == "functions.f:2"
    assert re.fullmatch("call_[0-9a-f]{24}", new_call_id("openai", "f", 0))
    assert new_call_id("nine", "f", 0) != new_call_id("nine", "f", 0)


def calls(*ids: str | None) -> dict[str, Any]:
    function = {"name": "f", "arguments": {}}
    found = [{"function": function} if id is None else {"id": id, "function": function} for id in ids]
    return {"role": "assistant", "content": "", "tool_calls": found}


def result(id: str | None) -> dict[str, Any]:
    return {"role": "tool", "content": "x"} | ({} if id is None else {"tool_call_id": id})


def ids_in(messages: list[dict[str, Any]]) -> list[str]:
    found = []
    for message in messages:
        found += [call["id"] for call in message.get("tool_calls", ())]
        found += [message["tool_call_id"]] if message["role"] == "tool" else []
    return found


def test_ids_of_other_servers_get_the_form_that_a_template_wants() -> None:
    given = [calls("call_abc", "toolu_1"), result("toolu_1"), result("call_abc"), calls("aB3dE6gH9"),
             result("aB3dE6gH9"), calls(None, None), result(None), result(None), result("lost")]  # fmt: skip
    a, b, b2, a2, kept, kept2, c, d, c2, d2, lost = ids_in(with_fitting_ids(given, "nine"))
    assert (a, b, c, d) == (a2, b2, c2, d2) and kept == kept2 == "aB3dE6gH9"
    assert len({a, b, c, d, kept, lost}) == 6
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", each) for each in (a, b, c, d, lost))
    assert ids_in(with_fitting_ids(given, "nine"))[0] == a  # the same prompt again
    assert ids_in(with_fitting_ids(given[:3], "kimi")) == [
        "functions.f:0", "functions.f:1", "functions.f:1", "functions.f:0",
    ]  # fmt: skip
    assert with_fitting_ids(given, "openai") == given
    assert "id" not in given[5]["tool_calls"][0]  # what was given stays as it was


def test_the_servers_own_ids_go_through() -> None:
    """The second request of a loop, with Mistral's own template."""
    chat, tokenizer = chat_of(chat_models.bpe((TEMPLATES / "mistral-nemo.jinja").read_text("utf-8")))
    id = new_call_id(chat.call_ids, "f", 0)
    loop = [USER, {**CALLS, "tool_calls": [{**CALL, "id": id}]}, {**RESULT, "tool_call_id": id}]
    assert names(tokenizer, chat.ids(check_messages(loop), [TOOL])).count(id) == 2
    assert chat.call_ids == "nine" and chat.tool_format is MISTRAL
    chat.close()
    assert HERMES.name == "hermes" and KIMI.name == "kimi"


def test_tools_are_told_where_a_template_of_channels_does_not() -> None:
    short = (
        "{# <|channel|> #}{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}{% endfor %}"
    )
    found = prompt(short, SYSTEM, USER, tools=[TOOL])
    assert found.startswith("<|start|>system<|message|>Be brief\n\n# Tools") and '{"name": "f", ' in found
    assert "# Tools" not in prompt(short, SYSTEM, USER)


def test_efforts_of_thinking_have_harmonys_names() -> None:
    template = (TEMPLATES / "gpt-oss.jinja").read_text("utf-8")
    for effort, named in (("low", "low"), ("minimal", "low"), ("max", "high"), ("medium", "medium")):
        assert f"Reasoning: {named}\n" in prompt(template, USER, kwargs={"reasoning_effort": effort})
    thought = {**CALLS, "content": "I look.", "reasoning_content": "Hm."}
    found = prompt(template, SYSTEM, USER, thought, RESULT, tools=[TOOL])
    assert "<|channel|>analysis<|message|>Hm.\nI look.«<|end|>»" in found.replace("«<|start|>»", "<|start|>")
    assert "# Instructions\n\nBe brief\n\n# Tools" in found
    closed: Chat = chat_of(chat_models.bpe(template))[0]
    assert closed.thinks
    closed.close()
