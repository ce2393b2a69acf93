"""Lossless speculation: guesses of next tokens, verified in one step (arXiv 2211.17192, without its
randomness).

A row's bits do not depend on the rows beside it, and the sampler draws by seed and position. So a guess is
right where it is the very token that the sampler chooses there, and the text is the same with and without
guesses, to the last bit. What is wrong is undone by a shorter length, since later rows write over it; states
of whole sequences are written after each row, and that of the last right one is taken.

This file decides how many guesses a step verifies, from what steps cost by their rows and how often guesses
are right. It may use the clock: it cannot change the text."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hotcold.engine.draft_block import BlockDrafts
from hotcold.engine.draft_model import DraftModel
from hotcold.engine.guesses import (
    FIRST_SHARES,
    Drafter,
    Guess,
    Guesser,
    Kind,
    copied,
    forced,
    look_up,
    possible,
)
from hotcold.engine.request import Request
from hotcold.runtime.session import Session

_RECENT = 0.08  # what the last guess weighs in how often they are right
_RECENT_TEXTS = 0.02  # in that of all texts
_WORTH = 1.02  # guesses must promise this much, since promises are rough
_SLOPE = 0.22  # of a step's cost that one row more adds, until that is known
_TRY_AGAIN = 40  # steps after which a model that does not pay guesses one token
_OFTEN, _EACH = 8, 32  # steps: costs are computed again after each of the first ones, then after so many
_LAST_STEP = 0.1  # what a step weighs in its cost
_KEPT = 0.999  # of what is known of a cost, at each step without it: then it is tried again
_FRESH = 100  # steps for which a cost without guesses holds; it is what all are held against
_FEWEST = 3  # steps without guesses before the first with some
_OUTLIER = 2.0  # times the mean, the most that one step counts: others have the machine, too


class StepCosts:
    """The cost of steps without a prompt by their rows, learnt from their seconds; without a unit.

    A cost is what a straight line says, times a correction, which is learnt for each number of rows and
    fades: so one that was measured in a bad moment is measured again. All of them are held against a scale
    that follows the machine's speed, which changes with the load and the length of texts."""

    def __init__(self, most_rows: int) -> None:
        self._line = [1 + _SLOPE * (rows - 1) for rows in range(most_rows + 1)]
        self._costs = [*self._line]
        self._corrections: dict[int, float] = {}
        self._seen = [0] * (most_rows + 1)  # how often each was noted
        self._noted_at = [0] * (most_rows + 1)
        self._now = 0
        self._scale = 0.0

    def note(self, rows: int, seconds: float) -> None:
        """Learns from one step."""
        if not 0 < rows < len(self._line) or seconds <= 0:
            return
        self._now += 1
        unit = seconds / self._line[rows]
        if not self._scale:
            self._scale = unit
        before = self._correction(rows)
        seen = min(unit / self._scale, _OUTLIER * before)
        self._scale *= 1 + _LAST_STEP * (seen / before - 1)
        weight = max(_LAST_STEP, 1 / (self._seen[rows] + 2))
        self._corrections[rows] = before + weight * (seen - before)
        self._seen[rows] += 1
        self._noted_at[rows] = self._now
        if self._seen[rows] <= _OFTEN or self._now % _EACH == 0:  # it takes longer than the rest
            self._costs = [each * self._correction(n) for n, each in enumerate(self._line)]

    def of(self, rows: int) -> float:
        """The cost of a step of so many rows."""
        return self._costs[rows]

    def rate(self, rows: int, tokens: float, seconds: float) -> float:
        """Tokens a cost of a step with so many rows, where it takes some seconds more."""
        return tokens / (self.of(rows) + (seconds / self._scale if self._scale else 0.0))

    def is_fresh(self, rows: int) -> bool:
        """Whether this cost was measured, and not long ago."""
        return self._seen[rows] >= _FEWEST and self._now - self._noted_at[rows] <= _FRESH

    def _correction(self, rows: int) -> float:
        known = self._corrections
        if rows in known:
            kept: float = _KEPT ** (self._now - self._noted_at[rows])
            return 1 + (known[rows] - 1) * kept
        below = max((each for each in known if each < rows), default=0)
        above = min((each for each in known if each > rows), default=0)
        if not below or not above:
            return self._correction(below or above) if known else 1.0
        share = (rows - below) / (above - below)
        return (1 - share) * self._correction(below) + share * self._correction(above)


class _Offer(NamedTuple):
    """A guess that could be verified, and how likely each of its tokens is right if those before it are."""

    guess: Guess
    shares: Sequence[float]


class Speculation:
    """Gives the rows of a step to guesses by what they earn. ``guessers`` are asked in this order, up to the
    first that has a guess; ``most`` is how many tokens of one request a step may verify, and ``most_rows``
    how many rows a step may have."""

    def __init__(self, guessers: Sequence[Guesser], most: int, most_rows: int) -> None:
        self.guessed = self.accepted = 0  #: tokens that were verified, and those of them that were right
        self.costs = StepCosts(most_rows)
        self._guessers = guessers
        self._block = next((each for each in guessers if isinstance(each, BlockDrafts)), None)
        self._most = most
        self._steps = 0
        self.drafting_s = 0.0  #: of this step, in which drafters ran
        self._shares = dict(FIRST_SHARES)  # over all texts
        self._offers: dict[Request, _Offer] = {}  # of this step, whether they are verified or not

    def choose(self, rooms: Mapping[Request, int], rows: int, spare: int) -> dict[Request, Sequence[int]]:
        """The guesses that the next step is to verify: ``rooms`` has the most for each request that may have
        any, ``rows`` are those of the step without guesses, and ``spare`` how many it may have more."""
        self._offers = {}
        self.drafting_s = 0.0
        if spare < 1 or not self.costs.is_fresh(rows) or not self._may_pay(rows):
            return {}
        if self._block is not None:
            self._block.begin(rooms)
        for request, room in rooms.items():
            most = min(room, spare, self._most)
            guess = self._guess(request, rows, most) if most > 0 else None
            if guess is not None:
                kinds = map(guess.kind_of, range(len(guess.tokens)))
                self._offers[request] = _Offer(guess, [self._share(request, kind) for kind in kinds])
        chosen = self._best(rows, spare) if self._offers else {}
        return {request: self._offers[request].guess.tokens[:n] for request, n in chosen.items()}

    def read(self, put: Sequence[tuple[Request, int]]) -> None:
        """Has the block that guesses, if any, read the rows of a step, whose tokens are chosen: requests, and
        the position after the rows of each."""
        if self._block is not None:
            self._block.read(put)

    def learn(self, request: Request, verified: int, right: int, output: Sequence[int]) -> None:
        """Learns from a request's step, in which ``right`` of so many guesses were; ``output`` are its new
        tokens. A guess that was not verified teaches, too: its first token came or did not."""
        self.guessed += verified
        self.accepted += right
        offer = self._offers.get(request)
        if offer is None:
            return
        guess = offer.guess
        if not verified:
            self._note(request, guess.kind, output[:1] == [*guess.tokens[:1]])
        for i in range(min(right + 1, verified)):
            self._note(request, guess.kind_of(i), i < right)

    def note(self, rows: int, seconds: float) -> None:
        """Learns what a step without a prompt cost, without the guesses of drafters: they cost by the
        token."""
        self.costs.note(rows, seconds - self.drafting_s)

    def drop(self) -> None:
        """Forgets what an exception may have broken off: the texts that drafters have read."""
        for guesser in self._guessers:
            if isinstance(guesser, Drafter):
                guesser.clear()

    def _guess(self, request: Request, rows: int, most: int) -> Guess | None:
        for guesser in self._guessers:
            guess = (
                self._draft(request, guesser, rows, most)
                if isinstance(guesser, Drafter)
                else guesser(request, most)
            )
            guess = possible(request, guess) if guess is not None else None
            if guess is not None or request.finished:
                return guess
        return None

    def _draft(self, request: Request, drafts: Drafter, rows: int, most: int) -> Guess | None:
        n = self._worth_drafting(request, drafts, rows, most)
        if not n:
            return None
        start = time.perf_counter()
        guess = drafts(request, n)
        self.drafting_s += time.perf_counter() - start
        return guess

    def _worth_drafting(self, request: Request, drafts: Drafter, rows: int, most: int) -> int:
        """How many tokens a drafter is to guess, which costs something, too: as many as promise most. Where
        none does, it guesses one now and then, since it may have become better."""
        share = self._share(request, drafts.kind)
        best, n = self.costs.rate(rows, rows, 0.0), 0
        tokens = float(rows)
        for more in range(1, most + 1):
            tokens += share**more
            rate = self.costs.rate(rows + more, tokens, drafts.seconds_of(more))
            if rate > best:
                best, n = rate, more
        self._steps += 1
        return n or int(self._steps % _TRY_AGAIN == 0)

    def _may_pay(self, rows: int) -> bool:
        """Whether a guess that is right for certain would pay."""
        costs = self.costs
        return costs.of(rows + 1) * rows * _WORTH < costs.of(rows) * (rows + 1)

    def _share(self, request: Request, kind: Kind) -> float:
        return request.guess_shares.get(kind, self._shares[kind])

    def _note(self, request: Request, kind: Kind, right: bool) -> None:
        before = self._share(request, kind)
        request.guess_shares[kind] = before + _RECENT * (right - before)
        self._shares[kind] += _RECENT_TEXTS * (right - self._shares[kind])

    def _best(self, rows: int, spare: int) -> dict[Request, int]:
        """How many tokens of each offer make the most of a step: tokens a cost, with the likeliest first."""
        gains: list[tuple[float, int, Request]] = []
        for request, offer in self._offers.items():
            gain = 1.0
            for n, share in enumerate(offer.shares):
                gain *= share
                gains.append((gain, -n, request))
        if len(self._offers) > 1:
            gains.sort(key=lambda each: each[:2], reverse=True)
        costs = self.costs
        tokens, best, taken = float(rows), _WORTH * rows / costs.of(rows), 0
        for more, (gain, _, _) in enumerate(gains[:spare], 1):
            tokens += gain
            rate = tokens / costs.of(rows + more)
            if rate > best:
                best, taken = rate, more
        chosen: dict[Request, int] = {}
        for _, _, request in gains[:taken]:
            chosen[request] = chosen.get(request, 0) + 1
        return chosen


def speculation_of(session: Session) -> Speculation | None:
    """How a session's requests are to be guessed on, as its model was loaded; None: not at all, where that
    was asked for, or memory had no room for states after guesses."""
    model = session.model
    if not model.draft_max or (session.slots is not None and not session.slots.spare):
        return None
    drafts: Drafter
    if model.draft is not None:
        session.draft_session = model.draft.session()
        drafts = DraftModel(session.draft_session, model.config.vocab)
    elif session.draft_block is not None:
        drafts = BlockDrafts(session.draft_block, session.transformer.batch)
    else:
        return Speculation([forced, look_up], model.draft_max, model.limits.decode)
    return Speculation([forced, copied, drafts, look_up], model.draft_max, model.limits.decode)


def best_possible(share: float, costs: Sequence[float]) -> float:
    """The most that guesses can gain, each right with probability ``share``: tokens a cost of one row, over
    all numbers of rows, of which ``costs`` are the costs."""
    if share >= 1:
        return max((i + 1) * costs[0] / cost for i, cost in enumerate(costs))
    tokens = [(1 - math.pow(share, i + 1)) / (1 - share) for i in range(len(costs))]
    return max(n * costs[0] / cost for n, cost in zip(tokens, costs, strict=True))
