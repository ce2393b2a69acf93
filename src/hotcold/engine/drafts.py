"""Guesses of a request's next tokens, which a step can verify: what they are, and where they come from.

A guess costs a row of a step where it is wrong, and never changes a token: see
:mod:`hotcold.engine.speculation`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from hotcold.engine.request import Request

_LONGEST = 32  # tokens that are compared, of two places in a text
_BEFORE_GAP = 8  # tokens at least that stood in the text before one that did not
_PLACES = 16  # that are compared, the latest ones
_LAST = 0.1  # weight of the newest time in a drafter's mean time of a token


class Kind(IntEnum):
    """The drafter of a guess. It has one acceptance rate."""

    FORCED = 0  #: the grammar, where it leaves no choice but how tokens divide the text
    LONG = 1  #: prompt lookup, where four or more tokens agree
    SHORT = 2  #: prompt lookup, where fewer agree, or the last token took the place of another one
    MODEL = 3  #: a smaller model
    BLOCK = 4  #: a block of the model's file


#: Acceptance rates before the first guess.
FIRST_RATES = {Kind.FORCED: 0.95, Kind.LONG: 0.7, Kind.SHORT: 0.35, Kind.MODEL: 0.6, Kind.BLOCK: 0.7}
_SHORT = 3  # tokens that agree at most in a guess of that kind


class Draft(NamedTuple):
    """Tokens that may come next, at least one."""

    tokens: Sequence[int]
    kind: Kind
    length: int = 0  #: of what was found in the text; 0 where nothing was looked up

    def kind_of(self, i: int) -> Kind:
        """The kind of token ``i``. Accepted tokens before it make what agrees longer."""
        return _kind(self.length + i) if i and self.length else self.kind


class Drafter(Protocol):
    """Guesses for requests."""

    def __call__(self, request: Request, most: int) -> Draft | None:
        """Tokens that may follow those of a request, up to ``most`` tokens; None where nothing is known."""


class ModelDrafter(ABC):
    """A :class:`Drafter` that computes with weights, and so takes time for each token."""

    kind: Kind

    def __init__(self) -> None:
        self.seconds = 0.0  #: of a token; of all requests together where the drafter serves them so

    @abstractmethod
    def __call__(self, request: Request, most: int) -> Draft | None:
        """As of a :class:`Drafter`."""

    @abstractmethod
    def seconds_of(self, tokens: int) -> float:
        """Estimates the time of a guess of so many tokens."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets all texts, which an exception may have broken off."""

    def note(self, seconds: float) -> None:
        """Learns the time of a token."""
        self.seconds += (_LAST if self.seconds else 1) * (seconds - self.seconds)


class _Places:
    """Where each so many tokens in a row end, the latest place first; others may be among them, rarely."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._last: dict[int, int] = {}  # by hash, which takes half the memory of tokens
        self._before: list[int] = []  # of each place, the one before that has the same; -1 without any

    def add(self, text: Sequence[int]) -> None:
        """Takes the end of a text that is one token longer than before."""
        at = len(self._before)
        key = hash((*text[-self._tokens :],))
        self._before.append(self._last.get(key, -1))
        self._last[key] = at

    def before(self, place: int) -> int:
        return self._before[place]


class Lookup:
    """Finds the longest end of one text that stood in it before: what followed there may follow here.

    Indexes of four and of two tokens, which grow with the text; no weights (prompt lookup decoding, Saxena
    2023). Two are often in too many places to look at all."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places = _Places(4), _Places(2)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes more tokens, at the end of the text."""
        for token in tokens:
            self._tokens.append(int(token))
            for places in self._places:
                places.add(self._tokens)

    def find(self, most: int) -> Draft | None:
        """The tokens that followed the longest end of the text that stood in it before, the latest of
        several; a text that repeats itself goes on so. Where nothing did, as after a name that takes the
        place of another one, the last token counts as that of the text found."""
        end = len(self._tokens) - 1
        if end < 1 or most < 1:
            return None
        place, length = self._longest(end)
        kind = _kind(length)
        if place < 0:
            place, length = self._longest(end - 1)
            if length < _BEFORE_GAP:
                return None
            place, kind = place + 1, Kind.SHORT
        found = self._tokens[place + 1 : place + 1 + most]
        while len(found) < most:  # the text has repeated itself up to its end
            found.append(found[len(found) - (end - place)])
        return Draft(found, kind, length)

    def _longest(self, end: int) -> tuple[int, int]:
        """Where else the text up to a place ends, and how many tokens are the same; -1 where less than two
        are."""
        best, length = -1, 1
        for places in self._places:
            place = places.before(end)
            for _ in range(_PLACES):
                if place < 1 or length == _LONGEST:
                    break
                same = self._same(place, end)
                if same > length:
                    best, length = place, same
                place = places.before(place)
            if best >= 0:
                break
        return best, length

    def _same(self, place: int, end: int) -> int:
        """How many tokens up to two places are the same."""
        tokens, same = self._tokens, 0
        while same < min(_LONGEST, place + 1) and tokens[place - same] == tokens[end - same]:
            same += 1
        return same


def _kind(length: int) -> Kind:
    return Kind.LONG if length > _SHORT else Kind.SHORT


def forced(request: Request, most: int) -> Draft | None:
    """Tokens that a request's grammar leaves no choice about. A :class:`Drafter`."""
    found = (_asked(request, "forced") or ())[:most]
    return Draft(found, Kind.FORCED) if found else None


def look_up(request: Request, most: int) -> Draft | None:
    """Looks in a request's prompt and answer. A :class:`Drafter`."""
    index = request.lookup
    if index is None:
        index = request.lookup = Lookup()
    if len(index) < request.length:
        index.extend(request.tokens(len(index), request.length))
    found: Draft | None = index.find(most)
    return found


def copied(request: Request, most: int) -> Draft | None:
    """As :func:`look_up`, where that is likely to be right. A :class:`Drafter`."""
    found = look_up(request, most)
    return found if found is not None and found.kind is Kind.LONG else None


def possible(request: Request, draft: Draft) -> Draft | None:
    """The part of a guess that is left under the request's grammar."""
    most = _asked(request, "possible", draft.tokens)
    tokens = draft.tokens[:most]
    return draft._replace(tokens=tokens) if tokens and not request.finished else None


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
