"""Reads calls of tools from a model's text, character by character, in the formats of models."""

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from hotcold.chat.literals import LiteralReader
from hotcold.chat.tool_formats import (
    ARGUMENT_KEYS,
    CallKind,
    JSONCall,
    LiteralCall,
    NamedCall,
    TaggedCall,
)

#: Words between tags that templates write in Python's form, with their JSON types.
PYTHON_WORDS = {"True": "boolean", "False": "boolean", "None": "null"}
_NAME = r"[^\s<>\[\]{}\"|]{1,256}"
_MOST_HEAD = 1024  # limit of characters before the arguments of a call
_MOST_ENDINGS = 1000  # limit of end tags in the values of a call


class CallReader(Protocol):
    """Reads one call. :attr:`broken` is true for a text that is not a call."""

    name: str | None  #: None until it is known
    done: bool
    broken: bool

    @property
    def streams(self) -> bool: ...  # whether arguments are available before their end

    def push(self, character: str) -> None: ...
    def take(self) -> str: ...  # returns the new JSON of the arguments; empty before the name is known


def call_reader(kind: CallKind, tools: Mapping[str, object]) -> CallReader:
    """Returns a reader for a kind of calls. ``tools`` has the known schemas of arguments by tool."""
    if isinstance(kind, JSONCall):
        return JSONReader()
    if isinstance(kind, NamedCall):
        return NamedReader(kind)
    if isinstance(kind, LiteralCall):
        return LiteralReader(kind.prefix, kind.notation)
    assert isinstance(kind, TaggedCall)
    return TaggedReader(kind, tools)


def valid_arguments(text: str) -> str | None:
    """Returns arguments as valid JSON of an object, or None. Escapes raw line breaks in strings, which models
    write, and unwraps an object in a string."""
    text = text.strip()
    if text in ("", "null"):
        return "{}"
    try:
        value = json.loads(text, strict=False)
        if isinstance(value, str):
            text, value = value, json.loads(value, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    try:
        json.loads(text, parse_constant=_refuse)
    except ValueError:
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except ValueError:
            return None
    return text


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


class _Object:
    """Finds the end of a JSON object."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, character: str) -> bool:
        """Adds a character; returns True if it ends the object."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
            return False
        if character == '"':
            self._in_string = True
        self._depth += (character in "{[") - (character in "}]")
        return character in "}]" and self._depth <= 0


class NamedReader:
    """Reader of a :class:`NamedCall`."""

    streams = True

    def __init__(self, kind: NamedCall) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        mark = "" if kind.mark is None else f"(?:{re.escape(kind.mark[0])}{kind.mark[1]})?"
        prefix, separator = re.escape(kind.prefix), re.escape(kind.separator.strip())
        # A model may omit the prefix.
        self._head_form = re.compile(rf"(?:{prefix})?\s*({_NAME}?){mark}\s*{separator}\s*", re.DOTALL)
        self._separator = kind.separator.strip()
        self._head = ""
        self._object = _Object()
        self._fragment = ""
        self._begun = False

    def push(self, character: str) -> None:
        if self.name is None:
            self._head += character
            if self._head.endswith(self._separator):
                match = self._head_form.fullmatch(self._head)
                self.name = match and match[1]
                self.broken = match is None
            elif len(self._head) > _MOST_HEAD:
                self.broken = True
        elif not self._begun and character.isspace():
            return
        elif not self._begun and character != "{":
            self.broken = True
        else:
            self._begun = True
            self._fragment += character
            self.done = self._object.push(character)

    def take(self) -> str:
        fragment, self._fragment = self._fragment, ""
        return fragment


class TaggedReader:
    """Reader of a :class:`TaggedCall`. Spaces between the tags are ignored. One line break at each end of a
    value belongs to the tags."""

    streams = False

    def __init__(self, kind: TaggedCall, tools: Mapping[str, object]) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        self._kind = kind
        self._suffix = kind.suffix.strip()
        self._tools = tools
        self._head = re.compile(
            rf"{re.escape(kind.prefix)}\s*({_NAME})\s*{re.escape(kind.separator.strip())}"
        )
        self._text = ""
        self._endings = 0
        self._arguments = ""

    def push(self, character: str) -> None:
        self._text += character
        if self.name is None and not self._text.isspace():
            self._read_name()
        if self._text.endswith(self._suffix) and not self.broken:
            self._endings += 1
            values = self._values()
            if values is not None:
                self._arguments = json.dumps(values, ensure_ascii=False)
                self.done = True
            elif self._endings > _MOST_ENDINGS:
                self.broken = True

    def take(self) -> str:
        arguments, self._arguments = self._arguments, ""
        return arguments

    def _read_name(self) -> None:
        """Reads the name, which is complete when another part follows."""
        text = self._text
        if len(text) > _MOST_HEAD:
            self.broken = True
        elif text.startswith(self._kind.prefix):
            after_prefix = text.removeprefix(self._kind.prefix).lstrip()
            match = re.match(_NAME, after_prefix)
            if after_prefix and match is None:
                self.broken = True
            elif match is not None and len(match[0]) < len(after_prefix):
                self.name = match[0]
        elif not self._kind.prefix.startswith(text):
            self.broken = True

    def _values(self) -> dict[str, Any] | None:
        """Returns the arguments if the text is a complete call, otherwise None."""
        before, between, behind = (each.strip() for each in self._kind.argument)
        head = self._head.match(self._text)
        if head is None or self.name is None:
            return None
        middle = re.sub(r"\s+", r"\\s*", re.escape(between).replace("\\\n", "\n"))
        key_form = re.compile(rf"\s*{re.escape(before)}(.*?){middle}", re.DOTALL)
        next_form = re.compile(rf"\s*(?:{re.escape(before)}|{re.escape(self._suffix)}\Z)")
        schema = self._tools.get(self.name)
        values: dict[str, Any] = {}
        at = head.end()
        while (key := key_form.match(self._text, at)) is not None:
            end = self._text.find(behind, key.end())
            while end >= 0 and next_form.match(self._text, end + len(behind)) is None:
                end = self._text.find(behind, end + 1)
            if end < 0:
                return None
            text = self._text[key.end() : end]
            if self._kind.argument[1].endswith("\n"):
                text = text.removeprefix("\n").removesuffix("\n")
            values[key[1].strip()] = typed(text, schema, key[1].strip())
            at = end + len(behind)
        remainder = self._text[at:].strip()
        return values if remainder == self._suffix else None


def typed(text: str, schema: object, name: str) -> Any:
    """Converts a value between tags: to a string if the schema requires one, or if it is not valid JSON;
    otherwise to JSON's value."""
    types = types_of(schema, name)
    if types == {"string"}:
        return text
    if (word := text.strip()) in PYTHON_WORDS and PYTHON_WORDS[word] in types:
        return {"True": True, "False": False, "None": None}[word]
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    kind = _type_of(value)
    fits = not types or kind in types or (kind == "number" and "integer" in types)
    return value if fits and kind != "string" else text


def types_of(schema: object, name: str) -> frozenset[str]:
    """Returns the JSON types of one property of a schema; empty if the schema does not state them."""
    if not isinstance(schema, Mapping):
        return frozenset()
    properties = schema.get("properties")
    property = properties.get(name) if isinstance(properties, Mapping) else None
    return frozenset(_types(property, schema, 0))


def _types(schema: object, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    if (type := schema.get("type")) is not None:
        return {type} if isinstance(type, str) else {each for each in type if isinstance(each, str)}
    if isinstance(values := schema.get("enum"), list):
        return {_type_of(each) for each in values}
    if "const" in schema:
        return {_type_of(schema["const"])}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        target: object = root
        for part in reference.split("/")[1:]:
            target = target.get(part) if isinstance(target, Mapping) else None
        return _types(target, root, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            type_sets = [_types(each, root, depth + 1) for each in schema[key]]
            return set() if key != "allOf" and not all(type_sets) else set().union(*type_sets)
    return set()


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


class JSONReader:
    """Reader of a :class:`JSONCall`. Keys may have any order; the outer braces may be doubled."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        self._fragment = ""  # the arguments since the last :meth:`take`
        self._any = False  # whether :meth:`take` has returned arguments
        self._object = _Object()
        self._expect: Literal["object", "key", "in key", "colon", "value", "comma"] = "object"
        self._keys: set[str] = set()
        self._key = ""
        self._value = ""  # JSON of the current key or value
        self._escaped = False

    def push(self, character: str) -> None:
        if self._expect == "value":
            self._push_value(character)
        elif self._expect == "in key":
            self._push_key(character)
        elif not character.isspace():
            self._push_between(character)

    @property
    def streams(self) -> bool:
        return self._any or bool(self._fragment)

    def take(self) -> str:
        if self.name is None:
            return ""
        fragment, self._fragment = self._fragment, ""
        if self.done and not self._any and not fragment:
            fragment = "{}"
        self._any |= bool(fragment)
        return fragment

    def _push_between(self, character: str) -> None:
        if character == "{" and self._expect in ("object", "key") and not self._keys:
            self._expect = "key"
        elif self._expect == "key" and character == '"':
            self._expect, self._value = "in key", character
        elif self._expect == "colon" and character == ":":
            self._expect, self._value, self._object = "value", "", _Object()
        elif self._expect == "comma" and character == ",":
            self._expect = "key"
        elif self._expect == "comma" and character == "}":
            self.done = self.name is not None
            self.broken = not self.done
        else:
            self.broken = True

    def _push_key(self, character: str) -> None:
        self._value += character
        if self._string_ends(character):
            key = _parsed(self._value)
            self._key = "arguments" if key in ARGUMENT_KEYS else key
            self._expect = "colon"
            self.broken = self._key not in ("name", "type", "id", "arguments") or self._key in self._keys
            self._keys.add(self._key)

    def _push_value(self, character: str) -> None:
        first = not self._value
        if first and character.isspace():
            return
        kind = character if first else self._value[0]
        if kind not in '{["' and character in ",}" and not first:
            self._end_value()  # only the next character ends a number or a word
            self._push_between(character)
            return
        self._value += character
        ended = False
        if kind == '"':
            ended = not first and self._string_ends(character)
        elif kind in "{[":
            ended = self._object.push(character)
        if self._key == "arguments" and kind in "{[":
            self._fragment += character
        if ended:
            self._end_value()

    def _string_ends(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        else:
            return character == '"'
        return False

    def _end_value(self) -> None:
        self._expect = "comma"
        if self._key == "name":
            self.name = _parsed(self._value)
            self.broken = not self.name
        elif self._key == "arguments" and self._value[0] not in "{[":
            # Some models write the object as a string; null means no arguments.
            text = self._value.strip()
            self._fragment += _parsed(text) if text[0] == '"' else "" if text == "null" else text


class ArgumentsReader(JSONReader):
    """Reader of a call of a known tool: its arguments alone, an object."""

    def __init__(self, name: str) -> None:
        super().__init__()
        for character in f'{{"name": {json.dumps(name)}, "arguments": ':
            super().push(character)

    def push(self, character: str) -> None:
        self.broken = not self._value and character != "{" and not character.isspace()
        if not self.broken:
            super().push(character)

    def _end_value(self) -> None:
        super()._end_value()
        self.done = self._key == "arguments"


def _parsed(text: str) -> str:
    """Returns the string in a JSON text; empty if it has none."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
