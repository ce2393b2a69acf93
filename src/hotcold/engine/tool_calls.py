"""How models write calls of tools: the formats, which one a chat template uses, and reading a call."""

import json
import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ToolFormat:
    """An answer that calls tools is ``before``, a call, any number of ``between`` and a call, ``after``.
    A call is a JSON object ``{"name": ..., arguments_key: {...}}``, keys in this order."""

    name: Literal["hermes", "llama", "mistral"]
    before: str
    between: str | None  #: None where an answer has one call at most
    after: str
    arguments_key: str
    marker: str  #: where it comes up in an answer, calls begin
    at_start: bool  #: whether an answer that begins with a call needs no marker
    between_calls: tuple[str, ...]  #: what may stand before, between and after calls, beside spaces
    #: Names in these texts that a vocabulary may have as single tokens, control tokens perhaps.
    tokens: tuple[str, ...]


HERMES = ToolFormat(
    name="hermes",
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    after="\n</tool_call>",
    arguments_key="arguments",
    marker="<tool_call>",
    at_start=False,
    between_calls=("</tool_call>",),
    tokens=("<tool_call>", "</tool_call>"),
)
LLAMA = ToolFormat(
    name="llama",
    before="",
    between=None,
    after="",
    arguments_key="parameters",
    marker="<|python_tag|>",
    at_start=True,
    between_calls=(";", ","),
    tokens=("<|python_tag|>",),
)
MISTRAL = ToolFormat(
    name="mistral",
    before="[TOOL_CALLS][",
    between=", ",
    after="]",
    arguments_key="arguments",
    marker="[TOOL_CALLS]",
    at_start=False,
    between_calls=("[", ",", "]"),
    tokens=("[TOOL_CALLS]",),
)


_ARGUMENTS = re.compile(r'\\?"arguments\\?"')  # in a template, perhaps within a string
#: Of templates that write something else between the same tags.
_NO_JSON = ("<function=", "<arg_key>", "<invoke", "<parameter", "<tool_calls>")


def tool_format(template: str) -> ToolFormat | None:
    """What a chat template asks for; None where it has no tools, or calls in a format of its own."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template and _ARGUMENTS.search(template):
        return None if any(each in template for each in _NO_JSON) else HERMES
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else MISTRAL
    if all(each in template for each in ('"parameters": ', '{"name": ', "<|start_header_id|>")):
        return LLAMA
    return None


class CallReader:
    """Reads one call, a JSON object, character by character: its name as soon as it is known, its arguments
    as they come. What is no call is :attr:`broken`."""

    def __init__(self, arguments_key: str) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        self._arguments_key = arguments_key
        self._fragment = ""  # of the arguments, since the last :meth:`take`
        self._any = False  # whether there were arguments
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._expect: Literal["object", "key", "colon", "value", "comma"] = "object"
        self._key = ""
        self._value = ""  # JSON of the key or of the value that is being read

    def push(self, character: str) -> None:
        if self._expect == "value":
            self._push_value(character)
        elif self._in_string:
            self._push_key(character)
        elif character.isspace():
            return
        else:
            self._push_between(character)

    def take(self) -> str:
        """JSON of the arguments that is new; nothing before the name is known."""
        if self.name is None:
            return ""
        if self.done and not self._any:
            self._any = True
            return "{}"
        found, self._fragment = self._fragment, ""
        self._any |= bool(found)
        return found

    def _push_between(self, character: str) -> None:
        if self._expect == "object" and character == "{":
            self._expect = "key"
        elif self._expect == "key" and character == '"':
            self._in_string, self._value = True, character
        elif self._expect == "colon" and character == ":":
            self._expect, self._value = "value", ""
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
            self._key = _parsed(self._value)
            self._expect = "colon"
            self.broken = self._key not in ("name", "type", "id", self._arguments_key)

    def _push_value(self, character: str) -> None:
        first = not self._value
        if first and character.isspace():
            return
        if not self._in_string and not self._depth and character in ",}" and not first:
            self._end_value()  # of a number or a word, which only what follows ends
            self._push_between(character)
            return
        self._value += character
        if self._in_string:
            ended = self._string_ends(character) and not self._depth
        elif character == '"':
            self._in_string, ended = True, False
        else:
            self._depth += (character in "{[") - (character in "}]")
            ended = character in "}]" and not self._depth
        if self._key == self._arguments_key and self._value[0] in "{[":
            self._fragment += character
        if ended:
            self._end_value()

    def _string_ends(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            return True
        return False

    def _end_value(self) -> None:
        self._expect = "comma"
        if self._key == "name":
            self.name = _parsed(self._value)
            self.broken = not self.name
        elif self._key == self._arguments_key and self._value[0] not in "{[":
            # Some models write the object into a string.
            self._fragment += _parsed(self._value)


def _parsed(text: str) -> str:
    """The string that JSON has; empty where it has none."""
    try:
        found = json.loads(text, strict=False)
    except ValueError:
        return ""
    return found if isinstance(found, str) else ""
