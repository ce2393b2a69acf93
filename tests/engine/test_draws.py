"""Draws from the whole vocabulary, against the same with each step on all of it."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from hotcold.engine.sampler import draw_by_id
from hotcold.runtime.sampling import SamplingParams

Floats = npt.NDArray[np.float32]


def plain_draw_by_id(values: Floats, params: SamplingParams, uniform: float) -> int:
    """Does what draw_by_id does, with each step on the whole vocabulary."""
    weights = values - values.max()
    if params.top_p < 1:
        bins = np.minimum(weights * -64, 8191).astype(np.intp)
        likely = np.exp(weights)
        sums = np.bincount(bins, likely).cumsum()
        last = int(sums.searchsorted(params.top_p * sums[-1]))
        ids = np.flatnonzero(bins == last)
        ids = ids[np.argsort(-weights[ids], kind="stable")]
        inside = likely[ids].cumsum(dtype=np.float64) + (sums[last - 1] if last else 0.0)
        n = int(inside.searchsorted(params.top_p * sums[-1])) + 1
        weights[bins > last] = weights[ids[n:]] = -math.inf
    if params.min_p > 0:
        weights[values < np.float64(values.max()) + math.log(params.min_p)] = -math.inf
    weights = np.exp(weights * np.float32(1 / params.temperature))
    sums = np.add.reduceat(weights, np.arange(0, len(weights), 256), dtype=np.float64).cumsum()
    block = int(sums.searchsorted(uniform * sums[-1], side="right"))
    inside = weights[256 * block : 256 * block + 256].cumsum(dtype=np.float64)
    rest = uniform * sums[-1] - (sums[block - 1] if block else 0.0)
    index = int(inside.searchsorted(rest, side="right"))
    return 256 * block + min(index, int(inside.searchsorted(inside[-1])))


@given(
    st.sampled_from([1, 7, 255, 256, 257, 600, 2048, 3000]),
    st.sampled_from([0.0, 0.01, 1.0, 3.0, 20.0]),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.5, 0.99]),
    st.sampled_from([0.05, 0.8, 1.0, 30.0]),
    st.sampled_from([1.0, 0.95, 0.5, 0.0]),
    st.sampled_from([0.0, 0.05, 0.001, 1.0]),
    st.floats(0, 1 - 2**-53),
)
def test_a_draw_of_few_ids_is_that_of_all(
    vocab: int,
    spread: float,
    seed: int,
    forbidden: float,
    temperature: float,
    top_p: float,
    min_p: float,
    uniform: float,
) -> None:
    random = np.random.default_rng(seed)
    values = (random.normal(0, 1, vocab) * spread).astype(np.float32)
    values[random.random(vocab) < forbidden] = -math.inf
    values[random.integers(vocab)] = values.max() if values.max() > -math.inf else 0.5
    params = SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p)
    assert draw_by_id(values, params, uniform) == plain_draw_by_id(values, params, uniform)
