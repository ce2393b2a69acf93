"""The text of an answer as it comes, divided into what is shown, thinking, and calls of tools."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from hotcold.chat.call_forms import CallForms, Head
from hotcold.chat.call_readers import CallReader, JSONReader, call_reader, valid_arguments
from hotcold.chat.thinking import CallOpening, Thinking
from hotcold.chat.tool_formats import JSONCall, LiteralCall, ToolFormat
from hotcold.engine.thought import CALL_WINDOW

PartKind = Literal["content", "reasoning", "call_start", "call_arguments"]


@dataclass(frozen=True)
class Part:
    """Some of an answer. The texts of one kind, and of one call, together are what was written."""

    kind: PartKind
    text: str = ""  #: of ``call_arguments``: JSON
    index: int = 0  #: of the call, from 0
    name: str = ""  #: of the tool, with ``call_start``


class AnswerStream:
    """Divides one answer. Each state is a method that takes what it can of the text that is held, and may
    name another state; ``end`` says that no text will follow."""

    def __init__(self, state: Callable[[bool], Iterable[Part]]) -> None:
        self.calls = 0  #: that have begun
        self._held = ""  # not divided yet
        self._state = state

    def push(self, text: str) -> list[Part]:
        """Takes more text, and returns the parts that it settles, perhaps none."""
        return joined(self._push(text, end=False))

    def finish(self) -> list[Part]:
        """The rest, when nothing will follow."""
        return joined(self._push("", end=True))

    def _push(self, text: str, end: bool) -> Iterable[Part]:
        self._held += text
        before = None
        while before != (self._state, self._held):
            before = self._state, self._held
            yield from self._state(end)

    def _called(self, name: str, arguments: str | None = None) -> Iterable[Part]:
        """A call begins, and has these arguments, where they are given."""
        self.calls += 1
        yield Part("call_start", index=self.calls - 1, name=name)
        if arguments is not None:
            yield Part("call_arguments", arguments, self.calls - 1)


class ChatStream(AnswerStream):
    """Divides an answer with marks. Nothing is given out that may yet become a marker, or a part of one; the
    spaces around thinking and calls belong to neither.

    ``opened`` says that the prompt has begun the thinking, ``begun`` that it has begun the answer; with
    ``opening`` a call ends the thinking, too. ``form``: a grammar holds the answer, and spaces before it
    are no part of it. Where thinking may be ``anywhere``, its end without a beginning is left out. With
    ``format`` calls are looked for; those of tools other than ``tools`` (schemas of arguments by name),
    where these are given, are no calls. Calls of these tools may also begin the answer in another form
    (``call_forms.py``). Where text only looks like a call, it is content. A call is given when it has
    come to its end and its arguments are JSON; what is not, or was cut off, is content, too. ``sure``
    says that a grammar ensures this: then arguments are given as they come, and may be cut off with the
    answer; what was cut off of a further call before its arguments is left out."""

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
        self._before = "\n"  # what comes before the text that is held: a line break, or " " for any text
        self._in_thought = False  # whether text that looks like a call stands in a thought
        self._fresh = not begun if opened else form  # whether spaces at the beginning are dropped
        self._call: CallReader | None = None
        self._begun = False  # whether some of the call was given out
        self._raw = ""  # since the marker of a call that may turn out to be none
        self._expected = False  # whether a call may begin now

    def _start(self, end: bool) -> Iterable[Part]:
        """Nothing has come but spaces, perhaps. Some models repeat the mark with which the prompt ends."""
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
        if found := self._opening and self._opening.calls.search(self._before + before):
            yield from self._call_in_thought(found.start() - len(self._before))
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
        """How many characters at the end of a thought may become a call."""
        if self._opening is None or self._format is None:
            return 0
        found = self._opening.marks.search(self._before + text, max(0, len(text) - CALL_WINDOW))
        if found is None:
            return kept(text, self._format.marks)
        return len(text) + len(self._before) - found.start()

    def _call_in_thought(self, at: int) -> Iterable[Part]:
        """A call begins here. No grammar has held what it began with."""
        assert self._format is not None
        thought = self._held[:at].rstrip()
        call = self._held[at:].lstrip()
        self._raw, self._held = self._held[len(thought) : len(self._held) - len(call)], call
        self._in_thought = True
        self._begin(next(mark for mark in self._format.marks if call.startswith(mark)))
        yield Part("reasoning", thought)

    def _answer(self, end: bool) -> Iterable[Part]:
        """Behind the thinking; a call may begin here without a marker."""
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

    def _behind_formed(self, end: bool) -> Iterable[Part]:
        """Behind a call in another form: a further one begins, or text. Under a grammar no text follows
        calls, as behind the format's own: models go on with results that they invent."""
        assert self._forms is not None
        head, unsettled = self._forms.further(self._held)
        if head is not None:
            self._begin_formed(head)
        elif end or not unsettled:
            self._held = self._held[self._forms.closed(self._held, self._around) :].lstrip()
            self._state = self._content
            if self._sure:
                self._held, self._state = "", self._left_out
        yield from ()

    def _left_out(self, end: bool) -> Iterable[Part]:
        """Text that is no part of the answer."""
        self._held = ""
        return ()

    def _begin_formed(self, head: Head) -> None:
        """Reads the call that the held text begins with."""
        self._call = JSONReader()
        for character in f'{{"name": {json.dumps(head.name)}':
            self._call.push(character)
        self._raw, self._held = self._held[: head.end], self._held[head.end :]
        self._around += self._raw + "}"  # the end of the call
        self._state, self._begun, self._formed = self._read_call, False, True

    def _content(self, end: bool) -> Iterable[Part]:
        marks = () if self._format is None else self._format.marks
        if self._thinking is not None and self._thinking.anywhere:
            marks += (self._thinking.start, self._thinking.end)
        held = self._held
        if found := [(at, each) for each in marks if (at := held.find(each)) >= 0]:
            at, marker = min(found)
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
        """Goes on behind this marker, with which the text that is held begins."""
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
        """Behind a marker or a call: another one begins, or content again."""
        assert self._format is not None
        format, text = self._format, self._held.lstrip()
        if self._raw:
            self._raw += self._held[: len(self._held) - len(text)]
        self._held = text
        known = (format.marker, *format.opens, *format.closes)
        for each in sorted(known, key=len, reverse=True):
            if text.startswith(each):
                self._held = text.removeprefix(each)
                if each == format.marker or self._raw:
                    self._raw += each
                if each == format.marker:
                    self._expected = format.shows_itself
                else:
                    self._expected = each in format.opens
                return
        waits = not end and any(each.startswith(text) for each in known)
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
                yield from self._given(call)
            if call.done or call.broken:
                self._held = self._held[n:]
                yield from self._end_call(call)
                return
        self._held = ""
        if end and not self._begun:
            yield from self._give_up(end)

    def _given(self, call: CallReader) -> Iterable[Part]:
        """Gives the new parts of a call that is certain to be one."""
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
            yield from self._given(call)
        else:
            arguments = valid_arguments(call.take())
            # Under a grammar, a formed call has arguments: without them it is content that must match one.
            if arguments is None or call.name is None or (self._formed and self._sure):
                yield from self._give_up()
                return
            self._raw, self._in_thought = "", False
            yield from self._called(call.name, arguments)
        self._state = self._behind_formed if self._formed else self._between
        self._expected = self._format is not None and isinstance(self._format.call, JSONCall | LiteralCall)

    def _give_up(self, end: bool = False) -> Iterable[Part]:
        """Gives text as content that was held back as a possible call, but not the beginning of another call
        that was cut off. A thought may end in that text; text in another form may have the format's marks."""
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
    """Neighbours of one kind as one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if last and part.kind != "call_start" and (last.kind, last.index) == (part.kind, part.index):
            found[-1] = Part(part.kind, last.text + part.text, part.index)
        elif part.text or part.kind == "call_start":
            found.append(part)
    return found


def kept(text: str, markers: Iterable[str]) -> int:
    """How many characters at the end may be the beginning of a marker."""
    return max(
        (n for marker in markers for n in range(1, len(marker)) if text.endswith(marker[:n])), default=0
    )
