"""llama.cpp's own routes beside ``/completion``: filling in, templates, properties, slots."""

from __future__ import annotations

import http.client
import json
from dataclasses import replace
from typing import Any

import pytest
from support import vocabularies
from support.api_pieces import facts, filling
from support.chat_models import CHATML, bpe, chat_of, names
from support.golden import DATA
from support.vocabularies import CONTROL

from hotcold.server.protocol import infill, native, props
from hotcold.server.protocol.errors import APIError
from hotcold.tokenizer.tokenizer import Tokenizer
from tests.server.conftest import Application

QWEN = [
    (f"<|{name}|>", CONTROL) for name in ("fim_prefix", "fim_suffix", "fim_middle", "repo_name", "file_sep")
]
HELLO = [{"role": "user", "content": "Hello"}]


def prompt(tokenizer: Tokenizer, context: int = 4096, **fields: Any) -> str:
    known = facts(tokenizer=tokenizer, context=context)
    call = infill.parse({"input_prefix": "x = ", "input_suffix": "\nprint(x)", **fields}, known)
    (ids,) = call.encode()
    assert len(ids) <= context
    assert call.jobs([ids])[0].prompt == ids and call.shown(ids).replace("«", "") == call.shown(ids)
    return names(tokenizer, ids)


def test_the_prompt_of_a_file_among_others() -> None:
    """As llama.cpp's source states it, and Qwen's paper (arXiv 2409.12186)."""
    tokenizer = Tokenizer.from_metadata(vocabularies.bpe("gpt-2", "print", QWEN))
    extra = [{"filename": "a.py", "text": "y = 1\n"}, {"text": "z"}]
    assert prompt(tokenizer, input_extra=extra, prompt="4") == (
        "«<|repo_name|>»myproject\n«<|file_sep|>»a.py\ny = 1\n«<|file_sep|>»tmp\nz«<|file_sep|>»filename\n"
        "«<|fim_prefix|>»x = 4«<|fim_suffix|>»\nprint(x)«<|fim_middle|>»"
    )
    inside = prompt(tokenizer, input_prefix="<|fim_middle|>")
    # A file's text stays text, and without other files there is no header.
    assert inside == "«<|fim_prefix|>»<|fim_middle|>«<|fim_suffix|>»\nprint(x)«<|fim_middle|>»"


def test_the_prompt_of_a_vocabulary_with_three_marks() -> None:
    """BOS, spaces before texts, marks by keys that older files have."""
    marks = [("<A>", CONTROL), ("<B>", CONTROL), ("<C>", CONTROL)]
    metadata = vocabularies.spm(marks)
    first = len(metadata["tokenizer.ggml.tokens"]) - 3
    for i, name in enumerate(("prefix", "suffix", "middle")):
        metadata[f"tokenizer.ggml.{name}_token_id"] = first + i
    tokenizer = Tokenizer.from_metadata(metadata)
    found = prompt(tokenizer, input_prefix="ab", input_suffix="c", input_extra=[{"text": "a"}])
    assert found == " \n\n--- snippet ---\n\n a«<s>»«<A>» ab«<B>» c«<C>»"


def test_what_is_too_long_is_cut() -> None:
    tokenizer = Tokenizer.from_metadata(vocabularies.bpe("gpt-2", "", QWEN))
    long = "".join(chr(97 + i % 26) for i in range(5000))
    text = prompt(tokenizer, 512, input_prefix=long, input_suffix=long, input_extra=[{"text": long}] * 3)
    extra, _, rest = text.partition("«<|fim_prefix|>»")
    prefix, _, rest = rest.partition("«<|fim_suffix|>»")
    assert long.endswith(prefix) and len(prefix) == 192
    assert long.startswith(rest.removesuffix("«<|fim_middle|>»")) and len(rest) > 60
    assert extra.endswith(f"{long[-20:]}«<|file_sep|>»filename\n")
    with pytest.raises(APIError, match=r"context length is 512 tokens.*resulted in [0-9]+ tokens or more\."):
        prompt(tokenizer, 512, prompt=2 * long)


def test_a_model_that_fills_nothing_in(app: Application) -> None:
    reply = app.client.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "model_not_supported"
    assert "lacks a prefix and a suffix and a middle token" in reply.json()["error"]["message"]


def test_the_route_that_fills_in(app_with: Any) -> None:
    app = app_with()
    app.service._facts = replace(app.service.facts, tokenizer=filling())
    body = {"input_prefix": "Once", "input_suffix": "a time", "n_predict": 5, "temperature": 0}
    reply = app.client.post("/infill", json=body).json()
    assert reply["content"] == "a b c" and reply["stop"] and "Once" in reply["prompt"]
    editors = {
        "id_slot": 0, "input_extra": [{"filename": "a.py", "text": "x = 1"}], "n_indent": 4, "top_k": 40,
        "samplers": ["top_k", "top_p", "infill"], "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
        "cache_prompt": True, "stream": False, "response_fields": ["content"], "prompt": "    ",
    }  # fmt: skip
    assert app.client.post("/infill", json={**body, **editors}).json()["content"] == "a b c"
    text = app.client.post("/infill", json={**body, "stream": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [each["stop"] for each in events] == [False] * (len(events) - 1) + [True]
    call = native.parse({"prompt": [5], "n_predict": 5, "temperature": 0}, app.service.facts)
    assert app.llm.jobs[-1] == replace(call.job, prompt=app.llm.jobs[0].prompt)


@pytest.mark.parametrize("route", ["/completion", "/infill"])
def test_fields_of_a_reply(app_with: Any, route: str) -> None:
    """As llama.cpp's json_get_nested_values: a path is the name, and what is not there is left out."""
    app = app_with()
    app.service._facts = replace(app.service.facts, tokenizer=filling())
    body: dict[str, Any] = {
        "input_prefix": "Once",
        "input_suffix": "a time",
        "prompt": "Once",
        "n_predict": 5,
    }
    names = ["content", "generation_settings/n_predict", "timings", "no/such", "content/x", "prompt/"]
    wanted = {"content": "a b c", "generation_settings/n_predict": 5}
    found = app.client.post(route, json={**body, "response_fields": names}).json()
    assert found.pop("timings")["predicted_n"] == 3 and found == wanted
    text = app.client.post(route, json={**body, "stream": True, "response_fields": names[:2]}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == {**wanted, "content": ""} and all(each["stop"] is False for each in events[:-1])
    assert app.client.post(route, json={**body, "response_fields": []}).json()["stop"] is True


HOSTILE = [
    {"input_prefix": None}, {"input_prefix": 5}, {"input_suffix": ["a"]}, {"input_prefix": "\ud800"},
    {"input_extra": 5}, {"input_extra": [None]}, {"input_extra": [{}]}, {"input_extra": [{"text": 5}]},
    {"input_extra": [{"text": "a", "filename": 5}]}, {"input_extra": [{"text": "a"}] * 300},
    {"prompt": [1]}, {"prompt": "word " * 5000}, {"n_predict": -2}, {"n_predict": "many"}, {"grammar": "("},
    {"temperature": -1}, {"n_probs": 10**9}, {"stream": 5}, {"json_schema": {"type": "what"}},
]  # fmt: skip


@pytest.mark.parametrize("fields", HOSTILE, ids=lambda fields: json.dumps(fields)[:50])
def test_hostile_bodies(app_with: Any, fields: dict[str, Any]) -> None:
    app = app_with()
    app.service._facts = replace(app.service.facts, tokenizer=filling())
    body = json.dumps({"input_prefix": "a", "input_suffix": "b", **fields}).encode()
    reply = app.client.post("/infill", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code < 500 and app.llm.running == 0
    assert reply.status_code >= 400 or "grammar" in fields, reply.text  # grammars are read elsewhere


def test_a_template_is_applied() -> None:
    chat, tokenizer = chat_of(bpe(CHATML))
    text = chat.text(HELLO)
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(text, add_bos=False, parse_special=True) == chat.ids(HELLO)
    begun = [*HELLO, {"role": "assistant", "content": "I <|im_end|>"}]
    assert chat.text(begun, continue_last=True).endswith("<|im_start|>assistant\nI <|im_end|>")
    chat.close()


def test_the_route_of_templates(app: Application) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    reply = app.client.post("/apply-template", json={"messages": HELLO})
    assert reply.json() == {"prompt": "Hello"}  # it has none
    assert (
        "look"
        in app.client.post("/apply-template", json={"messages": HELLO, "tools": tools}).json()["prompt"]
    )
    for body in (
        {}, {"messages": []}, {"messages": 5}, {"messages": [None]}, {"messages": HELLO, "tools": [{}]},
        {"messages": [{"role": "user", "content": "\ud800"}]}, {"messages": HELLO, "chat_template": "{{1}}"},
        {"messages": HELLO, "chat_template_kwargs": {"messages": 1}},
        {"messages": HELLO, "chat_template_kwargs": {"a": {"b": 1}}},
    ):  # fmt: skip
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        assert app.client.post("/apply-template", content=data, headers=kind).status_code == 400


#: Templates, and what llama.cpp's rules (common/jinja/caps.cpp) say of them.
WITH_TOOLS = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{{ reasoning_effort }}"""
IN_PARTS = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}"
    "{{ m.role }}: {% for part in m.content %}{{ part.text }}{% endfor %}\n{% endfor %}"
)
#: Tools in no prompt, but calls in what was said: DeepSeek V3.1.
WITH_CALLS = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %}<{{ call.function.name }}>{{ call.function.arguments | tojson }}
{%- endfor %}
{% endfor %}"""
CAPS = [
    (WITH_CALLS, {"string_content", "system_role", "tool_calls", "parallel_tool_calls", "object_arguments"}),
    (CHATML, {"string_content", "system_role"}),
    (IN_PARTS, {"typed_content"}),
    (
        WITH_TOOLS,
        {"string_content", "system_role", "tools", "tool_calls", "parallel_tool_calls", "object_arguments",
         "preserve_reasoning", "reasoning_effort"},
    ),
]  # fmt: skip


def test_a_template_that_writes_calls_and_lists_no_tools() -> None:
    """llama.cpp says the same of DeepSeek V3.1's, whose form of calls is known."""
    chat, _ = chat_of(bpe((DATA / "templates" / "deepseek-v3.1.jinja").read_text("utf-8")))
    found = props.caps(chat)
    assert found["supports_tool_calls"] and found["supports_object_arguments"] and not found["supports_tools"]
    chat.close()


@pytest.mark.parametrize(("template", "expected"), CAPS, ids=["calls", "chatml", "parts", "tools"])
def test_what_a_template_can_do(template: str, expected: set[str]) -> None:
    chat, _ = chat_of(bpe(template))
    found = props.caps(chat)
    assert {name.removeprefix("supports_") for name, can in found.items() if can} == expected
    assert len(found) == 9
    chat.close()


def test_properties(app: Application) -> None:
    found = app.client.get("/props").json()
    assert found["chat_template"] == "" and found["chat_template_caps"] == {}
    assert found["total_slots"] == 4 and found["default_generation_settings"]["n_ctx"] == 256
    assert (
        found["bos_token"] == "<s>" and not found["is_sleeping"] and "made-up.gguf" not in json.dumps(found)
    )


def test_slots(live: Any) -> None:
    server = live(ping_s=0.05)  # the answer's head is sent with the first sign of life
    server.llm.pace_s = 600.0  # the answer ends when its client has gone
    asking, looking = (http.client.HTTPConnection("127.0.0.1", server.port, timeout=60) for _ in range(2))
    body = {"prompt": "secret", "n_predict": 3, "stream": True}
    asking.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})

    def slots(query: str = "") -> tuple[int, Any]:
        looking.request("GET", f"/slots{query}")
        reply = looking.getresponse()
        return reply.status, json.loads(reply.read())

    asking.getresponse()
    status, found = slots("?fail_on_no_slot=1")
    assert status == 200 and [each["is_processing"] for each in found] == [True, False, False, False]
    assert [each["id"] for each in found] == [0, 1, 2, 3] and "secret" not in json.dumps(found)
    asking.close()
    looking.close()


def test_no_slot_is_free() -> None:
    assert len(props.slots(facts(), 9)) == 4
    with pytest.raises(APIError) as caught:
        props.slots(facts(), 4, fail_if_none=True)
    assert caught.value.status == 503 and caught.value.retry_after
