"""Parses GBNF, llama.cpp's notation of grammars, into a tree, which ``gbnf_lexemes`` translates to Lark."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hotcold.grammar.error import GrammarError
from hotcold.grammar.finite import Needs, ends
from hotcold.values import shown

MOST_REPEATS = 100_000
MOST_LEVELS = 100  #: limit of nested parentheses
LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)

Ranges = tuple[tuple[int, int], ...]  #: code points (first, last), ascending, not adjacent


@dataclass(frozen=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Token:
    """One token, by its id or the name of a control token; ``negated``: any other token."""

    name: str
    negated: bool


@dataclass(frozen=True)
class Ref:
    """A reference to a rule."""

    name: str


@dataclass(frozen=True)
class Sequence:
    parts: "tuple[Node, ...]"  #: in order; no parts match the empty text


@dataclass(frozen=True)
class Choice:
    options: "tuple[Node, ...]"  #: at least one


@dataclass(frozen=True)
class Repeat:
    part: "Node"
    least: int
    most: int | None  #: None: any number


@dataclass(frozen=True)
class Lexeme:
    """An expression without rules and tokens that is one lexeme. The parser makes none."""

    node: "Node"


Node = Chars | Token | Ref | Sequence | Choice | Repeat | Lexeme
Rules = dict[str, Node]


def inner(node: Node) -> tuple[Node, ...]:
    """The nodes of a sequence, choice or repetition; none for other nodes."""
    match node:
        case Sequence(parts) | Choice(parts):
            return parts
        case Repeat(part):
            return (part,)
    return ()


def mapped(node: Node, change: Callable[[Node], Any]) -> Node:
    """A sequence, choice or repetition with ``change`` applied to its nodes; any other node as it is."""
    match node:
        case Sequence(parts):
            return Sequence(tuple(map(change, parts)))
        case Choice(options):
            return Choice(tuple(map(change, options)))
        case Repeat(part, least, most):
            return Repeat(change(part), least, most)
    return node


def may_be_empty(node: Node) -> bool:
    """True if an expression without rules matches the empty text."""
    match node:
        case Sequence(parts):
            return all(map(may_be_empty, parts))
        case Choice(options):
            return any(map(may_be_empty, options))
        case Repeat(part, least, _):
            return least == 0 or may_be_empty(part)
        case Lexeme(expression):
            return may_be_empty(expression)
    return False


def any_of(ranges: Iterable[tuple[int, int]], *, negated: bool = False) -> Chars:
    """The characters of ranges, which may overlap, or all other characters; never surrogates."""
    outside = ranges if negated else _complement(ranges)
    return Chars(_complement([*outside, _SURROGATES]))


def _complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    gaps, start = [], 0
    for first, last in [*sorted(ranges), (LAST + 1, LAST + 1)]:
        if first > start:
            gaps.append((start, first - 1))
        start = max(start, last + 1)
    return tuple(gaps)


def parse(text: str) -> Rules:
    """Parses a grammar into its rules, including ``root`` and all rules that they name. GrammarError: the
    grammar is broken, and the message names the line; or no finite text matches it."""
    rules = _Parser(text).rules()

    def needs(node: Node) -> Needs:
        match node:
            case Ref(name):
                yield [[rules[name]]]
            case Sequence(parts):
                yield [parts]
            case Choice(options):
                yield [[option] for option in options]
            case Repeat(part, least, _) if least:
                yield [[part]]

    if not ends(rules["root"], needs):
        raise GrammarError("nothing finite matches the grammar: its rule 'root' needs itself to end")
    return rules


_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_TOKEN = re.compile(r"(!?)<(\[\d{1,9}\]|[^<>\s\[\]][^<>\s]*)>")
_COUNT = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
_SIGNS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_HEX = {"x": 2, "u": 4, "U": 8}


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._level = 0
        self._named: dict[str, int] = {}  # name -> position of its first use

    def rules(self) -> Rules:
        rules: Rules = {}
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._text):
            start = self._at
            name = self._match(_NAME, "the name of a rule")[0]
            self._skip(_SPACE)
            self._take("::=", f"'::=' is needed after {shown(name)}")
            if name in rules:
                raise self._error(f"the rule {shown(name)} is defined twice", start)
            self._skip(_SPACE_AND_LINES)
            rules[name] = self._choice(_SPACE)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._error("the end of the line is needed")
            self._skip(_SPACE_AND_LINES)
        if "root" not in rules:
            raise GrammarError("the grammar has no rule 'root': it is where an answer starts")
        for name, at in self._named.items():
            if name not in rules:
                raise self._error(f"there is no rule {shown(name)}", at)
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
                chars = [Chars(((code, code),)) for code, _ in self._ranges('"', "the text")]
                return chars[0] if len(chars) == 1 else Sequence(tuple(chars))
            case "[":
                return self._class()
            case ".":
                self._at += 1
                return any_of([(0, LAST)])
            case "(":
                return self._group()
            case "<" | "!":
                token = self._match(_TOKEN, "a token, as <[7]> or <name>,")
                return Token(token[2], bool(token[1]))
        name = _NAME.match(self._text, self._at)
        if not name:
            return None
        self._named.setdefault(name[0], self._at)
        self._at = name.end()
        return Ref(name[0])

    def _group(self) -> Node:
        self._level += 1
        if self._level > MOST_LEVELS:
            raise self._error(f"parentheses are nested too deeply: {MOST_LEVELS} levels are allowed")
        self._at += 1
        self._skip(_SPACE_AND_LINES)
        node = self._choice(_SPACE_AND_LINES)
        self._take(")", "')' is needed")
        self._level -= 1
        return node

    def _repeated(self, part: Node) -> Node:
        """Applies the signs of repetition after ``part`` to it."""
        while (sign := self._text[self._at : self._at + 1]) and sign in "*+?{":
            if sign in _SIGNS:
                self._at += 1
                part = Repeat(part, *_SIGNS[sign])
                continue
            count = self._match(_COUNT, "a number of times, as {2}, {2,} or {2,5},")
            least = int(count[1])
            most = int(count[3]) if count[3] else None if count[2] else least
            if max(least, most or 0) > MOST_REPEATS or (most is not None and most < least):
                allowed = f"from 0 to {MOST_REPEATS} times, fewest first"
                raise self._error(f"{count[0]!r:.40} is not allowed: {allowed}")
            part = Repeat(part, least, most)
        return part

    def _class(self) -> Node:
        negated = self._text.startswith("^", self._at + 1)
        node = any_of(self._ranges("]", "the class of characters", 2 if negated else 1), negated=negated)
        if not node.ranges:
            raise self._error("a class of characters is empty")
        return node

    def _ranges(self, close: str, label: str, opening: int = 1) -> list[tuple[int, int]]:
        """The characters up to a closing sign, in a class as ranges. ``label`` names the string or class,
        which begins with ``opening`` characters."""
        start = self._at
        self._at += opening
        ranges = []
        while not self._text.startswith(close, self._at):
            first = last = self._char(start, label)
            if close == "]" and re.match("-[^]]|-$", self._text[self._at : self._at + 2]):
                self._at += 1
                last = self._char(start, label)
            if last < first:
                raise self._error("a range of characters ends before it starts")
            ranges.append((first, last))
        self._at += 1
        return ranges

    def _char(self, start: int, label: str) -> int:
        """The next code point, which may be an escape; ``start`` is where the string or class begins."""
        if self._at >= len(self._text):
            raise self._error(f"{label} that starts here does not end", start)
        char = self._text[self._at]
        self._at += 1
        code = ord(char) if char != "\\" else self._escape()
        if code > LAST or _SURROGATES[0] <= code <= _SURROGATES[1]:
            raise self._error(f"U+{code:04X} is not a character")
        return code

    def _escape(self) -> int:
        letter = self._text[self._at : self._at + 1]
        if letter in _HEX:
            digits = self._text[self._at + 1 : self._at + 1 + _HEX[letter]]
            if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX[letter]}}}", digits):
                raise self._error(f"\\{letter} needs {_HEX[letter]} hexadecimal digits")
            self._at += 1 + len(digits)
            return int(digits, 16)
        if letter not in _ESCAPES:
            allowed = r"\n \r \t \\ \" \[ \] \x \u \U"
            raise self._error(f"\\{shown(letter)[1:-1]} is not known: allowed are {allowed}")
        self._at += 1
        return ord(_ESCAPES[letter])

    def _take(self, text: str, error: str) -> None:
        if not self._text.startswith(text, self._at):
            raise self._error(error)
        self._at += len(text)

    def _match(self, pattern: re.Pattern[str], label: str) -> re.Match[str]:
        match = pattern.match(self._text, self._at)
        if not match:
            raise self._error(f"{label} is needed")
        self._at = match.end()
        return match

    def _skip(self, pattern: re.Pattern[str]) -> None:
        self._match(pattern, "white space")

    def _error(self, message: str, at: int | None = None) -> GrammarError:
        at = self._at if at is None else at
        line = self._text.count("\n", 0, at) + 1
        column = at - (self._text.rfind("\n", 0, at) + 1) + 1
        rest = shown(self._text[at : at + 20].split("\n")[0])
        return GrammarError(f"line {line}, column {column}, at {rest}: {message}")
