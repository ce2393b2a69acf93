"""Synthetic models of experts: their files, their activity, and the comparison that they are made for."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.runtime.counters import Figures
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session

pytestmark = pytest.mark.usefixtures("benchmarks")


@pytest.fixture
def recipes() -> Any:
    return importlib.import_module("synthetic_experts")


def generated(session: Session) -> tuple[list[int], Figures]:
    tokens = np.random.default_rng(4).integers(259, 2000, 40).tolist()
    request = Request(Job(tokens, SamplingParams(seed=1), max_tokens=30, ignore_eos=True))
    Engine(session).run([request])
    return request.output, Figures.of(session.counters, session.footprint)


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_the_weights_cause_the_activity(recipes: Any, architecture: str, tmp_path: Path) -> None:
    """A tenth of the neurons of chosen experts fires, which the predictor finds; all experts are chosen."""
    shape = recipes.ExpertShape(
        512, 256, 2, 4, 2, 2000, 256, architecture, 8, 2, 64, qk_norm=architecture == "qwen3moe"
    )
    recipes.write(tmp_path / "m.gguf", recipes.Recipe(shape, "Q4_0", 0.1))
    model = load(tmp_path / "m.gguf", LoadOptions(threads=1, sparsity="predicted"))
    texts, shares = {}, {}
    for mode in ("off", "exact", "predicted"):
        texts[mode], figures = generated(model.session(mode))
        assert figures.active_share is not None
        shares[mode] = figures.active_share
    assert texts["off"] == texts["exact"]
    assert shares["off"] == pytest.approx(0.25)
    assert shares["exact"] == pytest.approx(0.025, rel=0.3)
    assert 0.9 * shares["exact"] < shares["predicted"] <= shares["exact"]


def test_dense_experts_and_a_comparison(
    recipes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = importlib.import_module("compare_experts")
    contestants = importlib.import_module("contestants")
    shape = recipes.ExpertShape(512, 256, 1, 4, 2, 2000, 256, "llama", 4, 2, 128, qk_norm=False)
    path = tmp_path / "m.gguf"
    recipes.write(path, recipes.Recipe(shape))
    lengths = contestants.Lengths(40, 4, 2, parallel_prompt=4, parallel_generate=3)

    def ours_again(path: Path, threads: int, lengths: Any, *, all_logits: bool) -> Any:
        assert all_logits
        return contestants.Ours(
            load(path, LoadOptions(threads=threads, sequences=2, context=lengths.context)).session(), lengths
        )

    monkeypatch.setattr(comparison, "LlamaCpp", ours_again)
    found = comparison.contestants(path, 1, lengths)
    assert [*found] == ["off", "llama.cpp"]
    table = comparison.rows(comparison.run(found, 2))
    assert len(table) == 6 and all(row["pairs"] == 2 for row in table)
    assert {row["ratio"] for row in table if row["contestant"] == "llama.cpp"} == {1.0}
