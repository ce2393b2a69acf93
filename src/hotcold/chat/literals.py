"""Arguments of calls as literals of a language that is not JSON: Python's, and one of Gemma's own."""

import json
import re
from collections.abc import Generator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

MOST_LEVELS = 64  #: of values within values
_MOST_WORD = 256  # characters of a name, a bare key or a number
_T = TypeVar("_T")
_Reading: TypeAlias = Generator[None, str, _T]  # is sent a character whenever it stops
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_BEHIND = ",)]}"  # follows a value
_NO_WORD = frozenset("()[]{}<>|\"'=,:")
_WORDS = MappingProxyType({
    "True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null",
})  # fmt: skip


@dataclass(frozen=True)
class Notation:
    """How arguments and their values are written. Numbers, lists, and the braces of objects are JSON's; the
    words of Python and those of JSON are understood alike."""

    opens: str  #: before the arguments
    closes: str  #: behind them
    equals: str  #: between the name of an argument, which is bare, and its value
    quotes: tuple[str, ...]  #: each may stand on both sides of a string
    escapes: bool  #: whether a backslash within a string means what it does in Python
    bare_keys: bool  #: whether keys within objects have no quotes
    in_order: bool  #: whether keys are sorted
    gap: str = ""  #: what may follow a comma, and the colon behind a key


PYTHON = Notation("(", ")", "=", ('"', "'"), escapes=True, bare_keys=False, in_order=False, gap=" ")
GEMMA = Notation("{", "}", ":", ('<|"|>',), escapes=False, bare_keys=True, in_order=True)


def is_word(name: str) -> bool:
    """True if a name can be read without quotes."""
    return 0 < len(name) <= _MOST_WORD and not any(each.isspace() or each in _NO_WORD for each in name)


def written(value: Any, notation: Notation) -> str:
    """A value in a notation; strings are in its first quotes."""
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
    """A call with its arguments, as a model writes it."""
    names = {name: name if is_word(name) else written(name, notation) for name in arguments}
    values = (f"{names[key]}{notation.equals}{written(each, notation)}" for key, each in arguments.items())
    return f"{name}{notation.opens}{f',{notation.gap}'.join(values)}{notation.closes}"


class _NoLiteral(Exception):
    """The text is no call."""


class LiteralReader:
    """Reads a call, and makes JSON of its arguments as they come. Spaces between the parts do not matter. In
    Python's notation a quote ends a string only where the next part may follow, since templates put strings
    between quotes as they are."""

    streams = True

    def __init__(self, prefix: str, notation: Notation) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        self._notation = notation
        self._new = ""  # JSON since the last :meth:`take`
        self._back = ""  # was looked at, and is to be read again
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
        found, self._new = self._new, ""
        return found

    def _any(self) -> _Reading[str]:
        if self._back:
            found, self._back = self._back[0], self._back[1:]
            return found
        return (yield)

    def _next(self) -> _Reading[str]:
        """The next character that is no space."""
        while True:
            character = yield from self._any()
            if not character.isspace():
                return character

    def _expect(self, text: str) -> _Reading[None]:
        for wanted in text:
            if (yield from self._any()) != wanted:
                raise _NoLiteral

    def _word(self) -> _Reading[str]:
        """A name, a bare key, a number or the like; there must be one."""
        found = yield from self._next()
        while not (self._back or found[-1].isspace() or found[-1] in _NO_WORD):
            if len(found) > _MOST_WORD:
                raise _NoLiteral
            found += yield from self._any()
        self._back = found[-1] + self._back
        if len(found) == 1:
            raise _NoLiteral
        return found[:-1]

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
                name = yield from self._word()  # what is made of it may be taken meanwhile
                self._new += json.dumps(name, ensure_ascii=False)
            if (yield from self._next()) != sign:
                raise _NoLiteral
            self._new += ": "
            yield from self._value(level + 1)
            character = yield from self._behind(closes)
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
            character = yield from self._behind("]")
            first = False
        self._new += "]"

    def _behind(self, closes: str) -> _Reading[str]:
        """The first character of what follows a member, past a comma."""
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
            yield from self._string(quote, _BEHIND)
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
        """The quote that begins a string here; nothing is read where there is none."""
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
            character = yield from self._any()
            if character == quote[0]:
                if (yield from self._ends(quote, behind)):
                    break
            elif character == "\\" and self._notation.escapes:
                yield from self._escape()
            else:
                self._say(character)
        self._new += '"'

    def _say(self, text: str) -> None:
        """Adds text to a string."""
        self._new += json.dumps(text, ensure_ascii=False)[1:-1]

    def _ends(self, quote: str, behind: str) -> _Reading[bool]:
        """True if a string ends with the quote whose first character was read, and behind which one of these
        characters follows; if not, what was looked at is part of the string."""
        seen = quote[0]
        for wanted in quote[1:]:
            character = yield from self._any()
            if character != wanted:
                self._say(seen)
                self._back = character + self._back
                return False
            seen += character
        if not self._notation.escapes:
            return True
        while (character := (yield from self._any())).isspace():
            seen += character
        self._back = character + self._back
        if character in behind:
            return True
        self._say(seen)
        return False

    def _escape(self) -> _Reading[None]:
        """Reads on behind a backslash. Where that means nothing, both stay."""
        character = yield from self._any()
        if character in "nrtbf":
            self._new += f"\\{character}"
        elif character in "\"'\\/":
            self._say(character)
        elif character in "ux":
            digits = ""
            while len(digits) < (4 if character == "u" else 2):
                digit = yield from self._any()
                if digit not in "0123456789abcdefABCDEF":
                    self._say(f"\\{character}{digits}")
                    self._back = digit + self._back
                    return
                digits += digit
            self._new += f"\\u{digits:0>4}"
        elif character != "\n":
            self._say(f"\\{character}")
