"""Divides the text of a streamed answer into content, thinking, and calls of tools."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from hotcold.chat.call_forms import CallForms, Head
from hotcold.chat.call_readers import (
    ArgumentsReader,
    CallReader,
    JSONReader,
    call_reader,
    valid_arguments,
)
from hotcold.chat.thinking import CallOpening, Thinking
from hotcold.chat.tool_formats import JSONCall, LiteralCall, ToolFormat
from hotcold.engine.thought import CALL_WINDOW

PartKind = Literal["content", "reasoning", "call_start", "call_arguments"]


@dataclass(frozen=True)
class Part:
    """A part of an answer. The texts of one kind, or of one call, form a whole."""

    kind: PartKind
    text: str = ""  #: of ``call_arguments``: JSON
    index: int = 0  #: number of the call, from 0
    name: str = ""  #: name of the tool, with ``call_start``


class AnswerStream:
    """Divides one answer. Each state is a method that consumes held text; ``end``: no text will follow."""

    def __init__(self, state: Callable[[bool], Iterable[Part]]) -> None:
        self.calls = 0  #: number of calls that have begun
        self._held = ""  # text that is not divided yet
        self._state = state

    def push(self, text: str) -> list[Part]:
        """Adds text, and returns the parts that are now certain, possibly none."""
        return joined(self._push(text, end=False))

    def finish(self) -> list[Part]:
        """Returns the remaining parts at the end of the text."""
        return joined(self._push("", end=True))

    def _push(self, text: str, end: bool) -> Iterable[Part]:
        self._held += text
        before = None
        while before != (self._state, self._held):
            before = self._state, self._held
            yield from self._state(end)

    def _called(self, name: str, arguments: str | None = None) -> Iterable[Part]:
        """Begins a call, and adds its arguments if they are given."""
        self.calls += 1
        yield Part("call_start", index=self.calls - 1, name=name)
        if arguments is not None:
            yield Part("call_arguments", arguments, self.calls - 1)


class ChatStream(AnswerStream):
    """Divides an answer with marks. Text that may become a mark is held back. Spaces around thinking and
    calls are dropped.

    ``opened``: the prompt has begun the thinking. ``begun``: it has begun the answer. With ``opening`` a call
    also ends the thinking. ``form``: a grammar determines the answer, and spaces before it are dropped. If
    thinking may be ``anywhere``, an end without a beginning is dropped.

    With ``format``, calls are recognised. ``tools`` has schemas of arguments by name. If it is given, other
    tools' calls are content, and calls may also begin the answer in another form (``call_forms.py``). A call
    is returned when it is complete and its arguments are JSON; an invalid or incomplete one is content.

    ``sure``: a grammar ensures valid calls. Arguments are then returned as they arrive, and may be incomplete
    at the end of the answer. A further call that ends before its arguments is dropped."""

    def __init__(
        self,
        thinking: Thinking | None = None,
        format: ToolFormat | None = None,
        *,
        opened: bool = False,
        tools: Mapping[str, object] | None = None,
        sure: bool = False,
        opening: CallOpening | None = None,
        form: bool = False,
        begun: bool = False,
    ) -> None:
        super().__init__(self._start)
        self._opened = opened
        self._thinking = thinking
        self._format = format
        self._tools = tools
        self._forms = CallForms(format, tools) if format is not None and tools else None
        self._formed = False  # whether the call is in another form than the format's
        self._around = ""  # calls in other forms: the text around their arguments
        self._sure = sure
        self._opening = opening
        self._before = "\n"  # the character before the held text: a line break, or " " for any other
        self._in_thought = False  # whether a possible call is inside thinking
        self._fresh = not begun if opened else form  # whether to drop spaces at the beginning
        self._call: CallReader | None = None
        self._begun = False  # whether a part of the call was returned
        self._raw = ""  # text since the mark of a possible call
        self._expected = False  # whether a call may begin now

    def _start(self, end: bool) -> Iterable[Part]:
        """Reads the beginning, so far only spaces. Some models repeat the mark at the end of the prompt."""
        text = self._held.lstrip()
        start = self._thinking.start if self._thinking else ""
        if start and text.startswith(start):
            self._held = text.removeprefix(start)
            self._state, self._fresh = self._think, True
        elif end or not start.startswith(text) or not start:
            self._state = self._think if self._thinking is not None and self._opened else self._answer
        return ()

    def _think(self, end: bool) -> Iterable[Part]:
        assert self._thinking is not None
        if self._fresh:
            self._held = self._held.lstrip()
            self._fresh = not self._held
        before, marker, after = self._held.partition(self._thinking.end)
        if match := self._opening and self._opening.calls.search(self._before + before):
            yield from self._call_in_thought(match.start() - len(self._before))
            return
        if marker:
            self._held, self._state, self._fresh = after, self._answer, True
            yield Part("reasoning", before.rstrip())
            return
        keep = 0 if end else max(kept(before, (self._thinking.end,)), self._may_call(before))
        text = before[: len(before) - keep]
        shown = text if end else text.rstrip()
        self._held = before[len(shown) :]
        self._before = " " if shown else self._before
        yield Part("reasoning", shown.rstrip() if end else shown)

    def _may_call(self, text: str) -> int:
        """Returns the number of characters at the end of thinking that may become a call."""
        if self._opening is None or self._format is None:
            return 0
        match = self._opening.marks.search(self._before + text, max(0, len(text) - CALL_WINDOW))
        if match is None:
            return kept(text, self._format.marks)
        return len(text) + len(self._before) - match.start()

    def _call_in_thought(self, at: int) -> Iterable[Part]:
        """Begins a call inside thinking. No grammar has enforced its beginning."""
        assert self._format is not None
        thought = self._held[:at].rstrip()
        call = self._held[at:].lstrip()
        self._raw, self._held = self._held[len(thought) : len(self._held) - len(call)], call
        self._in_thought = True
        self._begin(next(mark for mark in self._format.marks if call.startswith(mark)))
        yield Part("reasoning", thought)

    def _answer(self, end: bool) -> Iterable[Part]:
        """Reads the text after the thinking, where a call may begin without a marker."""
        text = self._held.lstrip()
        if not text and not end:
            return
        if self._fresh:
            self._held = text
        self._state = self._content
        if self._forms is not None:
            head, unsettled = self._forms.first(self._held)
            if head is not None:
                self._begin_formed(head)
            elif unsettled and not end:
                self._state = self._answer
        yield from ()

    def _after_formed(self, end: bool) -> Iterable[Part]:
        """Reads the text after a call in another form: a further call, or text. Under a grammar the text is
        dropped, as after the format's own calls: models continue with invented results."""
        assert self._forms is not None
        head, unsettled = self._forms.further(self._held)
        if head is not None:
            self._begin_formed(head, self._forms.closed(self._held, self._around))
        elif end or not unsettled:
            self._held = self._held[self._forms.closed(self._held, self._around) :].lstrip()
            self._state = self._content
            if self._sure:
                self._held, self._state = "", self._left_out
        yield from ()

    def _left_out(self, end: bool) -> Iterable[Part]:
        """Drops text that is not part of the answer."""
        self._held = ""
        return ()

    def _begin_formed(self, head: Head, closed: int = 0) -> None:
        """Reads the call that begins the held text, after the closing texts of earlier calls."""
        self._call = ArgumentsReader(head.name) if head.plain else JSONReader()
        if not head.plain:
            for character in f'{{"name": {json.dumps(head.name)}':
                self._call.push(character)
        self._around += self._held[: head.end] + ("" if head.plain else "}")  # the end of the call
        self._raw, self._held = self._held[closed : head.end], self._held[head.end :]
        self._raw = self._raw.lstrip() if self.calls else self._raw
        self._state, self._begun, self._formed = self._read_call, False, True

    def _content(self, end: bool) -> Iterable[Part]:
        marks = () if self._format is None else self._format.marks
        if self._thinking is not None and self._thinking.anywhere:
            marks += (self._thinking.start, self._thinking.end)
        held = self._held
        if places := [(at, each) for each in marks if (at := held.find(each)) >= 0]:
            at, marker = min(places)
            text = held[:at].rstrip()
            self._raw, self._held = held[len(text) : at], held[at:]
            self._begin(marker)
            yield Part("content", text)
            return
        if not marks:
            self._held = ""
            yield Part("content", held)
            return
        keep = 0 if end else kept(held, marks)
        text = held[: len(held) - keep]
        shown = text if end else text.rstrip()
        self._held = held[len(shown) :]
        yield Part("content", shown)

    def _begin(self, marker: str) -> None:
        """Processes the marker that begins the held text."""
        if self._format is not None and marker in self._format.marks:
            if marker == self._format.marker:
                self._raw, self._held = self._raw + marker, self._held.removeprefix(marker)
            self._state = self._between
            self._expected = self._format.shows_itself
            return
        self._held, self._raw, self._fresh = self._held.removeprefix(marker), "", True
        self._before = "\n"
        thinks = self._thinking is not None and marker == self._thinking.start
        self._state = self._think if thinks else self._answer

    def _between(self, end: bool) -> Iterable[Part]:
        """Reads the text after a marker or a call: another call, or content."""
        assert self._format is not None
        format, text = self._format, self._held.lstrip()
        if self._raw:
            self._raw += self._held[: len(self._held) - len(text)]
        self._held = text
        texts = (format.marker, *format.opens, *format.closes)
        for text_before_call in sorted(texts, key=len, reverse=True):
            if text.startswith(text_before_call):
                self._held = text.removeprefix(text_before_call)
                if text_before_call == format.marker or self._raw:
                    self._raw += text_before_call
                if text_before_call == format.marker:
                    self._expected = format.shows_itself
                else:
                    self._expected = text_before_call in format.opens
                return
        waits = not end and any(text_before_call.startswith(text) for text_before_call in texts)
        if self._expected and format.call.begins(text) and not waits:
            self._call = call_reader(format.call, self._tools or {})
            self._state, self._begun, self._formed = self._read_call, False, False
        elif end or (text and not waits and not (self._expected and format.call.may_begin(text))):
            yield from self._give_up(end)

    def _read_call(self, end: bool) -> Iterable[Part]:
        call = self._call
        assert call is not None
        for n, character in enumerate(self._held, 1):
            call.push(character)
            if not self._begun:
                self._raw += character
            if call.name is not None and self._tools is not None and call.name not in self._tools:
                call.broken = True
            streams = self._sure and call.streams and not self._in_thought
            if streams and call.name is not None and not call.broken:
                yield from self._new_parts(call)
            if call.done or call.broken:
                self._held = self._held[n:]
                yield from self._end_call(call)
                return
        self._held = ""
        if end and not self._begun:
            yield from self._give_up(end)

    def _new_parts(self, call: CallReader) -> Iterable[Part]:
        """Returns the new parts of a call that is certain."""
        assert call.name is not None
        if not self._begun:
            self._begun, self._raw = True, ""
            yield from self._called(call.name)
        yield Part("call_arguments", call.take(), self.calls - 1)

    def _end_call(self, call: CallReader) -> Iterable[Part]:
        if call.broken:
            yield from self._give_up()
            return
        if self._begun:
            yield from self._new_parts(call)
        else:
            arguments = valid_arguments(call.take())
            # Under a grammar such a call has arguments. Without them it is content of the grammar.
            if arguments is None or call.name is None or (self._formed and self._sure):
                yield from self._give_up()
                return
            self._raw, self._in_thought = "", False
            yield from self._called(call.name, arguments)
        self._state = self._after_formed if self._formed else self._between
        self._expected = self._format is not None and isinstance(self._format.call, JSONCall | LiteralCall)

    def _give_up(self, end: bool = False) -> Iterable[Part]:
        """Returns text of a possible call as content, except the incomplete beginning of a further call.
        Thinking may end in that text; text in another form may have the format's marks."""
        if self._in_thought:
            first = len(self._raw) - len(self._raw.lstrip()) + 1
            yield Part("reasoning", self._raw[:first])
            self._before, self._held = " ", self._raw[first:] + self._held
        elif self._formed and not (end and self._sure and self.calls):
            self._held = self._raw + self._held
        elif not (end and self._sure and self.calls):
            yield Part("content", self._raw)
        self._state = self._think if self._in_thought else self._content
        self._raw, self._expected, self._in_thought = "", False, False


def joined(parts: Iterable[Part]) -> list[Part]:
    """Joins neighbouring parts of one kind."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if last and part.kind != "call_start" and (last.kind, last.index) == (part.kind, part.index):
            merged[-1] = Part(part.kind, last.text + part.text, part.index)
        elif part.text or part.kind == "call_start":
            merged.append(part)
    return merged


def kept(text: str, markers: Iterable[str]) -> int:
    """Returns the number of characters at the end that may begin a marker."""
    return max(
        (n for marker in markers for n in range(1, len(marker)) if text.endswith(marker[:n])), default=0
    )
