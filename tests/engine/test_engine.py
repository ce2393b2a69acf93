"""The loop and its schedule, on a model that gives a different token for every history."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.history_model import STOP, VOCAB, follow, history_model

from hotcold.engine.engine import Engine
from hotcold.engine.events import Finished, Token
from hotcold.engine.request import Grammar, Job, Request
from hotcold.errors import UserError
from hotcold.kernels.backend import DECODE_ROWS, PAGE
from hotcold.runtime.sampling import SamplingParams

pytestmark = pytest.mark.long  # no backend computes here

GREEDY = SamplingParams(temperature=0)


def greedy(prompt: list[int], max_tokens: int, *, ignore_eos: bool = False) -> Request:
    return Request(Job(prompt, GREEDY, max_tokens=max_tokens, ignore_eos=ignore_eos))


def finish(engine: Engine, requests: list[Request]) -> None:
    while not all(request.finished for request in requests):
        engine.step()


def run(engine: Engine, requests: list[Request]) -> None:
    for request in requests:
        engine.add(request)
    finish(engine, requests)


def expect(request: Request) -> None:
    """The tokens are those of the prompt alone, and the reason is the right one."""
    tokens = follow(list(request.job.prompt), request.job.max_tokens, ignore_eos=request.job.ignore_eos)
    assert request.output == tokens
    assert request.finish_reason == ("length" if len(tokens) == request.job.max_tokens else "stop")


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=70)


@settings(max_examples=40)
@given(
    requests=st.lists(st.tuples(prompts, st.integers(1, 60)), min_size=1, max_size=30),
    sequences=st.integers(1, 25),
    spare_pages=st.integers(0, 20),
    chunk=st.integers(1, 40),
)
def test_each_request_gets_its_own_tokens_whatever_runs_beside_it(
    requests: list[tuple[list[int], int]], sequences: int, spare_pages: int, chunk: int
) -> None:
    session = history_model(context=131, sequences=sequences, pages=5 + spare_pages, chunk=chunk)
    engine = Engine(session)
    made = [greedy(prompt, n) for prompt, n in requests]
    run(engine, made)
    for request in made:
        expect(request)
    assert session.cache.free_pages == session.cache.pages, "pages were not given back"
    assert engine.step() == []


def test_a_long_prompt_goes_in_chunks_and_decoding_continues_beside_it() -> None:
    session = history_model(sequences=2, chunk=8)
    engine = Engine(session)
    first = greedy([1, 2, 3], 20, ignore_eos=True)
    engine.add(first)
    engine.step()
    second = greedy(list(range(20)), 3, ignore_eos=True)
    run(engine, [second])
    assert session.transformer.row_counts[:5] == [(0, 3), (1, 8), (1, 8), (1, 4), (2, 0)]


def test_several_short_prompts_share_a_step() -> None:
    session = history_model(sequences=3, chunk=8)
    requests = [greedy([i + 1] * 3, 2, ignore_eos=True) for i in range(3)]
    run(Engine(session), requests)
    assert session.transformer.row_counts == [(0, 8), (2, 1), (1, 0)]


def test_more_sequences_than_decode_rows_take_turns() -> None:
    session = history_model(sequences=DECODE_ROWS + 5, chunk=100)
    requests = [greedy([i + 1], 12, ignore_eos=True) for i in range(DECODE_ROWS + 5)]
    engine = Engine(session)
    for request in requests:
        engine.add(request)
    for _ in range(9):
        engine.step()
    lengths = [len(request.output) for request in requests]
    assert max(lengths) - min(lengths) <= 1
    assert max(decode for decode, _ in session.transformer.row_counts) == DECODE_ROWS


def test_step_returns_the_new_tokens() -> None:
    engine = Engine(history_model(chunk=4))
    request = greedy([5, 6, 7, 8, 9, 10], 3, ignore_eos=True)
    engine.add(request)
    assert engine.step() == []  # four of six prompt rows
    events = [engine.step() for _ in range(3)]
    tokens = [Token(request, token) for token in request.output]
    assert events == [tokens[:1], tokens[1:2], [tokens[2], Finished(request, "length")]]


def test_a_stop_token_ends_the_text_and_is_not_part_of_it() -> None:
    prompt = next([i] for i in range(VOCAB) if len(follow([i], 100)) < 90)
    request = greedy(prompt, 100)
    run(Engine(history_model()), [request])
    expect(request)
    assert request.finish_reason == "stop" and STOP not in request.output


def test_ignore_eos_never_chooses_a_stop_token() -> None:
    prompt = next([i] for i in range(VOCAB) if len(follow([i], 100)) < 90)
    request = greedy(prompt, 100, ignore_eos=True)
    run(Engine(history_model()), [request])
    assert len(request.output) == 100 and STOP not in request.output


def test_the_end_of_the_context_stops_generation_and_says_so() -> None:
    engine = Engine(history_model(context=40))
    request = greedy([1] * 30, 100, ignore_eos=True)
    run(engine, [request])
    assert (request.finish_reason, request.context_full) == ("length", True)
    assert len(request.job.prompt) + len(request.output) == 40


def test_max_tokens_that_just_fit_do_not_blame_the_context() -> None:
    request = greedy([1] * 30, 10, ignore_eos=True)
    run(Engine(history_model(context=40)), [request])
    assert (request.finish_reason, request.context_full) == ("length", False)


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    engine = Engine(history_model(context=40))
    with pytest.raises(ValueError, match=r"^the prompt has 51 tokens and the context holds 40\b.*`context`"):
        engine.add(greedy([1] * 51, 1))
    with pytest.raises(ValueError, match="has 40 tokens"):
        engine.add(greedy([1] * 40, 1))
    engine.add(greedy([1] * 39, 1))


def test_a_request_that_can_never_have_its_pages_is_refused() -> None:
    engine = Engine(history_model(context=200, pages=3))
    refused = r"the prompt has 96 tokens and the KV cache holds 96, .*: shorten the prompt, or enlarge the KV"
    with pytest.raises(ValueError, match=refused):
        engine.add(greedy([1] * (3 * PAGE), 5))
    fits = greedy([1] * (3 * PAGE - 5), 200, ignore_eos=True)
    run(engine, [fits])
    assert (len(fits.output), fits.finish_reason, fits.context_full) == (5, "length", True)


def test_a_request_waits_for_the_pages_of_its_prompt_and_one_for_each_that_runs() -> None:
    session = history_model(context=128, sequences=2, pages=4)
    engine = Engine(session)
    requests = [greedy([i] * 60, 60, ignore_eos=True) for i in (1, 2)]  # two pages each, then four
    for request in requests:
        engine.add(request)
    engine.step()
    assert requests[0].pages and not requests[1].pages
    finish(engine, requests)
    assert all(len(request.output) == 60 for request in requests)
    assert not any(request.preempted for request in requests)


def test_pages_come_as_tokens_do() -> None:
    session = history_model(context=128, pages=4)
    engine = Engine(session)
    engine.add(request := greedy([1] * 31, 60, ignore_eos=True))
    used_pages = []
    while not request.finished:
        engine.step()
        used_pages.append(4 - session.cache.free_pages)
    assert used_pages == [1, 1, 1, *[2] * 32, *[3] * 25, 0]


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_an_aborted_request_gives_its_pages_back(steps: int) -> None:
    session = history_model(sequences=2)
    engine = Engine(session)
    request, other = greedy([1] * 20, 50, ignore_eos=True), greedy([2] * 20, 50, ignore_eos=True)
    engine.add(request)
    engine.add(other)
    for _ in range(steps):
        engine.step()
    engine.abort(request)
    engine.abort(request)
    assert request.finish_reason == "cancelled"
    assert engine.scheduler.running == [other] or steps == 0
    finish(engine, [other])
    assert other.output == follow([2] * 20, 50, ignore_eos=True)
    assert session.cache.free_pages == session.cache.pages


def test_sampled_text_depends_on_the_seed_and_on_nothing_beside_it() -> None:
    def sampled(seed: int, others: int) -> list[int]:
        engine = Engine(history_model(sequences=8))
        params = SamplingParams(temperature=2.0, seed=seed)
        request = Request(Job([1, 2, 3], params, max_tokens=30, ignore_eos=True))
        run(engine, [greedy([i], 11) for i in range(others)] + [request])
        return request.output

    assert sampled(1, 0) == sampled(1, 7)
    assert sampled(1, 0) != sampled(2, 0)


def test_repeat_penalty_sees_the_prompt_and_the_output() -> None:
    engine = Engine(history_model())
    windows: list[list[int]] = []
    inner = engine.sampler.sample

    def sample(logits: Any, row: int, params: Any, position: int, recent: Any = ()) -> int:
        windows.append(list(recent))
        assert position == len(recent)
        return inner(logits, row, params, position, recent)

    engine.sampler.sample = sample  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, repeat_penalty=1.5)
    request = Request(Job([1, 2], params, max_tokens=3, ignore_eos=True))
    run(engine, [request])
    assert windows == [[1, 2], [1, 2, *request.output[:1]], [1, 2, *request.output[:2]]]


@pytest.mark.parametrize("last", [0, 1, 3, 5, 100, -1])
def test_the_repetition_penalty_costs_what_is_new(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long sequence is not copied for each token."""
    request = Request(Job([7, 8, 9, 8]))
    read = 0
    tokens = Request.tokens

    def counted(self: Request, start: int, stop: int) -> Any:
        nonlocal read
        read += stop - start
        return tokens(self, start, stop)

    monkeypatch.setattr(Request, "tokens", counted)
    for new in range(20, 30):
        every = [*request.job.prompt, *request.output]
        expected = every if last < 0 else every[max(len(every) - last, 0) :]
        assert set(request.recent(last)) == set(expected)
        request.output.append(new)
    if last < 0:
        assert read == len(every)
    else:
        assert len(request.recent(last)) == min(last, request.length)


def test_a_short_window_of_the_repetition_penalty() -> None:
    engine = Engine(history_model())
    windows: list[list[int]] = []
    inner = engine.sampler.sample

    def sample(logits: Any, row: int, params: Any, position: int, recent: Any = ()) -> int:
        windows.append(list(recent))
        return inner(logits, row, params, position, recent)

    engine.sampler.sample = sample  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, repeat_penalty=1.5, repeat_last_n=2)
    request = Request(Job([3, 1, 2], params, max_tokens=2, ignore_eos=True))
    run(engine, [request])
    assert windows == [[1, 2], [2, request.output[0]]]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prompt": []}, "no tokens"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 0, "echo": True}, "max_tokens is 0"),
        ({"max_tokens": -3}, "max_tokens is -3: allowed are the whole numbers 1 to"),
        ({"stop": ("",)}, "stop holds a string of 0"),
        ({"deadline_s": -1}, "deadline_s is -1"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Request(Job(**{"prompt": [1], **asked}))


def test_a_grammar_that_nobody_holds_the_text_to_is_refused() -> None:
    engine = Engine(history_model())
    with pytest.raises(ValueError, match="give the request the constraint"):
        engine.add(Request(Job([1], grammar=Grammar("regex", "a"))))
    assert not engine.scheduler.unfinished


def test_timings_are_in_order() -> None:
    request = greedy([1, 2], 5, ignore_eos=True)
    run(Engine(history_model()), [request])
    t = request.timings
    assert t.added is not None and t.first_token is not None and t.finished is not None
    assert t.added <= t.first_token <= t.finished
    assert t.ttft_s == t.first_token - t.added


def test_time_to_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock by which each step takes a second: one of waiting, three of the prompt, four more tokens."""
    now = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    engine = Engine(history_model(chunk=8))
    first, second = greedy([1], 1, ignore_eos=True), greedy([2] * 20, 5, ignore_eos=True)
    engine.add(first)
    engine.add(second)
    inner = engine.session.run

    def run() -> None:
        nonlocal now
        inner()
        now += 1

    engine.session.run = run  # type: ignore[method-assign]
    finish(engine, [first, second])
    assert (first.timings.ttft_s, first.timings.finished) == (1, 101)
    assert (second.timings.ttft_s, second.timings.finished) == (4, 108)
    assert Request(Job([1])).timings.ttft_s is None


def test_prompts_are_read_in_order_of_arrival() -> None:
    engine = Engine(history_model(sequences=3, chunk=8))
    requests = [greedy([i] * 20, 4, ignore_eos=True) for i in (1, 2, 3)]
    for request in requests:
        engine.add(request)
    begun = []
    for _ in range(20):
        for event in engine.step():
            if event.request not in begun:
                begun.append(event.request)
    assert begun == requests
    firsts = [request.timings.first_token for request in requests]
    assert None not in firsts and firsts == sorted(firsts)  # type: ignore[type-var]


# --- a request that fails -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            Request(Job([1], SamplingParams(logit_bias={10**6: 1.0}))),
            "logit_bias has token 1000000: .* 0 to 49",
        ),
        (
            Request(Job([1], SamplingParams(logit_bias={VOCAB: -1.0}))),
            "logit_bias has token 50: .* 0 to 49",
        ),
        (Request(Job([1, VOCAB, 2])), "the prompt has token 50: allowed are the ids 0 to 49"),
        (Request(Job([1, -1, 2])), "the prompt has token -1: allowed are the ids 0 to 49"),
        (Request(Job([1.5, 2])), "the prompt holds float64: integer token ids are needed"),  # type: ignore[list-item]
        (Request(Job("ab")), "the prompt holds .*: integer token ids are needed"),  # type: ignore[arg-type]
    ],
    ids=lambda value: None if isinstance(value, Request) else value[:25],
)
def test_what_cannot_work_is_refused_when_it_is_added(request_: Request, message: str) -> None:
    engine = Engine(history_model())
    with pytest.raises(UserError, match=message):
        engine.add(request_)
    good = greedy([1, 2], 9)
    engine.run([good])
    expect(good)


def test_a_request_is_added_once() -> None:
    engine = Engine(history_model())
    request = greedy([1, 2], 3, ignore_eos=True)
    engine.add(request)
    for _ in range(2):
        with pytest.raises(ValueError, match="was added before"):
            engine.add(request)
        finish(engine, [request])
    assert len(request.output) == 3


class Failing:
    """A sampler that fails for seed 13 from the third token on, as it does where logits are not numbers."""

    def __init__(self, engine: Engine, error: Exception) -> None:
        self.inner, self.error = engine.sampler.sample, error

    def sample(self, logits: Any, row: int, params: SamplingParams, position: int, recent: Any = ()) -> int:
        if params.seed == 13 and position >= 4:
            raise self.error
        return self.inner(logits, row, params, position, recent)


@pytest.mark.parametrize("error", [UserError("the logits contain nan"), TypeError("a defect")])
def test_a_request_that_fails_ends_alone(error: Exception) -> None:
    engine = Engine(history_model(sequences=3, chunk=8))
    engine.sampler.sample = Failing(engine, error).sample  # type: ignore[method-assign]
    bad = Request(Job([1, 2], SamplingParams(temperature=0, seed=13), max_tokens=9, ignore_eos=True))
    good = [greedy([i] * 11, 20, ignore_eos=True) for i in (3, 4, 5)]
    for request in (good[0], bad, *good[1:]):
        engine.add(request)
    ended = []
    while not all(request.finished for request in good):
        ended += [event for event in engine.step() if event.request is bad]
    assert ended == [*(Token(bad, token) for token in bad.output), Finished(bad, "error")]
    assert bad.finish_reason == "error" and bad.error is error and len(bad.output) == 2
    assert bad.timings.finished is not None
    for request in good:
        expect(request)
    assert engine.session.cache.free_pages == engine.session.cache.pages


def test_run_raises_the_error_when_the_others_are_done() -> None:
    engine = Engine(history_model(sequences=3, chunk=8))
    error = UserError("the logits contain nan")
    engine.sampler.sample = Failing(engine, error).sample  # type: ignore[method-assign]
    bad = Request(Job([1, 2], SamplingParams(temperature=0, seed=13), max_tokens=9, ignore_eos=True))
    good = greedy([3] * 11, 20, ignore_eos=True)
    with pytest.raises(UserError, match="logits contain nan"):
        engine.run([bad, good])
    expect(good)
    assert bad.finish_reason == "error"
    engine.run([again := greedy([6], 5)])
    expect(again)


def test_nothing_allowed_and_no_numbers_are_errors_of_one_request() -> None:
    session = history_model(sequences=2)
    engine = Engine(session)
    banned = SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(VOCAB), -math.inf))
    nothing, good = Request(Job([1], banned)), greedy([2], 20, ignore_eos=True)
    for request in (nothing, good):
        engine.add(request)
    engine.step()
    assert nothing.finish_reason == "error" and "no token can be chosen" in str(nothing.error)
    finish(engine, [good])
    expect(good)

    inner = session.run

    def damaged() -> None:
        inner()
        session.transformer.logits[0, 5] = np.nan

    session.run = damaged
    first, second = greedy([3], 4, ignore_eos=True), greedy([4], 4, ignore_eos=True)
    for request in (first, second):
        engine.add(request)
    finish(engine, [first, second])
    assert first.finish_reason == "error" and "logits contain nan" in str(first.error)
