"""Lossless speculation: guesses of next tokens, verified in one step (arXiv 2211.17192, without its
randomness).

A row's bits do not depend on the rows beside it, and the sampler draws by seed and position. So a guess is
right where it is the very token that the sampler chooses there, and the text is the same with and without
guesses, to the last bit. What is wrong is undone by a shorter length, since later rows write over it; states
of whole sequences are written after each row, and that of the last right one is taken.

This file decides how many guesses a step verifies, from what steps cost by their rows and how often guesses
are right. It may use the clock: it cannot change the text."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from hotcold.engine.draft_block import BlockDrafts
from hotcold.engine.draft_model import DraftModel
from hotcold.engine.drafts import (
    FIRST_RATES,
    Draft,
    Drafter,
    Kind,
    ModelDrafter,
    copied,
    forced,
    look_up,
    possible,
)
from hotcold.engine.request import Request
from hotcold.runtime.session import Session

_RECENT = 0.08  # weight of the newest draft token in a request's acceptance rate
_RECENT_TEXTS = 0.02  # its weight in the rate over all requests
_WORTH = 1.02  # drafts must promise this much, since promises are rough
_SLOPE = 0.22  # share of a step's cost that one more row adds, until that is measured
_FEW, _MANY = 5, 40  # steps of one size from which its cost is known, and after which it stays
_HOPE = 0.9  # factor of a cost that is not known, so that promising sizes are tried
_TRY_AGAIN = 40  # steps after which a drafter that does not pay drafts one token


class StepCosts:
    """Seconds of a step without a prompt by its rows, measured once per session.

    The cost of a number of rows is the median of the first steps with that many. Until it is known, it is a
    little less than its known neighbours let expect."""

    def __init__(self, most_rows: int) -> None:
        self._samples: list[list[float]] = [[] for _ in range(most_rows + 1)]
        self._costs = self._line = _SLOPE * (np.arange(most_rows + 1) - 1) + 1

    def note(self, rows: int, seconds: float) -> None:
        """Learns from one step."""
        if not 0 < rows < len(self._samples) or len(self._samples[rows]) == _MANY or seconds <= 0:
            return
        self._samples[rows].append(seconds)
        if sizes := [n for n, samples in enumerate(self._samples) if len(samples) >= _FEW]:
            known = [statistics.median(self._samples[n]) for n in sizes]
            factors = np.interp(np.arange(len(self._line)), sizes, known / self._line[sizes])
            self._costs = _HOPE * self._line * factors
            self._costs[sizes] = known

    def measured(self, rows: int) -> bool:
        return len(self._samples[rows]) >= _FEW

    def of(self, rows: int) -> float:
        """The cost of a step of so many rows."""
        return float(self._costs[rows])


class Speculation:
    """Gives the rows of a step to guesses by what they earn. ``drafters`` are asked in this order, up to the
    first that has a guess; ``most`` is how many tokens of one request a step may verify, and ``most_rows``
    how many rows a step may have."""

    def __init__(self, drafters: Sequence[Drafter], most: int, most_rows: int) -> None:
        self.guessed = self.accepted = 0  #: tokens that were verified, and those of them that were right
        self.costs = StepCosts(most_rows)
        self._drafters = drafters
        self._block = next((each for each in drafters if isinstance(each, BlockDrafts)), None)
        self._most = most
        self._steps = 0
        self.drafting_s = 0.0  #: of this step, in which drafters ran
        self._rates = dict(FIRST_RATES)  # over all requests
        self._drafts: dict[Request, Draft] = {}  # of this step, whether they are verified or not

    def choose(self, limits: Mapping[Request, int], rows: int, spare: int) -> dict[Request, Sequence[int]]:
        """The guesses that the next step is to verify: ``limits`` has the most for each request that may have
        any, ``rows`` are those of the step without guesses, and ``spare`` how many it may have more."""
        self._drafts = {}
        self.drafting_s = 0.0
        if spare < 1 or not self.costs.measured(rows) or not self._worth(rows, [1.0]):
            return {}
        if self._block is not None:
            self._block.begin(limits)
        for request, limit in limits.items():
            most = min(limit, spare, self._most)
            draft = self._propose(request, rows, most) if most > 0 else None
            if draft is not None:
                self._drafts[request] = draft
        return self._best(rows, spare) if self._drafts else {}

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
        draft = self._drafts.get(request)
        if draft is None:
            return
        if not verified:
            self._note(request, draft.kind, output[:1] == [*draft.tokens[:1]])
        for i in range(min(right + 1, verified)):
            self._note(request, draft.kind_of(i), i < right)

    def note(self, rows: int, seconds: float) -> None:
        """Learns what a step without a prompt cost, without the guesses of drafters: they cost by the
        token."""
        self.costs.note(rows, seconds - self.drafting_s)

    def drop(self) -> None:
        """Forgets what an exception may have broken off: the texts that drafters have read."""
        for drafter in self._drafters:
            if isinstance(drafter, ModelDrafter):
                drafter.clear()

    def _propose(self, request: Request, rows: int, most: int) -> Draft | None:
        for drafter in self._drafters:
            if isinstance(drafter, ModelDrafter):
                draft = self._draft(request, drafter, rows, most)
            else:
                draft = drafter(request, most)
            draft = possible(request, draft) if draft is not None else None
            if draft is not None or request.finished:
                return draft
        return None

    def _draft(self, request: Request, drafter: ModelDrafter, rows: int, most: int) -> Draft | None:
        """As many tokens of a drafter, which takes time for each, as promise most. Where none does, the
        drafter guesses one now and then, since it may have become better."""
        rate = self._rate(request, drafter.kind)
        n = self._worth(rows, [rate**n for n in range(1, most + 1)], drafter.seconds_of)
        self._steps += 1
        n = n or int(self._steps % _TRY_AGAIN == 0)
        if not n:
            return None
        start = time.perf_counter()
        draft = drafter(request, n)
        self.drafting_s += time.perf_counter() - start
        return draft

    def _worth(
        self, rows: int, chances: Iterable[float], seconds_of: Callable[[int], float] = lambda n: 0.0
    ) -> int:
        """The number of guessed tokens that gives a step the most tokens per second. ``chances`` are the
        chances of each to be right; ``seconds_of`` gives the time to guess a number of them."""
        tokens, best, worth = float(rows), _WORTH * rows / self.costs.of(rows), 0
        for n, chance in enumerate(chances, 1):
            tokens += chance
            speed = tokens / (self.costs.of(rows + n) + seconds_of(n))
            if speed > best:
                best, worth = speed, n
        return worth

    def _rate(self, request: Request, kind: Kind) -> float:
        """The acceptance rate of a drafter in a request, which begins as that over all requests."""
        return request.acceptance.get(kind, self._rates[kind])

    def _note(self, request: Request, kind: Kind, right: bool) -> None:
        before = self._rate(request, kind)
        request.acceptance[kind] = before + _RECENT * (right - before)
        self._rates[kind] += _RECENT_TEXTS * (right - self._rates[kind])

    def _best(self, rows: int, spare: int) -> dict[Request, Sequence[int]]:
        """The part of each guess that makes the most of a step, the likeliest tokens first."""
        chances: list[tuple[float, int, Request]] = []
        for request, draft in self._drafts.items():
            chance = 1.0
            for n in range(len(draft.tokens)):
                chance *= self._rate(request, draft.kind_of(n))
                chances.append((chance, -n, request))
        if len(self._drafts) > 1:
            chances.sort(key=lambda each: each[:2], reverse=True)
        worth = self._worth(rows, [chance for chance, *_ in chances[:spare]])
        counts = Counter(request for *_, request in chances[:worth])
        return {request: self._drafts[request].tokens[:n] for request, n in counts.items()}


def speculation_of(session: Session) -> Speculation | None:
    """How a session's requests are to be guessed on, as its model was loaded; None: not at all, where that
    was asked for, or memory had no room for states after guesses."""
    model = session.model
    if not model.draft_max or (session.slots is not None and not session.slots.spare):
        return None
    drafts: ModelDrafter
    if model.draft is not None:
        session.draft_session = model.draft.session()
        drafts = DraftModel(session.draft_session, model.config.vocab)
    elif session.draft_block is not None:
        drafts = BlockDrafts(session.draft_block, session.transformer.batch)
    else:
        return Speculation([forced, look_up], model.draft_max, model.limits.decode)
    return Speculation([forced, copied, drafts, look_up], model.draft_max, model.limits.decode)
