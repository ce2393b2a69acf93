"""Prompt rows of a step: few while other requests wait for its end, all otherwise. A made-up clock tells the
time of each step by its rows."""

from __future__ import annotations

import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.history_model import follow, history_model

from hotcold.engine.engine import Engine
from hotcold.engine.pace import STEP_S, Pace
from hotcold.engine.request import Job, Request
from hotcold.runtime.sampling import SamplingParams

pytestmark = pytest.mark.long  # no backend computes here

CHUNK = 128
FIXED_S, ROW_S = 0.05, 0.009  # of a step of the 1.5B model on two cores
FAR = 2048  # attention to this many positions takes as long as the rest of a row


def greedy(prompt: list[int], n: int, **more: Any) -> Request:
    return Request(Job(prompt, SamplingParams(temperature=0), max_tokens=n, ignore_eos=True, **more))


@given(
    fixed=st.floats(0, 0.19),
    row=st.floats(0.0001, 0.02),
    first=st.integers(1, CHUNK),
)
def test_it_comes_to_the_rows_that_take_the_time(fixed: float, row: float, first: int) -> None:
    pace = Pace(CHUNK)
    rows = first
    for _ in range(400):
        pace.note(rows, 0, fixed + row * rows)
        rows = pace.rows(0, awaited=True)
    assert rows == 8 or fixed + row * rows < 0.25
    assert rows == CHUNK or fixed + row * (rows + 1) >= STEP_S
    assert pace.rows(0, awaited=False) == CHUNK


@given(
    fixed=st.floats(0, 0.1),
    row=st.floats(0.0001, 0.02),
    far=st.floats(1024, 1e5),
    steps=st.lists(st.tuples(st.integers(0, 32768), st.booleans(), st.integers(1, CHUNK)), min_size=2),
)
def test_no_step_is_too_long_wherever_its_rows_are(
    fixed: float, row: float, far: float, steps: list[tuple[int, bool, int]]
) -> None:
    """Attention to ``far`` positions takes the time of the rest of a row. Prompts come in any order."""
    pace = Pace(CHUNK)
    for n, (start, awaited, wanted) in enumerate(steps):
        rows = min(pace.rows(start, awaited=awaited), wanted)
        position = start + (rows - 1) / 2
        one = row * (1 + position / far)
        if n and awaited and rows > 8:  # the chunk is rounded up, and its rows are not all at its start
            assert fixed + one * (rows - 1) <= STEP_S * (1 + CHUNK / 2 / 1024)
        pace.note(rows, position, fixed + one * rows)


def test_one_long_step_is_soon_forgotten() -> None:
    pace = Pace(CHUNK)
    pace.note(16, 0, 30.0)
    assert pace.rows(0, awaited=True) == 8
    for _ in range(8):
        rows = pace.rows(0, awaited=True)
        pace.note(rows, 0, FIXED_S + ROW_S * rows)
    assert pace.rows(0, awaited=True) >= 14


def test_one_short_step_raises_nothing() -> None:
    pace = Pace(CHUNK)
    for _ in range(3):
        pace.note(16, 0, STEP_S)
    pace.rows(0, awaited=True)
    pace.note(16, 0, STEP_S / 2)
    assert pace.rows(0, awaited=True) == 16
    pace.note(1, 0, STEP_S / 4)  # the end of a prompt
    assert pace.rows(0, awaited=True) == 16


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, Any]:
    """An engine, and a clock that each step moves."""
    session = history_model(context=2000, sequences=4, chunk=CHUNK)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    run = session.run

    def timed() -> None:
        run()
        n_decode, rows = session.transformer.row_counts[-1]
        positions = session.transformer.batch.positions[n_decode : n_decode + rows]
        clock.now += FIXED_S + ROW_S * float((1 + positions / FAR).sum())

    monkeypatch.setattr(session, "run", timed)
    return Engine(session), clock


def test_answers_beside_a_long_prompt_get_a_token_every_250_ms(clocked: Any) -> None:
    engine, clock = clocked
    answer, long = greedy([2], 300), greedy([1] * 1500, 3)
    engine.add(answer)
    engine.step()
    engine.add(greedy([3] * 300, 1))  # read before, as any server has read some prompt
    while len(engine.scheduler.running) + len(engine.scheduler.waiting) > 1:
        engine.step()
    engine.add(long)
    pauses = []
    while not long.output:
        tokens, before = len(answer.output), clock.now
        engine.step()
        assert len(answer.output) == tokens + 1
        pauses.append(clock.now - before)
    assert max(pauses) <= 0.25 and len(pauses) < 1500 / 8
    while not (long.finished and answer.finished):
        engine.step()
    for request in (answer, long):
        prompt = list(request.job.prompt)
        assert request.output == follow(prompt, request.job.max_tokens, ignore_eos=True)


def test_a_prompt_that_continues_a_long_one_is_read_in_short_steps(clocked: Any) -> None:
    """Its first rows are after the cached ones, and the last steps were at the beginning of a prompt."""
    engine, clock = clocked
    engine.run([greedy([1] * 1700, 1)])
    answer, short, long = greedy([3], 100), greedy([2] * 200, 1), greedy([1] * 1700 + [4] * 200, 1)
    engine.add(answer)
    engine.step()
    engine.add(short)
    while not short.output:
        engine.step()
    engine.add(long)
    pauses = []
    while not long.output:
        before = clock.now
        engine.step()
        pauses.append(clock.now - before)
    assert long.reused >= 1664 and max(pauses) <= 0.25


def test_a_prompt_that_no_answer_waits_for_is_read_in_whole_chunks(clocked: Any) -> None:
    engine, _ = clocked
    prompts = [greedy([1] * 1024, 1), greedy([2] * 1024, 1)]
    engine.run(prompts)
    counts = [rows for n_decode, rows in engine.session.transformer.row_counts if n_decode == 0]
    assert counts[:-1] == [CHUNK] * (len(counts) - 1) and sum(counts) == 2048


def test_a_scored_prompt_awaits_nothing(clocked: Any) -> None:
    """Its rows follow the decode rule, but no token comes of them."""
    engine, _ = clocked
    scored, long = greedy([3] * 200, 1, echo=True, logprobs=0), greedy([1] * 512, 1)
    engine.add(scored)
    engine.add(long)
    while not long.output:
        engine.step()
    counts = [rows for _, rows in engine.session.transformer.row_counts if rows]
    assert counts == [CHUNK] * 4


def test_prompts_and_decoding_take_turns_where_they_are_separate() -> None:
    """The model refuses steps with both. Each answer is that of its request alone."""
    session = history_model(context=2000, sequences=4, chunk=32, separates_prompts=True)
    engine = Engine(session)
    decoding, long, short = greedy([2], 60), greedy([1] * 640, 5), greedy([3] * 20, 30)
    engine.add(decoding)
    engine.step()
    engine.add(long)
    engine.add(short)
    while not (long.finished and short.finished and decoding.finished):
        engine.step()
    kinds = [decode > 0 for decode, _ in session.transformer.row_counts]
    both_wait = kinds[1 : kinds[1:].index(True) + 40]
    assert all(one != other for one, other in pairwise(both_wait)), "each kind has every second step"
    assert max(rows for _, rows in session.transformer.row_counts) == 32
    # Its prompt begins with tokens that were decoded, whose rows have other bits.
    engine.run([later := greedy([2, *decoding.output, 4], 5)])
    for request in (decoding, long, short, later):
        prompt, tokens = list(request.job.prompt), request.job.max_tokens
        assert request.output == follow(prompt, tokens, ignore_eos=True, prefill_equals_decode=False)
