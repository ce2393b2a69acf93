"""The reply to one request: the base class, which reads the pieces of answers for all dialects."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from hotcold.chat.call_ids import new_call_id
from hotcold.chat.stream import AnswerStream, Part
from hotcold.engine.generation import Piece
from hotcold.server.protocol.answers import KINDS, Answer, Block
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts

#: The dialect that forms the events of a stream.
Framing: TypeAlias = Literal["openai", "llama.cpp", "responses", "anthropic", "ollama"]
Event: TypeAlias = dict[str, Any]


class Reply(ABC):
    """The reply to one request, whose jobs have indices. :meth:`add` takes a piece of a job and returns the
    events of a stream; :meth:`whole` returns the reply without a stream.

    A dialect overrides :meth:`_opened`, :meth:`_text` and :meth:`_closed` for events of a block, and
    :meth:`_piece` for a whole piece."""

    framing: ClassVar[Framing] = "openai"
    prefix: ClassVar[str]  #: prefix of the reply's id
    at_once: int | None = None  #: limit of jobs that run or wait at the same time; None: all

    def __init__(
        self, facts: Facts, splitters: Sequence[AnswerStream | None], *, silent: bool = False
    ) -> None:
        self.id = self.prefix + secrets.token_hex(12)
        self.created = int(time.time())
        self._facts = facts
        self._answers = [Answer(splitter, silent) for splitter in splitters]

    def first(self) -> list[Event]:
        """Returns the events before any piece."""
        return []

    def waiting(self) -> list[Event]:
        """Returns events while a long prompt is read, for clients that ignore comments and pings. Without
        events the framing's ping is sent."""
        return []

    def add(self, i: int, piece: Piece) -> list[Event]:
        """Adds a piece of job ``i``, with finish reason None, ``stop`` or ``length``. Returns its events."""
        answer = self._answers[i]
        events: list[Event] = []
        for part in answer.parts(piece):
            events += self._add(i, answer, part)
        if piece.finish_reason is not None and answer.blocks:
            events += self._closed(i, answer.blocks[-1], cut=piece.finish_reason == "length")
        return self._piece(i, piece, events)

    def end(self) -> list[Event]:
        """Returns the events after the last piece of all jobs."""
        return []

    def fail(self, error: APIError) -> list[Event]:
        """Returns the events after an error, which end the stream."""
        return [error.body()]

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Returns the reply without a stream, after all jobs have ended."""

    def _add(self, i: int, answer: Answer, part: Part) -> list[Event]:
        """Adds a part to the open block, or to a new one."""
        kind = KINDS[part.kind]
        events: list[Event] = []
        if not answer.blocks or part.kind == "call_start" or answer.blocks[-1].kind != kind:
            if answer.blocks:
                events += self._closed(i, answer.blocks[-1], cut=False)
            block = Block(kind, part.name, part.index)
            if kind == "call":
                block.id = new_call_id(self._facts.call_ids, part.name, part.index)
            answer.blocks.append(block)
            events += self._opened(i, block)
        if part.text:
            answer.blocks[-1].text += part.text
            events += self._text(i, answer.blocks[-1], part.text)
        return events

    def _opened(self, i: int, block: Block) -> list[Event]:
        """Returns the events of a new block; its text is empty."""
        return []

    def _text(self, i: int, block: Block, text: str) -> list[Event]:
        """Returns the events of new text, which was already added to the block."""
        return []

    def _closed(self, i: int, block: Block, cut: bool) -> list[Event]:
        """Returns the events of a block that ends. ``cut``: the limit of tokens cut it off."""
        return []

    def _piece(self, i: int, piece: Piece, events: list[Event]) -> list[Event]:
        """Adds to the events of a piece the fields that belong to no block."""
        return events
