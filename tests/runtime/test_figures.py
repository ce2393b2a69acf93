"""Figures against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hotcold.runtime.counters import Counters, Figures, Footprint

FOOTPRINT = Footprint(
    step_bytes=1000,
    step_params=900,
    token_bytes=8,
    neurons=(10, 20),
    dim=4,
    row_bytes=((5, 5, 6, 9), (7, 7, 8, 0)),
    kv_bytes=3,
)


def counters() -> Counters:
    """Three decode steps, one of them with two rows."""
    return Counters(
        rows=np.array([[30, 9, 6, 8, 2], [60, 12, 10, 20, 3]]),
        prompt_tokens=100,
        prompt_s=2.0,
        decode_tokens=4,
        decode_steps=3,
        decode_s=0.5,
        run_s=0.4,
        kv_positions=50,
    )


def test_figures() -> None:
    figures = Figures.from_counters(counters(), FOOTPRINT)
    layers = 30 * 5 + 9 * 5 + 6 * 6 + 2 * 9 + 60 * 7 + 12 * 7 + 10 * 8
    total = 3 * 1000 + 4 * 8 + layers + 50 * 3
    assert figures.prompt_tok_s == 50
    assert figures.tok_s == 8
    assert figures.bytes_per_token == total / 4
    assert figures.gb_s == total / 0.5 / 1e9
    assert figures.active_share_by_layer == (8 / 40, 20 / 80)
    assert figures.active_share == pytest.approx((0.2 + 0.25) / 2)
    assert figures.params_per_token == 900 + 4 + (30 + 9 + 6 + 60 + 12 + 10) * 4 / 4
    assert figures.python_share == pytest.approx(0.2)


def test_nothing_decoded_has_no_figures() -> None:
    figures = Figures.from_counters(
        Counters(np.zeros((2, 5), np.int64), prompt_tokens=6, prompt_s=3.0), FOOTPRINT
    )
    assert figures.prompt_tok_s == 2
    assert figures.tok_s is figures.gb_s is figures.active_share is figures.params_per_token is None


def test_the_difference_of_two_snapshots() -> None:
    now = counters()
    before = now.copy()
    now.rows += 1
    now.decode_tokens += 2
    now.run_s += 0.25
    change = now.since(before)
    assert (change.rows == 1).all() and change.decode_tokens == 2 and change.run_s == pytest.approx(0.25)
    assert change.prompt_tokens == change.decode_steps == change.kv_positions == 0
