"""Fitted predictors: against the definition of recall, the gate itself, and NumPy's SVD."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize
from support.plain_forward import Model

from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf
from hotcold.model.config import Config
from hotcold.sparse import fitting
from hotcold.sparse.fitting import Fit, FitOptions, Fitted, fit_layer, thresholds
from hotcold.sparse.predictor import PredictorError, read_predictor

DIM, NEURONS = 64, 96


@given(
    seed=st.integers(0, 1000),
    shape=st.tuples(st.integers(2, 60), st.integers(1, 9)),
    recall=st.sampled_from([0.3, 0.9, 0.99, 1.0]),
    weighted=st.booleans(),
    share=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)
def test_thresholds_reach_the_recall(
    seed: int, shape: tuple[int, int], recall: float, weighted: bool, share: float
) -> None:
    """This holds for any scores, also if they carry no information or are equal."""
    random = np.random.default_rng(seed)
    active = random.random(shape) < share
    scores = random.standard_normal(shape).astype(np.float32) * 10.0 ** random.integers(-3, 4, shape[1])
    scores = (scores + active * np.abs(scores) * 2 + 5).astype(np.float32)
    scores[:, 0] = 1
    weight = random.random(shape).astype(np.float32) ** 3 * active if weighted else None
    found = thresholds(scores, active, recall, weight)
    assert np.isfinite(found).all() and found.dtype == np.float32
    counts = active.astype(np.float64) if weight is None else weight.astype(np.float64)
    assert (counts * (scores >= found)).sum() >= recall * counts.sum() * (1 - 1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_bound_is_that_of_tokens_that_are_not_fitted_to(weighted: bool) -> None:
    """Scores that say more about the tokens that were fitted to than about others."""
    random = np.random.default_rng(2)
    active = random.random((800, 30)) < 0.2
    noise = np.where(np.arange(800) < 600, 0.2, 1.0)[:, None] * random.standard_normal(active.shape)
    scores = (active + noise).astype(np.float32)
    weight = (active * random.random(active.shape)).astype(np.float32) if weighted else None
    adds = active if weight is None else weight

    def recall(fitted: int | None, rows: slice) -> float:
        found = scores >= thresholds(scores, active, 0.9, weight, fitted)
        return float((adds * found)[rows].sum() / adds[rows].sum())

    assert 0.9 <= recall(600, slice(600, None)) < 0.91 < recall(600, slice(600))
    assert recall(None, slice(600, None)) < 0.85
    active[600:] = False  # nothing is known of others: all tokens set the bound
    adds = active if weight is None else weight * active
    assert 0.9 <= recall(600, slice(None)) < 0.91


def test_thresholds_mark_few_others() -> None:
    """Predictable neurons are found; unpredictable ones are marked where it is cheapest."""
    random = np.random.default_rng(1)
    active = random.random((2000, 40)) < np.linspace(0.05, 0.6, 40)
    certain = (active + 0.1 * random.standard_normal(active.shape)).astype(np.float32)
    marked = certain >= thresholds(certain, active, 1.0)
    assert (marked & ~active).mean() < 0.02
    noisy = (active + random.standard_normal(active.shape)).astype(np.float32)
    together = (noisy >= thresholds(noisy, active, 0.9)).mean()
    alone = [np.quantile(noisy[active[:, i], i], 0.1) for i in range(40)]  # the recall in each neuron
    assert together < (noisy >= alone).mean() - 0.02
    weight = active * np.where(np.arange(40) < 20, 100, 1).astype(np.float32)
    by_weight = noisy >= thresholds(noisy, active, 0.9, weight)
    assert by_weight[:, :20].mean() > by_weight[:, 20:].mean()


def inputs() -> list[np.ndarray]:
    """To fit to and to judge by, ``[T, D]``: some directions count more, and the mean is not 0. The second
    is another kind of text, so that figures of the first would be seen to be wrong."""
    random = np.random.default_rng(5)
    mix = random.standard_normal((DIM, DIM)) * np.geomspace(3, 0.3, DIM)
    kinds = (1500, 0.2), (400, 0.6)
    return [(random.standard_normal((n, DIM)) @ mix.T + mean).astype(np.float32) for n, mean in kinds]


def fit(
    tmp_path: Path, activation: str, gated: bool = True, **options: object
) -> tuple[list[Fitted], dict[str, np.ndarray], np.ndarray]:
    """The ladder of layer 0 of a random model; its weights, and the inputs that it was judged by."""
    model = Model(dim=DIM, neurons=(NEURONS, 70), activation=activation, gated=gated)
    texts = inputs()
    with open_gguf(model.write(tmp_path / "model.gguf")) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        settings = FitOptions(**options)  # type: ignore[arg-type]
        fit_to, held_out = ({"normed": text} for text in texts)
        ladder = fit_layer(file, config, 0, settings, fit_to=fit_to, held_out=held_out)
        weights = {
            part: file.load(f"blk.0.ffn_{part}.weight").dequantise().astype(np.float64)
            for part in ("gate", "up", "down") if gated or part != "gate"
        }  # fmt: skip
    return ladder, weights, texts[1]


@pytest.mark.parametrize("gated", [True, False])
def test_a_full_rank_is_the_gate(tmp_path: Path, gated: bool) -> None:
    ladder, weights, x = fit(tmp_path, "relu", gated, type="F32", max_share=1.0)
    tensors, found = next(each for each in ladder if each[1].rank == DIM)
    product = tensors.second.dequantise().astype(np.float64) @ tensors.first.dequantise()
    gate = weights["gate" if gated else "up"]
    expected = gate / np.linalg.norm(gate, axis=1, keepdims=True)
    assert np.abs(product / np.linalg.norm(product, axis=1, keepdims=True) - expected).max() < 1e-4
    marked = x @ product.T >= tensors.threshold
    active = x @ gate.T > 0
    assert np.mean(marked & ~active) < 0.01 and (marked & active).sum() / active.sum() > 0.98
    assert found.candidates == pytest.approx(marked.mean(), abs=1e-3)


def test_under_drelu_gate_and_up_are_added(tmp_path: Path) -> None:
    ladder, weights, _ = fit(tmp_path, "drelu", type="F32", max_share=1.0)
    tensors = next(each for each, found in ladder if found.rank == DIM)
    product = tensors.second.dequantise().astype(np.float64) @ tensors.first.dequantise()
    x = inputs()[0][: 1500 - 1500 // 8]  # the rest sets thresholds
    both = (weights[part] / (x @ weights[part].T).std(0)[:, None] for part in ("gate", "up"))
    np.testing.assert_allclose(product, sum(both), atol=2e-3 * np.abs(product).max())


def test_the_figures_are_what_they_say(tmp_path: Path) -> None:
    """Recounted in float64 from the stored factors; dReLU, whose neurons need gate and up."""
    ladder, weights, x = fit(tmp_path, "drelu", type="F16", max_share=0.8)
    assert [each.fit.rank for each in ladder] == [32, 64]
    for tensors, found in ladder:
        scores = x @ tensors.first.dequantise().T.astype(np.float64) @ tensors.second.dequantise().T
        marked = scores >= tensors.threshold
        gate, up = x @ weights["gate"].T, x @ weights["up"].T
        active = (gate > 0) & (up > 0)
        adds = gate * up * active * np.linalg.norm(weights["down"], axis=0)
        assert tensors.first.shape == (found.rank, DIM) and not tensors.relu
        assert found.candidates == pytest.approx(marked.mean(), abs=2e-3)
        assert found.active == pytest.approx(active.mean(), abs=1e-4)
        assert found.recall == pytest.approx((marked & active).sum() / active.sum(), abs=2e-3)
        assert found.weighted_recall == pytest.approx((adds * marked).sum() / adds.sum(), abs=2e-3)
        assert 0.97 < found.recall < 1
        size = found.rank * (DIM + NEURONS) * 2 + 4 * NEURONS
        assert found.nbytes == size and found.size_ratio == size / (3 * DIM * NEURONS * 4) <= 0.8
        rows = marked.sum() + (marked & (gate > 0)).sum() + (marked & active).sum()
        exact = gate.size + (gate > 0).sum() + active.sum()
        read = (size * len(x) + rows * DIM * 4) / (exact * DIM * 4)
        assert found.read_ratio == pytest.approx(read, abs=2e-3)


@pytest.mark.parametrize(
    ("options", "recalls", "weighted", "order"),
    [
        ({}, (0.981, 0.999), (0.5, 0.5), [0, 1]),  # misses at most twice what it may, and reads less
        ({}, (0.979, 0.999), (1.0, 1.0), [1, 0]),
        ({}, (0.979, 0.978), (1.0, 1.0), [0, 1]),  # where both miss too much, bytes decide
        ({"recall": 0.9}, (0.81, 1.0), (0.5, 0.5), [0, 1]),
        ({"recall": 0.9}, (0.79, 1.0), (1.0, 1.0), [1, 0]),
        ({"weighted": True}, (0.5, 0.5), (0.981, 0.999), [0, 1]),
        ({"weighted": True}, (1.0, 1.0), (0.979, 0.999), [1, 0]),
        ({"method": "trained"}, (0.1, 1.0), (0.1, 1.0), [0, 1]),  # no recall was requested
    ],
)
def test_the_best_finds_enough_and_then_reads_the_least(
    options: dict[str, Any], recalls: tuple[float, float], weighted: tuple[float, float], order: list[int]
) -> None:
    both = [
        Fit(32 * (i + 1), 0, 0.1, 0.2, 0.1, recall, weight, 0.5 + i / 10)
        for i, (recall, weight) in enumerate(zip(recalls, weighted, strict=True))
    ]
    assert sorted(both, key=FitOptions(**options).order) == [both[i] for i in order]


def test_trained_predictors_that_name_nothing(tmp_path: Path) -> None:
    model = Model(dim=DIM, neurons=(NEURONS,), activation="relu")
    tensors = model.tensors()
    tensors["blk.0.fc1.weight"] = quantise(np.vstack([np.eye(DIM), -np.eye(DIM)]), "F16")
    tensors["blk.0.fc2.weight"] = quantise(np.full((NEURONS, 2 * DIM), -1.0), "F16")
    text = np.random.default_rng(2).standard_normal((600, DIM)).astype(np.float32)
    both = {"normed": text, "residual": text}
    with open_gguf(model.write(tmp_path / "model.gguf", tensors, "PWRI")) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        options = FitOptions("trained", max_share=0.9)
        ((_, found),) = fit_layer(file, config, 0, options, fit_to=both, held_out=both)
    assert found.candidates == found.recall == 0 and found.active > 0.3
    assert found.read_ratio < 0.95


def test_truncation_is_the_best_of_its_rank(tmp_path: Path) -> None:
    """By Eckart and Young: no map of rank 32 through the inputs' covariance is nearer to the gates."""
    ladder, weights, _ = fit(tmp_path, "relu", type="F32", max_share=0.8)
    tensors = next(each for each, found in ladder if found.rank == 32)
    x = inputs()[0].astype(np.float64)
    x -= x.mean(0)
    gates = x @ weights["gate"].T
    gates /= gates.std(0)
    error = gates - x @ tensors.first.dequantise().T @ tensors.second.dequantise().T
    sizes = np.linalg.svd(gates, compute_uv=False)
    assert (error**2).sum() == pytest.approx((sizes[32:] ** 2).sum(), rel=0.01)


def test_a_recall_by_weight_marks_fewer(tmp_path: Path) -> None:
    (_, counted), (_, weighted) = (
        fit(tmp_path, "relu", type="F16", max_share=0.4, weighted=weighted)[0][0]
        for weighted in (False, True)
    )
    assert weighted.candidates < counted.candidates and weighted.recall < counted.recall
    assert 0.98 < weighted.weighted_recall < counted.weighted_recall


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"type": "F32", "max_share": 0.1},
            r"layer 0: no predictor fits in at most 10% of the FFN's 73728 bytes",
        ),
        ({"recall": 0.0}, r"`recall` is 0.0: above 0 and at most 1"),
        ({"max_share": 1.5}, r"`max_share` is 1.5: above 0 and at most 1"),
        ({"type": "Q6_K"}, r"cannot write Q6_K: choose from"),
    ],
)
def test_what_cannot_be_fitted(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, "relu", **options)


@pytest.mark.parametrize("type", [None, "Q8_0"])
@pytest.mark.parametrize("recall", [None, 0.95])
def test_trained_predictors_are_kept_or_requantised(
    tmp_path: Path, type: str | None, recall: float | None
) -> None:
    random = np.random.default_rng(2)
    model = Model(dim=DIM, neurons=(NEURONS,), activation="relu")
    tensors = model.tensors()
    gate = tensors["blk.0.ffn_gate.weight"].dequantise()
    tensors["blk.0.fc1.weight"] = quantise(np.vstack([np.eye(DIM), -np.eye(DIM)]), "F16")
    tensors["blk.0.fc2.weight"] = quantise(np.hstack([gate, -gate]), "F16")
    text = random.standard_normal((600, DIM)).astype(np.float32)
    inputs = {"normed": text, "residual": 3 * text}
    with open_gguf(model.write(tmp_path / "model.gguf", tensors, "PWRI")) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        kept = read_predictor(file, config, 0)
        options = FitOptions("trained", recall, type=type, max_share=0.9)
        ((found, figures),) = fit_layer(file, config, 0, options, fit_to=inputs, held_out=inputs)
        with pytest.raises(PredictorError, match="no predictor fits in at most 15%"):
            fit_layer(file, config, 0, FitOptions("trained"), fit_to=inputs, held_out=inputs)
    assert found.relu and found.first.type.name == (type or "F16")
    if type is None:
        np.testing.assert_array_equal(found.second.data, kept.second.data)
    if recall is None:
        np.testing.assert_array_equal(found.threshold, np.zeros(NEURONS, np.float32))
        assert figures.recall > 0.98
    else:
        assert 0.949 < figures.recall < 0.98


def test_log_odds_are_those_of_a_logistic_regression() -> None:
    """Scores say much, little and nothing; the truth is the maximum of the likelihood that SciPy finds, less
    the prior's 0.05 times the squared slope."""
    random = np.random.default_rng(3)
    z = random.standard_normal((800, 4)).astype(np.float32)
    slopes = np.array([3.0, 1.0, 0.3, 0.0])
    active = random.random(z.shape) < 1 / (1 + np.exp(-(z * slopes - [6, 4, 3, 1])))  # the first are rare
    found = fitting._log_odds(z, active)
    for i in range(4):

        def loss(parameters: np.ndarray, i: int = i) -> float:
            logits = parameters[0] * z[:, i].astype(np.float64) + parameters[1]
            likelihood = (active[:, i] * logits - np.logaddexp(0, logits)).sum()
            return float(0.05 * parameters[0] ** 2 - likelihood)

        best = optimize.minimize(loss, [1.0, 0.0], bounds=[(1e-3, None), (None, None)]).x
        np.testing.assert_allclose(found[:, i], best, atol=2e-3)


@pytest.mark.parametrize(("type", "share"), [("Q4_0", 0.15), ("F16", 0.15), ("Q8_0", 0.4), ("F16", 0.9)])
def test_the_largest_rank_is_the_most_that_fits(type: str, share: float) -> None:
    """Factors and thresholds counted from arrays that are really made; of whole blocks of 32."""
    neurons, dim = 1024, 256
    most = share * 3 * neurons * dim * 2

    def nbytes(rank: int) -> int:
        first, second = (quantise(np.zeros(shape), type) for shape in ((rank, dim), (neurons, rank)))
        return first.nbytes + second.nbytes + np.zeros(neurons, np.float32).nbytes

    ranks = fitting.ranks(neurons, dim, most, type)
    assert ranks == sorted(set(ranks)) and all(rank % 32 == 0 for rank in ranks)
    assert ranks[-1] == max(rank for rank in range(32, dim + 1, 32) if nbytes(rank) <= most)
    assert fitting.ranks(neurons, dim, nbytes(32), type) == [32]
    assert fitting.ranks(neurons, dim, nbytes(32) - 1, type) == []
