"""The interval of a ratio of perplexities, against known distributions; windows beside other sequences."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.history_model import history_model, logits_after

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.tasks.scoring import Divergence, Scorer, score

BLOCK = 32  # neighbours that are drawn together


def interval(differences: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Logarithms of both ends."""
    zeros = np.zeros(len(differences))
    low, high = Divergence(zeros, zeros == 0, differences, zeros).ratio_interval(level=level)
    return math.log(low), math.log(high)


def test_every_block_is_drawn_as_often_as_any_other() -> None:
    """One of forty blocks differs; how often it is drawn is binomial, 97.5 % of the time at most 3 times."""
    for block in (0, 17, 39):
        differences = np.zeros((40, BLOCK))
        differences[block] = 1
        assert interval(differences.ravel()) == (pytest.approx(0, abs=1e-12), pytest.approx(3 / 40))


@pytest.mark.parametrize(("level", "width"), [(0.95, 1.96), (0.5, 0.674)])
def test_independent_blocks_have_the_normal_interval(level: float, width: float) -> None:
    differences = np.repeat(np.random.default_rng(5).normal(0.1, 1, 400), BLOCK)
    mean, error = differences.mean(), differences.std() / math.sqrt(400)
    low, high = ((end - mean) / error for end in interval(differences, level))
    assert (low, high) == (pytest.approx(-width, abs=0.15), pytest.approx(width, abs=0.15))


def test_a_model_for_several_sequences_scores_as_one_for_a_single_one() -> None:
    """Also after requests have left their lengths in other rows of the page table."""
    window = [1, *range(300, 360)]
    expected = score(Scorer(load(None, LoadOptions()).session()), window)
    session = load(None, LoadOptions(sequences=3)).session()
    np.testing.assert_array_equal(score(Scorer(session), window), expected)
    params = SamplingParams(temperature=0)
    Engine(session).run([Request(Job([1, 400 + i], params, max_tokens=3 + i)) for i in range(3)])
    np.testing.assert_array_equal(score(Scorer(session), window), expected)


def test_a_window_keeps_the_rules_of_a_batch() -> None:
    """The model checks rows, slots and lengths, and gives logits that depend on the whole history."""
    window = [i % 7 for i in range(50)]
    session = history_model(sequences=3)
    rows = np.concatenate([logits.copy() for logits in Scorer(session).logits(window)])
    expected = [logits_after(window[: i + 1]) for i in range(len(window) - 1)]
    np.testing.assert_array_equal(rows, expected)
