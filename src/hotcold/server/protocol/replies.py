"""The reply to one request: a base that reads the pieces of its answers for the routes of all dialects."""

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

#: Whose form the events of a stream have.
Framing: TypeAlias = Literal["openai", "llama.cpp", "responses", "anthropic", "ollama"]
Event: TypeAlias = dict[str, Any]


class Reply(ABC):
    """The reply to one request, whose jobs have indices. :meth:`add` takes a piece of a job and returns the
    values of the events that a stream sends; :meth:`whole` returns the reply that is not streamed.

    A dialect overrides the methods for what happens to a block: :meth:`_opened`, :meth:`_text` and
    :meth:`_closed`, and :meth:`_piece` for what concerns a whole piece."""

    framing: ClassVar[Framing] = "openai"
    prefix: ClassVar[str]  #: of the reply's id
    at_once: int | None = None  #: how many of the jobs may run or wait at the same time; None: all

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
        """Returns the events while a long prompt is read, for clients that count neither comments nor pings
        as signs of life; none: the framing's ping is enough."""
        return []

    def add(self, i: int, piece: Piece) -> list[Event]:
        """Takes a piece of job ``i``, and returns its events. Its finish reason is None, ``stop`` or
        ``length``."""
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
        """Returns the events in place of the missing ones; nothing may follow."""
        return [error.body()]

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Returns the reply of a request that is not streamed, when all jobs have ended."""

    def _add(self, i: int, answer: Answer, part: Part) -> list[Event]:
        """Adds a part to the block that is open, or to a new one."""
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
        """Returns the events of a block that begins; its text is empty."""
        return []

    def _text(self, i: int, block: Block, text: str) -> list[Event]:
        """Returns the events of new text, which the block has already."""
        return []

    def _closed(self, i: int, block: Block, cut: bool) -> list[Event]:
        """Returns the events of a block that ends. ``cut``: the most tokens of the answer cut it off."""
        return []

    def _piece(self, i: int, piece: Piece, events: list[Event]) -> list[Event]:
        """Adds to the events of a piece what does not belong to a block."""
        return events
