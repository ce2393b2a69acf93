"""Parameters of sampling: what is allowed, and that they keep it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hotcold.runtime.sampling import SamplingParams

pytestmark = pytest.mark.long  # no instruction set or backend changes it


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        ("temperature", [-1, math.nan, math.inf, 1e9, "1", True, None], "0 to 100"),
        ("top_k", [-1, 1 << 31, 1 << 40, 1.0, math.nan, True, "4"], "0 to 2147483647"),
        ("top_p", [-0.1, 1.1, math.nan, "x"], "0 to 1"),
        ("min_p", [-0.1, 2, math.nan, None], "0 to 1"),
        ("repeat_penalty", [0, -1, 1e9, math.nan, math.inf], "0.01 to 100"),
        ("repeat_last_n", [-2, 1 << 31, 1.5], "-1 to 2147483647"),
        ("frequency_penalty", [-2.1, 3, math.nan, "1"], "-2 to 2"),
        ("presence_penalty", [-2.1, 3, math.inf, None], "-2 to 2"),
        ("seed", [-1, 1 << 64, 1.0, "7", True], f"0 to {(1 << 64) - 1}"),
        ("logit_bias", [{-1: 0.0}, {"a": 0.0}, {1 << 31: 0.0}], "0 to 2147483647"),
        ("logit_bias", [{1: math.nan}, {1: math.inf}, {1: 1e9}, {1: "x"}], "-10000 to 10000"),
    ],
)
def test_params_out_of_range_are_refused(name: str, values: list[Any], allowed: str) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"{name}.* is .*{allowed}") as caught:
            SamplingParams(**{name: value})
        assert "\n" not in str(caught.value)


def test_params_keep_their_own_bias() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = math.nan
    assert params.logit_bias == {1: 2.0}
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2.0}))
