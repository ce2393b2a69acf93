"""Templates that mark thinking in different ways, and what the dialects of the server say of an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
JSON = ('{"ok": ', "true", "}")


@dataclass(frozen=True)
class Style:
    """How a model marks its thinking and its calls. Marks may be several tokens."""

    start: tuple[str, ...]
    end: tuple[str, ...]
    signs: str  #: texts by which Hotcold knows how the template writes calls
    call: tuple[str, ...]  #: tokens of a call ``f`` with ``{"a": 1}``
    mark: str  #: the first of them
    controls: tuple[str, ...] = ()
    #: tokens of a call up to one that brings more behind the name than its grammar takes, where there are
    #: such tokens: right except for its spaces, and wrong
    tight: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()

    def template(self) -> str:
        """A ChatML template. It opens the thought where the user says ``opens`` or ``always``, and leaves
        that to the model else. Where thinking is forbidden it closes an empty one, except for ``always``."""
        start, end = "".join(self.start), "".join(self.end)
        return (
            "{% if tools %}<|im_start|>system\n{{ tools | tojson }}{% if false %}"
            + self.signs
            + "{% endif %}"
            "<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
            "{{ message.content }}{% if message.tool_calls %}{{ message.tool_calls | tojson }}"
            '"arguments"{% endif %}<|im_end|>\n{% endfor %}'
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
            "{% set said = messages[-1].content %}"
            "{% if enable_thinking is defined and not enable_thinking and said != 'always' %}"
            f"{{{{ '{start}\n\n{end}\n\n' }}}}"
            f"{{% elif said in ('opens', 'always') %}}{{{{ '{start}\n' }}}}{{% endif %}}{{% endif %}}"
        )


_HERMES = ("<tool_call>", "\n", '{"name": "f", ', '"arguments": {"a": ', "1", "}}", "\n</tool_call>")
_HERMES_SIGNS = '<tool_call>\n{\\"name\\": \\"arguments\\"}'
_TIGHT = ("<tool_call>", "\n", '{"name":"f","arguments":{"a":1}}', "\n</tool_call>")
_BROKEN = ("<tool_call>", "\n", '{"name":"f", no')
_HERMES_CALLS: dict[str, Any] = {
    "signs": _HERMES_SIGNS, "call": _HERMES, "mark": "<tool_call>", "tight": _TIGHT, "broken": _BROKEN,
}  # fmt: skip
STYLES = {
    "think": Style(("<think>",), ("</think>",), **_HERMES_CALLS),
    "spelled": Style(("<th", "ink", ">"), ("</", "think", ">"), **_HERMES_CALLS),
    "mistral": Style(
        ("[THINK]",),
        ("[/THINK]",),
        "[TOOL_CALLS] [ARGS]",
        ("[TOOL_CALLS]", "f", "[ARGS]", '{"a": ', "1", "}"),
        "[TOOL_CALLS]",
        ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"),
        broken=("[TOOL_CALLS]", "f", " no"),
    ),
    "command-a": Style(
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        controls=("<|START_THINKING|>", "<|END_THINKING|>"),
        **_HERMES_CALLS,
    ),
    "seed": Style(("<seed:think>",), ("</seed:think>",), **_HERMES_CALLS),
    "qwen-xml": Style(
        ("<think>",),
        ("</think>",),
        "<tool_call> <function= <parameter=",
        ("<tool_call>", "\n", "<function=f>", "\n<parameter=a>\n", "1", "\n</parameter>\n",
         "</function>", "\n</tool_call>"),
        "<tool_call>",
    ),
    "gemma": Style(
        ("<|channel>", "thought"),
        ("<channel|>",),
        "<|tool_call>call:",
        ("<|tool_call>", "call:f{", "a:", "1", "}", "<tool_call|>"),
        "<|tool_call>",
        ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
}  # fmt: skip
WORDS = tuple(f" w{i}" for i in range(12))


#: What a token may have behind the end mark.
BEHIND = ("\n\n", '\n{"ok": ', " no")


def texts_of(style: Style, more: Sequence[str] = ()) -> tuple[str, ...]:
    """All tokens of chains that are no control tokens."""
    end = "".join(style.end)
    found = (
        *style.start,
        *style.end,
        *style.call,
        *style.tight,
        *style.broken,
        *JSON,
        *WORDS,
        *more,
        *(end + text for text in BEHIND),
    )
    return tuple(each for each in dict.fromkeys(found) if each not in style.controls)


def says(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def request(
    dialect: str, said: str, *, max_tokens: int = 200, stream: bool = False, **fields: Any
) -> tuple[str, Any]:
    """Path and body of a request with one message. ``fields`` are ``schema``, ``tools``, ``required``,
    ``stop``, ``budget`` and ``thinks``, in no dialect's words."""
    if dialect == "chat":
        return "/v1/chat/completions", _chat(said, max_tokens, stream, fields)
    if dialect == "responses":
        return "/v1/responses", _responses(said, max_tokens, stream, fields)
    if dialect == "anthropic":
        return "/v1/messages", _anthropic(said, max_tokens, stream, fields)
    return "/api/chat", _ollama(said, max_tokens, stream, fields)


def _chat(said: str, max_tokens: int, stream: bool, fields: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": says(said), "max_tokens": max_tokens, "stream": stream}
    if "schema" in fields:
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": fields["schema"]}}
    if "tools" in fields:
        body["tools"] = fields["tools"]
    if fields.get("required"):
        body["tool_choice"] = "required"
    if "stop" in fields:
        body["stop"] = fields["stop"]
    if fields.get("budget") is not None:
        body["thinking_token_budget"] = fields["budget"]
    if fields.get("thinks") is not None:
        body |= {} if fields["thinks"] else {"reasoning_effort": "none"}
    return body


def _responses(said: str, max_tokens: int, stream: bool, fields: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"input": said, "max_output_tokens": max_tokens, "stream": stream}
    if "schema" in fields:
        format = {"type": "json_schema", "name": "a", "schema": fields["schema"]}
        body["text"] = {"format": format}
    if "tools" in fields:
        body["tools"] = [{"type": "function", **each["function"]} for each in fields["tools"]]
    if fields.get("required"):
        body["tool_choice"] = "required"
    reasoning = {}
    if fields.get("budget") is not None:
        reasoning["max_tokens"] = fields["budget"]
    if fields.get("thinks") is False:
        reasoning["effort"] = "none"
    return body | ({"reasoning": reasoning} if reasoning else {})


def _anthropic(said: str, max_tokens: int, stream: bool, fields: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": says(said), "max_tokens": max_tokens, "stream": stream}
    if "schema" in fields:
        body["output_config"] = {"format": {"type": "json_schema", "schema": fields["schema"]}}
    if "tools" in fields:
        functions = (each["function"] for each in fields["tools"])
        body["tools"] = [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
    if fields.get("required"):
        body["tool_choice"] = {"type": "any"}
    if "stop" in fields:
        body["stop_sequences"] = fields["stop"]
    if fields.get("budget") is not None:
        body["thinking"] = {"type": "enabled", "budget_tokens": fields["budget"]}
    if fields.get("thinks") is False:
        body["thinking"] = {"type": "disabled"}
    return body


def _ollama(said: str, max_tokens: int, stream: bool, fields: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {"num_predict": max_tokens}
    body: dict[str, Any] = {"messages": says(said), "stream": stream, "options": options}
    if "schema" in fields:
        body["format"] = fields["schema"]
    if "tools" in fields:
        body["tools"] = fields["tools"]
    if "stop" in fields:
        options["stop"] = fields["stop"]
    if fields.get("thinks") is not None:
        body["think"] = fields["thinks"]
    return body


Parts = tuple[str, str, list[tuple[str, Any]]]  # reasoning, content, calls


def parts_of(dialect: str, reply: httpx.Response, stream: bool) -> Parts:
    """Reasoning, content and calls of a reply, in whatever dialect."""
    assert reply.status_code == 200, reply.text
    reader = {"chat": _of_chat, "responses": _of_responses, "anthropic": _of_anthropic, "ollama": _of_ollama}
    return reader[dialect](_events(dialect, reply.text) if stream else [reply.json()], stream)


def _events(dialect: str, text: str) -> list[Any]:
    if dialect == "ollama":
        return [json.loads(line) for line in text.splitlines()]
    lines = (line[6:] for line in text.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _of_chat(found: list[Any], stream: bool) -> Parts:
    messages = [each["choices"][0]["delta" if stream else "message"] for each in found if each["choices"]]
    calls: list[list[str]] = []
    for call in (call for each in messages for call in each.get("tool_calls", ())):
        if "name" in call["function"]:
            calls.append([call["function"]["name"], ""])
        calls[-1][1] += call["function"]["arguments"]
    return (
        "".join(each.get("reasoning_content") or "" for each in messages),
        "".join(each.get("content") or "" for each in messages),
        [(name, json.loads(arguments)) for name, arguments in calls],
    )


def _of_responses(found: list[Any], stream: bool) -> Parts:
    items = (found[-1]["response"] if stream else found[0])["output"]
    if stream:
        deltas = [each["delta"] for each in found if each["type"] == "response.output_text.delta"]
        whole = [part["text"] for each in items if each["type"] == "message" for part in each["content"]]
        assert "".join(deltas) == "".join(whole)
    texts = {
        kind: "".join(part["text"] for each in items if each["type"] == kind for part in each["content"])
        for kind in ("reasoning", "message")
    }
    calls = [each for each in items if each["type"] == "function_call"]
    return (
        texts["reasoning"],
        texts["message"],
        [(each["name"], json.loads(each["arguments"])) for each in calls],
    )


def _of_anthropic(found: list[Any], stream: bool) -> Parts:
    if not stream:
        blocks = found[0]["content"]
    else:
        blocks = [each["content_block"] for each in found if each["type"] == "content_block_start"]
        for each in blocks:
            each |= {"input": ""} if each["type"] == "tool_use" else {}
        for each in found:
            if each["type"] == "content_block_delta":
                block, delta = blocks[each["index"]], each["delta"]
                names = {"partial_json": "input"}
                for name, text in delta.items():
                    if name not in ("type", "signature"):
                        block[names.get(name, name)] += text
        for each in blocks:
            if each["type"] == "tool_use":
                each["input"] = json.loads(each["input"])
    return (
        "".join(each["thinking"] for each in blocks if each["type"] == "thinking"),
        "".join(each["text"] for each in blocks if each["type"] == "text"),
        [(each["name"], each["input"]) for each in blocks if each["type"] == "tool_use"],
    )


def _of_ollama(found: list[Any], stream: bool) -> Parts:
    messages = [each["message"] for each in found if "message" in each]
    calls = [call["function"] for each in messages for call in each.get("tool_calls", ())]
    return (
        "".join(each.get("thinking", "") for each in messages),
        "".join(each["content"] for each in messages),
        [(each["name"], each["arguments"]) for each in calls],
    )
