"""Parses GBNF, llama.cpp's notation of grammars, into a tree, which ``gbnf_lexemes`` translates to Lark."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hotcold.grammar.error import GrammarError
from hotcold.values import shown

MOST_REPEATS = 100_000
MOST_LEVELS = 100  #: limit of nested parentheses
LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)

Ranges = tuple[tuple[int, int], ...]  #: code points (first, last), ascending, with gaps between


@dataclass(frozen=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Token:
    """One token, by its id or the name of a control token; or any other one."""

    name: str
    negated: bool


@dataclass(frozen=True)
class Ref:
    """A reference to a rule."""

    name: str


@dataclass(frozen=True)
class Sequence:
    parts: "tuple[Node, ...]"  #: one after the other; none match the empty text


@dataclass(frozen=True)
class Choice:
    options: "tuple[Node, ...]"  #: at least one


@dataclass(frozen=True)
class Repeat:
    part: "Node"
    least: int
    most: int | None  #: None: any number


Node = Chars | Token | Ref | Sequence | Choice | Repeat
Rules = dict[str, Node]


def parse(text: str) -> Rules:
    """The rules of a grammar, including ``root`` and all that they name. GrammarError names the line."""
    return _Parser(text).rules()


def any_of(ranges: Iterable[tuple[int, int]], *, negated: bool = False) -> Chars:
    """The characters of ranges that may overlap, or all others; never surrogates, which no text has."""
    excluded = [_SURROGATES]
    if negated:
        excluded += ranges
        ranges = [(0, LAST)]
    return Chars(tuple(_without(_merged(ranges), _merged(excluded))))


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged


def _without(ranges: list[tuple[int, int]], holes: list[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    for first, last in ranges:
        for low, high in holes:
            if high < first or low > last:
                continue
            if low > first:
                yield first, low - 1
            first = high + 1
        if first <= last:
            yield first, last


_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_TOKEN = re.compile(r"(!?)<(\[\d{1,9}\]|[^<>\s\[\]][^<>\s]*)>")
_COUNT = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_HEX = {"x": 2, "u": 4, "U": 8}


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._level = 0
        self._named: dict[str, int] = {}  # name -> where it is first used

    def rules(self) -> Rules:
        rules: Rules = {}
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._text):
            start = self._at
            name = self._match(_NAME, "the name of a rule")[0]
            self._skip(_SPACE)
            if not self._text.startswith("::=", self._at):
                raise self._error(f"'::=' is needed after {shown(name)}")
            if name in rules:
                self._at = start
                raise self._error(f"the rule {shown(name)} is there twice")
            self._at += 3
            self._skip(_SPACE_AND_LINES)
            rules[name] = self._choice(_SPACE)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._error("the end of the line is needed")
            self._skip(_SPACE_AND_LINES)
        if "root" not in rules:
            raise GrammarError("the grammar has no rule 'root': it is where an answer starts")
        for name, at in self._named.items():
            if name not in rules:
                self._at = at
                raise self._error(f"there is no rule {shown(name)}")
        return rules

    def _choice(self, space: re.Pattern[str]) -> Node:
        options = [self._sequence(space)]
        while self._text.startswith("|", self._at):
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            options.append(self._sequence(space))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, space: re.Pattern[str]) -> Node:
        parts: list[Node] = []
        while (part := self._item()) is not None:
            self._skip(space)
            parts.append(self._repeated(part))
            self._skip(space)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _item(self) -> Node | None:
        match self._text[self._at : self._at + 1]:
            case '"':
                return self._literal()
            case "[":
                return self._class()
            case ".":
                self._at += 1
                return any_of([(0, LAST)])
            case "(":
                return self._group()
            case "<" | "!":
                found = self._match(_TOKEN, "a token, as <[7]> or <name>,")
                return Token(found[2], bool(found[1]))
        found_name = _NAME.match(self._text, self._at)
        if not found_name:
            return None
        self._named.setdefault(found_name[0], self._at)
        self._at = found_name.end()
        return Ref(found_name[0])

    def _group(self) -> Node:
        self._level += 1
        if self._level > MOST_LEVELS:
            raise self._error(f"parentheses are too deep: allowed are {MOST_LEVELS}")
        self._at += 1
        self._skip(_SPACE_AND_LINES)
        inner = self._choice(_SPACE_AND_LINES)
        if not self._text.startswith(")", self._at):
            raise self._error("')' is needed")
        self._at += 1
        self._level -= 1
        return inner

    def _repeated(self, part: Node) -> Node:
        """``part`` with the signs of repetition after it."""
        while self._at < len(self._text) and self._text[self._at] in "*+?{":
            sign = self._text[self._at]
            if sign != "{":
                self._at += 1
                part = Repeat(part, int(sign == "+"), 1 if sign == "?" else None)
                continue
            found = self._match(_COUNT, "a number of times, as {2}, {2,} or {2,5},")
            least = int(found[1])
            most = int(found[3]) if found[3] else None if found[2] else least
            if max(least, most or 0) > MOST_REPEATS or (most is not None and most < least):
                raise self._error(
                    f"{found[0]!r:.40} is not allowed: from 0 to {MOST_REPEATS} times, fewest first"
                )
            part = Repeat(part, least, most)
        return part

    def _literal(self) -> Node:
        start = self._at
        self._at += 1
        chars: list[Node] = []
        while not self._text.startswith('"', self._at):
            code = self._char(start, "the text")
            chars.append(Chars(((code, code),)))
        self._at += 1
        return chars[0] if len(chars) == 1 else Sequence(tuple(chars))

    def _class(self) -> Node:
        start = self._at
        negated = self._text.startswith("^", self._at + 1)
        self._at += 2 if negated else 1
        ranges = []
        while not self._text.startswith("]", self._at):
            first = last = self._char(start, "the class of characters")
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                last = self._char(start, "the class of characters")
            if last < first:
                raise self._error("a range of characters ends before it starts")
            ranges.append((first, last))
        self._at += 1
        found = any_of(ranges, negated=negated)
        if not found.ranges:
            raise self._error("a class of characters has none")
        return found

    def _char(self, start: int, what: str) -> int:
        """The next code point, which may be an escape; ``start`` is the beginning of the whole."""
        if self._at >= len(self._text):
            self._at = start
            raise self._error(f"{what} that starts here does not end")
        char = self._text[self._at]
        self._at += 1
        if char != "\\":
            code = ord(char)
        else:
            code = self._escape()
        if code > LAST or _SURROGATES[0] <= code <= _SURROGATES[1]:
            raise self._error(f"U+{code:04X} is no character")
        return code

    def _escape(self) -> int:
        letter = self._text[self._at : self._at + 1]
        if letter in _HEX:
            digits = self._text[self._at + 1 : self._at + 1 + _HEX[letter]]
            if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX[letter]}}}", digits):
                raise self._error(f"\\{letter} needs {_HEX[letter]} hexadecimal digits")
            self._at += 1 + len(digits)
            return int(digits, 16)
        if letter not in _ESCAPES or not letter:
            raise self._error(
                f'\\{shown(letter)[1:-1]} is not known: allowed are \\n \\r \\t \\\\ \\" \\[ \\] \\x \\u \\U'
            )
        self._at += 1
        return ord(_ESCAPES[letter])

    def _match(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        found = pattern.match(self._text, self._at)
        if not found:
            raise self._error(f"{what} is needed")
        self._at = found.end()
        return found

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self._at)
        assert found
        self._at = found.end()

    def _error(self, what: str) -> GrammarError:
        line = self._text.count("\n", 0, self._at) + 1
        column = self._at - (self._text.rfind("\n", 0, self._at) + 1) + 1
        seen = shown(self._text[self._at : self._at + 20].split("\n")[0])
        return GrammarError(f"line {line}, column {column}, at {seen}: {what}")
