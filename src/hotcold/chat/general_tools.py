"""Tools for models whose templates support none: the prompt describes them, and calls are text.

The marks are Hermes's, which many small models know; ``tool_formats.GENERAL`` parses them."""

import json
from collections.abc import Sequence
from typing import Any

from hotcold.chat.messages import Message, content_text
from hotcold.chat.tool_formats import GENERAL

_DESCRIPTION = """You may call functions to help the user. Here they are, one JSON object a line:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments, which match its parameters, as JSON between tags:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>
Its result comes in the next message, between <tool_response> and </tool_response>. Where no function helps, \
answer in plain words."""

_OF_DEEPSEEK = "## Tools\nYou have access to the following tools:\n"
_FORM_OF_DEEPSEEK = """IMPORTANT: ALWAYS adhere to this exact format for tool use:
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>\
{additional_tool_calls}<｜tool▁calls▁end｜>

Where:
- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces"""


def described(tools: Sequence[dict[str, Any]]) -> str:
    """Returns the text that describes tools to a model."""
    lines = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return _DESCRIPTION.format(tools="\n".join(lines))


def with_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Describes tools in the system message, and converts calls to text and results to user messages."""
    changed: list[Message] = []
    results: Message | None = None  # the last message, if further results belong to it
    for message in messages:
        if message["role"] != "tool":
            results = None
            changed.append(_with_call_text(message) if "tool_calls" in message else dict(message))
            continue
        result = f"<tool_response>\n{content_text(message['content'])}\n</tool_response>"
        if results is not None:
            results["content"] += f"\n{result}"
        else:
            results = {"role": "user", "content": result}
            changed.append(results)
    return _with_instructions(changed, described(tools)) if tools else changed


def with_tools_in_channels(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Adds the description of tools, for a Harmony model whose template has none."""
    lines = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = "# Tools\n\nCalls to these functions must go to the commentary channel, as functions.NAME:\n"
    return _with_instructions(messages, text + "\n".join(lines))


def with_tools_of_deepseek(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Adds DeepSeek's published description of tools for V3.1, whose template has none."""
    parts = [
        f"### {function['name']}\nDescription: {function.get('description') or ''}\n\n"
        f"Parameters: {json.dumps(function.get('parameters') or {}, ensure_ascii=False)}\n"
        for function in (tool["function"] for tool in tools)
    ]
    return _with_instructions(messages, "\n".join([_OF_DEEPSEEK, *parts, _FORM_OF_DEEPSEEK]))


def _with_instructions(messages: Sequence[Message], text: str) -> list[Message]:
    """Appends a text to the system message."""
    changed = [dict(message) for message in messages]
    if not changed or changed[0]["role"] not in ("system", "developer"):
        changed.insert(0, {"role": "system", "content": ""})
    text_before = content_text(changed[0]["content"])
    changed[0]["content"] = f"{text_before}\n\n{text}" if text_before else text
    return changed


def _with_call_text(message: Message) -> Message:
    calls = [
        json.dumps(
            {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}, ensure_ascii=False
        )
        for call in message["tool_calls"]
    ]
    text = f"{GENERAL.before}{(GENERAL.between or '').join(calls)}{GENERAL.after}"
    text_before = content_text(message["content"])
    fields = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**fields, "content": f"{text_before}\n{text}" if text_before else text}
