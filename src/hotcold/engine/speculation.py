"""Lossless speculation: draft tokens, verified in one step (arXiv 2211.17192, without its randomness).

A row's bits do not depend on other rows, and the sampler draws by seed and position. A draft token is
accepted if the sampler chooses the same token there. So the text is the same with and without speculation, to
the last bit. A shorter length undoes rejected tokens, since later rows overwrite them. The state of a
sequence is written after each row, and the one after the last accepted token is taken.

This module decides how many draft tokens a step verifies, from the cost of a step by its rows and from
acceptance rates. It may use the clock, since it cannot change the text."""

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
_WORTH = 1.02  # least gain for which drafts are verified, since estimates are rough
_SLOPE = 0.22  # estimated share of a step's cost that one more row adds, until it is measured
_FEW, _MANY = 5, 40  # samples of a step size from which its cost is known, and after which it is fixed
_HOPE = 0.9  # factor for unknown costs, so that promising sizes are tried
_TRY_AGAIN = 40  # steps between trials of a drafter that does not pay


class StepCosts:
    """Seconds of a step without prompt rows by its number of rows, measured once per session. The cost of a
    size is the median of its first steps. An unmeasured cost is interpolated from its measured neighbours,
    and a little lower."""

    def __init__(self, most_rows: int) -> None:
        self._samples: list[list[float]] = [[] for _ in range(most_rows + 1)]
        self._costs = self._line = _SLOPE * (np.arange(most_rows + 1) - 1) + 1

    def note(self, rows: int, seconds: float) -> None:
        """Records the time of one step."""
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
        """Returns the cost of a step with this number of rows."""
        return float(self._costs[rows])


class Speculation:
    """Chooses the draft tokens of each step by their expected gain. ``drafters``: drafters, the preferred one
    first; the first with drafts for a request serves it. ``most``: draft tokens of one request in a step.
    ``most_rows``: rows of a step."""

    def __init__(self, drafters: Sequence[Drafter], most: int, most_rows: int) -> None:
        self.guessed = self.accepted = 0  #: draft tokens verified, and accepted
        self.costs = StepCosts(most_rows)
        self._drafters = drafters
        self._block = next((each for each in drafters if isinstance(each, BlockDrafts)), None)
        self._most = most
        self._steps = 0
        self.drafting_s = 0.0  #: time that drafters took in this step
        self._rates = dict(FIRST_RATES)  # over all requests
        self._drafts: dict[Request, Draft] = {}  # drafts for this step, verified or not

    def choose(self, limits: Mapping[Request, int], rows: int, spare: int) -> dict[Request, Sequence[int]]:
        """Returns the draft tokens that the next step verifies. ``limits``: the limit for each request;
        ``rows``: rows of the step without drafts; ``spare``: rows that may be added."""
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
        """Lets the draft block, if any, read the rows of a step whose tokens are chosen. ``put``: requests,
        each with the position after its rows."""
        if self._block is not None:
            self._block.read(put)

    def learn(self, request: Request, verified: int, accepted: int, output: Sequence[int]) -> None:
        """Updates acceptance rates after a request's step. ``accepted``: the number of accepted draft tokens;
        ``output``: new tokens of the request. A draft that was not verified counts by its first token."""
        self.guessed += verified
        self.accepted += accepted
        draft = self._drafts.get(request)
        if draft is None:
            return
        if not verified:
            self._note(request, draft.kind, output[:1] == [*draft.tokens[:1]])
        for i in range(min(accepted + 1, verified)):
            self._note(request, draft.kind_of(i), i < accepted)

    def note(self, rows: int, seconds: float) -> None:
        """Records the time of a step without prompt rows, without the drafters' time, which is counted by
        token."""
        self.costs.note(rows, seconds - self.drafting_s)

    def drop(self) -> None:
        """Clears the texts that drafters have read, since an exception may have left them incomplete."""
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
        """Drafts the number of tokens with the highest expected speed. If no number pays, drafts one token
        now and then, since the drafter may have become better."""
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
        """Returns the number of draft tokens with which a step gives the most tokens per second. ``chances``:
        probability of acceptance of each; ``seconds_of``: time to draft a number of tokens."""
        tokens, best, worth = float(rows), _WORTH * rows / self.costs.of(rows), 0
        for n, chance in enumerate(chances, 1):
            tokens += chance
            speed = tokens / (self.costs.of(rows + n) + seconds_of(n))
            if speed > best:
                best, worth = speed, n
        return worth

    def _rate(self, request: Request, kind: Kind) -> float:
        """Returns the acceptance rate of a drafter for a request; initially the rate over all requests."""
        return request.acceptance.get(kind, self._rates[kind])

    def _note(self, request: Request, kind: Kind, right: bool) -> None:
        before = self._rate(request, kind)
        request.acceptance[kind] = before + _RECENT * (right - before)
        self._rates[kind] += _RECENT_TEXTS * (right - self._rates[kind])

    def _best(self, rows: int, spare: int) -> dict[Request, Sequence[int]]:
        """Returns the part of each draft that makes the step fastest, the likeliest tokens first."""
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
    """Makes the speculation of a session, as its model was loaded; None if drafts are off, or if memory has
    no slots for states after draft tokens."""
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
