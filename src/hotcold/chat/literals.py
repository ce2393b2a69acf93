"""Arguments of calls as literals of a language other than JSON: Python's, and Gemma's own."""

import json
import re
from collections.abc import Generator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

MOST_LEVELS = 64  #: limit of nested values
_MOST_WORD = 256  # limit of characters in a name, a bare key or a number
_T = TypeVar("_T")
_Reading: TypeAlias = Generator[None, str, _T]  # receives one character at each yield
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_AFTER_VALUE = ",)]}"  # characters that may follow a value
_NO_WORD = frozenset("()[]{}<>|\"'=,:")
_WORDS = MappingProxyType({
    "True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null",
})  # fmt: skip


@dataclass(frozen=True)
class Notation:
    """The form of arguments and their values. Numbers, lists and the braces of objects are JSON's; words of
    Python and of JSON are both understood."""

    opens: str  #: before the arguments
    closes: str  #: after the arguments
    equals: str  #: between the name of an argument, which has no quotes, and its value
    quotes: tuple[str, ...]  #: texts that may enclose a string
    escapes: bool  #: whether strings have Python's escapes
    bare_keys: bool  #: whether keys of objects have no quotes
    in_order: bool  #: whether keys are sorted
    gap: str = ""  #: optional text after a comma and after the colon of a key


PYTHON = Notation("(", ")", "=", ('"', "'"), escapes=True, bare_keys=False, in_order=False, gap=" ")
GEMMA = Notation("{", "}", ":", ('<|"|>',), escapes=False, bare_keys=True, in_order=True)


def is_word(name: str) -> bool:
    """Returns whether a name can be read without quotes."""
    return 0 < len(name) <= _MOST_WORD and not any(each.isspace() or each in _NO_WORD for each in name)


def written(value: Any, notation: Notation) -> str:
    """Returns a value in a notation; strings are in its first quotes."""
    if isinstance(value, str):
        quote = notation.quotes[0]
        return json.dumps(value, ensure_ascii=False) if notation.escapes else f"{quote}{value}{quote}"
    comma, colon = f",{notation.gap}", f":{notation.gap}"
    if isinstance(value, list):
        return f"[{comma.join(written(each, notation) for each in value)}]"
    if isinstance(value, dict):
        names = sorted(value) if notation.in_order else value
        keys = {
            name: name if notation.bare_keys and is_word(name) else written(name, notation) for name in names
        }
        return f"{{{comma.join(keys[name] + colon + written(value[name], notation) for name in names)}}}"
    if isinstance(value, bool) or value is None:
        return str(value) if notation.escapes else json.dumps(value)
    return json.dumps(value)


def written_call(name: str, arguments: dict[str, Any], notation: Notation) -> str:
    """Returns a call with its arguments, as a model writes it."""
    names = {name: name if is_word(name) else written(name, notation) for name in arguments}
    values = (f"{names[key]}{notation.equals}{written(each, notation)}" for key, each in arguments.items())
    return f"{name}{notation.opens}{f',{notation.gap}'.join(values)}{notation.closes}"


class _NoLiteral(Exception):
    """Raised if the text is not a call."""


class LiteralReader:
    """Reads a call, and converts its arguments to JSON. Spaces between the parts are ignored. In Python's
    notation a quote ends a string only if the next part may follow, since templates do not escape quotes in
    strings."""

    streams = True

    def __init__(self, prefix: str, notation: Notation) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        self._notation = notation
        self._new = ""  # JSON since the last :meth:`take`
        self._back = ""  # characters to read again
        self._reading = self._call(prefix)
        next(self._reading)

    def push(self, character: str) -> None:
        try:
            self._reading.send(character)
        except StopIteration:
            self.done = True
        except _NoLiteral:
            self.broken = True

    def take(self) -> str:
        new, self._new = self._new, ""
        return new

    def _read(self) -> _Reading[str]:
        if self._back:
            character, self._back = self._back[0], self._back[1:]
            return character
        return (yield)

    def _next(self) -> _Reading[str]:
        """Returns the next character that is not a space."""
        while True:
            character = yield from self._read()
            if not character.isspace():
                return character

    def _expect(self, text: str) -> _Reading[None]:
        for expected in text:
            if (yield from self._read()) != expected:
                raise _NoLiteral

    def _word(self) -> _Reading[str]:
        """Returns a name, a bare key, a number or a similar word, which must be present."""
        word = yield from self._next()
        while not (self._back or word[-1].isspace() or word[-1] in _NO_WORD):
            if len(word) > _MOST_WORD:
                raise _NoLiteral
            word += yield from self._read()
        self._back = word[-1] + self._back
        if len(word) == 1:
            raise _NoLiteral
        return word[:-1]

    def _call(self, prefix: str) -> _Reading[None]:
        yield from self._expect(prefix)
        name = yield from self._word()
        if (yield from self._next()) != self._notation.opens:
            raise _NoLiteral
        self.name = name
        yield from self._members(self._notation.closes, 0)

    def _members(self, closes: str, level: int) -> _Reading[None]:
        self._new += "{"
        character = yield from self._next()
        first = True
        while character != closes:
            self._back = character
            self._new += "" if first else ", "
            sign = ":" if level else self._notation.equals
            quote = yield from self._quote()
            if quote:
                yield from self._string(quote, sign)
            elif level and not self._notation.bare_keys:
                raise _NoLiteral
            else:
                name = yield from self._word()  # the JSON so far may be taken meanwhile
                self._new += json.dumps(name, ensure_ascii=False)
            if (yield from self._next()) != sign:
                raise _NoLiteral
            self._new += ": "
            yield from self._value(level + 1)
            character = yield from self._after_member(closes)
            first = False
        self._new += "}"

    def _items(self, level: int) -> _Reading[None]:
        self._new += "["
        character = yield from self._next()
        first = True
        while character != "]":
            self._back = character
            self._new += "" if first else ", "
            yield from self._value(level + 1)
            character = yield from self._after_member("]")
            first = False
        self._new += "]"

    def _after_member(self, closes: str) -> _Reading[str]:
        """Returns the first character after a member and its comma."""
        character = yield from self._next()
        if character == ",":
            return (yield from self._next())
        if character != closes:
            raise _NoLiteral
        return character

    def _value(self, level: int) -> _Reading[None]:
        if level > MOST_LEVELS:
            raise _NoLiteral
        if quote := (yield from self._quote()):
            yield from self._string(quote, _AFTER_VALUE)
            return
        character = yield from self._next()
        if character == "[":
            yield from self._items(level)
        elif character == "{":
            yield from self._members("}", level)
        else:
            self._back = character
            word = yield from self._word()
            if word not in _WORDS and not _NUMBER.fullmatch(word):
                raise _NoLiteral
            self._new += _WORDS.get(word, word)

    def _quote(self) -> _Reading[str]:
        """Returns the quote that begins a string here; without one, reads nothing."""
        character = yield from self._next()
        for quote in self._notation.quotes:
            if quote[0] == character:
                yield from self._expect(quote[1:])
                return quote
        self._back = character + self._back
        return ""

    def _string(self, quote: str, behind: str) -> _Reading[None]:
        self._new += '"'
        while True:
            character = yield from self._read()
            if character == quote[0]:
                if (yield from self._string_ends(quote, behind)):
                    break
            elif character == "\\" and self._notation.escapes:
                yield from self._escape()
            else:
                self._append(character)
        self._new += '"'

    def _append(self, text: str) -> None:
        """Appends text to a string."""
        self._new += json.dumps(text, ensure_ascii=False)[1:-1]

    def _string_ends(self, quote: str, behind: str) -> _Reading[bool]:
        """Returns whether the quote whose first character was read ends the string, and one of the characters
        ``behind`` follows. Otherwise adds the characters to the string."""
        read_text = quote[0]
        for expected in quote[1:]:
            character = yield from self._read()
            if character != expected:
                self._append(read_text)
                self._back = character + self._back
                return False
            read_text += character
        if not self._notation.escapes:
            return True
        while (character := (yield from self._read())).isspace():
            read_text += character
        self._back = character + self._back
        if character in behind:
            return True
        self._append(read_text)
        return False

    def _escape(self) -> _Reading[None]:
        """Reads an escape after its backslash. An unknown escape is added unchanged."""
        character = yield from self._read()
        if character in "nrtbf":
            self._new += f"\\{character}"
        elif character in "\"'\\/":
            self._append(character)
        elif character in "ux":
            digits = ""
            while len(digits) < (4 if character == "u" else 2):
                digit = yield from self._read()
                if digit not in "0123456789abcdefABCDEF":
                    self._append(f"\\{character}{digits}")
                    self._back = digit + self._back
                    return
                digits += digit
            self._new += f"\\u{digits:0>4}"
        elif character != "\n":
            self._append(f"\\{character}")
