"""Adapts messages to a chat template, so that it neither refuses nor drops them."""

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
CALL_MARKS = 2  #: tokens of a format that may occur in calls written into content


def fitted(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    template: str,
    traits: Traits,
    format: ToolFormat,
    ids: CallIds,
    marks: Sequence[str],
) -> tuple[list[Message], list[dict[str, Any]]]:
    """Returns the adapted messages, and the tools for the template itself. In calls written into content,
    ``marks``, which no text has, replace the first tokens of the format."""
    adapted = [dict(message) for message in messages]
    if "developer" not in template:
        adapted = [{**each, "role": "system"} if each["role"] == "developer" else each for each in adapted]
    if format is GENERAL:
        adapted, tools = with_tools(adapted, tools), ()
    elif format is DEEPSEEK and tools and not knows_tools(template):
        adapted, tools = with_tools_of_deepseek(adapted, tools), ()
    elif format is HARMONY and tools and not knows_tools(template):
        adapted, tools = with_tools_in_channels(adapted, tools), ()
    elif not traits.calls and isinstance(format.call, LiteralCall):
        adapted = [_with_written_calls(each, format, format.call, marks) for each in adapted]
    if "tool_responses" in template and "tool_call_id" not in template:
        adapted = with_responses(adapted)
    adapted = with_fitting_ids(adapted, ids)
    if not traits.several_calls:
        adapted = with_one_call_each(adapted)
    if not (traits.system and traits.systems):
        adapted = with_one_system(adapted)
    if not traits.system:
        adapted = without_system(adapted)
    if not traits.users:
        adapted = with_one_user_at_a_time(adapted)
    for message in adapted:
        _fit(message, template, traits, format)
    return adapted, [*tools] if traits.bare_tools else [_complete(tool) for tool in tools]


def with_one_system(messages: Sequence[Message]) -> list[Message]:
    """Joins the first system messages to one. Inserts a later one before the next user message, or after the
    last message of the user or a tool."""
    changed = [dict(message) for message in messages]
    first = 1
    while first < len(changed) and changed[0]["role"] in _SYSTEMS and changed[first]["role"] in _SYSTEMS:
        _add(changed[0], changed.pop(first), "\n\n")
    i = 1
    while i < len(changed):
        if changed[i]["role"] in _SYSTEMS:
            if i + 1 < len(changed) and changed[i + 1]["role"] in (*_SYSTEMS, "user"):
                later = changed.pop(i + 1)
                role = later["role"]
                _add(changed[i], later, "\n")
                changed[i]["role"] = role
                continue
            if changed[i - 1]["role"] in ("user", "tool"):
                _add(changed[i - 1], changed.pop(i), "\n")
                continue
            changed[i]["role"] = "user"
        i += 1
    return changed


def without_system(messages: Sequence[Message]) -> list[Message]:
    """Inserts the text of a first system message before the first user message, as llama.cpp does."""
    changed = [dict(message) for message in messages]
    if changed and changed[0]["role"] in _SYSTEMS:
        if len(changed) > 1 and changed[1]["role"] == "user":
            _add(changed[0], changed.pop(1), "\n")
        changed[0]["role"] = "user"
    return changed


def with_one_user_at_a_time(messages: Sequence[Message]) -> list[Message]:
    """Joins consecutive user messages."""
    changed: list[Message] = []
    for message in messages:
        if changed and changed[-1]["role"] == message["role"] == "user":
            _add(changed[-1], message, "\n\n")
        else:
            changed.append(dict(message))
    return changed


def with_one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Splits a message with several calls into one message for each call, followed by its result."""
    changed: list[Message] = []
    i = 0
    while i < len(messages):
        message, calls = messages[i], messages[i].get("tool_calls", ())
        i += 1
        if len(calls) < 2:
            changed.append(message)
            continue
        results = []
        while i < len(messages) and messages[i]["role"] == "tool":
            results.append(messages[i])
            i += 1
        for n, call in enumerate(calls):
            no_content = {} if n == 0 else {"content": None}
            fields = {name: value for name, value in message.items() if n == 0 or name != "reasoning_content"}
            changed.append({**fields, **no_content, "tool_calls": [call]})
            matching = [each for each in results if each.get("tool_call_id") == call.get("id")]
            result = matching[:1] or results[:1]
            results = [each for each in results if not any(each is one for one in result)]
            changed += result
        changed += results
    return changed


def with_responses(messages: Sequence[Message]) -> list[Message]:
    """Moves results into the message with their calls, and appends the next answer to its content. Gemma 4's
    first template does not support the role ``tool``."""
    changed: list[Message] = []
    for message in messages:
        last = changed[-1] if changed else {}
        calls = last.get("tool_calls", ())
        if message["role"] == "tool" and calls:
            responses = last.setdefault("tool_responses", [])
            named = {call.get("id"): call["function"]["name"] for call in calls}
            named[None] = calls[min(len(responses), len(calls) - 1)]["function"]["name"]
            name = named.get(message.get("tool_call_id"), named[None])
            responses.append({"name": name, "response": content_text(message["content"])})
        elif message["role"] == "assistant" and last.get("tool_responses") and "tool_calls" not in message:
            last["content"] = "\n".join(filter(None, map(_content, (last, message))))
        else:
            changed.append(dict(message))
    return changed


def _content(message: Message) -> str:
    return content_text(message["content"])


def _with_written_calls(
    message: Message, format: ToolFormat, kind: LiteralCall, marks: Sequence[str]
) -> Message:
    """Writes calls into content, in the model's format, for a template that omits them."""
    if not (calls := message.get("tool_calls")):
        return message
    functions = (call["function"] for call in calls)
    written = (written_call(each["name"], each["arguments"], kind.notation) for each in functions)
    before, after = format.before, format.after
    for mark, token in zip(marks, format.tokens, strict=False):
        before, after = before.replace(token, mark), after.replace(token, mark)
    text = f"{before}{(format.between or '').join(written)}{after}"
    fields = {name: each for name, each in message.items() if name != "tool_calls"}
    return {**fields, "content": _content(message) + text}


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
    """Stores thinking where the template reads it. Gpt-oss's has one place for it and a call's text."""
    if "block['thinking']" in template:  # Mistral's templates
        thought, content = message.pop("reasoning_content"), message["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        message["content"] = [{"type": "thinking", "thinking": thought}, *parts]
    if "message.thinking" not in template:
        return
    thought = message.pop("reasoning_content")
    if harmony and "tool_calls" in message:
        text = content_text(message["content"])
        thought, message["content"] = "\n".join(filter(None, (thought, text))), ""
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
