"""The method ``by-layer`` of the script on predictors: its choices against the reference backend."""

from __future__ import annotations

import argparse
import importlib
import math
import re
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.plain_forward import Model

from hotcold.demo import model_path
from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.backend import PredictorTensors
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.sparse.fitting import Fitted
from hotcold.sparse.predictor import write_sidecar
from hotcold.tasks import fitting
from hotcold.tasks.scoring import Scorer
from hotcold.tasks.windows import text_windows

pytestmark = pytest.mark.usefixtures("benchmarks")

CONTEXT = 48
NEURONS = 96, 128  # one rank alone fits, so that thresholds decide how many neurons are skipped
BUDGETS = 1e-3, 5e-3  # nats: recalls inside the range
RECALLS = 0.5, 0.999  # the largest names so few neurons that its divergence is not near 0
NEAR = 0.05  # relative: rounding of scores may move a neuron across its threshold

#: A step of the bisection: its layer, its recall, and the predictor.
Step = tuple[int, float, Fitted]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = importlib.import_module("quality.predictors")
    monkeypatch.setattr(module, "CONTEXT", CONTEXT)
    monkeypatch.setattr(module, "RECALLS", RECALLS)
    monkeypatch.setattr(fitting, "_ROUNDS", 1)
    return module


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A random ReLU model with the tokenizer of the built-in model."""
    with open_gguf(model_path()) as file:
        tokenizer = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    vocab = len(tokenizer["tokenizer.ggml.tokens"])
    shape = Model(dim=64, neurons=NEURONS, activation="relu", type="F16", vocab=vocab, extra=tokenizer)
    return shape.write(tmp_path / "model.gguf")


@pytest.fixture
def arguments(tmp_path: Path, repository: Path) -> argparse.Namespace:
    path = tmp_path / "text.txt"
    text = (repository / "tests" / "data" / "heidi.txt").read_text(encoding="utf-8")
    path.write_text(text[:5900], encoding="utf-8")
    return argparse.Namespace(
        text=path, held_out=path, work=tmp_path, kl=BUDGETS, tokens=10**6, eval_tokens=64, threads=1,
        layers=False,
    )  # fmt: skip


class Truth:
    """KL divergences from ``exact`` on the last fifth of a text, by the reference backend in float64."""

    def __init__(self, path: Path, text: str, judged: int) -> None:
        self.model = load(path, LoadOptions(backend="reference", context=CONTEXT, sparsity="exact"))
        windows = text_windows(self.model.tokenizer, text, CONTEXT)
        self.windows = windows[len(windows) * 4 // 5 :]
        assert len(self.windows) == judged  # so all of them judge
        self.sidecar = path.with_name("truth.predictor.gguf")
        self.exact = self.probabilities(Scorer(self.model.session("exact")))

    def probabilities(self, scorer: Scorer) -> np.ndarray:
        logits = [np.array(rows) for window in self.windows for rows in scorer.logits(window)]
        powers = np.exp(np.concatenate(logits).astype(np.float64))
        return powers / powers.sum(axis=1, keepdims=True)

    def divergence(self, layer: int, tensors: PredictorTensors) -> float:
        """The divergence if the other layers name all neurons: their scores are 0, and any score will do."""
        layers = [
            PredictorTensors(
                quantise(np.zeros((32, 64)), "F32"), quantise(np.zeros((n, 32)), "F32"),
                np.full(n, -1, np.float32), relu=False,
            )
            for n in NEURONS
        ]  # fmt: skip
        layers[layer] = tensors
        write_sidecar(self.sidecar, self.model.fingerprint, layers, {"input": "normed"})
        q = self.probabilities(Scorer(self.model.session("predicted", self.sidecar)))
        return float((self.exact * np.log(self.exact / q)).sum(axis=1).mean())


def stored_thresholds(path: Path) -> list[np.ndarray]:
    with open_gguf(path) as file:
        return [file.load(f"blk.{i}.predictor.threshold").dequantise() for i in range(len(NEURONS))]


def test_each_layer_has_the_least_recall_within_its_part_of_the_divergence(
    script: ModuleType, model: Path, arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The predictors in the file keep the bound. The next smaller recall that was tried breaks it, and is
    one width of the last step away. A looser bound skips at least as many neurons."""
    steps: list[Step] = []
    fit = script.LayerSearch.fitted

    def recorded(search: Any, layer: int, recall: float) -> Fitted:
        steps.append((layer, recall, fit(search, layer, recall)))
        return steps[-1][2]

    monkeypatch.setattr(script.LayerSearch, "fitted", recorded)
    truth = Truth(model, arguments.text.read_text(encoding="utf-8"), script.JUDGED)
    width = math.log((1 - RECALLS[0]) / (1 - RECALLS[1])) / 2**script.STEPS
    candidates = []
    for budget, report in zip(BUDGETS, script.by_layer(model, arguments), strict=True):
        stored = stored_thresholds(model.with_name("model-by-layer.predictor.gguf"))
        for layer, thresholds in enumerate(stored):
            tried = sorted((step[1:] for step in steps if step[0] == layer), key=lambda step: step[0])
            (at,) = (
                i for i, (_, made) in enumerate(tried) if np.array_equal(made.tensors.threshold, thresholds)
            )
            (below, less), (recall, chosen) = tried[at - 1 : at + 1]
            part = budget / len(NEURONS)
            assert truth.divergence(layer, chosen.tensors) <= part * (1 + NEAR)
            assert truth.divergence(layer, less.tensors) >= part * (1 - NEAR)
            assert math.log((1 - below) / (1 - recall)) == pytest.approx(width)
            assert asdict(chosen.fit) == report["layers"][layer]
        candidates.append([fit["candidates"] for fit in report["layers"]])
        steps.clear()
    assert np.all(np.array(candidates[1]) <= candidates[0]) and np.all(np.array(candidates) < 1)


def test_a_bound_that_no_recall_keeps_has_a_row_without_predictors(
    script: ModuleType,
    model: Path,
    arguments: argparse.Namespace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments.kl = [1e-9]
    assert list(script.by_layer(model, arguments)) == []
    reason = r"none: layer 0 costs .* nats at a recall of 0\.999: at most 5e-10, its part of --kl"
    assert re.search(reason, capsys.readouterr().out)
