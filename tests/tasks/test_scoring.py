"""Perplexity by the decode rule, and how far two modes are apart."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from support.buffers import cache_bytes
from support.golden import golden
from support.threads import Running, held, wait_until

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.errors import UserError
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session
from hotcold.tasks.scoring import (
    LEAST_TOKENS,
    Divergence,
    Scorer,
    compare,
    cut_windows,
    join,
    log_softmax,
    perplexity,
    perplexity_error,
    score,
)

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(scope="module")
def session() -> Session:
    return load(None, LoadOptions()).session()


@pytest.mark.parametrize(
    ("n", "size", "bos", "expected"),
    [
        (6, 4, 99, [[99, 0, 1, 2], [99, 3, 4, 5]]),
        (8, 4, 99, [[99, 0, 1, 2], [99, 3, 4, 5]]),  # an incomplete last window is dropped
        (2, 4, 99, [[99, 0, 1]]),  # unless it is the only one
        (6, 3, None, [[0, 1, 2], [3, 4, 5]]),
    ],
)
def test_windows(n: int, size: int, bos: int | None, expected: list[list[int]]) -> None:
    assert cut_windows(list(range(n)), size, bos) == expected


@pytest.mark.parametrize(("n", "bos"), [(0, 1), (1, None), (0, None)])
def test_a_text_with_nothing_to_predict_is_refused(n: int, bos: int | None) -> None:
    with pytest.raises(ValueError, match=f"the text has {n} tokens: at least . needed"):
        cut_windows(list(range(n)), 8, bos)


def test_log_softmax_of_large_logits() -> None:
    values = log_softmax(np.array([[1000.0, 1000.0 + math.log(3)], [-2000.0, -2000.0]], np.float32))
    assert values == pytest.approx(np.log([[0.25, 0.75], [0.5, 0.5]]), abs=1e-4)


def test_perplexity_of_a_uniform_guess() -> None:
    nll = np.full(50, math.log(8))
    assert perplexity(nll) == pytest.approx(8)
    assert perplexity_error(nll) == pytest.approx(0)


def test_standard_error_by_the_delta_method() -> None:
    nll = np.array([1.0, 2.0, 3.0, 4.0])
    expected = math.exp(2.5) * math.sqrt(5 / 3) / 2
    assert perplexity_error(nll) == pytest.approx(expected)


def test_scores_are_those_of_the_goldens(tmp_path: Path) -> None:
    """By the decode rule too every token is as surprising as it is to transformers."""
    tiny = golden("tiny-drelu", tmp_path)
    scorer = Scorer(load(tiny.path, LoadOptions(backend="cpu")).session())
    window = [*tiny.prompt.tolist(), *tiny.steps.tolist()]
    logits = np.concatenate([tiny.prompt_logits, tiny.step_logits])[: len(window) - 1].astype(np.float64)
    expected = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(window) - 1), window[1:]]
    assert len(window) > 20, "several steps of 16 rows"
    assert score(scorer, window) == pytest.approx(expected, abs=0.02)  # K and V are float16


def test_sixteen_rows_a_step_are_what_single_decode_steps_compute(session: Session) -> None:
    """The text is forced through the engine one token at a time."""
    window = session.model.tokenizer.encode(
        "There was once a little girl who lived in the mountains with her goats."
    )
    engine = Engine(session)
    single_rows: list[np.ndarray] = []
    step = session.run

    def run() -> None:
        step()
        single_rows.append(session.transformer.read_logits()[0].copy())

    session.run = run  # type: ignore[method-assign]
    try:
        request = Request(Job(window[:1], SamplingParams(temperature=0), max_tokens=len(window) - 1))
        engine.sampler.sample = lambda logits, row, params, position, recent=(): window[position]  # type: ignore[assignment,method-assign]
        engine.add(request)
        while not request.finished:
            engine.step()
    finally:
        del session.run
    rows = np.concatenate([np.array(logits) for logits in Scorer(session).logits(window)])
    assert np.array_equal(
        rows[1:], np.array(single_rows)[1:]
    )  # the first came from a prompt row, summed otherwise


def test_pages_are_given_back_when_scoring_stops_early(session: Session) -> None:
    before = session.cache.free_pages
    rows = Scorer(session).logits(list(range(1, 60)))
    next(rows)
    assert session.cache.free_pages < before
    rows.close()
    assert session.cache.free_pages == before


def test_a_window_longer_than_the_context_is_refused(session: Session) -> None:
    with pytest.raises(ValueError, match="window of 257 tokens: the context holds 256"):
        score(Scorer(session), [1] * 257)


def test_exact_and_off_do_not_differ(session: Session) -> None:
    window = session.model.tokenizer.encode(
        "Heidi ran down the path to the hut, and the wind sang in the fir trees."
    )
    both = compare(Scorer(session), Scorer(session.model.session("off")), window)
    assert len(both.nll) == len(window) - 1
    assert (both.kl == 0).all() and both.same_top.all()
    assert both.perplexity_ratio == 1 and both.ratio_interval() is None


def test_divergence_of_known_distributions() -> None:
    """A scorer is anything that yields logits: here two fixed distributions over two tokens."""

    class Fixed:
        def __init__(self, probabilities: list[float]) -> None:
            self.rows = np.log(np.array([probabilities, probabilities], np.float32))

        def logits(self, window: list[int]) -> list[np.ndarray]:
            return [self.rows]

    both = compare(Fixed([0.25, 0.75]), Fixed([0.5, 0.5]), [0, 1, 0])  # type: ignore[arg-type]
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert both.kl == pytest.approx([kl, kl], abs=1e-6)
    assert both.same_top.tolist() == [False, False]  # a tie goes to token 0
    assert both.nll == pytest.approx([-math.log(0.75), -math.log(0.25)], abs=1e-6)
    assert both.base_nll == pytest.approx([math.log(2)] * 2, abs=1e-6)
    two = join([both, both])
    assert len(two.kl) == 4 and two.perplexity_ratio == pytest.approx(both.perplexity_ratio)


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    rng, covered = np.random.default_rng(0), 0
    for trial in range(100):
        base = rng.gamma(2.0, 2.0, 3200)
        worse = base + rng.normal(0.01, 0.2, 3200)
        both = Divergence(np.zeros(3200), np.ones(3200, np.bool_), worse, base)
        low, high = both.ratio_interval(trial) or (0.0, 0.0)
        assert low < both.perplexity_ratio < high
        covered += low <= math.exp(0.01) <= high
    assert 88 <= covered <= 100


def gaussian(tokens: int, *, neighbours: int = 1, seed: int = 0) -> Divergence:
    """Surprise that is about 1 % worse under the mode; runs of neighbouring tokens are alike."""
    rng = np.random.default_rng(seed)
    base = rng.gamma(2.0, 2.0, tokens)
    worse = base + 0.01 + np.repeat(rng.normal(0, 0.2, -(-tokens // neighbours)), neighbours)[:tokens]
    return Divergence(rng.gamma(1.0, 0.01, tokens), np.ones(tokens, np.bool_), worse, base)


def test_tokens_that_depend_on_their_neighbours_are_drawn_together() -> None:
    """Runs of 16 equal tokens: drawn one by one, the interval would be a quarter as wide and cover little."""
    covered, widths = 0, []
    for trial in range(60):
        both = gaussian(6400, neighbours=16, seed=trial)
        low, high = both.ratio_interval(trial) or (0.0, 0.0)
        covered += low <= math.exp(0.01) <= high
        widths.append(math.log(high / low))
    assert covered >= 51
    assert np.mean(widths) == pytest.approx(2 * 1.96 * 0.2 / math.sqrt(6400 / 16), rel=0.15)


def test_few_tokens_have_no_interval() -> None:
    assert gaussian(LEAST_TOKENS - 1).ratio_interval() is None
    low, high = gaussian(LEAST_TOKENS).ratio_interval() or (0.0, 0.0)
    assert 0.9 < low < high < 1.1
    few, enough = gaussian(LEAST_TOKENS - 1).summary(), gaussian(LEAST_TOKENS).summary()
    assert few["ppl_ratio_low"] is few["ppl_ratio_high"] is None
    assert enough["ppl_ratio_low"] == low and few["ppl_ratio"] == pytest.approx(math.exp(0.01), rel=0.05)


def test_the_summary_of_known_numbers() -> None:
    """One token of a hundred is 50 times as far off: the mean hides it, P99 shows it, P90 would not."""
    kl = np.full(1000, 0.01)
    kl[::50] = 0.5
    same = np.arange(1000) % 4 > 0
    summary = Divergence(kl, same, np.full(1000, 2.0), np.full(1000, 1.5)).summary()
    assert summary["kl_p99"] == pytest.approx(0.5)
    assert summary["kl_mean"] == pytest.approx(0.0198)
    assert summary["top1_agreement"] == pytest.approx(0.75)
    assert summary["ppl"] == pytest.approx(math.exp(1.5)) and summary["ppl_ratio"] == pytest.approx(
        math.exp(0.5)
    )


def test_the_interval_repeats_with_its_seed() -> None:
    rng = np.random.default_rng(0)
    both = Divergence(np.zeros(999), np.ones(999, np.bool_), rng.normal(size=999), rng.normal(size=999))
    assert both.ratio_interval(3) == both.ratio_interval(3) != both.ratio_interval(4)


@pytest.mark.full
def test_the_card_of_the_built_in_model() -> None:
    """Perplexity and active share that an independent float32 forward pass measured; here in Q8_0."""
    card = json.loads((DATA / "fable-7m/golden.json").read_text())["Heidi_heldout.txt"]
    text = (DATA / "heidi.txt").read_text(encoding="utf-8")
    scorer = Scorer(session := load(None, LoadOptions()).session())
    windows = cut_windows(
        session.model.tokenizer.encode(text, add_bos=False), 256, session.model.tokenizer.bos_id
    )
    nll = np.concatenate([score(scorer, window) for window in windows[: card["windows"]]])
    assert len(nll) == card["tokens"]
    assert perplexity(nll) == pytest.approx(card["perplexity"], rel=1e-3)
    assert scorer.figures.active_share_by_layer == pytest.approx(card["active_share_per_layer"], abs=5e-4)


def test_the_kv_cache_holds_what_its_type_can() -> None:
    """Layer 0's keys and values depend on the tokens alone: in each cache they are the same except for
    rounding."""
    window = load(None, LoadOptions()).tokenizer.encode("Heidi ran down the path to the hut. " * 4)
    found, sizes = {}, {}
    for type in ("f32", "f16", "q8_0"):
        session = load(None, LoadOptions(cache_type=type)).session()
        rows = Scorer(session).logits(window)
        for _ in rows:  # up to the last step, before the pages are given back
            pass
        sizes[type] = cache_bytes(session)
        read = session.model.backend.read
        found[type] = [stored(read(each), len(window) - 1) for each in session.state.layers[0]]
    assert sizes["f16"] * 2 == sizes["f32"] and sizes["q8_0"] * 64 == sizes["f16"] * 34
    for exact, half, eighth in zip(found["f32"], found["f16"], found["q8_0"], strict=True):
        assert (np.abs(half - exact) <= np.abs(exact) * 2.0**-11 + 2.0**-25).all()
        largest = np.abs(exact).reshape(*exact.shape[:-1], -1, 32).max(axis=-1)
        # Half a step of amax / 127, whose scale is a float16.
        bound = np.repeat(largest, 32, axis=-1) * (0.5 / 127 + 2.0**-11) + 2.0**-24
        assert (np.abs(eighth - exact) <= bound).all()
        assert 0 < np.abs(half - exact).max() < np.abs(eighth - exact).max()


def stored(cache: np.ndarray, n: int) -> np.ndarray:
    """The first n positions of a cache whose pages were used in order, ``[n, K, head_dim]`` float64."""
    if cache.dtype == np.uint8:
        blocks = cache.reshape(*cache.shape[:-1], -1, 34)
        scale = blocks[..., :2].copy().view(np.float16).astype(np.float64)
        cache = (blocks[..., 2:].view(np.int8) * scale).reshape(*cache.shape[:-1], -1)
    return cache.astype(np.float64).transpose(0, 2, 1, 3).reshape(-1, *cache.shape[1::2])[:n]


def test_a_scoring_waits_for_a_step_of_another_thread(session: Session) -> None:
    """Its beginning and its steps do; its end does not, as the garbage collector may bring it."""
    scorer = Scorer(session)
    expected = [rows.copy() for rows in scorer.logits(range(40))]
    step, thread = held(session.lock)
    scoring = scorer.logits(range(40))
    found = Running(lambda: next(scoring).copy())
    wait_until(lambda: len(session.lock._changes) == 1)
    assert session.cache.free_pages == session.cache.pages
    step.go.set()
    assert np.array_equal(found.result(), expected[0])
    thread.result()
    step, thread = held(session.lock)
    found = Running(lambda: next(scoring).copy())
    wait_until(lambda: len(session.lock._changes) == 1)
    step.go.set()
    assert np.array_equal(found.result(), expected[1])
    thread.result()
    step, thread = held(session.lock)
    scoring.close()  # type: ignore[attr-defined]
    assert session.cache.free_pages < session.cache.pages
    step.go.set()
    thread.result()
    assert session.cache.free_pages == session.cache.pages


def test_a_closed_session_is_not_scored() -> None:
    session = load(None, LoadOptions()).session()
    scoring = Scorer(session).logits(range(40))
    next(scoring)
    session.close()
    for each in (scoring, Scorer(session).logits(range(40))):
        with pytest.raises(UserError, match="is closed: load it again"):
            next(each)
