"""Guesses of a request's next tokens, which a step can verify: what they are, and where they come from.

A guess costs a row of a step where it is wrong, and never changes a token: see
:mod:`hotcold.engine.speculation`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from hotcold.engine.request import Request

_LONGEST = 32  # tokens that are compared, of two places in a text
_PLACES = 16  # that are compared, the latest ones


class Kind(IntEnum):
    """Where a guess comes from: guesses of one kind are about equally often right."""

    PAIR = 0  #: looked up: the last two tokens, no more, stood in the text before
    SHORT = 1  #: three or four
    LONG = 2  #: up to eight
    COPY = 3  #: more
    FORCED = 4  #: what a grammar leaves no choice about, but for how tokens divide it
    MODEL = 5  #: from a smaller model
    REPLAY = 6  #: from somebody who knows
    BLOCK = 7  #: from a block of the model's file that guesses


#: How often the first token of a guess is right, until that is known.
FIRST_SHARES = {
    Kind.PAIR: 0.25,
    Kind.SHORT: 0.4,
    Kind.LONG: 0.6,
    Kind.COPY: 0.8,
    Kind.FORCED: 0.95,
    Kind.MODEL: 0.6,
    Kind.REPLAY: 0.5,
    Kind.BLOCK: 0.7,
}


class Guess(NamedTuple):
    """Tokens that may come next, at least one."""

    tokens: Sequence[int]
    kind: Kind


class Guesser(Protocol):
    """Guesses for requests."""

    def __call__(self, request: Request, most: int) -> Guess | None:
        """Tokens that may follow those of a request, up to ``most`` tokens; None where nothing is known."""


class Drafter(ABC):
    """A :class:`Guesser` that computes with weights, and so takes time for each token."""

    kind: Kind

    @abstractmethod
    def __call__(self, request: Request, most: int) -> Guess | None:
        """As of a :class:`Guesser`."""

    @abstractmethod
    def seconds_of(self, tokens: int) -> float:
        """Estimates the time of a guess of so many tokens."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets all texts, which an exception may have broken off."""


class Lookup:
    """Finds the longest end of one text that stood in it before: what followed there may follow here.

    An index of pairs of tokens, which grows with the text; no weights (prompt lookup decoding, Saxena
    2023)."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._last: dict[tuple[int, int], int] = {}  # pair -> the latest place where its second token is
        self._before: list[int] = []  # of each place, the one before that has the same pair; -1 without any

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes more tokens, at the end of the text."""
        for token in tokens:
            at = len(self._before)
            pair = (self._tokens[at - 1] if at else -1, int(token))
            self._tokens.append(int(token))
            self._before.append(self._last.get(pair, -1))
            self._last[pair] = at

    def find(self, most: int) -> Guess | None:
        """The tokens that followed the longest end of the text that stood in it before, the latest of
        several; a text that repeats itself goes on so."""
        tokens, end = self._tokens, len(self._tokens) - 1
        if end < 1 or most < 1:
            return None
        best, length, place = -1, 1, self._before[end]
        for _ in range(_PLACES):
            if place < 1 or length == _LONGEST:
                break
            same = 2
            while same < min(_LONGEST, place + 1) and tokens[place - same] == tokens[end - same]:
                same += 1
            if same > length:
                best, length = place, same
            place = self._before[place]
        if best < 0:
            return None
        found = tokens[best + 1 : best + 1 + most]
        while len(found) < most:  # the text has repeated itself up to its end
            found.append(found[len(found) - (end - best)])
        return Guess(found, _kind(length))


def _kind(length: int) -> Kind:
    if length == 2:
        return Kind.PAIR
    if length <= 4:
        return Kind.SHORT
    return Kind.LONG if length <= 8 else Kind.COPY


def forced(request: Request, most: int) -> Guess | None:
    """Tokens that a request's grammar leaves no choice about. A :class:`Guesser`."""
    found = (_asked(request, "forced") or ())[:most]
    return Guess(found, Kind.FORCED) if found else None


def look_up(request: Request, most: int) -> Guess | None:
    """Looks in a request's prompt and answer. A :class:`Guesser`."""
    index = request.lookup
    if index is None:
        index = request.lookup = Lookup()
    if len(index) < request.length:
        index.extend(request.tokens(len(index), request.length))
    found: Guess | None = index.find(most)
    return found


def copied(request: Request, most: int) -> Guess | None:
    """As :func:`look_up`, where that is likely to be right. A :class:`Guesser`."""
    found = look_up(request, most)
    return found if found is not None and found.kind >= Kind.LONG else None


def possible(request: Request, guess: Guess) -> Guess | None:
    """The part of a guess that is left under the request's grammar."""
    most = _asked(request, "possible", guess.tokens)
    tokens = guess.tokens[:most]
    return Guess(tokens, guess.kind) if tokens and not request.finished else None


def _asked(request: Request, method: str, *more: Sequence[int]) -> Any:
    """The answer of a request's constraint; None where it has no such method. An exception ends the request
    alone."""
    ask = getattr(request.constraint, method, None)
    if ask is None:
        return None
    try:
        return ask(request.output, *more)
    except Exception as error:
        request.fail(error)
        return None
