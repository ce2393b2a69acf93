"""Builds the parts that the replies of all routes share."""

import secrets
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, TypeAlias

from hotcold.engine.generation import Piece
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.usage import Tally

#: Whose form the events of a stream have.
Framing: TypeAlias = Literal["openai", "llama.cpp", "responses", "anthropic", "ollama"]


class Reply(ABC):
    """The reply to one request, whose jobs have indices. Pieces go in; out come the values of events, or at
    the end one whole reply. All methods but :meth:`whole` are for streams; otherwise :meth:`add` gives
    nothing."""

    framing: ClassVar[Framing] = "openai"
    at_once: int | None = None  #: how many of the jobs may run or wait at the same time; None: all

    def __init__(self, facts: Facts, jobs: int, *, prefix: str) -> None:
        self.id = prefix + secrets.token_hex(12)
        self.created = int(time.time())
        self._facts = facts
        self._tallies = [Tally() for _ in range(jobs)]

    def first(self) -> list[dict[str, Any]]:
        """Values of events before any piece."""
        return []

    def waiting(self) -> list[dict[str, Any]]:
        """Values of events while a long prompt is read, for clients that count neither comments nor pings as
        signs of life; none: the framing's ping is enough."""
        return []

    @abstractmethod
    def add(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        """Events of a piece of job ``i``. Its finish reason is None, ``stop`` or ``length``."""

    def end(self) -> list[dict[str, Any]]:
        """Values of events after the last piece of all jobs."""
        return []

    def fail(self, error: APIError) -> list[dict[str, Any]]:
        """Instead of what is missing; nothing may follow."""
        return [error.body()]

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The reply of a request that is not streamed, when all jobs have ended."""

    @property
    def completion_tokens(self) -> int:
        """So far, of all choices."""
        return sum(each.tokens for each in self._tallies)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self._facts.name,
            "system_fingerprint": self._facts.fingerprint,
        }
