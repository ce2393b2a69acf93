"""Guesses change no token: not where they are right, not where they are wrong, whatever runs beside them."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from support.drafting import Reckless
from support.history_model import STOP, VOCAB, follow, history_model
from support.page_count import assert_no_page_is_lost

from hotcold.engine.drafts import Draft, Kind, forced, look_up
from hotcold.engine.engine import Engine
from hotcold.engine.events import Finished, Token
from hotcold.engine.request import Job, Request
from hotcold.engine.sampler import Allowed
from hotcold.engine.speculation import Speculation, StepCosts
from hotcold.kernels.backend import DECODE_ROWS, PAGE
from hotcold.runtime.sampling import SamplingParams

pytestmark = pytest.mark.long  # no backend computes here

GREEDY = SamplingParams(temperature=0)


def some_requests(random: np.random.Generator, count: int) -> list[Request]:
    stem = random.integers(8, VOCAB, 90).tolist()
    made = []
    for _ in range(count):
        common, own = int(random.integers(0, 90)), int(random.integers(1, 20))
        prompt = [*stem[:common], *random.integers(8, VOCAB, own).tolist()]
        more: dict[str, Any] = {"echo": True, "logprobs": 1} if random.random() < 0.2 else {}
        made.append(Request(Job(prompt, GREEDY, max_tokens=int(random.integers(1, 70)), **more)))
    return made


def expected(request: Request, *, prefill_equals_decode: bool = True) -> list[int]:
    return follow(
        [*request.job.prompt],
        request.job.max_tokens,
        ignore_eos=request.job.ignore_eos,
        prefill_equals_decode=prefill_equals_decode,
        scored=request.job.scored,
    )


COUNTS = ((1, None), (3, 8), (5, 12), (20, 60))  #: requests, and pages of the cache
STATES = ({}, {"copies": 0, "spare": 3}, {"copies": 4, "spare": 1})


@pytest.mark.parametrize("prefill_equals_decode", [True, False])
@pytest.mark.parametrize(
    ("states", "count", "pages", "share"),  # each pair of values of two of them comes up
    [
        (states, *count, (0.0, 0.6, 1.0)[(i + j) % 3])
        for i, states in enumerate(STATES)
        for j, count in enumerate(COUNTS)
    ],
)
def test_tokens_are_those_without_guesses(
    prefill_equals_decode: bool, share: float, count: int, pages: int | None, states: dict[str, int]
) -> None:
    """With arrivals and cancellations at random, and caches that hold only some of the requests. The model
    itself refuses a state after other tokens than those before a row."""
    random = np.random.default_rng(count)
    requests = some_requests(random, count)
    known = {request: expected(request, prefill_equals_decode=prefill_equals_decode) for request in requests}
    model = history_model(
        sequences=min(count, 18), pages=pages, prefill_equals_decode=prefill_equals_decode, **states
    )
    speculation = Reckless(known.__getitem__, share, VOCAB, seed=count)
    engine = Engine(model, speculation=speculation)
    left, cancelled = list(requests), set[Request]()
    tokens: dict[Request, list[int]] = {request: [] for request in requests}
    for _ in range(5000):
        while left and random.random() < 0.5:
            engine.add(left.pop(0))
        if count > 3 and random.random() < 0.02:
            one = requests[int(random.integers(count))]
            if one not in left and not one.finished:
                cancelled.add(one)
                engine.abort(one)
        for event in engine.step():
            if isinstance(event, Token):
                tokens[event.request].append(event.id)
        assert_no_page_is_lost(engine.session.cache)
        if states:
            assert_no_page_is_lost(engine.session.slots)
        if not left and all(request.finished for request in requests):
            break
    for request in requests:
        own = known[request]
        assert tokens[request] == request.output
        if request in cancelled:
            assert request.output == own[: len(request.output)]
        else:
            assert request.output == own
            ended = len(own) < request.job.max_tokens
            assert request.finish_reason == ("stop" if ended else "length")
    assert share == 0 or speculation.accepted > 0


def test_the_context_and_max_tokens_end_a_text_as_without_guesses() -> None:
    for context, n in ((40, 100), (64, 64), (200, 1), (200, 2), (200, 33)):
        request = Request(Job([9, 10, 11], GREEDY, max_tokens=n, ignore_eos=True))
        own = follow([9, 10, 11], min(n, context - 3), ignore_eos=True)
        model = history_model(context=context)
        engine = Engine(model, speculation=Reckless(lambda _: own, 1.0, VOCAB))  # noqa: B023
        engine.run([request])
        assert request.output == own and request.context_full == (context - 3 < n)


def test_steps_are_fewer_where_guesses_are_right() -> None:
    request = Request(Job([1], GREEDY, max_tokens=100, ignore_eos=True))
    own = expected(request)
    model = history_model()
    Engine(model, speculation=Reckless(lambda _: own, 1.0, VOCAB)).run([request])
    assert request.output == own and len(model.transformer.row_counts) < 40


def test_pages_that_were_guessed_on_are_kept_for_others_with_right_tokens_alone() -> None:
    first = Request(Job([1] * 20, GREEDY, max_tokens=100, ignore_eos=True))
    own = expected(first)
    engine = Engine(history_model(sequences=2), speculation=Reckless(lambda _: own, 0.7, VOCAB))
    engine.run([first])
    assert first.output == own
    again = Request(Job([*[1] * 20, *own[:90]], GREEDY, max_tokens=10, ignore_eos=True))
    engine = Engine(engine.session)  # its prefix cache is another, whose pages are the pool's
    engine.run([again])
    assert again.output == own[90:100] and again.reused == 110 // PAGE * PAGE


def test_a_stop_among_guesses_ends_the_text_there() -> None:
    for seed in range(40):
        request = Request(Job([8 + seed, 9], GREEDY, max_tokens=150))
        own = expected(request)
        if len(own) == 150:
            continue
        guessed = [*own, STOP, 3, 4, 5]
        engine = Engine(history_model(), speculation=Reckless(lambda _: guessed, 1.0, VOCAB, seed))  # noqa: B023
        events = []
        engine.add(request)
        while not request.finished:
            events += engine.step()
        assert request.output == own == [each.id for each in events if isinstance(each, Token)]
        assert isinstance(events[-1], Finished)


def test_each_choice_asks_the_constraint_with_the_tokens_before_it() -> None:
    asked: list[list[int]] = []

    def even(output: Any) -> Allowed:
        asked.append(list(output))
        mask = np.array([sum(1 << i for i in range(8, VOCAB, 2))], np.uint64)
        return Allowed(mask)

    def run(speculation: Speculation | None) -> list[int]:
        asked.clear()
        request = Request(Job([1, 2], GREEDY, max_tokens=60, ignore_eos=True), even)
        Engine(history_model(), speculation=speculation).run([request])
        assert asked == [request.output[:i] for i in range(60)]
        return request.output

    own = run(None)
    assert all(id % 2 == 0 for id in own)
    assert run(Reckless(lambda _: own, 0.7, VOCAB)) == own


def test_a_constraint_that_cannot_guess_ends_its_request_alone() -> None:
    class Broken:
        def __init__(self, method: str) -> None:
            setattr(self, method, self._fail)

        def __call__(self, output: Any) -> Allowed:
            return Allowed(None)

        def _fail(self, *_: Any) -> Any:
            raise LookupError("guesses nothing")

    for method in ("forced", "possible"):
        broken, other = (Request(Job([1, 2, 1, 2], GREEDY, max_tokens=30, ignore_eos=True)) for _ in range(2))
        broken.constraint = Broken(method)
        speculation = Speculation([forced, Fixed(1, 0)], 3, DECODE_ROWS)
        costs: Any = speculation.costs
        costs.measured, costs.of = lambda rows: True, lambda rows: 1.0
        engine = Engine(history_model(sequences=2), speculation=speculation)
        with pytest.raises(LookupError):
            engine.run([broken, other])
        assert broken.finish_reason == "error"
        again = Request(Job([1, 2, 1, 2], GREEDY, max_tokens=30, ignore_eos=True))
        engine.run([again])
        assert again.output == expected(again)


@pytest.mark.parametrize(("prompt", "tokens"), [(20, 60), (31, 3), (32, 70), (40, 200)])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_copies_of_states_are_made_at_borders_that_guesses_pass(
    prompt: int, tokens: int, share: float
) -> None:
    """The next turn begins where it would have without guesses."""

    def reused(speculation: Speculation | None) -> int:
        engine = Engine(history_model(context=400, copies=2, spare=3), speculation=speculation)
        first = Request(Job(text, GREEDY, max_tokens=tokens, ignore_eos=True))
        engine.run([first])
        assert first.output == known
        second = Request(Job([*text, *known, 1, 2, 3], GREEDY, max_tokens=4, ignore_eos=True))
        engine.run([second])
        assert second.output == expected(second)
        return second.reused

    text = np.random.default_rng(prompt).integers(8, VOCAB, prompt).tolist()
    known = follow(text, tokens, ignore_eos=True)
    plain = reused(None)
    assert plain == (prompt + tokens - 1) // PAGE * PAGE
    assert reused(Reckless(lambda request: known, share, VOCAB)) == plain


@pytest.mark.parametrize("seed", range(12))
def test_an_exception_among_guesses_leaves_states_in_order(seed: int) -> None:
    """Requests that ran end; later ones continue from intact copies."""
    random = np.random.default_rng(seed)
    model = history_model(sequences=3, copies=3, spare=3, pages=20)
    known: dict[Request, list[int]] = {}
    speculation = Reckless(lambda request: known[request], 0.7, VOCAB, seed)
    engine = Engine(model, speculation=speculation)
    for _ in range(6):
        requests = some_requests(random, 3)
        known |= {request: expected(request) for request in requests}
        model.transformer.interrupt_in = int(random.integers(1, 30))
        with contextlib.suppress(KeyboardInterrupt):
            engine.run(requests)
        model.transformer.interrupt_in = None
        for request in requests:
            assert request.output == known[request][: len(request.output)]
        assert model.slots.free == model.slots.slots
        assert_no_page_is_lost(model.slots)
    assert speculation.accepted > 0


def test_states_after_guesses_need_slots() -> None:
    with pytest.raises(ValueError, match="draft tokens on a model with states need spare state slots"):
        Engine(history_model(copies=1), speculation=Speculation([look_up], 3, DECODE_ROWS))


def test_penalties_and_logprobs_are_those_without_guesses() -> None:
    params = SamplingParams(temperature=0.8, seed=5, repeat_penalty=1.3, frequency_penalty=0.4)

    def run(speculation: Speculation | None) -> Request:
        request = Request(Job([1, 2], params, max_tokens=80, logprobs=3))
        Engine(history_model(), speculation=speculation).run([request])
        return request

    own = run(None)
    guessed = run(Reckless(lambda _: own.output, 0.7, VOCAB))
    assert guessed.output == own.output and guessed.output_logprobs == own.output_logprobs


# --- how many -----------------------------------------------------------------------------------------


class Fixed:
    """A guesser that is right with a probability, and a text without a model."""

    def __init__(self, share: float, seed: int) -> None:
        self.share = share
        self.random = np.random.default_rng(seed)

    def __call__(self, request: Request, most: int) -> Draft | None:
        return Draft([1] * most, Kind.MODEL)

    def right(self, n: int) -> int:
        wrong = np.flatnonzero(self.random.random(n) >= self.share)
        return int(wrong[0]) if len(wrong) else n


def tokens_a_cost(share: float, costs: list[float], steps: int = 3000, seed: int = 0) -> float:
    drafter = Fixed(share, seed)
    speculation = Speculation([drafter], 7, DECODE_ROWS)
    request = Request(Job([1], GREEDY, max_tokens=10**6))
    tokens = cost = 0.0
    for _ in range(steps):
        chosen = speculation.choose({request: 10}, 1, 15)
        n = len(chosen.get(request, ()))
        right = drafter.right(n)
        first = drafter.right(1) if not n else 0
        new = [1] * right + ([2] if right < n or not first else [1])
        speculation.learn(request, n, right, new)
        noise = float(drafter.random.lognormal(0, 0.1))
        speculation.costs.note(1 + n, 0.05 * costs[n] * noise)
        tokens += right + 1
        cost += costs[n]
    return tokens / cost * costs[0]


ZEN5 = [14.8, 17.9, 21.3, 22.2, 27.2, 30.2, 31.4, 35.2]
ZEN3 = [10, 13.1, 16.1, 19.2, 22.3, 25.4, 28.4, 31.5]
STEEP = [10, 20, 30, 40, 50, 60, 70, 80]


@pytest.mark.full
@pytest.mark.parametrize("costs", [ZEN5, ZEN3, STEEP])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.7, 0.9])
def test_the_number_of_guesses_is_nearly_the_best(costs: list[float], share: float) -> None:
    best = max(sum(share**i for i in range(n + 1)) * costs[0] / costs[n] for n in range(len(costs)))
    assert tokens_a_cost(share, costs) >= 0.93 * best


def test_nothing_is_lost_where_nothing_is_right() -> None:
    for costs in (ZEN5, ZEN3, STEEP):
        assert tokens_a_cost(0.02, costs) >= 0.98


def test_the_cost_of_each_number_of_rows_is_measured_once() -> None:
    """The median of the first steps: two slow ones of five change nothing, nor does any later step."""
    costs, random = StepCosts(8), np.random.default_rng(0)
    for rows in random.permutation(np.repeat(np.arange(1, 9), 3)).tolist():
        assert not costs.measured(rows)
        costs.note(rows, ZEN3[rows - 1])
    for slower in (10.0, 20.0, 0.1):
        for rows in range(1, 9):
            costs.note(rows, slower * ZEN3[rows - 1])
    assert [costs.of(rows) for rows in range(1, 9)] == ZEN3
    assert all(map(costs.measured, range(1, 9)))


def test_costs_between_measured_ones() -> None:
    costs = StepCosts(16)
    before = [costs.of(rows) / costs.of(1) for rows in range(1, 17)]
    for rows in (2, 6):
        for _ in range(5):
            costs.note(rows, 3 * before[rows - 1] * rows)  # a row costs more than the line says
    factors = [costs.of(rows) / before[rows - 1] for rows in range(1, 17)]
    assert factors == pytest.approx([5.4, 6, 8.1, 10.8, 13.5, 18, *[16.2] * 10])


def test_rows_go_to_the_sequences_that_earn_most() -> None:
    speculation = Speculation([Fixed(1, 0)], 7, DECODE_ROWS)
    for _ in range(5):
        speculation.costs.note(2, 0.1)
    good, bad = (Request(Job([1], GREEDY)) for _ in range(2))
    good.acceptance[Kind.MODEL], bad.acceptance[Kind.MODEL] = 0.9, 0.3
    chosen = speculation.choose({good: 10, bad: 10}, 2, 14)
    assert len(chosen[good]) > len(chosen.get(bad, ()))
    assert not speculation.choose({good: 10, bad: 10}, 2, 0)
    assert len(speculation.choose({good: 1, bad: 0}, 2, 14)[good]) == 1
