"""The base of the replies of OpenAI's routes for chats and completions, which have choices."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from hotcold.chat.stream import AnswerStream
from hotcold.engine.generation import Piece
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.replies import Event, Reply
from hotcold.server.protocol.usage import timings, usage


class OpenAIReply(Reply):
    """A reply with choices; see :class:`Reply`. ``n`` answers continue the same prompt."""

    whole_object: ClassVar[str]  #: ``object`` of the whole reply
    chunk_object: ClassVar[str]  #: ``object`` of the events

    def __init__(
        self,
        facts: Facts,
        splitters: Sequence[AnswerStream | None],
        *,
        n: int,
        include_usage: bool,
        every_timings: bool,
        silent: bool = False,
    ) -> None:
        super().__init__(facts, splitters, silent=silent)
        self._n = n
        self._include_usage = include_usage
        self._every_timings = every_timings

    def end(self) -> list[Event]:
        return [{**self._chunk([]), **self._counts()}] if self._include_usage else []

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(i) for i in range(len(self._answers))]
        return {**self._head(self.whole_object), "choices": choices, **self._counts()}

    @abstractmethod
    def _choice(self, i: int) -> dict[str, Any]:
        """Returns a choice of the whole reply."""

    def _chunk(self, choices: list[dict[str, Any]]) -> Event:
        chunk = {**self._head(self.chunk_object), "choices": choices}
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def _decorate(self, i: int, piece: Piece, events: list[Event]) -> None:
        """Adds the picture of a piece to its first event, and the times to the last event."""
        if piece.frame is not None:
            events[0]["hotcold"] = piece.frame.plain()
        if self._every_timings or piece.finish_reason is not None:
            events[-1]["timings"] = timings([self._answers[i]], 1, self._facts.sparsity)

    def _counts(self) -> dict[str, Any]:
        return {
            "usage": usage(self._answers, self._n),
            "timings": timings(self._answers, self._n, self._facts.sparsity),
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self._facts.name,
            "system_fingerprint": self._facts.fingerprint,
        }
