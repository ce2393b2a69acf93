"""Guesses of a text that is known are right with the probability that was asked for."""

from __future__ import annotations

import pytest

from hotcold.engine.replay import Replay
from hotcold.engine.request import Job, Request
from hotcold.runtime.sampling import SamplingParams


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_a_share_of_guesses_is_right(share: float) -> None:
    text = list(range(5, 4005))
    replay = Replay(share, 5000)
    replay.tell(7, text)
    request = Request(Job([1], SamplingParams(seed=7)))
    right = 0
    for i in range(3000):
        guess = replay(request, 4)
        assert guess is not None and len(guess.tokens) == 4
        right += guess.tokens[0] == text[i]
        assert replay(request, 4) == guess
        request.output.append(text[i])
    assert abs(right / 3000 - share) < 0.03


def test_nothing_is_guessed_of_other_texts_nor_after_the_end() -> None:
    replay = Replay(1.0, 50)
    replay.tell(7, [3, 4])
    assert replay(Request(Job([1], SamplingParams(seed=8))), 4) is None
    request = Request(Job([1], SamplingParams(seed=7)))
    guess = replay(request, 4)
    assert guess is not None and guess.tokens == [3, 4]
    request.output += [3, 4]
    assert replay(request, 4) is None
