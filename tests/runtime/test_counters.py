"""A model counts while it runs, step by step."""

from __future__ import annotations

import time
from dataclasses import asdict

import numpy as np
import pytest

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.runtime.counters import Counters, Figures, Footprint
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams

PROMPT = [1, *range(300, 320)]


def greedy(prompt: list[int], tokens: int) -> Request:
    return Request(Job(prompt, SamplingParams(temperature=0), max_tokens=tokens, ignore_eos=True))


def test_before_the_first_step_everything_is_0() -> None:
    values = asdict(load(None, LoadOptions()).session().counters)
    for value in (*values.pop("disk").values(), *values.values()):
        assert not np.any(value)


def test_one_sequence() -> None:
    """The first token comes from the prompt's step; each later one reads all positions so far."""
    session = load(None, LoadOptions()).session()
    start = time.perf_counter()
    Engine(session).run([greedy(PROMPT, 8)])
    elapsed, counters = time.perf_counter() - start, session.counters
    assert (counters.prompt_tokens, counters.decode_tokens, counters.decode_steps) == (len(PROMPT), 7, 7)
    assert counters.kv_positions == sum(len(PROMPT) + i for i in range(1, 8))
    assert counters.decode_s > counters.run_s > 0 and counters.prompt_s > 0
    assert counters.decode_s + counters.prompt_s <= elapsed


@pytest.mark.parametrize("sparsity", ["exact", "off"])
def test_a_step_with_prompt_rows_counts_those_alone(sparsity: str) -> None:
    session = load(None, LoadOptions(sequences=2, sparsity=sparsity)).session()
    engine = Engine(session)
    engine.add(greedy(PROMPT, 20))
    for _ in range(3):
        engine.step()
    before = session.counters.copy()
    assert before.rows[:, :4].all() and before.decode_steps == 2
    engine.add(greedy(PROMPT[:5], 20))
    engine.step()
    change = session.counters.since(before)
    assert not change.rows.any() and change.prompt_tokens == 5 and change.prompt_s > 0
    assert not change.decode_tokens and not change.decode_steps and not change.kv_positions
    assert not change.decode_s and not change.run_s


def test_a_dense_step_computes_each_neuron_for_each_of_its_tokens() -> None:
    session = load(None, LoadOptions(sequences=3, sparsity="off")).session()
    engine = Engine(session)
    for i in range(3):
        engine.add(greedy([1, 400 + i], 20))
    engine.step()
    before = session.counters.copy()
    for _ in range(4):
        engine.step()
    change, neurons = session.counters.since(before), np.array(session.model.config.neurons)
    assert (change.decode_steps, change.decode_tokens) == (4, 12)
    assert change.kv_positions == 3 * (3 + 4 + 5 + 6)
    np.testing.assert_array_equal(change.rows[:, :4].T, np.outer((4, 4, 4, 12), neurons))


def test_without_seconds_there_are_no_rates() -> None:
    """A clock that stood still must not end in a division by zero."""
    footprint = Footprint(1, 1, 1, (4,), 2, ((1, 1, 1, 1),), 1)
    figures = Figures.from_counters(
        Counters(np.ones((1, 5), np.int64), decode_tokens=6, decode_steps=2), footprint
    )
    assert figures.prompt_tok_s is figures.tok_s is figures.gb_s is figures.python_share is None
    assert figures.rows_per_step == 3 and figures.active_share == 1 / 24
