"""The sampler against a brute-force distribution, its random numbers against published ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotcold.engine.sampler import Sampler, draw, draw_by_id, random_uniform, splitmix64
from hotcold.kernels.reference import ReferenceBackend
from hotcold.runtime.sampling import SamplingParams

Floats = npt.NDArray[np.float32]


class Sorting:
    """Ranks by sorting, and remembers how it was called."""

    def __init__(self) -> None:
        self.ks: list[int] = []
        self.biases: list[Floats | None] = []  # of all ids

    def read(self, logits: Floats, start: int, stop: int) -> Floats:
        return logits[start:stop]

    def top_k(
        self,
        logits: Floats,
        row: int,
        k: int,
        bias: tuple[npt.NDArray[np.int32], Floats] | None = None,
        allowed: npt.NDArray[np.uint64] | None = None,
    ) -> tuple[npt.NDArray[np.int32], Floats]:
        self.ks.append(k)
        dense = np.zeros(logits.shape[1], np.float32)
        if bias is not None:
            dense[bias[0]] = bias[1]
        self.biases.append(None if bias is None else dense)
        values = logits[row] + dense
        order = sorted(range(len(values)), key=lambda id: (-values[id], id))
        if allowed is not None:
            order = [id for id in order if int(allowed[id // 64]) >> (id % 64) & 1]
        ids = np.array(order[:k], np.int32)
        return ids, values[ids]


class Selecting(Sorting):
    """The same, faster."""

    def top_k(
        self,
        logits: Floats,
        row: int,
        k: int,
        bias: tuple[npt.NDArray[np.int32], Floats] | None = None,
        allowed: npt.NDArray[np.uint64] | None = None,
    ) -> tuple[npt.NDArray[np.int32], Floats]:
        return ReferenceBackend().top_k(logits, row, k, bias, allowed)


class Remembering(Selecting):
    """The same where the logits and the mask are always the same: ranks once for each k and each bias."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[Any, tuple[npt.NDArray[np.int32], Floats]] = {}

    def top_k(
        self,
        logits: Floats,
        row: int,
        k: int,
        bias: tuple[npt.NDArray[np.int32], Floats] | None = None,
        allowed: npt.NDArray[np.uint64] | None = None,
    ) -> tuple[npt.NDArray[np.int32], Floats]:
        key = k, *(() if bias is None else (each.tobytes() for each in bias))
        if key not in self._found:
            self._found[key] = super().top_k(logits, row, k, bias, allowed)
        ids, values = self._found[key]
        return ids.copy(), values.copy()


def distribution(
    logits: Sequence[float], params: SamplingParams, recent: Sequence[int] = ()
) -> dict[int, float]:
    """Each token's probability, step by step as llama.cpp's samplers are described."""
    values = {id: logit + params.logit_bias.get(id, 0.0) for id, logit in enumerate(map(float, logits))}
    for id in set(recent[len(recent) - params.repeat_last_n :] if params.repeat_last_n >= 0 else recent):
        value = values[id]
        values[id] = value / params.repeat_penalty if value > 0 else value * params.repeat_penalty
    kept = sorted(values, key=lambda id: (-values[id], id))[: params.top_k or len(values)]

    def softmax(ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        weights = [math.exp((values[id] - values[kept[0]]) / temperature) for id in ids]
        return [weight / sum(weights) for weight in weights]

    likely, total = [], 0.0
    for id, p in zip(kept, softmax(kept), strict=True):
        likely.append(id)
        total += p
        if params.top_p < 1 and total >= params.top_p:
            break
    most = softmax(likely)[0]
    kept = [id for id, p in zip(likely, softmax(likely), strict=True) if p >= params.min_p * most]
    return dict(zip(kept, softmax(kept, params.temperature), strict=True))


def assert_drawn_from(ids: Sequence[int], expected: dict[int, float]) -> None:
    """Pearson's chi-square; rare outcomes are counted together. Fails by chance once in a million."""
    assert set(ids) <= set(expected)
    counts = np.bincount(ids, minlength=max(expected) + 1)
    common = [id for id, p in expected.items() if p * len(ids) >= 10]
    observed = [*counts[common], len(ids) - counts[common].sum()]
    wanted = np.array([*(expected[id] for id in common), 1 - sum(expected[id] for id in common)]) * len(ids)
    if wanted[-1] < 10:
        observed, wanted = observed[:-1], wanted[:-1]
    statistic = float(((np.array(observed) - wanted) ** 2 / wanted).sum())
    freedom = max(len(wanted) - 1, 1)
    # Wilson and Hilferty: the cube root of chi-square over its freedom is nearly normal.
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + 4.75 * math.sqrt(spread)) ** 3


@pytest.fixture
def logits() -> Floats:
    return np.random.default_rng(5).normal(scale=1, size=60).astype(np.float32)


# --- the distribution -----------------------------------------------------------------------------

PARAMS = [
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=1, top_k=0, top_p=1, min_p=0),
    SamplingParams(seed=3, temperature=2.5, top_k=7, top_p=1, min_p=0),
    SamplingParams(seed=4, temperature=1.5, top_k=0, top_p=0.6, min_p=0),
    SamplingParams(seed=5, temperature=3, top_k=0, top_p=1, min_p=0.2),
    SamplingParams(seed=6, temperature=0.3, top_k=50, top_p=0.99, min_p=0.001),
    SamplingParams(seed=7, temperature=2, repeat_penalty=1.7, repeat_last_n=20),
    SamplingParams(
        seed=8, temperature=2, repeat_penalty=0.5, repeat_last_n=-1, logit_bias={3: 2.0, 9: -math.inf}
    ),
]


@pytest.mark.parametrize("params", PARAMS, ids=lambda params: f"seed{params.seed}")
def test_tokens_follow_the_distribution(logits: Floats, params: SamplingParams) -> None:
    sampler, recent = Sampler(Remembering()), [*range(0, 60, 2), *range(9)]
    ids = [sampler.sample(logits[None], 0, params, position, recent) for position in range(5000)]
    expected = distribution(logits, params, recent)
    assert len(expected) > 3
    assert_drawn_from(ids, expected)


def test_seeds_follow_the_distribution(logits: Floats) -> None:
    sampler = Sampler(Remembering())
    drawn = [sampler.sample(logits[None], 0, SamplingParams(seed=seed), 17) for seed in range(5000)]
    assert_drawn_from(drawn, distribution(logits, SamplingParams()))


SEEDS = st.integers(0, 2**64 - 1)
#: short lists of awkward numbers, and long ones of ordinary numbers
VALUES = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20) | st.builds(
    lambda seed, size: np.random.default_rng(seed).normal(0, 3, size).astype(np.float32).tolist(),
    st.integers(0, 2**32), st.integers(1, 80),
)  # fmt: skip


@given(VALUES, st.floats(0.01, 100), st.integers(0, 90), st.floats(0, 1), st.floats(0, 1), SEEDS)
def test_only_likely_tokens_are_chosen(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = np.array(values, np.float32)
    params = SamplingParams(temperature, top_k, top_p, min_p, seed=seed)
    id = Sampler(Sorting()).sample(logits[None], 0, params, 3)
    # Rounding, of float32, may move a boundary by one token, so the oracle's limits are a little wider.
    wider = SamplingParams(temperature, top_k, min(1, top_p + 1e-6), max(0, min_p - 1e-9), seed=seed)
    assert id in distribution(values, wider)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=80), SEEDS)
def test_the_narrowest_limits_are_greedy_and_ties_go_to_the_lowest_id(values: list[int], seed: int) -> None:
    logits = np.array(values, np.float32)
    narrow: list[dict[str, Any]] = [{"temperature": 0}, {"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}]
    for options in narrow:
        params = SamplingParams(seed=seed, **options)
        assert Sampler(Sorting()).sample(logits[None], 0, params, 1) == values.index(max(values)), options
    tied = Sampler(Sorting()).sample(logits[None], 0, SamplingParams(seed=seed, min_p=1, top_p=1), 1)
    assert values[tied] == max(values)
    cold = Sampler(Sorting()).sample(
        logits[None], 0, SamplingParams(seed=seed, temperature=1e-320, top_p=1), 1
    )
    assert values[cold] == max(values)


@given(
    st.lists(st.floats(-9, 9, width=32), min_size=2, max_size=50, unique=True),
    st.randoms(),
    st.integers(0, 99),
)
def test_the_order_of_the_vocabulary_does_not_matter_where_it_is_ranked(
    values: list[float], random: Any, position: int
) -> None:
    params = SamplingParams(seed=11, temperature=1.5, top_k=len(values) - 1)
    sampler = Sampler(Sorting())
    chosen = values[sampler.sample(np.array(values, np.float32)[None], 0, params, position)]
    random.shuffle(values)
    assert values[sampler.sample(np.array(values, np.float32)[None], 0, params, position)] == chosen


def test_a_token_depends_on_seed_and_position_alone(logits: Floats) -> None:
    sampler, params = Sampler(Sorting()), SamplingParams(seed=99, temperature=2)
    forward = [sampler.sample(logits[None], 0, params, position) for position in range(50)]
    backward = [
        Sampler(Sorting()).sample(logits[None], 0, params, position) for position in reversed(range(50))
    ]
    assert forward == backward[::-1]
    assert forward != [
        sampler.sample(logits[None], 0, SamplingParams(seed=98, temperature=2), p) for p in range(50)
    ]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_candidate_without_probability_is_never_drawn(uniform: float) -> None:
    params = SamplingParams(top_p=1, min_p=0, seed=0)
    for last in (-math.inf, -1e30):
        values = np.array([0.0, -0.1, -0.2, last, last], np.float32)
        assert draw(values, params, uniform) in (0, 1, 2)
    assert draw(np.array([3.0, 2.9], np.float32), params, uniform) == (0 if uniform <= 0.5 else 1)


def test_where_exactly_the_boundaries_lie() -> None:
    equal = np.zeros(4, np.float32)
    # Two of four equal tokens reach a sum of exactly one half.
    half = SamplingParams(top_p=0.5, min_p=0)
    assert [draw(equal, half, uniform) for uniform in (0, 0.49, 0.5, 0.99)] == [0, 0, 1, 1]
    whole = SamplingParams(top_p=1, min_p=1)
    assert [draw(equal, whole, uniform) for uniform in (0, 0.25, 0.5, 0.75)] == [0, 1, 2, 3]


# --- what the backend sees ------------------------------------------------------------------------


def test_nothing_is_ranked_without_a_top_k() -> None:
    ranking = Sorting()
    for top_p, min_p in ((1, 0), (1, 0.01), (0.9, 0)):
        params = SamplingParams(seed=1, temperature=1, top_k=0, top_p=top_p, min_p=min_p)
        Sampler(ranking).sample(np.zeros((1, 9000), np.float32), 0, params, 0)
    assert not ranking.ks


@given(
    st.lists(st.floats(-20, 20, width=32) | st.just(-math.inf), min_size=1, max_size=900),
    st.floats(0, 1 - 2**-53),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([0.0, 0.001, 0.5]),
)
def test_a_draw_by_id_is_where_the_sum_of_probabilities_is(
    values: list[float], uniform: float, temperature: float, min_p: float
) -> None:
    """Exactly the id whose share of [0, 1) holds the random number, except for rounding at its edges."""
    best = max(values)
    params = SamplingParams(temperature=temperature, top_p=1, min_p=min_p)
    if best == -math.inf:
        with pytest.raises(ValueError, match="no token can be chosen"):
            draw_by_id(np.array(values, np.float32), params, uniform)
        return
    weights = [
        0 if min_p and value - best < math.log(min_p) else math.exp((value - best) / temperature)
        for value in values
    ]
    id = draw_by_id(np.array(values, np.float32), params, uniform)
    total = math.fsum(weights)
    assert weights[id] > 0
    assert math.fsum(weights[:id]) / total <= uniform + 1e-5
    assert math.fsum(weights[: id + 1]) / total >= uniform - 1e-5


LARGE = 6000
ALL = [
    SamplingParams(seed=1, temperature=2, top_k=0, top_p=1, min_p=0),
    SamplingParams(seed=2, temperature=1.5, top_k=0, top_p=0.9, min_p=0),
    SamplingParams(seed=3, temperature=2, top_k=0, top_p=1, min_p=0.02),
    SamplingParams(seed=4, temperature=2, top_k=0, top_p=0.97, min_p=0.01),
    SamplingParams(seed=5, temperature=1, top_k=3000, top_p=1, min_p=0),
    SamplingParams(
        seed=6, temperature=1, top_k=LARGE - 1, top_p=0.8, min_p=0, logit_bias={4: 3.0, 5: -math.inf}
    ),
    SamplingParams(seed=7, temperature=0.5, top_k=1 << 30, top_p=1, min_p=0),
]


@pytest.mark.parametrize("params", ALL, ids=lambda params: f"seed{params.seed}")
def test_all_means_all(params: SamplingParams) -> None:
    """Most of the probability lies with the unlikely."""
    logits = np.random.default_rng(2).normal(0, 1.5, LARGE).astype(np.float32)
    sampler = Sampler(Remembering())
    ids = [sampler.sample(logits[None], 0, params, position) for position in range(1200)]
    expected = distribution(logits.tolist(), params)
    assert len(expected) > 400
    assert set(ids) <= set(expected)
    # Tokens are rare: they are compared in 30 groups of about the same probability.
    order = list(expected)
    group = dict(zip(order, (np.cumsum([expected[id] for id in order]) * 29.999).astype(int), strict=True))
    together: dict[int, float] = {}
    for id in order:
        together[group[id]] = together.get(group[id], 0.0) + expected[id]
    assert_drawn_from([group[id] for id in ids], together)


@pytest.mark.full
@pytest.mark.parametrize(("top_p", "min_p"), [(0.9, 0), (0.95, 0.05), (0.3, 0)])
@pytest.mark.parametrize("spread", [0, 0.01, 1.5, 30])
def test_both_ways_keep_the_same_tokens(spread: float, top_p: float, min_p: float) -> None:
    """Without a top-k, and with one that leaves out the least likely alone: the same ids come up, and none
    that the mask forbids. Ties (no spread) are broken by the lower id."""
    logits = np.random.default_rng(2).normal(0, 1, 128).astype(np.float32) * np.float32(spread)
    allowed = np.full(2, 0xF0F0F0F0F0F0F0F0, np.uint64)
    sampler = Sampler(Remembering())
    every, most = (
        {sampler.sample(logits[None], 0, params, position, allowed=allowed) for position in range(1500)}
        for params in (
            SamplingParams(seed=1, temperature=30, top_k=top_k, top_p=top_p, min_p=min_p)
            for top_k in (0, 127)
        )
    )
    assert every == most and all(id % 8 >= 4 for id in every)


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=20, max_size=20),
    st.lists(st.integers(0, 19), max_size=30),
    st.floats(0.5, 3),
    st.sampled_from([-1, 0, 1, 2, 3, 5, 8, 64]),
    st.integers(0, 30),
    st.tuples(st.floats(-2, 2), st.floats(-2, 2)),
)
def test_penalties_and_bias_rank_the_whole_vocabulary(
    values: list[float],
    recent: list[int],
    penalty: float,
    last: int,
    start: int,
    counted: tuple[float, float],
) -> None:
    """OpenAI's penalties count the answer alone, and come after that for repetition (llama.cpp's order):
    logit - count * frequency - (count > 0) * presence."""
    bias = {0: 2.5, 19: -1.0}
    ranking = Sorting()
    params = SamplingParams(
        temperature=0,
        repeat_penalty=penalty,
        repeat_last_n=last,
        logit_bias=bias,
        frequency_penalty=counted[0],
        presence_penalty=counted[1],
    )
    generated, logits = recent[start:], np.array(values, np.float32)[None]
    id = Sampler(ranking).sample(logits, 0, params, 0, recent, generated=generated)
    wanted = {i: value + bias.get(i, 0.0) for i, value in enumerate(values)}
    for i in set(recent if last < 0 else recent[len(recent) - last :] if last < len(recent) else recent):
        wanted[i] = wanted[i] / penalty if wanted[i] > 0 else wanted[i] * penalty
    for i in range(20):
        if i in generated:
            wanted[i] -= generated.count(i) * counted[0] + counted[1]
    assert wanted[id] >= max(wanted.values()) - 1e-4
    biases = ranking.biases[0]
    assert biases is not None
    np.testing.assert_allclose(np.array(values) + biases, list(wanted.values()), atol=1e-4)


def test_one_requests_bias_does_not_reach_the_next(logits: Floats) -> None:
    class Failing(Sorting):
        def top_k(self, *args: Any, **kwargs: Any) -> Any:
            super().top_k(*args, **kwargs)
            raise MemoryError

    best, ranking, failing = int(logits.argmax()), Sorting(), Failing()
    sampler = Sampler(ranking)
    banned = SamplingParams(temperature=0, logit_bias={best: -math.inf})
    other = SamplingParams(temperature=0, logit_bias={0: 0.125})
    assert sampler.sample(logits[None], 0, banned, 0) == int(np.argsort(logits)[-2])
    assert sampler.sample(logits[None], 0, other, 0) == best
    sampler._backend = failing
    with pytest.raises(MemoryError):
        sampler.sample(logits[None], 0, banned, 0)
    sampler._backend = ranking
    assert sampler.sample(logits[None], 0, other, 0) == best
    assert ranking.biases[-1] is not None and ranking.biases[-1].tolist() == [0.125, *[0.0] * 59]


def test_a_forbidden_token_stays_forbidden_when_it_is_penalised(logits: Floats) -> None:
    logits[7] = -np.inf
    params = SamplingParams(
        seed=1, temperature=5, min_p=0, top_p=1, repeat_penalty=1.3, logit_bias={8: -math.inf}
    )
    ranking = Sorting()
    ids = {Sampler(ranking).sample(logits[None], 0, params, position, [7, 8, 9]) for position in range(500)}
    assert len(ids) > 30 and not {7, 8} & ids
    assert not any(np.isnan(bias).any() for bias in ranking.biases if bias is not None)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_mask_limits_the_choice(logits: Floats, temperature: float) -> None:
    params = SamplingParams(seed=3, temperature=temperature, top_p=1, min_p=0)
    allowed = np.array([1 << 5 | 1 << 40], np.uint64)
    ids = {Sampler(Sorting()).sample(logits[None], 0, params, p, allowed=allowed) for p in range(100)}
    assert ids == ({5, 40} if temperature else {max(5, 40, key=lambda id: logits[id])})
    with pytest.raises(ValueError, match="no token can be chosen"):
        Sampler(Sorting()).sample(logits[None], 0, params, 0, allowed=np.zeros(1, np.uint64))


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error(logits: Floats, value: float, temperature: float) -> None:
    logits[31] = value
    with pytest.raises(ValueError, match=f"logits contain {value}"):
        Sampler(Sorting()).sample(logits[None], 0, SamplingParams(seed=1, temperature=temperature), 0)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_nothing_to_choose_from_is_an_error(logits: Floats, temperature: float) -> None:
    params = SamplingParams(seed=1, temperature=temperature)
    with pytest.raises(ValueError, match="no token can be chosen"):
        Sampler(Sorting()).sample(np.full(5, -np.inf, np.float32)[None], 0, params, 0)
    with pytest.raises(ValueError, match="logit_bias has token 60: allowed are the ids 0 to 59"):
        Sampler(Sorting()).sample(logits[None], 0, SamplingParams(seed=1, logit_bias={60: 1.0}), 0)


def test_a_seed_is_drawn_once() -> None:
    with pytest.raises(ValueError, match=r"with_seed\(\)"):
        Sampler(Sorting()).sample(np.zeros(4, np.float32)[None], 0, SamplingParams(), 0)
    seeded = SamplingParams(top_k=3).with_seed()
    assert seeded.seed is not None and seeded.top_k == 3 and seeded.with_seed() is seeded
    assert SamplingParams().with_seed() != SamplingParams().with_seed()


# --- random numbers -------------------------------------------------------------------------------


def test_splitmix64_gives_the_published_sequence() -> None:
    # https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
    published = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
        16408922859458223821,
    ]  # fmt: skip
    assert [splitmix64(1234567, index) for index in range(5)] == published


@pytest.mark.parametrize(
    "keys",
    [lambda i: (0, i), lambda i: (i, 0), lambda i: (i, i), lambda i: (2**64 - 1 - i, 1000 - i % 1000)],
    ids=["position", "seed", "diagonal", "down"],
)
def test_random_numbers_are_uniform_and_neighbours_independent(
    keys: Callable[[int], tuple[int, int]],
) -> None:
    numbers = np.array([random_uniform(*keys(i)) for i in range(20_000)])
    assert numbers.min() >= 0 and numbers.max() < 1
    cells = (numbers * 16).astype(int)
    assert_drawn_from(cells.tolist(), dict.fromkeys(range(16), 1 / 16))
    pairs = cells[:-1] * 16 + cells[1:]
    assert_drawn_from(pairs.tolist(), dict.fromkeys(range(256), 1 / 256))


def test_seeds_do_not_shift_one_anothers_sequence() -> None:
    # Seeds that differ by splitmix64's increment would, were the seed not mixed first.
    seed = 12345
    assert random_uniform(seed, 1) != random_uniform(seed + 0x9E3779B97F4A7C15, 0)
