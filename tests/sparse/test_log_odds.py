"""The regression behind a predictor's thresholds, on neurons whose odds are known."""

from __future__ import annotations

import numpy as np
import pytest

from hotcold.sparse.fitting import log_odds


def test_slopes_and_odds_are_found() -> None:
    random = np.random.default_rng(11)
    slopes, odds = np.array([0.5, 1.5, 3, 1]), np.array([-1, -2, 0, -4])
    scores = random.standard_normal((20_000, 4)).astype(np.float32)
    active = random.random(scores.shape) < 1 / (1 + np.exp(-(slopes * scores + odds)))
    found = log_odds(scores, active)
    assert found[0] == pytest.approx(slopes, abs=0.12)
    assert found[1] == pytest.approx(odds, abs=0.12)


def test_neurons_that_separate_have_finite_odds() -> None:
    """One that is always active, one that never is, and one that a score tells without error."""
    scores = np.linspace(-1, 1, 400, dtype=np.float32)[:, None].repeat(3, axis=1)
    active = np.stack([scores[:, 0] < 9, scores[:, 0] > 9, scores[:, 0] > 0.2], axis=1)
    slopes, odds = log_odds(scores, active)
    assert np.isfinite(slopes).all() and np.isfinite(odds).all() and (slopes > 0).all()
    assert odds[0] > 2 and odds[1] < -2
    assert -odds[2] / slopes[2] == pytest.approx(0.2, abs=0.05)
