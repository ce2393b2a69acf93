"""Drafts of known texts are right with the given probability, and the best speed is that of a simulation."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from hotcold.engine.request import Job, Request
from hotcold.runtime.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("benchmarks")


@pytest.fixture
def drafts() -> Any:
    return importlib.import_module("lib.drafts")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_a_share_of_guesses_is_right(share: float, drafts: Any) -> None:
    text = list(range(5, 4005))
    replay = drafts.Replay(share, 5000)
    replay.add(7, text)
    request = Request(Job([1], SamplingParams(seed=7)))
    right = 0
    for i in range(3000):
        draft = replay(request, 4)
        assert draft is not None and len(draft.tokens) == 4
        right += draft.tokens[0] == text[i]
        assert replay(request, 4) == draft
        request.output.append(text[i])
    assert abs(right / 3000 - share) < 0.03


def test_nothing_is_guessed_of_other_texts_nor_after_the_end(drafts: Any) -> None:
    replay = drafts.Replay(1.0, 50)
    replay.add(7, [3, 4])
    assert replay(Request(Job([1], SamplingParams(seed=8))), 4) is None
    request = Request(Job([1], SamplingParams(seed=7)))
    draft = replay(request, 4)
    assert draft is not None and draft.tokens == [3, 4]
    request.output += [3, 4]
    assert replay(request, 4) is None


def test_the_best_speed_is_that_of_a_simulation(drafts: Any) -> None:
    costs = [14.8, 17.9, 21.3, 22.2, 27.2, 30.2, 31.4, 35.2]
    right = np.random.default_rng(0).random((200_000, 7)) < 0.7
    accepted = np.minimum.accumulate(right, axis=1).cumsum(axis=1).mean(axis=0)
    simulated = max((1 + tokens) * costs[0] / cost for tokens, cost in zip(accepted, costs[1:], strict=True))
    assert drafts.best_possible(0.7, costs) == pytest.approx(simulated, rel=0.01)
    assert drafts.best_possible(0, costs) == 1 and drafts.best_possible(1, costs) == 8 * 14.8 / 35.2
