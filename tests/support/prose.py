"""The prose of sources and pages: docstrings, comments, messages, and the phrases that Hotcold avoids."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

#: Phrases without a noun or an actor, each with plain words for it.
AVOIDED = {
    "those that": "name the things", "that which": "name the thing", "of which": "begin a new sentence",
    "so many": "this number of", "nobody": "name the actor", "somebody": "name the actor",
    "whoever": "name the actor", "is told": "gets", "are told": "get", "at hand": "available",
    "in vain": "without effect", "but for": "except", "takes turns": "alternates", "lies in": "is in",
    "lie in": "are in", "goes on": "continues", "sees to": "ensures", "beside which": "next to it",
    "for the rest": "otherwise",
}  # fmt: skip
_AVOIDED = re.compile(rf"\b({'|'.join(AVOIDED)})\b".replace(" ", r"\s+"), re.IGNORECASE)
_QUOTED = re.compile(r"(`+)[^`]*\1")
_ENTRY = re.compile(r"\s*([-*]|\d+\.)\s")
#: Code, headings and the like.
_NO_TEXT = re.compile(r"\s*(```|>>>|\.\.\. |$)|[#!<]")
#: Shorter lines within a paragraph are left by an edit.
RAGGED = 60


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def paragraphs(text: str) -> Iterator[tuple[int, list[str]]]:
    """The lines of each paragraph, list entry and row of a table, with the number of the first one.

    An indent of four columns or more begins a paragraph, too."""
    lines: list[str] = []
    fenced, first = False, 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        starts = _ENTRY.match(line) or line.lstrip().startswith("|")
        starts = starts or (lines and abs(_indent(line) - _indent(lines[-1])) >= 4)
        ends = _NO_TEXT.match(line)
        if lines and (starts or ends or fenced):
            yield first, lines
            lines = []
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not ends:
            first = first if lines else number
            lines.append(line)


def plain(lines: list[str]) -> str:
    """The words of a paragraph: code is one sign, addresses and marks are left out."""
    text = _QUOTED.sub("\u00a7", " ".join(line.strip() for line in lines))
    return re.sub(r"[*_]{2}|^([-*]|\d+\.)\s", "", re.sub(r"\]\([^)]*\)", "]", text))


def avoided(text: str) -> list[str]:
    """The avoided phrases of words without their quotes, each with what to write instead."""
    phrases = [" ".join(phrase.lower().split()) for phrase in _AVOIDED.findall(text)]
    return [f"{phrase!r}: {AVOIDED[phrase]}" for phrase in phrases]


def ragged(lines: list[str], width: int) -> Iterator[int]:
    """The short lines of a paragraph, by their index, that have space for the next line's first word. Lines
    with columns are those of a table."""
    for i, (line, following) in enumerate(pairwise(lines)):
        if "   " in line.strip() or "   " in following.strip():
            continue
        if len(line) < RAGGED and len(line) + 1 + len(following.split()[0]) <= width:
            yield i


@dataclass
class Passage:
    """A docstring, a comment on one or more lines, or a message, which adjacent strings form.

    Spaces stand for the marks of docstrings and comments and for code before them: columns are the file's.
    Lines that begin four columns behind ``margin`` are code."""

    kind: str
    line: int
    text: str
    margin: int = 0


_DOUBLE, _SINGLE = r'"(?:[^"\\\n]|\\.)*+"', r"'(?:[^'\\\n]|\\.)*+'"
_TRIPLE = r'@@@(?:[^"\\]|\\.|"(?!""))*+@@@'.replace("@@@", '"' * 3)
_SLASHES = r"(?P<comment>//[^\n]*|/\*.*?\*/)"
#: a regular expression of JavaScript, which may hold quotes
_PATTERN = r"(?:(?<=[=(,:!&|?\[])|(?<=[=(,:!&|?\[] ))/(?![/*])(?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*+\])++/"
_C = rf"{_SLASHES}|(?P<string>{_DOUBLE}|(?<!\w){_SINGLE})"
#: by the end of a file's name: its comments and strings
TOKENS = {
    suffix: re.compile(pattern, re.DOTALL)
    for suffix, pattern in {
        ".py": rf"(?P<comment>\#[^\n]*)|(?:\b[rRbBfFuU]{{1,2}})?(?P<string>{_TRIPLE}|{_DOUBLE}|{_SINGLE})",
        ".js": rf"{_SLASHES}|{_PATTERN}|(?P<string>{_DOUBLE}|{_SINGLE}|`(?:[^`\\]|\\.)*+`)",
        **dict.fromkeys((".cpp", ".h", ".c", ".comp", ".glsl"), _C),
    }.items()
}
_MARKS = re.compile(r"\A(?:\#+[!:]?|//+[!<]*|/\*+)|^ *\*+(?!/)|\*/\Z", re.MULTILINE)


def _spaces(found: re.Match[str]) -> str:
    return " " * len(found[0])


def passages(source: str, suffix: str) -> tuple[list[Passage], str]:
    """The docstrings, comments and messages of a source, and its code without them."""
    texts: list[Passage] = []
    code: list[str] = []
    last, last_column = Passage("", 0, ""), 0
    end, line, tail = 0, 1, ":"
    for token in TOKENS[suffix].finditer(source):
        between = source[end : token.start()]
        code.append(between)
        tail = (tail + between.rstrip())[-1]
        line += between.count("\n")
        before = source[source.rfind("\n", 0, token.start()) + 1 : token.start()]
        column = len(before)
        if token["comment"]:
            text = " " * column + _MARKS.sub(_spaces, token[0])
            if last.kind == "comment" and between.strip(" ") == "\n" and column == last_column:
                last.text += "\n" + text
            else:
                last = Passage("comment", line, text, _indent(text))
                texts.append(last)
            last_column = column
        elif quoted := token["string"]:
            if suffix == ".py" and quoted.startswith('"' * 3) and not before.strip() and tail == ":":
                last = Passage("docstring", line, f"{' ' * (column + 3)}{quoted[3:-3]}", column)
                texts.append(last)
            elif last.kind == "message" and not between.strip():
                last.text += quoted[1:-1]
            else:
                last = Passage("message", line, quoted[1:-1])
                texts.append(last)
        end = token.end()
        line += token[0].count("\n")
    return texts, "".join([*code, source[end:]])
