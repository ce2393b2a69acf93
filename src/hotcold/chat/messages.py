"""The messages of a conversation, validated, in the form of chat templates: plain dicts of plain values."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from hotcold.chat.stand_ins import texts_of
from hotcold.errors import UserError
from hotcold.tokenizer.unicode import check_unicode
from hotcold.values import shown

#: ``role``, ``content`` and other fields that a template may read.
Message: TypeAlias = dict[str, Any]
#: A request's value for the template in addition to messages, such as ``enable_thinking``.
TemplateValue: TypeAlias = bool | int | float | str

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_MESSAGES = 10_000
MOST_TOOLS = 1_000
MOST_VALUES = 32
MOST_CHARACTERS = 4 << 20  #: limit of the characters of all messages, and of all tools
MOST_LEVELS = 64  #: limit of nested values in the arguments of a call

#: Name for the text of arguments that are not a JSON object, so that the model sees all of it.
CUT_OFF = "cut_off_arguments"
_OF_EACH = ("name", "tool_call_id", "reasoning_content")  # optional strings of a message
_VALUE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
#: Names with another meaning for templates, or for programs that render them elsewhere.
RESERVED = frozenset((
    "messages", "message", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "chat_template", "template", "tokenize", "bos_token", "eos_token", "unk_token", "pad_token", "sep_token",
    "cls_token", "mask_token", "eot_token", "eom_token", "additional_special_tokens", "raise_exception",
    "strftime_now", "range", "dict", "cycler", "joiner", "namespace", "lipsum", "loop", "self", "caller",
    "varargs", "kwargs", "super", "true", "false", "none",
))  # fmt: skip


class MessageError(UserError):
    """Raised for an invalid conversation. The text begins with the wrong part, such as ``messages[2]``."""


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Returns messages in the form of templates.

    ``content`` is a string, a list of ``{"type": "text", "text": ...}``, or None with an assistant's calls;
    otherwise None becomes empty, if it is allowed. Arguments of calls become objects. Arguments that are not
    an object, for instance incomplete ones, or that have too many levels become text under the name
    :data:`CUT_OFF`. Unknown keys are left out. Raises MessageError for all other deviations from the
    documentation."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise MessageError(f"messages is {shown(messages)}: a list of at least one message is needed")
    if len(messages) > MOST_MESSAGES:
        raise MessageError(f"messages has {len(messages)} entries: at most {MOST_MESSAGES} are allowed")
    return _plain("messages", [_message(f"messages[{i}]", message) for i, message in enumerate(messages)])


def check_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns tools in the form of templates: ``{"type": "function", "function": {"name": ...}}`` each.
    Raises MessageError for other values."""
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise MessageError(f"tools is {shown(tools)}: a list is needed")
    if len(tools) > MOST_TOOLS:
        raise MessageError(f"tools has {len(tools)} entries: at most {MOST_TOOLS} are allowed")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            needed = '{"type": "function", "function": {"name": ...}} is needed'
            raise MessageError(f"tools[{i}] is {shown(tool)}: {needed}")
    return _plain("tools", [*tools])


def check_values(values: Mapping[str, TemplateValue]) -> dict[str, TemplateValue]:
    """Returns a request's values for the template. Raises MessageError for a value other than a boolean, a
    number or a string, or for a reserved name."""
    if not isinstance(values, Mapping) or len(values) > MOST_VALUES:
        raise MessageError(
            f"template arguments are {shown(values)}: an object of up to {MOST_VALUES} names is needed"
        )
    for name, value in values.items():
        if not isinstance(name, str) or not _VALUE_NAME.fullmatch(name):
            raise MessageError(f"template argument {shown(name)}: a name of letters, digits and _ is needed")
        if name in RESERVED:
            raise MessageError(f"template argument {name} is set by the server: leave it out")
        if not isinstance(value, bool | int | float | str):
            raise MessageError(
                f"template argument {name} is {shown(value)}: true, false, numbers and strings are allowed"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise MessageError(f"template argument {name} is {value}: a finite number is needed")
    return _plain("template arguments", [dict(values)])[0]


def _plain(kind: str, values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a copy in plain Python. Raises MessageError if a part is not JSON, or if there is too much."""
    try:
        copies: list[dict[str, Any]] = json.loads(json.dumps(list(values), allow_nan=False))
        total = sum(map(len, texts_of(copies)))
    except (TypeError, ValueError) as error:
        raise MessageError(f"{kind} are not valid JSON: {shown(str(error))}") from None
    except RecursionError:
        raise MessageError(
            f"{kind} are nested too deeply: at most a few hundred levels are allowed"
        ) from None
    if total > MOST_CHARACTERS:
        raise MessageError(f"{kind} have {total} characters: at most {MOST_CHARACTERS} are allowed")
    for text in texts_of(copies):
        check_unicode(text, kind)
    return copies


def _message(where: str, message: Mapping[str, Any]) -> Message:
    if not isinstance(message, Mapping):
        raise MessageError(f"{where} is {shown(message)}: an object with role and content is needed")
    role = message.get("role")
    if role not in ROLES:
        raise MessageError(f"{where}.role is {shown(role)}: allowed are {', '.join(ROLES)}")
    calls = message.get("tool_calls")
    content = message.get("content")
    checked: Message = {"role": role, "content": _content(where, content)}
    for name in _OF_EACH:
        if (value := message.get(name)) is None:
            continue
        if not isinstance(value, str):
            raise MessageError(f"{where}.{name} is {shown(value)}: a string is needed")
        checked[name] = value
    if calls is not None and calls != []:
        if role != "assistant" or not isinstance(calls, list | tuple):
            raise MessageError(
                f"{where}.tool_calls is {shown(calls)}: a list is needed, and only the role assistant has one"
            )
        for i, call in enumerate(calls):
            _check_call(f"{where}.tool_calls[{i}]", call)
        checked["tool_calls"] = calls
    if content is None and role not in ("assistant", "tool"):
        raise MessageError(f"{where}.content is missing: text is needed")
    return normal(checked)


def normal(message: Message) -> Message:
    """Returns a valid message in the form of templates: arguments are objects, content is None only with
    calls."""
    normalised = {name: value for name, value in message.items() if name != "tool_calls"}
    if calls := message.get("tool_calls"):
        normalised["tool_calls"] = [_normal_call(call) for call in calls]
    elif normalised["content"] is None:
        normalised["content"] = ""
    return normalised


def content_text(content: str | list[dict[str, Any]] | None) -> str:
    """Returns content as one text, with one part per line."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def _content(where: str, content: Any) -> str | list[dict[str, str]] | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return [{"type": "text", "text": text} for text in _parts(where, content)]
    raise MessageError(f"{where}.content is {shown(content)}: a string or a list of text parts is needed")


def _parts(where: str, parts: Sequence[Any]) -> Iterator[str]:
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text"):
            got = shown(part if kind is None else kind)
            raise MessageError(f"{where}.content[{i}] is {got}: only parts of type text are supported")
        if not isinstance(part.get("text"), str):
            raise MessageError(f"{where}.content[{i}].text is {shown(part.get('text'))}: a string is needed")
        yield part["text"]


def _check_call(where: str, call: Any) -> None:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise MessageError(f"{where} is {shown(call)}: an object with function.name is needed")
    arguments, id = function.get("arguments"), call.get("id")
    if not isinstance(arguments, str | Mapping | None):
        raise MessageError(f"{where}.function.arguments is {shown(arguments)}: an object as JSON is needed")
    if id is not None and not isinstance(id, str):
        raise MessageError(f"{where}.id is {shown(id)}: a string is needed")


def _normal_call(call: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"].get("arguments")
    if isinstance(arguments, str):
        arguments = _arguments(arguments)
    normalised = {"type": "function", "function": {"name": name, "arguments": dict(arguments or {})}}
    return normalised if call.get("id") is None else {"id": call["id"], **normalised}


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text.strip() or "{}", strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        arguments = text
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) and not _deep(arguments) else {CUT_OFF: text}


def _deep(value: object) -> bool:
    """Returns whether values are nested on more than :data:`MOST_LEVELS` levels."""
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [
            inner
            for container in level
            for inner in (container.values() if isinstance(container, dict) else container)  # type: ignore[attr-defined]
            if isinstance(inner, dict | list)
        ]
    return bool(level)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")
