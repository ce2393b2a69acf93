"""Steps return events: tokens with their probabilities, ends, and what a request allows token by token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.history_model import STOP, VOCAB, follow, history_model, logits_after

from hotcold.engine.engine import Engine
from hotcold.engine.events import Event, Finished, Token
from hotcold.engine.request import Job, Request
from hotcold.engine.sampler import Allowed, Sampler
from hotcold.errors import UserError
from hotcold.kernels.reference import ReferenceBackend
from hotcold.runtime.sampling import SamplingParams

pytestmark = pytest.mark.long  # no backend computes here

GREEDY = SamplingParams(temperature=0)


def mask(ids: Sequence[int], vocab: int = VOCAB) -> np.ndarray:
    bits = np.zeros(-(-vocab // 64) * 64, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint64)


def all_events(engine: Engine, requests: Sequence[Request]) -> list[Event]:
    events = []
    while not all(request.finished for request in requests):
        events += engine.step()
    return events


def run(request: Request, **options: int) -> list[Event]:
    engine = Engine(history_model(**options))
    engine.add(request)
    return all_events(engine, [request])


# --- tokens and ends ----------------------------------------------------------------------------------


@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), st.integers(1, 20)),
        min_size=1,
        max_size=12,
    ),
    sequences=st.integers(1, 20),
    chunk=st.integers(1, 40),
)
def test_events_tell_every_token_and_one_end_of_each_request(
    requests: list[tuple[list[int], int]], sequences: int, chunk: int
) -> None:
    engine = Engine(history_model(sequences=sequences, chunk=chunk))
    made = [Request(Job(prompt, GREEDY, max_tokens=n)) for prompt, n in requests]
    for request in made:
        engine.add(request)
    events = all_events(engine, made)
    for request in made:
        own = [event for event in events if event.request is request]
        tokens = follow(list(request.job.prompt), request.job.max_tokens)
        assert own[:-1] == [Token(request, token) for token in tokens]
        assert own[-1] == Finished(request, "length" if len(tokens) == request.job.max_tokens else "stop")
    assert engine.step() == []


def test_an_end_comes_in_the_step_of_the_last_token() -> None:
    request = Request(Job([1], GREEDY, max_tokens=2, ignore_eos=True))
    engine = Engine(history_model())
    engine.add(request)
    assert [type(event) for event in engine.step()] == [Token]
    assert [type(event) for event in engine.step()] == [Token, Finished]


def test_a_request_that_was_complete_before_the_step_is_told_too() -> None:
    """One may ask for fewer tokens between two steps."""
    engine = Engine(history_model(sequences=2))
    first, second = (Request(Job([i], GREEDY, max_tokens=5, ignore_eos=True)) for i in (1, 2))
    for request in (first, second):
        engine.add(request)
    engine.step()
    first.job = replace(first.job, max_tokens=1)
    events = engine.step()
    assert [type(event) for event in events if event.request is first] == [Finished]
    second.job = replace(second.job, max_tokens=2)
    assert engine.step() == [Finished(second, "length")]


# --- log-probabilities --------------------------------------------------------------------------------


def log_softmax(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.longdouble)
    return exact - np.log(np.exp(exact).sum())


def test_log_probabilities_are_those_of_the_model_whatever_sampling_does() -> None:
    params = SamplingParams(
        temperature=5.0, top_k=7, seed=3, repeat_penalty=3.0, logit_bias={4: 9.0, 5: -math.inf}
    )
    request = Request(Job([1, 2], params, max_tokens=12, ignore_eos=True, logprobs=4))
    tokens = [event for event in run(request) if isinstance(event, Token)]
    assert [token.id for token in tokens] == request.output and len(tokens) == 12
    assert any(token.id != token.top[0][0] for token in tokens)  # or sampling changed nothing
    history = [1, 2]
    for token, kept in zip(tokens, request.output_logprobs, strict=True):
        expected = log_softmax(logits_after(history))
        assert token.logprob == pytest.approx(float(expected[token.id]), abs=1e-12)
        order = np.argsort(-expected, kind="stable")[:4]
        assert [id for id, _ in token.top] == order.tolist()
        assert [value for _, value in token.top] == pytest.approx(expected[order].astype(float), abs=1e-12)
        assert (token.logprob, token.top) == kept
        history.append(token.id)


def test_what_was_not_asked_for_is_not_stated() -> None:
    without, alone = (Request(Job([1], GREEDY, max_tokens=3, ignore_eos=True, logprobs=n)) for n in (None, 0))
    for event in run(without):
        assert isinstance(event, Finished) or (event.logprob, event.top) == (None, ())
    assert without.output_logprobs == []
    for event in run(alone):
        assert isinstance(event, Finished) or (event.logprob is not None and event.top == ())


@pytest.mark.parametrize("count", [-1, 21])
def test_too_many_alternatives_are_refused(count: int) -> None:
    with pytest.raises(UserError, match=rf"logprobs is {count}: allowed are the whole numbers 0 to 20"):
        Request(Job([1], logprobs=count))


def test_more_alternatives_than_the_vocabulary_has() -> None:
    logits = np.array([0, -np.inf, 1], np.float32)
    found = Sampler(ReferenceBackend()).logprobs(logits[None], 0, 0, 20)
    total = math.log(1 + math.e)
    assert found.logprob == pytest.approx(-total)
    assert found.top[:2] == ((2, pytest.approx(1 - total)), (0, pytest.approx(-total)))
    assert all(value == -math.inf for _, value in found.top[2:])


def test_logits_far_from_zero_do_not_overflow() -> None:
    logits = np.array([1e4, 1e4 - 1, -1e30], np.float32)
    found = Sampler(ReferenceBackend()).logprobs(logits[None], 0, 1, 1)
    assert found.logprob == pytest.approx(-1 - math.log(1 + math.exp(-1)))
    assert found.top == ((0, pytest.approx(-math.log(1 + math.exp(-1)))),)


# --- constraints --------------------------------------------------------------------------------------


def constrained(prompt: list[int], n: int, allowed: Mapping[int, Sequence[int]]) -> list[int]:
    """The greedy continuation where token i must be one of ``allowed[i]``; others are free."""
    history = list(prompt)
    for i in range(n):
        logits = logits_after(history).astype(np.float64)
        if i in allowed:
            forbidden = np.ones(VOCAB, bool)
            forbidden[list(allowed[i])] = False
            logits[forbidden] = -np.inf
        history.append(int(logits.argmax()))
    return history[len(prompt) :]


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_mask_for_each_token(temperature: float) -> None:
    """Other requests beside it are not touched; where it allows one id, that is drawn at any temperature."""
    sets = {0: [3], 1: [9, 10], 3: [STOP + 1], 4: [48, 49]}
    outputs: list[list[int]] = []

    def constraint(output: Sequence[int]) -> Allowed:
        outputs.append(list(output))
        return Allowed(mask(sets[len(output)])) if len(output) in sets else Allowed()

    params = SamplingParams(temperature=temperature, seed=1)
    request = Request(Job([5, 6], params, max_tokens=6, ignore_eos=True), constraint=constraint)
    other = Request(Job([7, 8], GREEDY, max_tokens=6, ignore_eos=True))
    Engine(history_model(sequences=2)).run([request, other])
    assert outputs == [request.output[:i] for i in range(6)]
    assert all(request.output[i] in ids for i, ids in sets.items())
    assert other.output == follow([7, 8], 6, ignore_eos=True)
    if temperature == 0 and STOP not in request.output:
        assert request.output == constrained([5, 6], 6, sets)


def test_a_bias_for_each_token_is_added_to_that_of_all_tokens() -> None:
    def constraint(output: Sequence[int]) -> Allowed:
        return Allowed(bias={10 + len(output): 50.0})

    params = SamplingParams(temperature=0, logit_bias={11: -60.0, 30: 40.0})
    request = Request(Job([5], params, max_tokens=3, ignore_eos=True), constraint=constraint)
    run(request)
    assert request.output == [10, 30, 12]


def test_a_mask_may_allow_the_end_alone() -> None:
    request = Request(Job([5], GREEDY, max_tokens=9), constraint=lambda output: Allowed(mask([STOP])))
    assert run(request) == [Finished(request, "stop")] and not request.output


@pytest.mark.parametrize(
    ("allowed", "message"),
    [
        (Allowed(mask([])), "no token can be chosen"),
        (Allowed(np.zeros(2, np.uint64)), r"a mask of uint64 \(2,\): uint64 \(1,\) is needed"),
        (Allowed(np.zeros(1, np.int64)), r"a mask of int64 \(1,\): uint64 \(1,\) is needed"),
        (Allowed(bias={VOCAB: 1.0}), "has token 50: allowed are the ids 0 to 49"),
        (Allowed(bias={-1: 1.0}), "has token -1: allowed are the ids 0 to 49"),
        (Allowed(bias={3: math.nan}), "the bias of token 3 is nan"),
        (Allowed(bias={3: math.inf}), "the bias of token 3 is inf"),
    ],
)
def test_a_constraint_that_makes_no_sense_ends_its_request_alone(allowed: Allowed, message: str) -> None:
    bad = Request(Job([5], GREEDY, max_tokens=9, ignore_eos=True), constraint=lambda output: allowed)
    good = Request(Job([6], GREEDY, max_tokens=9, ignore_eos=True))
    engine = Engine(history_model(sequences=2))
    with pytest.raises(UserError, match=message):
        engine.run([bad, good])
    assert good.output == follow([6], 9, ignore_eos=True) and bad.finish_reason == "error"


def test_an_exception_of_a_constraint_ends_its_request_alone() -> None:
    error = KeyError("a defect")

    def constraint(output: Sequence[int]) -> Allowed:
        if len(output) == 2:
            raise error
        return Allowed()

    bad = Request(Job([5], GREEDY, max_tokens=9, ignore_eos=True), constraint=constraint)
    good = Request(Job([6], GREEDY, max_tokens=9, ignore_eos=True))
    engine = Engine(history_model(sequences=2))
    for request in (bad, good):
        engine.add(request)
    events = all_events(engine, [bad, good])
    ends = [event for event in events if isinstance(event, Finished)]
    assert ends == [Finished(bad, "error"), Finished(good, "length")] and bad.error is error
    assert bad.output == follow([5], 2, ignore_eos=True)
    assert good.output == follow([6], 9, ignore_eos=True)
    assert engine.session.cache.free_pages == engine.session.cache.pages


# --- ends from outside --------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["stop", "cancelled"])
@pytest.mark.parametrize("steps", [0, 1, 2, 5], ids=["waiting", "prompt", "first token", "decode"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_request_is_ended_from_outside_in_any_state(place: int, steps: int, reason: str) -> None:
    """One of two that run while a third waits: its tokens stay, its pages are free at once and the third gets
    them in the next step; the others' tokens are their own. Events do not name the caller."""
    engine = Engine(history_model(context=64, sequences=2, pages=4, chunk=24))
    requests = [Request(Job([i] * 15, GREEDY, max_tokens=49, ignore_eos=True)) for i in (1, 2, 3)]
    for request in requests:
        engine.add(request)
    for _ in range(steps):
        engine.step()
    ended = requests[place]
    before = list(ended.output)
    engine.finish(ended, reason)  # type: ignore[arg-type]
    engine.abort(ended)  # harmless
    assert (ended.finish_reason, ended.output) == (reason, before) and ended.timings.finished is not None
    assert engine.session.cache.free_pages == 4 - len(requests[1 - place].pages)
    rest = [request for request in requests if request is not ended]
    events = engine.step()
    assert requests[2] in engine.scheduler.running
    events += all_events(engine, rest)
    assert all(event.request is not ended for event in events)
    for request in rest:
        assert request.output == follow(list(request.job.prompt), 49, ignore_eos=True)
    assert engine.session.cache.free_pages == engine.session.cache.pages


def test_a_request_that_waits_behind_others_is_ended_from_outside() -> None:
    engine = Engine(history_model(sequences=1))
    requests = [Request(Job([i], GREEDY, max_tokens=4, ignore_eos=True)) for i in (1, 2, 3)]
    for request in requests:
        engine.add(request)
    engine.step()
    engine.abort(requests[1])
    events = all_events(engine, [requests[0], requests[2]])
    assert [e.request for e in events if isinstance(e, Finished)] == [requests[0], requests[2]]
    assert not requests[1].output and requests[1].finish_reason == "cancelled"
