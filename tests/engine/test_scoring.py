"""Perplexity by the decode rule, and how far two modes are apart."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from golden import golden

from hotcold.demo import model_path
from hotcold.engine.engine import Engine
from hotcold.engine.load_options import LoadOptions
from hotcold.engine.loading import LoadedModel, load
from hotcold.engine.request import Request
from hotcold.engine.sampler import SamplingParams
from hotcold.engine.scoring import (
    Divergence,
    Scorer,
    compare,
    cut_windows,
    ffn_inputs,
    join,
    log_softmax,
    perplexity,
    perplexity_error,
    score,
)
from hotcold.formats.gguf import open_gguf

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(None, LoadOptions())


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
    scorer = Scorer(load(tiny.path, LoadOptions(backend="cpu")))
    window = [*tiny.prompt.tolist(), *tiny.steps.tolist()]
    logits = np.concatenate([tiny.prompt_logits, tiny.step_logits])[: len(window) - 1].astype(np.float64)
    expected = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(window) - 1), window[1:]]
    assert len(window) > 20, "several steps of 16 rows"
    assert score(scorer, window) == pytest.approx(expected, abs=0.02)  # K and V are float16


def test_sixteen_rows_a_step_are_what_single_decode_steps_compute(model: LoadedModel) -> None:
    """The text is forced through the engine one token at a time."""
    window = model.tokenizer.encode("There was once a little girl who lived in the mountains with her goats.")
    engine = Engine(model)
    seen: list[np.ndarray] = []
    step = model.run

    def run() -> None:
        step()
        seen.append(np.array(model.transformer.logits[0]))

    model.run = run  # type: ignore[method-assign]
    try:
        request = Request(window[:1], SamplingParams(temperature=0), max_tokens=len(window) - 1)
        engine.sampler.sample = lambda logits, params, position, recent=(): window[position]  # type: ignore[assignment,method-assign]
        engine.add(request)
        while not request.finished:
            engine.step()
    finally:
        del model.run
    rows = np.concatenate([np.array(logits) for logits in Scorer(model).logits(window)])
    assert np.array_equal(rows[1:], np.array(seen)[1:])  # the first came from a prompt row, summed otherwise


def test_pages_are_given_back_when_scoring_stops_early(model: LoadedModel) -> None:
    before = model.cache.free_pages
    rows = Scorer(model).logits(list(range(1, 60)))
    next(rows)
    assert model.cache.free_pages < before
    rows.close()
    assert model.cache.free_pages == before


def test_a_window_longer_than_the_context_is_refused(model: LoadedModel) -> None:
    with pytest.raises(ValueError, match="window of 257 tokens: the context holds 256"):
        score(Scorer(model), [1] * 257)


def test_exact_and_off_do_not_differ(model: LoadedModel) -> None:
    window = model.tokenizer.encode("Heidi ran down the path to the hut, and the wind sang in the fir trees.")
    both = compare(Scorer(model), Scorer(model.with_sparsity("off")), window)
    assert len(both.nll) == len(window) - 1
    assert (both.kl == 0).all() and both.same_top.all()
    assert both.perplexity_ratio == 1 and both.ratio_interval() == (1, 1)


def test_what_the_ffns_are_given(model: LoadedModel) -> None:
    """One input is the norm of the other, by the file's weights; a row depends on those before it alone."""
    window = model.tokenizer.encode(
        "Heidi ran down the path to the hut, and the wind sang in the fir trees. " * 3
    )
    layers = ffn_inputs(model, [window[:9], window], {"normed", "residual"})
    assert len(layers) == 6
    with open_gguf(model_path()) as file:
        for i, layer in enumerate(layers):
            normed, residual = layer["normed"], layer["residual"]
            assert normed.shape == residual.shape == (8 + len(window) - 1, 256)
            size = np.sqrt(
                (residual**2).mean(axis=-1, keepdims=True)
                + float(file.metadata["bamboo.attention.layer_norm_rms_epsilon"])
            )
            weight = file.load(f"blk.{i}.ffn_norm.weight").dequantise()
            np.testing.assert_allclose(normed, residual / size * weight, atol=1e-4)
            np.testing.assert_allclose(normed[:8], normed[8:16], atol=1e-6)
    assert ffn_inputs(model, [window[:9]], {"normed"})[0].keys() == {"normed"}


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
        low, high = both.ratio_interval(trial)
        assert low < both.perplexity_ratio < high
        covered += low <= math.exp(0.01) <= high
    assert 88 <= covered <= 100


def test_the_interval_repeats_with_its_seed() -> None:
    rng = np.random.default_rng(0)
    both = Divergence(np.zeros(999), np.ones(999, np.bool_), rng.normal(size=999), rng.normal(size=999))
    assert both.ratio_interval(3) == both.ratio_interval(3) != both.ratio_interval(4)


def test_the_card_of_the_built_in_model() -> None:
    """Perplexity and active share that an independent float32 forward pass measured; here in Q8_0."""
    card = json.loads((DATA / "fable-7m/golden.json").read_text())["Heidi_heldout.txt"]
    text = (DATA / "heidi.txt").read_text(encoding="utf-8")
    scorer = Scorer(model := load(None, LoadOptions()))
    windows = cut_windows(model.tokenizer.encode(text, add_bos=False), 256, model.tokenizer.bos_id)
    nll = np.concatenate([score(scorer, window) for window in windows[: card["windows"]]])
    assert len(nll) == card["tokens"]
    assert perplexity(nll) == pytest.approx(card["perplexity"], rel=1e-3)
    assert scorer.figures.active_share_by_layer == pytest.approx(card["active_share_per_layer"], abs=5e-4)
