"""A schedule keeps its promises: no request waits for long or loses a token, and no page is lost."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.history_model import VOCAB, follow, history_model
from support.page_count import assert_no_page_is_lost

from hotcold.engine.engine import Engine
from hotcold.engine.events import Finished
from hotcold.engine.pace import Pace
from hotcold.engine.request import Job, Request, RequestError
from hotcold.engine.sampler import Allowed
from hotcold.engine.scheduler import divided
from hotcold.kernels.backend import DECODE_ROWS, PAGE
from hotcold.runtime.sampling import SamplingParams

pytestmark = pytest.mark.long  # no backend computes here

GREEDY = SamplingParams(temperature=0)


def greedy(prompt: list[int], n: int, **more: Any) -> Request:
    constraint = more.pop("constraint", None)
    return Request(Job(prompt, GREEDY, max_tokens=n, ignore_eos=True, **more), constraint)


def expected(request: Request, *, prefill_equals_decode: bool = True) -> list[int]:
    prompt = list(request.job.prompt)
    return follow(
        prompt,
        request.job.max_tokens,
        ignore_eos=True,
        prefill_equals_decode=prefill_equals_decode,
        scored=request.job.scored,
    )


def finish(engine: Engine, requests: Sequence[Request]) -> None:
    for _ in range(5000):
        if all(request.finished for request in requests):
            return
        engine.step()
    raise AssertionError("the engine spins")


# --- fairness -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "wanted", "given"),
    [
        (8, [100], [8]),
        (8, [3], [3]),
        (8, [3, 3, 3], [3, 3, 2]),
        (8, [100, 3], [5, 3]),
        (8, [100, 50, 3], [4, 1, 3]),
        (8, [100, 100, 100], [8, 0, 0]),
        (1, [5, 1], [1, 0]),
        (0, [5, 1], [0, 0]),
    ],
)
def test_how_a_chunk_is_divided(rows: int, wanted: list[int], given: list[int]) -> None:
    assert divided(rows, wanted) == given


def test_a_short_prompt_is_not_held_up_by_a_long_one_nor_by_those_that_decode() -> None:
    engine = Engine(history_model(context=2000, sequences=4, chunk=32))
    engine.scheduler.pace = Pace(32, math.inf)
    long, decoding, short = greedy([1] * 1500, 2), greedy([2], 100), greedy([3] * 30, 2)
    engine.add(decoding)
    engine.step()
    engine.add(long)
    engine.step()
    engine.add(short)
    steps = 0
    while not short.output:
        before = len(decoding.output)
        engine.step()
        steps += 1
        assert len(decoding.output) == before + 1, "each step gives a token to who decodes"
    assert steps == 2 and long.computed == 32 + 16 + 18
    finish(engine, [long, decoding, short])
    for request in (long, decoding, short):
        assert request.output == expected(request)


def test_a_long_prompt_goes_on_while_short_ones_keep_coming() -> None:
    engine = Engine(history_model(context=2000, sequences=4, chunk=32))
    long = greedy([1] * 640, 2)
    engine.add(long)
    for i in range(40):
        engine.add(greedy([i] * 31, 1))
        engine.step()
    assert long.output, "half of each chunk is its own"


def test_a_scored_prompt_leaves_rows_to_those_that_decode() -> None:
    """Also where there are as many of these as there are decode rows: then each has its turn."""
    engine = Engine(history_model(context=200, sequences=DECODE_ROWS + 1, chunk=32))
    others = [greedy([i], 60) for i in range(DECODE_ROWS)]
    scored = greedy([7] * 40, 3, echo=True, logprobs=0)
    for request in (*others, scored):
        engine.add(request)
    finish(engine, [*others, scored])
    for request in (*others, scored):
        assert request.output == expected(request)


def test_a_scored_prompt_takes_all_decode_rows_that_are_free() -> None:
    session = history_model(context=200, sequences=3, chunk=32)
    engine = Engine(session)
    scored = greedy([5] * 40, 2, echo=True, logprobs=2)
    engine.run([scored])
    assert session.transformer.row_counts == [(16, 0), (16, 0), (8, 0), (1, 0)]
    assert len(scored.prompt_logprobs) == 40 and scored.prompt_logprobs[0] is None
    assert scored.output == expected(scored)


def test_max_tokens_0_scores_the_prompt_alone() -> None:
    engine = Engine(history_model(context=200, sequences=2))
    for prompt in ([5] * 40, [5]):
        engine.run([request := greedy(prompt, 0, echo=True, logprobs=0)])
        assert request.output == [] and request.finish_reason == "length" and not request.context_full
        assert len(request.prompt_logprobs) == len(prompt)
    with pytest.raises(ValueError, match="max_tokens is 0: allowed are the whole numbers 1 to"):
        greedy([1], 0, echo=True)


# --- the queue ----------------------------------------------------------------------------------------


def test_a_full_queue_says_when_to_try_again() -> None:
    engine = Engine(history_model(sequences=2), max_waiting=3)
    requests = [greedy([i], 9) for i in range(5)]
    for request in requests:
        engine.add(request)
    with pytest.raises(RequestError, match="0 requests run and 5 wait") as caught:
        engine.add(greedy([9], 9))
    assert caught.value.code == "queue_full" and caught.value.retry_after_s in range(1, 61)
    engine.step()
    with pytest.raises(RequestError, match="2 requests run and 3 wait, which is the limit: try again in 1 s"):
        engine.add(greedy([9], 9))
    engine.abort(requests[0])
    engine.add(more := greedy([9], 9))
    finish(engine, [*requests, more])
    assert more.output == expected(more)


def test_no_queue_takes_what_can_start_at_once() -> None:
    engine = Engine(history_model(sequences=2), max_waiting=0)
    requests = [greedy([i], 9) for i in range(2)]
    for request in requests:
        engine.add(request)
    with pytest.raises(RequestError, match="which is the limit"):
        engine.add(greedy([9], 9))
    finish(engine, requests)


@pytest.mark.parametrize("limit", ["deadline_s", "timeout_s"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_request_whose_time_is_over_ends_alone(steps: int, limit: str) -> None:
    """In the queue, in its prompt and among its tokens."""
    session = history_model(sequences=1 if steps == 0 else 2, chunk=16)
    engine = Engine(session)
    other, late = greedy([1] * 3, 30), greedy([2] * 20, 30, **{limit: 3600})
    for request in (other, late):
        engine.add(request)
    for _ in range(steps):
        engine.step()
    assert not late.finished
    moment = "progress" if limit == "timeout_s" else "made"
    setattr(late, moment, time.perf_counter() - 3601)
    events = engine.step()
    assert Finished(late, "error") in events
    assert isinstance(late.error, RequestError) and late.error.code == "deadline"
    state = {
        0: "it waited in the queue",
        1: f"{late.computed} of 20 prompt tokens were computed",
        3: f"{len(late.output)} tokens were generated",
    }[steps]
    assert str(late.error).endswith(f"(`{limit}`): {state}")
    finish(engine, [other])
    assert other.output == expected(other) and session.cache.free_pages == session.cache.pages


@pytest.mark.parametrize("limit", ["deadline_s", "timeout_s"])
def test_a_time_limit_that_is_kept_changes_nothing(limit: str) -> None:
    engine = Engine(history_model())
    engine.run([request := greedy([1], 9, **{limit: 3600})])
    assert request.output == expected(request)
    engine.add(late := greedy([1], 9, **{limit: 0}))
    assert engine.step() == [Finished(late, "error")]


def test_timeout_s_counts_anew_from_the_start_and_from_each_token() -> None:
    """A request may take any time in all: as a whole, only ``deadline_s`` limits it."""
    session = history_model(sequences=1, chunk=16)
    engine = Engine(session)
    other, slow = greedy([1] * 3, 3), greedy([2] * 20, 6, timeout_s=10)
    for request in (other, slow):
        engine.add(request)
    state = None
    while not slow.finished:
        if state != (slow.timings.started, len(slow.output)):
            state = slow.timings.started, len(slow.output)
            slow.progress -= 6  # twice without a new start is too long
        engine.step()
    assert slow.finish_reason == "length" and slow.output == expected(slow)


# --- constraints --------------------------------------------------------------------------------------


class Prepared:
    """Notes what it was told before it is asked."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.fail_at = fail_at

    def prepare(self, output: Sequence[int]) -> None:
        if len(output) == self.fail_at:
            raise KeyError("a defect")
        self.calls.append(("prepare", list(output)))

    def __call__(self, output: Sequence[int]) -> Allowed:
        self.calls.append(("ask", list(output)))
        return Allowed()


def test_a_constraint_is_told_before_the_model_runs() -> None:
    session = history_model()
    constraint = Prepared()
    inner = session.run

    def run() -> None:
        constraint.calls.append(("run", []))
        inner()

    session.run = run
    Engine(session).run([request := greedy([1, 2], 3, constraint=constraint)])
    calls: list[tuple[str, list[int]]] = []
    for i in range(3):
        calls += [("prepare", request.output[:i]), ("run", []), ("ask", request.output[:i])]
    assert constraint.calls == calls


@pytest.mark.parametrize("fail_at", [0, 2])
def test_a_constraint_that_fails_to_prepare_ends_its_request_alone(fail_at: int) -> None:
    engine = Engine(history_model(sequences=2))
    bad, good = greedy([1], 9, constraint=Prepared(fail_at)), greedy([2], 9)
    for request in (bad, good):
        engine.add(request)
    finish(engine, [bad, good])
    assert isinstance(bad.error, KeyError) and len(bad.output) == fail_at
    assert good.output == expected(good)


# --- pages that lack ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefill_equals_decode", [True, False])
def test_the_youngest_gives_way_and_keeps_its_tokens(prefill_equals_decode: bool) -> None:
    session = history_model(
        context=128, sequences=2, pages=4, chunk=64, prefill_equals_decode=prefill_equals_decode
    )
    engine = Engine(session)
    old, young, third = greedy([1] * 30, 90), greedy([2] * 30, 60), greedy([3] * 9, 3)
    for request in (old, young, third):
        engine.add(request)
    while not young.preempted:
        engine.step()
    assert [*engine.scheduler.waiting] == [young, third] and engine.scheduler.running == [old]
    kept = list(young.output)
    assert len(kept) > 30 and old.preempted == 0
    finish(engine, [old, young, third])
    assert young.output[: len(kept)] == kept
    for request in (old, young, third):
        assert request.output == expected(request, prefill_equals_decode=prefill_equals_decode)
    assert session.cache.free_pages == 4


# --- everything at once -------------------------------------------------------------------------------


class Schedules(RuleBasedStateMachine):
    """Requests come, go on and are ended in any order, in a cache that is too small for them."""

    @initialize(
        prefill_equals_decode=st.booleans(),
        sequences=st.integers(1, 5),
        pages=st.integers(4, 12),
        chunk=st.integers(1, 60),
        context=st.integers(40, 128),
        copies=st.none() | st.integers(0, 7),
    )
    def begin(
        self,
        prefill_equals_decode: bool,
        sequences: int,
        pages: int,
        chunk: int,
        context: int,
        copies: int | None,
    ) -> None:
        self.prefill_equals_decode = prefill_equals_decode
        self.session = history_model(
            context=context,
            sequences=sequences,
            pages=pages,
            chunk=chunk,
            prefill_equals_decode=prefill_equals_decode,
            copies=copies,
        )
        self.engine = Engine(self.session)
        self.requests: list[Request] = []
        inner = self.session.run

        def run() -> None:
            batch, pool = self.session.transformer.batch, self.session.cache
            for page in set((batch.slots[: int(batch.counts[0])] // PAGE).tolist()):
                owners = [owner for owner, pages in pool._owned.items() if page in pages]
                assert len(owners) == 1 and owners[0] in self.engine.scheduler.running
                assert page not in pool._keys
            inner()

        self.session.run = run

    @rule(
        common=st.integers(0, 70),
        own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
        n=st.integers(1, 60),
        kind=st.sampled_from(["plain", "plain", "plain", "echo", "alone"]),
    )
    def add(self, common: int, own: list[int], n: int, kind: str) -> None:
        more: dict[str, Any] = {"cache": kind != "alone"}
        if kind == "echo":
            more |= {"echo": True, "logprobs": 0}
        stem = np.random.default_rng(1).integers(0, VOCAB, common).tolist()
        request = greedy([*stem, *own], n, **more)
        if len(request.job.prompt) < self.engine.scheduler.context:
            self.engine.add(request)
            self.requests.append(request)

    @rule(n=st.integers(1, 25))
    def step(self, n: int) -> None:
        for _ in range(n):
            self.engine.step()

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        self.engine.abort(self.requests[which % len(self.requests)])

    @invariant()
    def the_pool_is_what_its_owners_say(self) -> None:
        if not hasattr(self, "session"):
            return
        pool, scheduler = self.session.cache, self.engine.scheduler
        assert_no_page_is_lost(pool)
        assert set(pool._owned) == set(scheduler.running)
        if slots := self.session.slots:
            assert_no_page_is_lost(slots)
            assert {*slots._owned} == {*scheduler.running}
            for request, owned in slots._owned.items():
                assert {*owned} == {request.slot, request.state} - {-1}
                assert request.slot not in slots._keys and slots.owners(request.slot) == 1
        assert len({request.row for request in scheduler.running}) == len(scheduler.running)
        arrivals = [request.arrival for request in scheduler.waiting]
        assert arrivals == sorted(arrivals)

    def teardown(self) -> None:
        if not hasattr(self, "session"):
            return
        finish(self.engine, self.requests)
        for request in self.requests:
            whole = expected(request, prefill_equals_decode=self.prefill_equals_decode)
            assert request.output == whole[: len(request.output)]
            room = self.engine.scheduler.context - len(request.job.prompt)
            if request.finish_reason == "length":
                assert len(request.output) == min(request.job.max_tokens, room)
                assert request.context_full == (request.job.max_tokens > room)
        pool = self.session.cache
        assert pool.free_pages == pool.pages and not self.engine.scheduler.unfinished
        assert self.session.slots is None or self.session.slots.free == self.session.slots.slots


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
