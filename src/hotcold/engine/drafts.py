"""Drafters that need no weights, and the interface of all drafters.

A rejected draft token costs a row of a step and never changes the output
(:mod:`hotcold.engine.speculation`)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from hotcold.engine.request import Request

_LONGEST = 32  # tokens at most that a match compares
_BEFORE_GAP = 8  # minimum match before a one-token gap
_PLACES = 16  # latest earlier places that a search compares
_LAST = 0.1  # weight of the newest time in a drafter's mean time per token


class Kind(IntEnum):
    """Kinds of drafters; each has its own acceptance rate."""

    FORCED = 0  #: the grammar, where only one text may follow (in any split into tokens)
    LONG = 1  #: prompt lookup with a match of four or more tokens
    SHORT = 2  #: prompt lookup with a shorter match, or with a match before a one-token gap
    MODEL = 3  #: a smaller model
    BLOCK = 4  #: a draft block in the model's file


#: Acceptance rates before the first draft.
FIRST_RATES = {Kind.FORCED: 0.95, Kind.LONG: 0.7, Kind.SHORT: 0.35, Kind.MODEL: 0.6, Kind.BLOCK: 0.7}
_SHORT = 3  # longest match of that kind


class Draft(NamedTuple):
    """Draft tokens, at least one."""

    tokens: Sequence[int]
    kind: Kind
    length: int = 0  #: tokens that match an earlier place; 0 if not from prompt lookup

    def kind_of(self, i: int) -> Kind:
        """Returns the kind of token ``i``: accepted tokens before it lengthen the match."""
        return _kind(self.length + i) if i and self.length else self.kind


class Drafter(Protocol):
    """A drafter: proposes next tokens of a request."""

    def __call__(self, request: Request, most: int) -> Draft | None:
        """Returns up to ``most`` tokens that may follow; None if it has no draft."""


class ModelDrafter(ABC):
    """A :class:`Drafter` that computes with weights and so takes time per token."""

    kind: Kind

    def __init__(self) -> None:
        self.seconds = 0.0  #: mean time of a token (of one token for all requests, if drafted together)

    @abstractmethod
    def __call__(self, request: Request, most: int) -> Draft | None:
        """Returns up to ``most`` tokens that may follow; None if it has no draft."""

    @abstractmethod
    def seconds_of(self, tokens: int) -> float:
        """Estimates the time to draft this number of tokens."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets all texts; an exception may have left them incomplete."""

    def note(self, seconds: float) -> None:
        """Updates the mean time per token."""
        self.seconds += (_LAST if self.seconds else 1) * (seconds - self.seconds)


class _Places:
    """An index of all n-grams of a text by their last position, the latest first; hash collisions are
    possible."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._last: dict[int, int] = {}  # by hash, which takes half the memory of the tokens
        self._before: list[int] = []  # previous position of the same n-gram, by position; -1: none

    def add(self, text: Sequence[int]) -> None:
        """Adds the last n-gram of a text that is one token longer than before."""
        at = len(self._before)
        key = hash((*text[-self._tokens :],))
        self._before.append(self._last.get(key, -1))
        self._last[key] = at

    def before(self, place: int) -> int:
        return self._before[place]


class Lookup:
    """Prompt lookup decoding (Saxena 2023): drafts what followed an earlier match of the text's end. Two
    indexes grow with the text, of four and of two tokens. A pair of tokens often has too many places to
    compare them all."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places = _Places(4), _Places(2)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text."""
        for token in tokens:
            self._tokens.append(int(token))
            for places in self._places:
                places.add(self._tokens)

    def find(self, most: int) -> Draft | None:
        """Returns the tokens that followed the longest earlier match of the text's end, the latest of equal
        ones; repetition continues. Without a match, looks for one that ends before the last token: that token
        may have replaced another one, such as a name."""
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
        tokens = self._tokens[place + 1 : place + 1 + most]
        while len(tokens) < most:  # the match reaches the end of the text: repeat it
            tokens.append(tokens[len(tokens) - (end - place)])
        return Draft(tokens, kind, length)

    def _longest(self, end: int) -> tuple[int, int]:
        """Returns the earlier place with the longest match of the text up to ``end``, and the match's length;
        -1 if fewer than two tokens match."""
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
        """Returns how many tokens up to two places are the same."""
        tokens, same = self._tokens, 0
        while same < min(_LONGEST, place + 1) and tokens[place - same] == tokens[end - same]:
            same += 1
        return same


def _kind(length: int) -> Kind:
    return Kind.LONG if length > _SHORT else Kind.SHORT


def forced(request: Request, most: int) -> Draft | None:
    """Drafts the tokens that the request's grammar forces. A :class:`Drafter`."""
    tokens = (_asked(request, "forced") or ())[:most]
    return Draft(tokens, Kind.FORCED) if tokens else None


def look_up(request: Request, most: int) -> Draft | None:
    """Drafts from the request's prompt and output (prompt lookup). A :class:`Drafter`."""
    index = request.lookup
    if index is None:
        index = request.lookup = Lookup()
    if len(index) < request.length:
        index.extend(request.tokens(len(index), request.length))
    draft: Draft | None = index.find(most)
    return draft


def copied(request: Request, most: int) -> Draft | None:
    """Drafts as :func:`look_up`, but only from long matches. A :class:`Drafter`."""
    draft = look_up(request, most)
    return draft if draft is not None and draft.kind is Kind.LONG else None


def possible(request: Request, draft: Draft) -> Draft | None:
    """Returns the longest beginning of a draft that the request's grammar allows; None if empty."""
    most = _asked(request, "possible", draft.tokens)
    tokens = draft.tokens[:most]
    return draft._replace(tokens=tokens) if tokens and not request.finished else None


def _asked(request: Request, method: str, *arguments: Sequence[int]) -> Any:
    """Calls a method of the request's constraint; returns None if it has no such method. An exception ends
    only this request."""
    ask = getattr(request.constraint, method, None)
    if ask is None:
        return None
    try:
        return ask(request.output, *arguments)
    except Exception as error:
        request.fail(error)
        return None
