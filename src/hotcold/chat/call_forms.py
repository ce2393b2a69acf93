"""Forms in which models write calls of tools at the start of an answer, without their template's own tag.

A form is the text up to the name of a known tool. Its one description has two uses: a regular expression in
the grammar of an answer, and a match of a text that is still incomplete."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from hotcold.chat.tool_formats import ToolFormat


@dataclass(frozen=True)
class Run:
    """Any number of the given characters."""

    characters: str


@dataclass(frozen=True)
class Options:
    """One of the given sequences, repeated ``least`` to ``most`` times."""

    sequences: "tuple[Pattern, ...]"
    least: int = 1
    most: int = 1


#: The parts of a text, in order. The part after a :class:`Run` never begins with its characters.
Pattern: TypeAlias = "tuple[str | Run | Options, ...]"

SPACE = Run(" \t\r\n")
LANGUAGE = Run("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_+-")


@dataclass(frozen=True)
class Wrapper:
    """Text around calls. Wrappers may be nested, with spaces between them."""

    opening: Pattern
    closing: str
    source: str  #: report of a model that wrote it


_HERMES_2_PRO = "https://github.com/ggml-org/llama.cpp/pull/12034"  # common_chat_parse_hermes_2_pro
WRAPPERS = (
    Wrapper(("```", LANGUAGE), "```", "https://github.com/ardanlabs/kronk/pull/950"),
    Wrapper(("<tool_call>",), "</tool_call>", "https://github.com/NousResearch/hermes-agent/pull/83023"),
    Wrapper(("<tool_calls>",), "</tool_calls>", "https://github.com/UKGovernmentBEIS/inspect_ai/pull/1871"),
    Wrapper(("<tools>",), "</tools>", "https://github.com/vllm-project/vllm/pull/33083"),
    Wrapper(("<tool>",), "</tool>", _HERMES_2_PRO),
    Wrapper(("<function_call>",), "</function_call>", _HERMES_2_PRO),
    Wrapper(("<response>",), "</response>", _HERMES_2_PRO),
    Wrapper(("<json>",), "</json>", _HERMES_2_PRO),
    Wrapper(("<JSON>",), "</JSON>", _HERMES_2_PRO),
    Wrapper(("<xml>",), "</xml>", _HERMES_2_PRO),
    Wrapper(("<|python_tag|>",), "<|eom_id|>", "https://github.com/unslothai/unsloth/pull/5620"),
    Wrapper(("<|python_start|>",), "<|python_end|>", "https://github.com/vllm-project/vllm/issues/16214"),
    Wrapper(("[TOOL_CALLS]",), "[/TOOL_CALLS]", "https://github.com/vllm-project/vllm/issues/16190"),
    Wrapper(("[tool_call]",), "[/tool_call]", "https://github.com/QwenLM/Qwen3-Coder/issues/180"),
    Wrapper(
        ("{", SPACE, '"tool_calls"', SPACE, ":"), "}", "https://github.com/Nano-Collective/nanocoder/pull/493"
    ),
    Wrapper(("[",), "]", "https://github.com/vllm-project/vllm/pull/33083"),
    Wrapper(("{",), "}", "https://github.com/QwenLM/Qwen3/issues/918"),
)
MOST_WRAPPERS = 4  #: limit before the first call
MOST_CLOSINGS = 16  #: limit after a call, in characters of space, commas and closing texts of wrappers


@dataclass(frozen=True)
class Shape:
    """The beginning of a call, up to the name of its tool. The call is an object, and a quote ends the name;
    or the arguments alone follow the text after the name."""

    before: Pattern
    source: str  #: report of a model that wrote it
    after: str = '"'  #: the text after the name
    closing: str = ""  #: the text after the arguments, if they are alone


def _shape(before: str, source: str) -> Shape:
    """Makes a shape; a space in ``before`` matches any number of spaces."""
    parts = [part for text in before.split() for part in (text, SPACE)]
    return Shape((*parts, '"'), source)


SHAPES = (
    _shape('{ "name" :', "https://github.com/ollama/ollama/issues/12174"),
    _shape('{ "type" : "function" , "name" :', "https://github.com/vllm-project/vllm/issues/46863"),
    _shape(
        '{ "type" : "function" , "function" : { "name" :', "https://github.com/Gitlawb/openclaude/pull/1076"
    ),
    _shape('{ "function" : { "name" :', "https://github.com/agentscope-ai/QwenPaw/pull/1961"),
    _shape('{ "function" :', "https://github.com/ml-explore/mlx-lm/pull/792"),
    _shape('{ "tool" : { "name" :', "https://github.com/ml-explore/mlx-lm/pull/792"),
    Shape(("<function=",), "https://github.com/NousResearch/hermes-agent/pull/35129", ">", "</function>"),
)


def name_text(name: str) -> str:
    """Returns a tool's name and the quote after it."""
    return json.dumps(name, ensure_ascii=False)[1:]


@dataclass(frozen=True)
class Head:
    """A call up to the text after the name of its tool."""

    name: str
    end: int  #: position after the head
    plain: bool  #: whether the arguments alone follow


class CallForms:
    """The forms of calls of these tools that the format itself does not define. Its own marks begin a call
    anywhere in an answer, so they are excluded."""

    def __init__(self, format: ToolFormat, names: Iterable[str]) -> None:
        marks = {*format.marks, *format.tokens}
        wrappers = [each for each in WRAPPERS if marks.isdisjoint(each.opening)]
        shapes = [each for each in SHAPES if marks.isdisjoint(each.before)]
        openings = tuple((*each.opening, SPACE) for each in wrappers)
        #: Pairs of an opening text and its closing text.
        self._pairs = [(str(each.opening[0]), each.closing) for each in wrappers]
        self._pairs += [(str(each.before[0]), each.closing) for each in shapes if each.closing]
        closings = {*(closing for _, closing in self._pairs), *SPACE.characters, ",", ";"}
        #: The text before the name of the first tool. No match is a prefix of a longer match.
        self.before: Pattern = (
            SPACE,
            Options(openings, 0, MOST_WRAPPERS),
            Options(tuple(each.before for each in shapes)),
        )
        #: Text around calls that no JSON begins with.
        self.wrapped: Pattern = (
            Options(tuple(each for each in openings if str(each[0])[0] not in "{["), 1, MOST_WRAPPERS),
        )
        #: Text after a call, at least one character.
        self.behind: Pattern = (Options(tuple((each,) for each in sorted(closings)), 1, MOST_CLOSINGS),)
        #: The text between two calls, up to the name of the second tool.
        self.between: Pattern = (Options((self.behind,), 0), *self.before)
        #: texts after the names where the arguments alone follow
        self.plain = tuple(each.after for each in shapes if each.closing)
        #: tool's name with the text after it -> the tool's name, and whether the arguments alone follow
        self.names = {name_text(name): (name, False) for name in names} | {
            name + after: (name, True) for name in names for after in self.plain
        }
        self._before, self._between = _Matcher(self.before), _Matcher(self.between)
        self._behind = re.compile(regex(self.behind, re.escape))

    def first(self, text: str) -> tuple[Head | None, bool]:
        """Returns the head of the call that begins a text, and whether more text could complete one."""
        return self._head(self._before, text)

    def further(self, text: str) -> tuple[Head | None, bool]:
        """Returns the head of a call that follows another call, and whether more text could complete one."""
        return self._head(self._between, text)

    def closed(self, text: str, opening_text: str) -> int:
        """Returns the length of the closing texts after calls. They close the wrappers that ``opening_text``
        has opened; any closing texts match if nothing else follows."""
        if self._behind.fullmatch(text):
            return len(text)
        at = 0
        while True:
            rest = text[at:].lstrip(SPACE.characters)
            closing = next(
                (
                    pair[1]
                    for pair in self._pairs
                    if rest.startswith(pair[1]) and _is_open(*pair, opening_text)
                ),
                None,
            )
            if closing is None:
                return at
            at, opening_text = len(text) - len(rest) + len(closing), opening_text + closing

    def _head(self, before: "_Matcher", text: str) -> tuple[Head | None, bool]:
        end = before.end(text)
        if end is None:
            return None, before.unsettled(text)
        for written, (name, plain) in self.names.items():
            if text.startswith(written, end):
                return Head(name, end + len(written), plain), False
        rest = text[end:]
        return None, any(written.startswith(rest) for written in self.names)


def _is_open(opening: str, closing: str, text: str) -> bool:
    if opening == closing:
        return text.count(opening) % 2 == 1
    return text.count(opening) > text.count(closing)


class _Matcher:
    """Matches a pattern at the beginning of an incomplete text."""

    def __init__(self, pattern: Pattern) -> None:
        self._whole = re.compile(regex(pattern, re.escape))
        self._part = re.compile(_part(pattern))

    def end(self, text: str) -> int | None:
        """Returns the end of the match."""
        match = self._whole.match(text)
        return None if match is None else match.end()

    def unsettled(self, text: str) -> bool:
        """Returns whether the whole text may be the beginning of a match."""
        return self._part.match(text) is not None


def regex(pattern: Pattern, escaped: Callable[[str], str]) -> str:
    """Returns the pattern as a regular expression."""
    parts = []
    for part in pattern:
        if isinstance(part, str):
            parts.append(escaped(part))
        elif isinstance(part, Run):
            parts.append(f"[{escaped(part.characters)}]*")
        else:
            inner = "|".join(regex(sequence, escaped) for sequence in part.sequences)
            parts.append(f"({inner}){{{part.least},{part.most}}}")
    return "".join(parts)


def _part(pattern: Pattern, behind: str = r"(?!)") -> str:
    """Returns a regular expression for texts that end within the pattern; ``behind`` follows it."""
    expression = behind
    for part in reversed(pattern):
        if isinstance(part, str):
            for character in reversed(part):
                expression = rf"(?:\Z|{re.escape(character)}{expression})"
        elif isinstance(part, Run):
            expression = rf"{regex((part,), re.escape)}(?:\Z|{expression})"
        else:
            parts = "|".join(_part(sequence) for sequence in part.sequences)
            # Some of the repetitions are complete. The text ends within another one, or after all of them.
            repeated = regex((replace(part, least=0),), re.escape)
            expression = rf"(?:{regex((part,), re.escape)}{expression}|{repeated}(?:{parts}))"
    return expression
