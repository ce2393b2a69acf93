"""The rule by which ``--sparsity auto`` uses predictors, at its borders."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.sidecars import PASSING

from hotcold.sparse.measurement import MOST_RATIO, Measurement


@pytest.mark.parametrize(
    ("changes", "objection"),
    [
        ({}, ""),
        ({"ppl_ratio": 1.0005, "ppl_ratio_low": 1.0001, "ppl_ratio_high": 1.0009}, ""),
        ({"ppl_ratio_high": MOST_RATIO}, ""),
        ({"ppl_ratio_high": math.nextafter(MOST_RATIO, 2)}, "perplexity may be more than 1.001 times"),
        ({"ppl_ratio": 0.99, "ppl_ratio_high": 1.0011}, "perplexity may be more than 1.001 times"),
        ({"ppl_ratio": 1.002, "ppl_ratio_low": MOST_RATIO, "ppl_ratio_high": 1.003}, "perplexity may be"),
        (
            {"ppl_ratio": 1.002, "ppl_ratio_low": 1.0011, "ppl_ratio_high": 1.003},
            "perplexity is more than 1.001 times that of exact",
        ),
        ({"ppl_ratio_low": 0.0, "ppl_ratio_high": math.inf}, "that of exact: more held-out tokens decide"),
        ({"ppl_ratio_high": math.nan}, "perplexity may be more than"),
        ({"speed_low": math.nextafter(1, 2)}, ""),
        ({"speed_low": 1.0}, "generation was not faster than exact in every round"),
        ({"speed_low": 0.9, "speed_ratio": 1.5, "speed_high": 2.0}, "generation was not faster"),
        ({"ppl_ratio_low": 1.002, "ppl_ratio_high": 1.003, "speed_low": 0.5}, "perplexity is more than"),
    ],
)
def test_the_rule(changes: dict[str, Any], objection: str) -> None:
    found = replace(PASSING, **changes).objection
    assert objection in found and bool(objection) == bool(found)


@pytest.mark.parametrize(
    ("log_ratio", "deviation"), [(0.0, 0.1), (0.0005, 0.05), (0.002, 0.15), (0.004, 0.6)]
)
def test_more_tokens_would_decide(log_ratio: float, deviation: float) -> None:
    """With that many more tokens, the interval of independent tokens just touches the limit."""

    def interval(tokens: int) -> tuple[float, float]:
        width = 1.96 * deviation / math.sqrt(tokens)
        return math.exp(log_ratio - width), math.exp(log_ratio + width)

    low, high = interval(2000)
    first = replace(
        PASSING, tokens=2000, ppl_ratio=math.exp(log_ratio), ppl_ratio_low=low, ppl_ratio_high=high
    )
    assert low <= MOST_RATIO < high and first.more_tokens is not None
    assert f"about {first.more_tokens} more held-out tokens decide" in first.objection
    low, high = interval(2000 + first.more_tokens + 1)
    assert high <= MOST_RATIO if log_ratio < math.log(MOST_RATIO) else low > MOST_RATIO
    low, high = interval(2000 + first.more_tokens - 2)
    assert low <= MOST_RATIO < high


def test_a_number_of_tokens_that_nothing_tells() -> None:
    near = replace(PASSING, ppl_ratio=MOST_RATIO, ppl_ratio_low=1.0, ppl_ratio_high=1.002)
    assert near.more_tokens is None and "that of exact: more held-out tokens decide" in near.objection
    for odd in ({"ppl_ratio": 0.0}, {"ppl_ratio_low": 0.0}, {"ppl_ratio_high": math.inf}):
        assert replace(near, **odd).more_tokens is None


def test_the_report_is_json() -> None:
    found = PASSING.report()
    assert (found["used_by_auto"], found["objection"], found["tokens"]) == (True, None, 4096)
    few = replace(PASSING, ppl_ratio_low=0.0, ppl_ratio_high=math.inf).report()
    assert (few["ppl_ratio_low"], few["ppl_ratio_high"], few["used_by_auto"]) == (None, None, False)
    json.dumps([found, few], allow_nan=False)


def test_keys_without_a_measurement() -> None:
    assert Measurement.read({"pays": np.array([True]), "recall": np.array([0.99])}) is None
    assert Measurement.read(PASSING.metadata() | {"recall": 1}) == PASSING
