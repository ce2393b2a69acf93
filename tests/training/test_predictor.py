"""Trained predictors of a layer: against the SVD, the definition of the loss, and runs without a break."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plain_forward import Model

pytest.importorskip("torch", reason="training needs torch")

import torch

from hotcold.errors import UserError
from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf
from hotcold.model.config import Config
from hotcold.sparse.fitting import Fit, FitOptions, Fitted
from hotcold.sparse.predictor import PredictorError
from hotcold.training import predictor
from hotcold.training.examples import Examples
from hotcold.training.layer import Texts, TrainedLayer, _Attempt, first_size, search, train_layer
from hotcold.training.options import TrainOptions
from hotcold.training.predictor import Learned, reproducible, train

DIM, NEURONS = 64, 96
QUICK = TrainOptions(epochs=12, rate=0.01)


def inputs(seed: int, tokens: int) -> dict[str, np.ndarray]:
    """Around points of their own, as words are, so that more is to be learned than the covariance tells."""
    random = np.random.default_rng(seed)
    words = 2 * np.random.default_rng(5).standard_normal((80, DIM))
    values = words[random.integers(0, 80, tokens)] + 0.5 * random.standard_normal((tokens, DIM)) + 0.2
    return {"normed": values.astype(np.float32)}


def trained(
    folder: Path, model: Model, options: FitOptions, training: TrainOptions = QUICK
) -> tuple[TrainedLayer, dict[str, np.ndarray], Texts]:
    texts = Texts(inputs(1, 1500), inputs(2, 300), inputs(3, 400))
    tensors = model.tensors()
    down = tensors["blk.0.ffn_down.weight"].dequantise()
    down *= np.random.default_rng(4).lognormal(
        sigma=1.5, size=NEURONS
    )  # some neurons add much more than others
    tensors["blk.0.ffn_down.weight"] = quantise(down.astype(np.float32), "F32")
    with open_gguf(model.write(folder / "model.gguf", tensors)) as file, reproducible(1):
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        found = train_layer(file, config, 0, options, training, texts, folder)
        names = [name for name in ("gate", "up", "down") if f"blk.0.ffn_{name}.weight" in file.tensors]
        weights = {name: file.load(f"blk.0.ffn_{name}.weight").dequantise() for name in names}
    return found, weights, texts


def added(weights: dict[str, np.ndarray], activation: str, x: np.ndarray) -> np.ndarray:
    """Computes what each neuron adds, by the definition, in float64."""
    gate = x.astype(np.float64) @ weights["gate" if "gate" in weights else "up"].T
    up = x.astype(np.float64) @ weights["up"].T if "gate" in weights else 1.0
    h = np.maximum(gate, 0) * (np.maximum(up, 0) if activation == "drelu" else up)
    return np.abs(h * gate if activation == "relu2" else h) * np.linalg.norm(weights["down"], axis=0)


@pytest.mark.parametrize(
    ("activation", "gated"), [("drelu", True), ("relu", True), ("relu", False), ("relu2", False)]
)
def test_training_marks_fewer_than_the_svd(tmp_path: Path, activation: str, gated: bool) -> None:
    """At one rank, whose figures are recounted from the stored factors; both must find 0.95 by weight."""
    model = Model(dim=DIM, neurons=(NEURONS,), activation=activation, gated=gated)
    options = FitOptions("train", 0.95, True, "Q8_0", 0.16)
    found, weights, texts = trained(tmp_path, model, options)
    x = texts.held_out["normed"]
    adds = added(weights, activation, x)
    tensors, fit = found.best
    scores = x @ tensors.first.dequantise().T @ tensors.second.dequantise().T
    marked = scores >= tensors.threshold
    assert fit.rank == found.svd.fit.rank == 32 and fit.size_ratio <= 0.16
    assert fit.candidates == pytest.approx(marked.mean(), abs=5e-3)
    assert fit.active == pytest.approx((adds > 0).mean(), abs=1e-3)
    assert fit.weighted_recall == pytest.approx((adds * marked).sum() / adds.sum(), abs=5e-3)
    assert fit.weighted_recall > 0.93
    # Thresholds that give the SVD the same recall of this very text mark more.
    svd = found.svd.tensors
    scores = x @ svd.first.dequantise().T @ svd.second.dequantise().T - svd.threshold
    scores /= scores.std(axis=0)
    order = np.argsort(-scores, axis=None)
    needed = np.searchsorted(np.cumsum(adds.ravel()[order]), fit.weighted_recall * adds.sum())
    assert fit.candidates < 0.99 * needed / adds.size
    assert {path.suffix for path in tmp_path.iterdir()} == {".gguf", ".state"}


def test_with_a_relu_between(tmp_path: Path) -> None:
    model = Model(dim=DIM, neurons=(NEURONS,), activation="relu")
    options = FitOptions("train", 0.95, True, "Q8_0", 0.4)
    found, weights, texts = trained(tmp_path, model, options, TrainOptions(1, 6, 0.01, relu=True))
    x, (tensors, fit) = texts.held_out["normed"], found.best
    marked = (
        np.maximum(x @ tensors.first.dequantise().T, 0) @ tensors.second.dequantise().T >= tensors.threshold
    )
    adds = added(weights, "relu", x)
    assert tensors.relu and fit.weighted_recall > 0.93
    assert fit.weighted_recall == pytest.approx((adds * marked).sum() / adds.sum(), abs=5e-3)


def test_no_predictor_is_small_enough(tmp_path: Path) -> None:
    model = Model(dim=DIM, neurons=(NEURONS,), activation="relu")
    with pytest.raises(
        PredictorError, match="layer 0: no predictor fits in at most 1% of the FFN's 73728 bytes"
    ):
        trained(tmp_path, model, FitOptions("train", type="Q4_0", max_share=0.01))


def some_experts(seed: int = 1, tokens: int = 300) -> Examples:
    """Four experts of 16 neurons; a token chooses two, and no token chooses the last one."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((tokens, DIM)).astype(np.float32)
    ids = np.stack([random.permutation(3)[:2] for _ in range(tokens)])
    rows = [np.flatnonzero((ids == expert).any(axis=1)) for expert in range(4)]
    gates = np.random.default_rng(9).standard_normal((4, 16, DIM)).astype(np.float32)
    return Examples(x, rows, [np.maximum(x[own] @ gates[e].T - 6, 0) for e, own in enumerate(rows)])


def test_the_loss_is_what_it_says() -> None:
    examples, random = some_experts(), np.random.default_rng(2)
    first = random.standard_normal((32, DIM)).astype(np.float32) / 8
    second = random.standard_normal((64, 32)).astype(np.float32) / 8
    run = predictor._Run(first, second, FitOptions("train", 0.99, type="Q8_0"), TrainOptions(), examples)
    tokens = np.array([3, 5, 40, 41, 200])
    stored = [
        quantise(run.parameters[name].detach().numpy(), "Q8_0").dequantise() for name in ("first", "second")
    ]
    bias, mean = (
        run.parameters["bias"].detach().numpy(),
        np.mean([v for e in examples.adds for v in e[e > 0]]),
    )
    total, pairs, all_added, found = 0.0, 0, 0.0, 0.0
    for token in tokens:
        scores = stored[1] @ (stored[0] @ examples.x[token]) + bias
        for expert, own in enumerate(examples.rows):
            for neuron in range(16 if token in own else 0):
                adds = float(examples.adds[expert][np.flatnonzero(own == token)[0], neuron])
                score = float(scores[16 * expert + neuron])
                total += (
                    math.exp(run.price) * adds / mean * math.log1p(math.exp(-score))
                    if adds
                    else math.log1p(math.exp(score))
                )
                pairs, all_added, found = pairs + 1, all_added + adds, found + adds * (score >= 0)
    loss, recall = run._loss(examples, tokens)
    assert pairs == 5 * 2 * 16 and float(loss.detach()) == pytest.approx(total / pairs, rel=1e-4)
    assert recall == pytest.approx(found / all_added, rel=1e-4)


def learn(state: Path, epochs: int = 3, rate: float = 0.01) -> Learned:
    random = np.random.default_rng(3)
    first = random.standard_normal((32, DIM)).astype(np.float32) / 8
    second = random.standard_normal((64, 32)).astype(np.float32) / 8
    options, training = FitOptions("train", 0.9, type="Q8_0"), TrainOptions(epochs=epochs, rate=rate)
    with reproducible(1):
        return train(first, second, options, training, some_experts(1, 1100), some_experts(2), state)


def same(one: Learned, other: Learned) -> bool:
    arrays = all(np.array_equal(getattr(one, n), getattr(other, n)) for n in ("first", "second", "bias"))
    return arrays and one.marked == other.marked


def test_a_break_at_any_step_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three epochs of four steps; a run is interrupted at each of them, and continues."""
    whole = learn(tmp_path / "whole")
    loss = predictor._Run._loss
    for broken in range(12):
        left = broken

        def count(self: Any, *args: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return loss(self, *args)

        monkeypatch.setattr(predictor._Run, "_loss", count)
        state = tmp_path / f"state-{broken}"
        with pytest.raises(KeyboardInterrupt):
            learn(state)
        assert state.exists() == (broken >= 4)
        monkeypatch.setattr(predictor._Run, "_loss", loss)
        assert same(learn(state), whole)
    assert not same(learn(tmp_path / "other", rate=0.02), whole)


def test_a_loss_that_is_not_finite_keeps_what_was_learned(tmp_path: Path) -> None:
    state = tmp_path / "state"
    learn(state, epochs=1)
    kept = state.read_bytes()
    with pytest.raises(UserError, match=r"rank 32, epoch 2: .*; the state before it is kept: .* `rate`"):
        learn(state, epochs=3, rate=1e30)
    assert state.read_bytes() == kept
    assert np.isfinite(learn(state, epochs=3).second).all()


def test_training_leaves_torch_as_it_was() -> None:
    before = torch.get_num_threads()
    with reproducible(before + 1):
        assert torch.are_deterministic_algorithms_enabled() and torch.get_num_threads() == before + 1
    assert not torch.are_deterministic_algorithms_enabled() and torch.get_num_threads() == before


def attempt(rank: int, marked: float) -> _Attempt:
    fit = Fit(rank, 0, 0.0, marked, 0.1, 1.0, 1.0, 0.5)
    return _Attempt(Fitted(None, fit), marked, 0.1)  # type: ignore[arg-type]


@given(
    marked=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6).map(lambda all: sorted(all, reverse=True)),
    data=st.data(),
)
def test_the_smallest_rank_that_holds(marked: list[float], data: st.DataObject) -> None:
    """Where a larger rank never marks more: the first of all that holds, or the last."""
    at = data.draw(st.integers(0, len(marked) - 1))
    asked: list[int] = []

    def train_one(rank: int) -> _Attempt:
        asked.append(rank)
        return attempt(rank, marked[rank])

    best, tried = search(list(range(len(marked))), at, 1.5, train_one)
    limit = 1.5 * 0.1
    first = next((rank for rank, share in enumerate(marked) if share <= limit), None)
    if first is None:
        assert best.marked == min(marked)
    else:
        assert best.fitted.fit.rank == first
    assert asked[0] == at and len(set(asked)) == len(asked) == len(tried)


def test_sparse_and_skewed_layers_begin_narrow() -> None:
    sizes = [32, 64, 96, 128, 256]
    half, tenth = np.full(100, 0.5), np.full(100, 0.1)
    skewed = np.array([0.999] * 9 + [0.01] * 91)  # as active as a tenth, by few neurons
    assert sizes[first_size(sizes, half, 256)] == 256
    assert sizes[first_size(sizes, tenth, 256)] == 128  # 0.469 bits of 256 is 120
    assert sizes[first_size(sizes, skewed, 256)] == 32
    assert sizes[first_size(sizes, np.zeros(100), 256)] == 32
