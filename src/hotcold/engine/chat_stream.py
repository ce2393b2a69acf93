"""The text of an answer as it comes, divided into what is shown, thinking, and calls of tools."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from hotcold.engine.tool_calls import CallReader, ToolFormat
from hotcold.model.reasoning import Thinking

PartKind = Literal["content", "reasoning", "call_start", "call_arguments"]


@dataclass(frozen=True)
class Part:
    """Some of an answer. The texts of one kind, and of one call, together are what was written."""

    kind: PartKind
    text: str = ""  #: of ``call_arguments``: JSON
    index: int = 0  #: of the call, from 0
    name: str = ""  #: of the tool, with ``call_start``


class ChatStream:
    """Divides an answer. Nothing is given out that may yet become a marker, or a part of one; the spaces
    around thinking and calls belong to neither.

    ``opened`` says that the prompt has begun the thinking. With ``format`` calls are looked for; those of
    tools other than ``names``, where these are given, are no calls. Where text only looks like a call, it is
    content."""

    def __init__(
        self,
        thinking: Thinking | None = None,
        format: ToolFormat | None = None,
        *,
        opened: bool = False,
        names: Collection[str] | None = None,
    ) -> None:
        self.calls = 0  #: that have begun
        self._thinking = thinking
        self._format = format
        self._names = names
        self._held = ""  # not divided yet
        self._state: Literal["start", "thinking", "answer", "content", "between", "call"] = "start"
        if thinking is not None and opened:
            self._state = "thinking"
        self._fresh = opened  # whether spaces at the beginning are dropped
        self._call = CallReader("")
        self._raw = ""  # since the marker of a call that may turn out to be none
        self._expected = False  # whether a call may begin now

    def push(self, text: str) -> list[Part]:
        """What more text settles; perhaps nothing."""
        return self._joined(self._push(text, end=False))

    def finish(self) -> list[Part]:
        """The rest, when nothing will follow."""
        return self._joined(self._push("", end=True))

    def _push(self, text: str, end: bool) -> Iterable[Part]:
        self._held += text
        step = {
            "start": self._start,
            "thinking": self._think,
            "answer": self._answer,
            "content": self._content,
            "between": self._between,
            "call": self._read_call,
        }
        while True:
            state, held = self._state, self._held
            yield from step[state](end)
            if (self._state, self._held) == (state, held):
                return

    def _joined(self, parts: Iterable[Part]) -> list[Part]:
        """Neighbours of one kind as one."""
        found: list[Part] = []
        for part in parts:
            last = found[-1] if found else None
            if last and part.kind != "call_start" and (last.kind, last.index) == (part.kind, part.index):
                found[-1] = Part(part.kind, last.text + part.text, part.index)
            elif part.text or part.kind == "call_start":
                found.append(part)
        return found

    def _start(self, end: bool) -> Iterable[Part]:
        """Nothing has come but spaces, perhaps."""
        text = self._held.lstrip()
        start = self._thinking.start if self._thinking else ""
        if start and text.startswith(start):
            self._held = text.removeprefix(start)
            self._state, self._fresh = "thinking", True
        elif end or not start.startswith(text) or not start:
            self._state = "answer"
        return ()

    def _think(self, end: bool) -> Iterable[Part]:
        assert self._thinking is not None
        if self._fresh:
            self._held = self._held.lstrip()
            self._fresh = not self._held
        before, marker, after = self._held.partition(self._thinking.end)
        if marker:
            self._held, self._state, self._fresh = after, "answer", True
            yield Part("reasoning", before.rstrip())
            return
        keep = 0 if end else _kept(before, (self._thinking.end,))
        text = before[: len(before) - keep]
        shown = text if end else text.rstrip()
        self._held = before[len(shown) :]
        yield Part("reasoning", shown.rstrip() if end else shown)

    def _answer(self, end: bool) -> Iterable[Part]:
        """Behind the thinking; a call may begin here without a marker."""
        text = self._held.lstrip()
        if not text and not end:
            return
        if self._fresh:
            self._held = text
        self._state = "content"
        if self._format is not None and self._format.at_start and text.startswith("{"):
            self._raw = self._held[: len(self._held) - len(text)]
            self._held = text
            self._state, self._expected = "between", True
        yield from ()

    def _content(self, end: bool) -> Iterable[Part]:
        if self._format is None:
            text, self._held = self._held, ""
            yield Part("content", text)
            return
        before, marker, after = self._held.partition(self._format.marker)
        if marker:
            text = before.rstrip()
            self._raw = before[len(text) :] + marker
            self._held, self._state, self._expected = after, "between", True
            yield Part("content", text)
            return
        keep = 0 if end else _kept(before, (self._format.marker,))
        text = before[: len(before) - keep]
        shown = text if end else text.rstrip()
        self._held = before[len(shown) :]
        yield Part("content", shown)

    def _between(self, end: bool) -> Iterable[Part]:
        """Behind a marker or a call: another one begins, or content again."""
        assert self._format is not None
        format, text = self._format, self._held.lstrip()
        if self._raw:
            self._raw += self._held[: len(self._held) - len(text)]
        self._held = text
        if text.startswith("{") and self._expected:
            self._call = CallReader(format.arguments_key)
            self._state = "call"
            return
        known = (format.marker, *format.between_calls)
        for each in known:
            if text.startswith(each):
                self._held = text.removeprefix(each)
                if each == format.marker or self._raw:
                    self._raw += each
                if each == format.marker:
                    self._expected = True
                elif each in ("</tool_call>", "]"):
                    self._expected = False
                return
        if end or (text and not any(each.startswith(text) for each in known)):
            yield from self._give_up()

    def _read_call(self, end: bool) -> Iterable[Part]:
        call = self._call
        for n, character in enumerate(self._held, 1):
            known = call.name is not None
            call.push(character)
            if not known and call.name is not None and not call.broken:
                call.broken = self._names is not None and call.name not in self._names
                if not call.broken:
                    self._raw = ""
                    self.calls += 1
                    yield Part("call_start", index=self.calls - 1, name=call.name)
            if not call.broken and call.name is not None:
                yield Part("call_arguments", call.take(), self.calls - 1)
            elif not known:
                self._raw += character
            if call.done or call.broken:
                self._held = self._held[n:]
                yield from self._end_call()
                return
        self._held = ""
        if end and call.name is None:
            yield from self._give_up()

    def _end_call(self) -> Iterable[Part]:
        if self._call.broken:
            yield from self._give_up()
        else:
            self._state = "between"

    def _give_up(self) -> Iterable[Part]:
        """What was held back for a call is content."""
        yield Part("content", self._raw)
        self._raw, self._state, self._expected = "", "content", False


def _kept(text: str, markers: Iterable[str]) -> int:
    """How many characters at the end may be the beginning of a marker."""
    return max(
        (n for marker in markers for n in range(1, len(marker)) if text.endswith(marker[:n])), default=0
    )
