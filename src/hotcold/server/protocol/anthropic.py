"""Anthropic's ``/v1/messages``: translates the request to one of the chat route."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hotcold.chat.stream import AnswerStream
from hotcold.server.protocol import chat, sampling, thinking
from hotcold.server.protocol.anthropic_reply import MessagesReply
from hotcold.server.protocol.chat import ChatCall
from hotcold.server.protocol.dialects import translated
from hotcold.server.protocol.errors import invalid
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.fields import (
    Anything,
    Choice,
    Either,
    Field,
    Fields,
    Flag,
    Items,
    Kind,
    Neutral,
    Shape,
    Tagged,
    Text,
    Whole,
    check_depth,
)
from hotcold.server.protocol.limits import (
    LARGEST,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
)
from hotcold.server.protocol.messages import FUNCTION_NAME, ONLY_TEXT, TEXT_PART, ResultPart
from hotcold.values import shown


def _blocks(kind: Kind, low: int = 0) -> Either:
    return Either({str: Text(), list: Items(kind, low, MAX_PARTS)}, "a string, or a list of blocks,")


_TEXT = Tagged("type", {"text": TEXT_PART}, ONLY_TEXT)
_TEXTS = _blocks(_TEXT)
_SEARCH_RESULT = Shape(
    {
        "title": Field(Text(), ""),
        "source": Field(Text(), ""),
        "content": Field(Items(_TEXT, 0, MAX_PARTS), required=True),
    }
)
_READABLE = {"text": TEXT_PART, "search_result": _SEARCH_RESULT}
_RESULT = Shape(
    {
        "tool_use_id": Field(Text(0, 256), required=True),
        "content": Field(_blocks(ResultPart(Tagged("type", _READABLE, ONLY_TEXT))), ""),
        "is_error": Field(Flag(), False, "The model reads a note about the error before the text."),
    }
)
_USERS = Tagged("type", {**_READABLE, "tool_result": _RESULT}, ONLY_TEXT)
#: The assistant's blocks of tools that ran elsewhere, which are left out.
_ELSEWHERE = (
    "bash_code_execution_tool_result", "code_execution_tool_result", "container_upload", "mcp_tool_result",
    "mcp_tool_use", "server_tool_use", "text_editor_code_execution_tool_result", "tool_search_tool_result",
    "web_fetch_tool_result", "web_search_tool_result",
)  # fmt: skip
_OWN = Tagged(
    "type",
    {
        "text": TEXT_PART,
        "thinking": Shape({"thinking": Field(Text(), required=True)}),
        "redacted_thinking": Shape({}),
        "tool_use": Shape(
            {
                "id": Field(Text(0, 256), required=True),
                "name": Field(Text(1, 256), required=True),
                "input": Field(Anything(), required=True),
            }
        ),
        **dict.fromkeys(_ELSEWHERE, Shape({})),
    },
)
_MESSAGE = Tagged(
    "role",
    {
        "user": Shape({"content": Field(_blocks(_USERS, 1), required=True)}),
        "assistant": Shape({"content": Field(_blocks(_OWN), required=True)}),
        "system": Shape({"content": Field(_TEXTS, required=True)}),
    },
)
_TOOL = Shape(
    {
        "type": Field(Choice(("custom",)), "custom", "Tools that Anthropic itself runs are not available."),
        "name": Field(FUNCTION_NAME, required=True),
        "description": Field(Text()),
        "input_schema": Field(Anything(), required=True, note="JSON Schema of the input."),
        "strict": Field(Flag(), note="Has no effect: input always matches the schema."),
    }
)
_PARALLEL = {"disable_parallel_tool_use": Field(Flag(), None)}
_TOOL_CHOICE = Tagged(
    "type",
    {
        "auto": Shape(_PARALLEL),
        "any": Shape(_PARALLEL),
        "tool": Shape({"name": Field(Text(1, 256), required=True), **_PARALLEL}),
        "none": Shape({}),
    },
)
_FORMAT = Tagged("type", {"json_schema": Shape({"schema": Field(Anything(), required=True)})})
_OUTPUT = Shape(
    {
        "format": Field(_FORMAT, None, "JSON that matches a schema."),
        "effort": Field(
            Choice(("low", "medium", "high", "xhigh", "max")), None, "A value for the chat template."
        ),
    }
)
#: The edit that changes nothing.
_KEPT = {"type": "clear_thinking_20251015", "keep": "all"}
_STOP = Items(Text(0, MAX_STOP_LENGTH), 0, MAX_STOPS)

#: Fields of the prompt.
COUNT: Fields = {
    "model": chat.MODEL,
    "messages": Field(
        Items(_MESSAGE, 1, MAX_MESSAGES), None, "A last message of the assistant is continued.", required=True
    ),
    "system": Field(_TEXTS, None, "The system message; Claude Code's billing line is left out."),
    "tools": Field(Items(_TOOL, 0), None, "Functions that the model may call."),
    "tool_choice": Field(_TOOL_CHOICE, None, "auto if there are tools."),
    "thinking": Field(thinking.THINKING, None, "A value for the chat template; disabled turns thinking off."),
    "output_config": Field(_OUTPUT, None, "The form of the answer, and the effort."),
    "mcp_servers": Field(Neutral(([],))),
    "container": Field(Neutral()),
    "context_management": Field(Neutral(({}, {"edits": []}, {"edits": [_KEPT]}))),
    "output_format": Field(Neutral(), note="Use output_config."),
}  # fmt: skip
FIELDS: Fields = {
    **COUNT,
    "max_tokens": Field(Whole(1, LARGEST), None, "Limit of tokens in the answer.", required=True),
    "stop_sequences": Field(_STOP, None, "Texts that end the answer; empty ones have no effect."),
    "stream": Field(Flag(), False, "Streams the answer as server-sent events."),
    **sampling.SHARED,
}  # fmt: skip
BODY, COUNT_BODY = Shape(FIELDS), Shape(COUNT)
_NAMES = {"response_format": "output_config"}
#: A line that Claude Code writes at the beginning of a text, for Anthropic's billing:
#: ``x-anthropic-billing-header: cc_version=2.1.100.f2a; cc_entrypoint=cli; cch=0a1b2;``
_BILLING_LINE = re.compile(
    r"x-anthropic-billing-header:(?:[ \t]*\w+=[^;\s]*;)*[ \t]*\w+=[^;\s]*;?[ \t]*(?:\r?\n|\Z)"
)


@dataclass(frozen=True)
class MessagesCall(ChatCall):
    """The job and options of one request."""

    def reply(self, parts: Callable[[], AnswerStream]) -> MessagesReply:
        return MessagesReply(self.facts, parts())


def parse(body: object, facts: Facts) -> MessagesCall:
    """Reads the body of a request. Raises APIError for wrong values; ignores unknown fields."""
    check_depth(body)
    return _call(BODY.read(body, ""), facts)


def parse_count(body: object, facts: Facts) -> MessagesCall:
    """Reads the body of a request to count its tokens."""
    check_depth(body)
    return _call(COUNT_BODY.read(body, ""), facts)


def _call(values: Mapping[str, Any], facts: Facts) -> MessagesCall:
    last = values["messages"][-1]
    if last["role"] == "assistant" and not isinstance(last["content"], str):
        for part in last["content"]:
            if part["type"] == "tool_use":
                got = f"messages ends with the call {shown(part['id'])}"
                raise invalid(f"{got}: add a tool_result of each, in a message of role user", "messages")
    return MessagesCall(**vars(translated(chat.parse, _chat(values), facts, _NAMES)))


def _chat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Translates the request to one of the chat route."""
    output = values["output_config"] or {}
    format, choice = output.get("format"), values["tool_choice"] or {}
    body: dict[str, Any] = {
        "messages": [*_system(values["system"]), *_messages(values["messages"])],
        "max_tokens": values.get("max_tokens"),
        "stop": values.get("stop_sequences"),
        "stream": values.get("stream"),
        "reasoning_effort": output.get("effort"),
        "thinking": values["thinking"],
        **{name: values.get(name) for name in sampling.SHARED},
    }
    if values["tools"]:
        body["tools"] = [_tool(each) for each in values["tools"]]
    if choice:
        body["tool_choice"] = _choice(choice)
    if choice.get("disable_parallel_tool_use") is not None:
        body["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    if format is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": format["schema"]}}
    return body


def _system(content: str | list[dict[str, Any]] | None) -> Iterator[dict[str, Any]]:
    if content := _without_billing_line(content or []):
        yield {"role": "system", "content": _text(content)}


def _without_billing_line(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Leaves out Claude Code's billing line, which is the first block or the first line of the first block.

    The line changes with each request, so no prompt would share a prefix with an earlier one."""
    if isinstance(content, str):
        line = _BILLING_LINE.match(content)
        return content[line.end() :] if line else content
    blocks: list[dict[str, Any]] = []
    for block in content:
        text = block["text"]
        line = _BILLING_LINE.match(text)
        if line and not text[line.end() :].strip():
            continue
        if line and not blocks:
            block = {**block, "text": text[line.end() :]}
        blocks.append(block)
    return blocks


def _text(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Reduces a single block to its text, which every template supports."""
    if isinstance(content, str):
        return content
    texts = [{"type": "text", "text": _block_text(each)} for each in content]
    return texts if len(texts) > 1 else texts[0]["text"] if texts else ""


def _block_text(block: Mapping[str, Any]) -> str:
    """Returns the text of a block; of a search result its title, its source and its texts."""
    if block["type"] == "text":
        return str(block["text"])
    texts = [block["title"], block["source"], *(each["text"] for each in block["content"])]
    return "\n".join(filter(None, texts))


def _messages(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message["content"]
        if message["role"] == "user" and not isinstance(content, str):
            yield from _of_user(content)
        elif message["role"] == "assistant" and not isinstance(content, str):
            yield _of_assistant(content)
        else:
            yield {"role": message["role"], "content": _text(content)}


def _of_user(blocks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Divides a user's message: each result of a tool is a separate message, in its place among the texts."""
    texts: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] != "tool_result":
            texts.append(block)
            continue
        if texts:
            yield {"role": "user", "content": _text(texts)}
            texts = []
        yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _result(block)}
    if texts:
        yield {"role": "user", "content": _text(texts)}


def _result(block: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    content = _text(block["content"])
    if not block["is_error"]:
        return content
    if isinstance(content, str):
        return f"Error: {content}"
    return [{"type": "text", "text": "Error:"}, *content]


def _of_assistant(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    texts = [block for block in blocks if block["type"] == "text"]
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    message: dict[str, Any] = {"role": "assistant", "content": _text(texts) or None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = [
            {"id": each["id"], "function": {"name": each["name"], "arguments": each["input"]}}
            for each in calls
        ]
    return message


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool["name"],
        "description": tool["description"],
        "parameters": tool["input_schema"],
        "strict": tool["strict"],
    }
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given}


def _choice(choice: Mapping[str, Any]) -> str | dict[str, Any]:
    if choice["type"] == "tool":
        return {"type": "function", "function": {"name": choice["name"]}}
    return {"any": "required"}.get(choice["type"], str(choice["type"]))
