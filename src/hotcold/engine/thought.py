"""Marks of the thought before an answer, and the division of a text into thought and answer."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from hotcold.values import whole

CALL_WINDOW = 640  #: limit for the characters of a call's mark, its spaces and the tool's name
_CHANNEL_MARKS = ("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>", "to=")
_CHANNEL_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?!assistant\b)[^\s<]")


@dataclass(frozen=True, slots=True)
class Thought:
    """The marks of the thought that may come before an answer. Grammars and stop strings apply only to the
    answer. UserError: the budget is negative."""

    start: str = ""  #: text that begins a thought
    end: str = ""  #: text that ends a thought
    opened: bool = False  #: whether the prompt has begun the thought
    may_begin: bool = True  #: whether a grammar leaves the model the choice to begin a thought
    anywhere: bool = False  #: whether a thought may also begin after an answer
    budget: int | None = None  #: tokens after which the end mark is inserted; None: no limit
    #: regular expression of a call up to the tool's name; a call ends the thought; empty: none
    call: str = ""
    call_head: str = ""  #: text before the tool's name in the grammar of calls
    channels: bool = False  #: whether thought and answer are messages in channels, as in Harmony

    def __post_init__(self) -> None:
        if self.budget is not None:
            object.__setattr__(self, "budget", whole("the budget of thinking tokens", self.budget, 0))


class Phases:
    """Divides a model's text into phases. In the first phase, ``begin``, a thought or the answer may
    follow."""

    end: str  #: text that ends a thought

    def __init__(self, thought: Thought) -> None:
        self.phase: Literal["begin", "thought", "header", "answer"] = "begin"
        self.call = ""  #: name of the tool, if a call ended the thought
        self.end = thought.end
        self._thought = thought
        self._call = _compiled(thought.call) if thought.call else None
        self._tail = ""  # text that may become a mark; in ``begin``, push() has not returned it yet
        if thought.opened:
            self._think()

    @property
    def tail(self) -> str:
        """The newest text, at least as long as the longest mark."""
        return self._tail

    def push(self, text: str) -> Iterator[tuple[bool, str]]:
        """Yields text in parts, each with whether it belongs to the answer. Text at the beginning that may
        become a mark is yielded later."""
        while text:
            if self.phase == "begin":
                yield from self._begin(text)
                return
            before = self.phase
            parts = self._split_thought(text) if before == "thought" else self._split_answer(text)
            part, text = parts
            if part:
                yield before == "answer", part

    def resume(self) -> None:
        """Returns to the thought, if the call that ended it was invalid."""
        self.phase, self.call, self._tail = "thought", "", ""

    def finish(self) -> str:
        """Returns the rest of the answer after the last text."""
        return self._tail if self.phase == "begin" else ""

    def _begin(self, text: str) -> Iterator[tuple[bool, str]]:
        text, start = self._tail + text, self._thought.start
        stripped = text.lstrip()
        if start.startswith(stripped) and stripped != start:
            self._tail = text
            return
        self._tail = ""
        if start and stripped.startswith(start):
            rest = stripped.removeprefix(start)
            self._think()
            yield False, text[: len(text) - len(rest)]
            yield from self.push(rest)
        else:
            self.phase = "answer"
            yield from self.push(text)

    def _think(self) -> None:
        self.phase, self._tail = "thought", "\n"  # a call may follow at once

    def _split_thought(self, text: str) -> tuple[str, str]:
        """Splits text in a thought into the rest of the thought and the text after it."""
        known = self._tail + text
        at = known.find(self.end)
        call = self._call.search(known) if self._call else None
        if call and (at < 0 or call.start() < at):
            self.call, stop = call[1], call.end()
        elif at >= 0:
            stop = at + len(self.end)
        else:
            self._tail = known[-CALL_WINDOW:] if self._call else known[-len(self.end) :]
            return text, ""
        stop = max(stop - len(self._tail), 0)
        self.phase, self._tail = "answer", ""
        return text[:stop], text[stop:]

    def _split_answer(self, text: str) -> tuple[str, str]:
        """Splits text in an answer into text up to the mark of a new thought and the text after it."""
        start = self._thought.start
        if not self._thought.anywhere or not start:
            return text, ""
        known = self._tail + text
        at = known.find(start)
        if at < 0:
            self._tail = known[-len(start) :]
            return text, ""
        stop = max(at + len(start) - len(self._tail), 0)
        self._think()
        return text[:stop], text[stop:]


class ChannelPhases(Phases):
    """The phases of an answer in Harmony: only message bodies are thought or answer."""

    def __init__(self, thought: Thought) -> None:
        super().__init__(thought)
        self.end = "<|end|>"

    def push(self, text: str) -> Iterator[tuple[bool, str]]:
        while text:
            known = self._tail + text
            if self.phase == "begin":
                stripped = known.lstrip()
                if any(mark.startswith(stripped) and mark != stripped for mark in _CHANNEL_MARKS):
                    self._tail = known
                    return
                text, self._tail = known, ""
                self.phase = "header" if stripped.startswith(_CHANNEL_MARKS) else "answer"
            elif self.phase == "header":
                header, mark, rest = known.partition("<|message|>")
                given, self._tail = len(self._tail), known
                yield False, (header + mark)[given:]
                if not mark:
                    return
                text, self._tail = rest, ""
                thinks = _CHANNEL.findall(header)[-1:] == ["analysis"] and not _RECIPIENT.search(header)
                self.phase = "thought" if thinks else "answer"
            else:
                answers = self.phase == "answer"
                ends = ((n, each) for each in _CHANNEL_ENDS if (n := known.find(each)) >= 0)
                at, mark = min(ends, default=(-1, ""))
                if at < 0:
                    self._tail = known[-max(map(len, _CHANNEL_ENDS)) :]
                    yield answers, text
                    return
                behind = at + len(mark) - len(self._tail)
                yield answers, text[: max(behind - len(mark), 0)]
                yield False, text[max(behind - len(mark), 0) : behind]
                text = (mark if mark == "<|start|>" else "") + text[behind:]
                self.phase, self._tail = "begin", ""


def phases_of(thought: Thought) -> Phases:
    return ChannelPhases(thought) if thought.channels else Phases(thought)


def unfinished(text: str, mark: str) -> str:
    """Returns the longest incomplete beginning of a mark that ends a text."""
    return next((mark[:n] for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), "")


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
