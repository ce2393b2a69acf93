"""Harmony, the format of gpt-oss: an answer is messages in channels.

``<|channel|>analysis<|message|>...<|end|>`` is thinking. ``final``, and ``commentary`` without a recipient,
are content. A message to ``functions.NAME`` is a call: the recipient is written after the channel or before
it, and ``<|call|>`` ends it. ``<|start|>assistant`` begins each further message; the prompt ends with the
first one."""

import re
from collections.abc import Iterable, Mapping
from typing import Literal

from hotcold.chat.call_readers import valid_arguments
from hotcold.chat.stream import AnswerStream, Part, kept

_OPENINGS = ("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>", "to=")
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_MOST_HEADER = 1024
#: Other efforts -> one of this format's three.
EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


class HarmonyStream(AnswerStream):
    """Divides an answer in channels. ``tools`` has the schemas of arguments by name. A call of an unknown
    tool, or to another recipient, is content with its header. A text without any mark is content."""

    def __init__(self, tools: Mapping[str, object] | None = None, *, sure: bool = False) -> None:
        super().__init__(self._start)
        self._tools = tools or {}
        self._sure = sure
        self._kind: Literal["content", "reasoning", "call"] = "content"
        self._name = ""
        self._raw = ""  # text of a call since its header, if it turns out to be content
        self._arguments = ""
        self._kinds_with_text: set[str] = set()

    def _start(self, end: bool) -> Iterable[Part]:
        """Reads a message's header, at the start of the answer or after a message. Other text is content."""
        text = self._held.lstrip()
        if text.startswith(_OPENINGS):
            self._state, self._held = self._header, text
        elif end or (text and not any(each.startswith(text) for each in _OPENINGS)):
            self._state, self._kind = self._body, "content"
        return ()

    def _header(self, end: bool) -> Iterable[Part]:
        header, mark, after = self._held.partition("<|message|>")
        if not mark:
            if not end and len(header) <= _MOST_HEADER:
                return ()
            self._held, self._state, self._kind = "", self._body, "content"
            return (Part("content", header),)
        self._held, self._state = after, self._body
        channels, recipients = _CHANNEL.findall(header), _RECIPIENT.findall(header)
        recipient = recipients[-1] if recipients else "assistant"
        self._name = recipient.removeprefix("functions.")
        self._raw = self._arguments = ""
        if recipient == "assistant":
            thinks = bool(channels) and channels[-1] == "analysis"
            self._kind = "reasoning" if thinks else "content"
            # Separates two messages of a kind by a line break.
            return (Part(self._kind, "\n"),) if self._kind in self._kinds_with_text else ()
        self._kind = "call" if self._name in self._tools else "content"
        self._raw = header + mark
        if self._kind == "content":
            return (Part("content", self._raw),)
        if self._sure:
            return self._called(self._name)
        return ()

    def _body(self, end: bool) -> Iterable[Part]:
        ends = [at for each in _ENDS if (at := self._held.find(each)) >= 0]
        if ends:
            at = min(ends)
            text, mark = self._held[:at], next(each for each in _ENDS if self._held.startswith(each, at))
            # The next header may begin here.
            self._held = self._held[at if mark == "<|start|>" else at + len(mark) :]
            yield from self._text(text)
            yield from self._ended(mark)
            self._state = self._start
            return
        keep = 0 if end else kept(self._held, _ENDS)
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(text) :]
        yield from self._text(text)
        if end:
            yield from self._ended("", cut=True)

    def _text(self, text: str) -> Iterable[Part]:
        if not text:
            return
        if self._kind != "call":
            self._kinds_with_text.add(self._kind)
            yield Part(self._kind, text)
        elif self._sure:
            yield Part("call_arguments", text, self.calls - 1)
        else:
            self._arguments += text

    def _ended(self, mark: str, cut: bool = False) -> Iterable[Part]:
        if self._kind == "call" and not self._sure and self._raw:
            arguments = valid_arguments(self._arguments) if self._arguments or not cut else None
            if arguments is None:
                yield Part("content", self._raw + self._arguments + mark)
            else:
                yield from self._called(self._name, arguments)
        self._raw = self._arguments = ""
        self._kind = "content"
