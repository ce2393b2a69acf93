"""Determines the abilities of a chat template, by rendering a few conversations with it.

A template does not declare whether it supports a system message, iterates over parts of content, or expects
null from an assistant that only called tools. Some raise an error, others silently leave text out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hotcold.chat.messages import Message

_SYSTEM, _SECOND, _LATER = "Vexillum", "Quincunx", "Obolus"
_USER, _ANSWER, _RESULT = "Fibula", "Lacuna", "Tessera"
_KEY, _VALUE, _OTHER = "ansa", "Rostrum", "Scutum"
_ID, _OTHER_ID = "call00001", "call00002"
_BARE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}}},
}
_NO_PARAMETERS = {"type": "function", "function": {"name": "probe", "description": "d"}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "d",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": "d"}}},
    },
}


@dataclass(frozen=True)
class Traits:
    """The forms that a template accepts; by default the usual ones."""

    text: bool = True  #: whether content may be a text
    parts: bool = False  #: whether content may be a list of parts
    system: bool = True  #: whether a system message may be the first message
    systems: bool = True  #: whether there may be several system messages, anywhere
    null: bool = False  #: whether the content of an assistant with calls should be null
    object_arguments: bool = True  #: whether arguments of calls are objects; otherwise JSON in a text
    bare_tools: bool = True  #: whether descriptions and parameters of tools are optional
    calls: bool = True  #: whether calls of earlier messages are written
    several_calls: bool = True  #: whether a message may have several calls
    users: bool = True  #: whether consecutive user messages are allowed
    before_user: str = ""  #: the template's text between a system message and a user message
    #: its text between a user message and the answer: in a prompt for the answer, and in later prompts
    before_answer: tuple[str, str] = ("", "")


def _message(role: str, text: Any, **fields: Any) -> Message:
    return {"role": role, "content": text, **fields}


def _calls(content: Any, *arguments: Any) -> list[Message]:
    ids = (_ID, _OTHER_ID)[: len(arguments)]
    calls = [
        {"id": id, "type": "function", "function": {"name": "probe", "arguments": each}}
        for id, each in zip(ids, arguments, strict=True)
    ]
    return [
        _message("user", _USER),
        _message("assistant", content, tool_calls=calls),
        *(_message("tool", _RESULT, tool_call_id=id, name="probe") for id in ids),
        _message("assistant", _ANSWER),
        _message("user", _USER),
    ]


def _in_parts(messages: Sequence[Message]) -> list[Message]:
    return [
        {**each, "content": [{"type": "text", "text": each["content"]}]} if each["content"] else each
        for each in messages
    ]


_PLAIN = [_message("user", _USER)]
_TURNS = [*_PLAIN, _message("assistant", _ANSWER), _message("user", _SECOND)]
_ONE_SYSTEM = [_message("system", _SYSTEM), *_PLAIN]
_MORE_SYSTEMS = [
    _message("system", _SYSTEM),
    _message("system", _SECOND),
    _message("user", _USER),
    _message("assistant", _ANSWER),
    _message("system", _LATER),
    _message("user", _USER),
]
_NULL, _EMPTY, _AS_TEXT, _TWO = (
    _calls(None, {_KEY: _VALUE}),
    _calls("", {_KEY: _VALUE}),
    _calls("", f'{{"{_KEY}": "{_VALUE}"}}'),
    _calls("", {_KEY: _VALUE}, {_KEY: _OTHER}),
)


def probes(parts: bool = False, tools: bool = False) -> list[dict[str, Any]]:
    """Returns the conversations to render. ``parts`` converts all content to parts, for a template that
    accepts nothing else; ``tools`` adds tools to each."""
    form = _in_parts if parts else list
    none = [_TOOL] if tools else None
    return [
        {"messages": _PLAIN, "tools": none},
        {"messages": _in_parts(_PLAIN), "tools": none},
        {"messages": form(_ONE_SYSTEM), "tools": none},
        {"messages": form(_MORE_SYSTEMS), "tools": none},
        *({"messages": form(each), "tools": [_TOOL]} for each in (_NULL, _EMPTY, _AS_TEXT, _TWO)),
        {"messages": form(_PLAIN), "tools": [_TOOL]},
        {"messages": form(_PLAIN), "tools": [_BARE_TOOL]},
        {"messages": form(_PLAIN), "tools": [_NO_PARAMETERS]},
        {"messages": form([_message("user", _USER), _message("user", _SECOND)]), "tools": none},
        {"messages": form(_TURNS), "tools": none},
    ]


def needs_parts(texts: Sequence[str | None]) -> bool:
    """Returns whether the results of :func:`probes` show that content must be in parts, also of probes."""
    return not _shows(texts[0], _USER) and _iterates(texts[1])


def needs_tools(texts: Sequence[str | None]) -> bool:
    """Returns whether nothing can be rendered without tools."""
    return texts[0] is None and texts[1] is None


def traits_of(texts: Sequence[str | None]) -> Traits:
    """Returns the traits that the results of :func:`probes` show; None is a failed rendering."""
    plain, in_parts, system, systems, null, empty, as_text, two, tool, *bare, users, turns = texts
    text, parts = _shows(plain, _USER), _iterates(in_parts)
    if not text and not parts:
        return Traits()  # it shows no user messages, so the other traits are unknown
    words = ("None", "null")
    no_null = null is None or any(null.count(word) > (empty or "").count(word) for word in words)
    objects = _shows(empty, _VALUE) and f"{{'{_KEY}'" not in (empty or "")
    return Traits(
        text=text,
        parts=parts,
        system=_shows(system, _SYSTEM),
        systems=all(_shows(systems, each) for each in (_SYSTEM, _SECOND, _LATER)),
        null=not no_null,
        object_arguments=objects or not _shows(as_text, _VALUE),
        bare_tools=tool is None or all(each is not None for each in bare),
        calls=_shows(empty, _VALUE) or _shows(as_text, _VALUE) or _shows(null, _VALUE),
        several_calls=not _shows(empty, _VALUE) or (_shows(two, _VALUE) and _shows(two, _OTHER)),
        users=_shows(users, _USER) and _shows(users, _SECOND),
        before_user=_between(system, _SYSTEM, _USER),
        before_answer=(_between(plain if text else in_parts, _USER), _between(turns, _USER, _ANSWER)),
    )


def _between(rendered: str | None, first: str, second: str = "") -> str:
    """Returns the text between two others, or after the first; empty if one of them is missing."""
    after = (rendered or "").partition(first)[2]
    if not second:
        return after
    between, end, _ = after.partition(second)
    return between if end else ""


def _shows(rendered: str | None, text: str) -> bool:
    return rendered is not None and text in rendered


def _iterates(rendered: str | None) -> bool:
    """Returns whether the text of a part occurs alone, not inside a list in Python's or JSON's form."""
    if rendered is None or _USER not in rendered:
        return False
    return rendered[rendered.index(_USER) + len(_USER) :][:1] not in ("'", '"')
