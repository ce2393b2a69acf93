"""Rendering of chat templates: like others do it, within bounds, and whatever a stranger wrote."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest

from hotcold.chat import rendering as template_process
from hotcold.chat.rendering import TemplateError, TemplateProcess
from hotcold.engine.request import RequestError
from hotcold.errors import UserError

#: Names of the cases of chat_template_vectors.json that plain Jinja renders as expected.
VECTORS = (
    "teknium/OpenHermes-2.5-Mistral-7B", "TheBloke/FusionNet_34Bx2_MoE-AWQ", "mlabonne/AlphaMonarch-7B",
    "deepseek-ai/deepseek-coder-33b-instruct", "Orca-Vicuna", "Llama-3", "Phi-3-small", "Phi-3-vision",
    "GLMEdge", "ibm-granite/granite-3.0-8b-instruct", "phi-4",
    "Mistral-Large-Instruct-2407 (mistralai 'v3' template; modified to have system prompt at start)",
    "mistralai/Mistral-Large-Instruct-2411 (mistralai 'v7' template)",
)  # fmt: skip


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    found = TemplateProcess()
    yield found
    found.close()


def request(template: str, messages: list[dict[str, Any]] | None = None, **values: Any) -> dict[str, Any]:
    found = {"template": template, "messages": messages or [{"role": "user", "content": "Hello"}]}
    return found | {"stand_ins": ["<|m", "\ue000\ue001\ue002"], "users": {}, "values": values}


def rendered(process: TemplateProcess, template: str, *args: Any, **values: Any) -> str:
    back = str.maketrans("\ue000\ue001\ue002", "<|m")
    return process.render(request(template, *args, **values)).translate(back)


def test_the_list_of_vectors_is_whole(test_data: Path) -> None:
    cases = json.loads((test_data / "golden" / "chat_template_vectors.json").read_text("utf-8"))["cases"]
    assert sorted(VECTORS) == sorted(case["name"] for case in cases if case["plain_jinja2_equal"])


@pytest.mark.parametrize("name", VECTORS)
def test_templates_of_well_known_models(process: TemplateProcess, test_data: Path, name: str) -> None:
    vectors = json.loads((test_data / "golden" / "chat_template_vectors.json").read_text("utf-8"))
    (case,) = (case for case in vectors["cases"] if case["name"] == name)
    tokens = {token: case.get(token) or "" for token in ("bos_token", "eos_token")}
    text = rendered(
        process, case["template_str"], vectors["messages"], add_generation_prompt=True, tools=None, **tokens
    )
    assert text == (case["expected_output_jinja"] or case["expected_output"])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("{% for m in messages %}\n  {% generation %}\n{{ m.content }}\n  {% endgeneration %}\n{% endfor %}",
         "Hello\n"),
        ("{{ {'a': '<b>é', 'n': [1, true]} | tojson }}", '{"a": "<b>é", "n": [1, true]}'),
        ("{{ {'b': 1, 'a': '\\n'} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": "\\n",\n  "b": 1\n}'),
        ("{{ messages | tojson(separators=(',', ':')) }}", '[{"role":"user","content":"Hello"}]'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ 'missing: ' ~ nothing }}", "missing: "),
        ("{{ 'x' * 3 }}{{ 2 ** 10 }}{{ '%s-%d' % ('a', 5) }}", "xxx1024a-5"),
        ("{{ messages[0]['content'].startswith('Hel') }}", "True"),
        ("{%- set s = namespace(n=0) -%}{%- for m in messages -%}{%- set s.n = 5 -%}{%- endfor -%}{{ s.n }}",
         "5"),
    ],
)  # fmt: skip
def test_what_templates_expect(process: TemplateProcess, template: str, text: str) -> None:
    assert rendered(process, template) == text


USERS = [{"role": "user", "content": ' <think>a</think>  "m"|é\\n '}]
ASKED = (
    "{{ c }}", "{{ c | trim }}", "{{ c.split('</think>')[-1].lstrip(' ') }}", "{{ '<think>' in c }}",
    "{% set d = 'x' + c + 'y' %}{{ d.split('</think>') | length }}{{ d }}",
    "{% set d %}x{{ c }}{% endset %}{{ '</think>' in d }}{{ d.split('>') | join('-') }}",
    "{% macro d(e) %}x{{ e }}{% endmacro %}{{ d(c).find('m') }}{{ d(c) }}",
    "{{ c.replace('<think>', '<|') }}{{ c.replace('|', c) }}{{ c | replace('m', '') }}",
    "{{ c.strip().partition('>')[2] }}{{ c.partition('nothing') | join('/') }}",
    "{{ c.rpartition('m')[0] }}{{ c.rpartition('m')[1] }}", "{{ c.split() | join(',') }}",
    "{{ c.split(none, 1) | join(',') }}{{ c.rsplit('<', 1) | join(',') }}{{ c.rsplit() | join(',') }}",
    "{{ c[1:3] }}{{ c[-2] }}{{ c | length }}{{ c | first }}{{ c | last }}", "{{ c | upper }}{{ c.lower() }}",
    "{{ c.rstrip().removeprefix(' <think>').removesuffix('n') }}", "{{ c.find('m') }}{{ c.count('<') }}",
    "{{ c == other }}{{ c != other }}{{ other == c }}{{ c == 'x' }}{{ c in [other] }}{{ c in ['x'] }}",
    "{{ {other: 5}[c] }}", "{{ c | tojson }}", "{{ c | tojson(ensure_ascii=true) }}", "{{ [c] }}{{ {c: c} }}",
    "{% for d in c %}{% if d == '|' %}{{ loop.index }}{% endif %}{% endfor %}", "{{ c is string }}",
    "{{ c.splitlines() | length }}{{ (c + '\n' + c).splitlines()[1] }}", "{{ c.startswith(' <t') }}",
    "{{ c.strip().rstrip('n|é\\\\') }}",
    "{{ c.strip('m<> ') }}{{ c.lstrip(' <') }}{{ c.isalpha() }}", "{{ c ~ c }}{{ '%s!' % c }}{{ c < other }}",
    "{{ [c, c] | join('<') }}{{ (c, 'x') | sort | first }}{{ c > 'x' }}{{ ('m' ~ c) | trim }}",
    "{{ messages | selectattr('content', 'equalto', other) | list | length }}{{ messages | tojson }}",
)  # fmt: skip


@pytest.mark.parametrize("template", ASKED)
def test_users_texts_answer_as_they_are(process: TemplateProcess, template: str) -> None:
    """Though ``<``, ``|`` and ``m`` have stand-ins: against plain Jinja and plain strings."""
    plain = jinja2.Environment()
    plain.filters["tojson"] = lambda value, **more: json.dumps(value, **{"ensure_ascii": False, **more})
    template = "{% set c = messages[0].content %}" + template
    content = USERS[0]["content"]
    expected = plain.from_string(template).render(messages=USERS, other=content)
    assert rendered(process, template, USERS, other=content) == expected


ENDLESS = "{% for a in range(20000) %}{% for b in range(20000) %}{% endfor %}{% endfor %}"
ATTACKS = {
    "globals": ("{{ cycler.__init__.__globals__ }}", "unsafe|undefined|no attribute"),
    "globals through a filter": ("{{ (cycler | attr('__init__')).__globals__ }}", "unsafe|undefined|no attr"),
    "classes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "of our own function": ("{{ strftime_now.__globals__['json'] }}", "unsafe"),
    "of the environment": ("{{ self._TemplateReference__context.environment }}", "unsafe|undefined|no attr"),
    "files": ("{% include '/etc/passwd' %}", "."),
    "import": ("{% import 'os' as os %}", "."),
    "a change": ("{{ messages.append(1) }}", "unsafe"),
    "many steps": ("{% for i in range(10**9) %}a{% endfor %}", "steps"),
    "a long text": ("{{ 'a' * 10**10 }}", "repeats"),
    "a long list": ("{{ [1, 2] * 10**9 }}", "repeats"),
    "doubling": ("{% set ns = namespace(t='aaaaaaaa') %}{% for i in range(60) %}"
                 "{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}", "memory|characters"),
    "a power": ("{{ 10 ** 10 ** 10 }}", "power"),
    "a wide number": ("{{ '%1000000000d' % 1 }}", "too many characters"),
    "a centred text": ("{{ 'a' | center(10**10) }}", "memory|large"),
    "a wide format": ("{{ '{:>10000000000}'.format(1) }}", "memory|."),
    "an unclosed tag": ("{% if true %}", "."),
    "an unknown tag": ("{% evil %}", "unknown tag"),
    "deep brackets": ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "."),
    "its own error": ("{{ raise_exception('Roles must\n alternate') }}", "Roles must alternate"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_of_a_template(process: TemplateProcess, attack: str) -> None:
    template, reason = ATTACKS[attack]
    with pytest.raises(TemplateError, match=reason) as raised:
        process.render(request(template))
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600
    assert rendered(process, "{{ messages[0].content }}") == "Hello"  # the next one is served


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content._plain }}",
        "{{ (messages[0].content + '!').__new__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{0._plain}'.format(messages[0].content) }}",
        "{{ strftime_now.__code__ }}{{ raise_exception.__globals__ }}{{ messages.__class__ }}",
    ],
)
def test_what_is_unsafe_is_nothing(process: TemplateProcess, template: str) -> None:
    assert rendered(process, template) == ""


def test_a_prompt_without_end() -> None:
    """Where the characters come one by one."""
    process = TemplateProcess(seconds=60)
    endless = ENDLESS.replace("{% endfor %}", "x" * 5000 + "{% endfor %}", 1)
    with pytest.raises(TemplateError, match="characters"):
        process.render(request(endless))
    process.close()


def test_a_template_that_hangs_is_ended_and_holds_up_nobody() -> None:
    process = TemplateProcess(seconds=0.5)
    rendered(process, "first")
    errors: list[str] = []

    def hang() -> None:
        try:
            process.render(request(ENDLESS))
        except TemplateError as error:
            errors.append(str(error))

    hanging = threading.Thread(target=hang)
    hanging.start()
    assert rendered(process, "{{ messages[0].content }}") == "Hello"
    hanging.join(60)
    assert len(errors) == 1 and "0.5 s" in errors[0]
    assert rendered(process, "{{ messages[0].content }}") == "Hello"
    process.close()


def test_where_all_hang_nobody_waits_for_ever() -> None:
    process = TemplateProcess(seconds=2, wait_seconds=0.1)
    errors: list[UserError] = []

    def hang() -> None:
        try:
            process.render(request(ENDLESS))
        except UserError as error:
            errors.append(error)

    hanging = [threading.Thread(target=hang) for _ in range(6)]
    for thread in hanging:
        thread.start()
    for thread in hanging:
        thread.join(120)
    assert len(errors) == 6
    busy = [each for each in errors if "busy" in str(each)]
    assert busy and all(isinstance(each, RequestError) and each.code == "queue_full" for each in busy)
    late = [each for each in errors if "longer than 2 s" in str(each)]
    assert late and all(isinstance(each, TemplateError) for each in late)
    assert rendered(process, "{{ messages[0].content }}") == "Hello"
    process.close()


def test_where_no_process_starts_it_is_no_mistake_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MODULE", "no_such_module")
    process = TemplateProcess()
    with pytest.raises(RequestError, match="cannot be rendered now: the process") as caught:
        rendered(process, "x")
    assert caught.value.code == "engine_failed"
    process.close()


def test_a_closed_one_says_so_and_leaves_no_process() -> None:
    process = TemplateProcess()
    rendered(process, "x")
    pids = [each.pid for each in process._idle]
    assert pids and all(pid is not None for pid in pids)
    process.close()
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(TemplateError, match="closed"):
        rendered(process, "x")
