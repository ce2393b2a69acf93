"""Adapts messages to a chat template, so that it refuses and drops nothing."""

import json
from collections.abc import Sequence
from typing import Any

from hotcold.chat.call_ids import CallIds, with_fitting_ids
from hotcold.chat.general_tools import with_tools, with_tools_in_channels, with_tools_of_deepseek
from hotcold.chat.literals import written_call
from hotcold.chat.messages import Message, content_text
from hotcold.chat.tool_formats import DEEPSEEK, GENERAL, HARMONY, LiteralCall, ToolFormat, knows_tools
from hotcold.chat.traits import Traits

_SYSTEMS = ("system", "developer")
CALL_MARKS = 2  #: tokens of a format that may be in calls that are written into content


def fitted(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    template: str,
    traits: Traits,
    format: ToolFormat,
    ids: CallIds,
    marks: Sequence[str],
) -> tuple[list[Message], list[dict[str, Any]]]:
    """The adapted messages, and the tools that the template itself shows. In calls that are written into
    content, ``marks``, which no text has, stand for the first tokens of the format."""
    found = [dict(message) for message in messages]
    if "developer" not in template:
        found = [{**each, "role": "system"} if each["role"] == "developer" else each for each in found]
    if format is GENERAL:
        found, tools = with_tools(found, tools), ()
    elif format is DEEPSEEK and tools and not knows_tools(template):
        found, tools = with_tools_of_deepseek(found, tools), ()
    elif format is HARMONY and tools and not knows_tools(template):
        found, tools = with_tools_in_channels(found, tools), ()
    elif not traits.calls and isinstance(format.call, LiteralCall):
        found = [_with_written_calls(each, format, format.call, marks) for each in found]
    if "tool_responses" in template and "tool_call_id" not in template:
        found = with_responses(found)
    found = with_fitting_ids(found, ids)
    if not traits.several_calls:
        found = with_one_call_each(found)
    if not (traits.system and traits.systems):
        found = with_one_system(found)
    if not traits.system:
        found = without_system(found)
    if not traits.users:
        found = with_one_user_at_a_time(found)
    for message in found:
        _fit(message, template, traits, format)
    return found, [*tools] if traits.bare_tools else [_complete(tool) for tool in tools]


def with_one_system(messages: Sequence[Message]) -> list[Message]:
    """Joins the first system messages to one. A later one is put before the next user message, or after the
    last message of the user or a tool."""
    found = [dict(message) for message in messages]
    first = 1
    while first < len(found) and found[0]["role"] in _SYSTEMS and found[first]["role"] in _SYSTEMS:
        _add(found[0], found.pop(first), "\n\n")
    i = 1
    while i < len(found):
        if found[i]["role"] in _SYSTEMS:
            if i + 1 < len(found) and found[i + 1]["role"] in (*_SYSTEMS, "user"):
                later = found.pop(i + 1)
                role = later["role"]
                _add(found[i], later, "\n")
                found[i]["role"] = role
                continue
            if found[i - 1]["role"] in ("user", "tool"):
                _add(found[i - 1], found.pop(i), "\n")
                continue
            found[i]["role"] = "user"
        i += 1
    return found


def without_system(messages: Sequence[Message]) -> list[Message]:
    """Puts the text of a first system message before the first user message, as llama.cpp does."""
    found = [dict(message) for message in messages]
    if found and found[0]["role"] in _SYSTEMS:
        if len(found) > 1 and found[1]["role"] == "user":
            _add(found[0], found.pop(1), "\n")
        found[0]["role"] = "user"
    return found


def with_one_user_at_a_time(messages: Sequence[Message]) -> list[Message]:
    """Joins consecutive user messages."""
    found: list[Message] = []
    for message in messages:
        if found and found[-1]["role"] == message["role"] == "user":
            _add(found[-1], message, "\n\n")
        else:
            found.append(dict(message))
    return found


def with_one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Splits a message with several calls into several, each before the result of its call."""
    found: list[Message] = []
    i = 0
    while i < len(messages):
        message, calls = messages[i], messages[i].get("tool_calls", ())
        i += 1
        if len(calls) < 2:
            found.append(message)
            continue
        results = []
        while i < len(messages) and messages[i]["role"] == "tool":
            results.append(messages[i])
            i += 1
        for n, call in enumerate(calls):
            more = {} if n == 0 else {"content": None}
            rest = {name: value for name, value in message.items() if n == 0 or name != "reasoning_content"}
            found.append({**rest, **more, "tool_calls": [call]})
            own = [each for each in results if each.get("tool_call_id") == call.get("id")]
            mine = own[:1] or results[:1]
            results = [each for each in results if not any(each is one for one in mine)]
            found += mine
        found += results
    return found


def with_responses(messages: Sequence[Message]) -> list[Message]:
    """Puts results into the message with their calls, and the answer behind them, too: Gemma 4's first
    template knows no role ``tool``."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else {}
        calls = last.get("tool_calls", ())
        if message["role"] == "tool" and calls:
            given = last.setdefault("tool_responses", [])
            named = {call.get("id"): call["function"]["name"] for call in calls}
            named[None] = calls[min(len(given), len(calls) - 1)]["function"]["name"]
            name = named.get(message.get("tool_call_id"), named[None])
            given.append({"name": name, "response": content_text(message["content"])})
        elif message["role"] == "assistant" and last.get("tool_responses") and "tool_calls" not in message:
            last["content"] = "\n".join(filter(None, map(_content, (last, message))))
        else:
            found.append(dict(message))
    return found


def _content(message: Message) -> str:
    return content_text(message["content"])


def _with_written_calls(
    message: Message, format: ToolFormat, kind: LiteralCall, marks: Sequence[str]
) -> Message:
    """Writes calls into content, as the model does, for a template that leaves them out."""
    if not (calls := message.get("tool_calls")):
        return message
    functions = (call["function"] for call in calls)
    written = (written_call(each["name"], each["arguments"], kind.notation) for each in functions)
    before, after = format.before, format.after
    for mark, token in zip(marks, format.tokens, strict=False):
        before, after = before.replace(token, mark), after.replace(token, mark)
    text = f"{before}{(format.between or '').join(written)}{after}"
    rest = {name: each for name, each in message.items() if name != "tool_calls"}
    return {**rest, "content": _content(message) + text}


def _add(message: Message, other: Message, between: str) -> None:
    """Appends the text of another message to this one's."""
    texts = [content_text(message["content"]), content_text(other["content"])]
    message["content"] = between.join(filter(None, texts))
    for name, value in other.items():
        message.setdefault(name, value)


def _fit(message: Message, template: str, traits: Traits, format: ToolFormat) -> None:
    content = message["content"]
    if content is None and not ("tool_calls" in message and traits.null):
        content = ""
    if isinstance(content, list) and not traits.parts:
        content = content_text(content)
    elif isinstance(content, str) and not traits.text and traits.parts:
        content = [{"type": "text", "text": content}]
    message["content"] = content
    if not traits.object_arguments:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            call["function"] = {
                **function,
                "arguments": json.dumps(function["arguments"], ensure_ascii=False),
            }
    if "reasoning_content" in message:
        _fit_thinking(message, template, harmony=format is HARMONY)


def _fit_thinking(message: Message, template: str, *, harmony: bool) -> None:
    """Puts thinking where a template looks for it. That of gpt-oss has no room for thinking and text beside a
    call."""
    if "block['thinking']" in template:  # Mistral's
        thought, content = message.pop("reasoning_content"), message["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        message["content"] = [{"type": "thinking", "thinking": thought}, *parts]
    if "message.thinking" not in template:
        return
    thought = message.pop("reasoning_content")
    if harmony and "tool_calls" in message:
        own = content_text(message["content"])
        thought, message["content"] = "\n".join(filter(None, (thought, own))), ""
    message["thinking"] = thought


def _complete(tool: dict[str, Any]) -> dict[str, Any]:
    """Adds a missing description and missing parameters, which templates read."""
    function: dict[str, Any] = {"description": "", "parameters": {"type": "object", "properties": {}}}
    function |= {name: value for name, value in tool["function"].items() if value is not None}
    parameters = function["parameters"]
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if isinstance(properties, dict):
        described = {
            name: {"description": "", **each} if isinstance(each, dict) else each
            for name, each in properties.items()
        }
        function["parameters"] = {**parameters, "properties": described}
    return {**tool, "function": function}
