"""Synthetic models: files that are complete, and as sparse as they claim."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.formats.blocks import Tensor, block_type
from hotcold.formats.gguf import open_gguf
from hotcold.runtime.counters import Figures
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session
from hotcold.tasks.scoring import Scorer, score

pytestmark = [pytest.mark.usefixtures("benchmarks"), pytest.mark.full]


@pytest.fixture(scope="module")
def synthetic() -> Any:
    return importlib.import_module("lib.models")


def generated(session: Session) -> tuple[list[int], Figures]:
    tokens = np.random.default_rng(4).integers(259, 2000, 40).tolist()
    request = Request(Job(tokens, SamplingParams(seed=1), max_tokens=30, ignore_eos=True))
    Engine(session).run([request])
    return request.output, Figures.from_counters(session.counters, session.footprint)


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_the_weights_cause_the_activity(synthetic: Any, architecture: str, tmp_path: Path) -> None:
    """A tenth of the neurons of chosen experts is active, which the predictor finds; all experts are
    chosen."""
    shape = synthetic.Shape(
        512, 256, 2, 4, 2, 2000, 256, architecture, 8, 2, 64, qk_norm=architecture == "qwen3moe"
    )
    synthetic.write(tmp_path / "m.gguf", synthetic.Recipe(shape, "Q4_0", 0.1))
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


@pytest.mark.parametrize(
    ("type", "active", "gated"),  # each pair of values once or twice
    [
        ("Q4_0", 0.05, True),
        ("Q4_0", 0.2, False),
        ("Q8_0", 0.05, False),
        ("Q8_0", 0.2, True),
        ("F16", 0.05, True),
        ("F16", 0.2, False),
    ],
)
def test_the_share_of_active_neurons(
    synthetic: Any, tmp_path: Path, type: str, active: float, gated: bool
) -> None:
    """Counted while the model runs, against the share that was asked for."""
    shape = synthetic.Shape(512, 1408, 3, 8, 4, 2000, 512)
    path = tmp_path / "sparse.gguf"
    synthetic.write(path, synthetic.Recipe(shape, type, active, "by_neuron", seed=3, gated=gated))
    session = load(path, LoadOptions()).session()
    assert session.sparsity == "exact" and session.model.config.gated == gated
    scorer = Scorer(session)
    score(scorer, np.random.default_rng(0).integers(259, 2000, 200).tolist())
    assert scorer.figures.active_share_by_layer == pytest.approx([active] * 3, rel=0.1)


def test_a_stock_file_runs_dense_and_has_all_that_llama_cpp_wants(synthetic: Any, tmp_path: Path) -> None:
    path = tmp_path / "dense.gguf"
    shape = synthetic.Shape(512, 1408, 2, 8, 8, 1000, 256)
    synthetic.write(path, synthetic.Recipe(shape))
    assert load(path, LoadOptions()).session().sparsity == "off"
    fields = GGUFReader(path).fields
    assert not any(name.startswith("hotcold.") for name in fields)
    assert {"llama.rope.dimension_count", "llama.vocab_size", "tokenizer.ggml.token_type"} <= fields.keys()
    assert len(set(synthetic.synthetic_vocabulary(32000)["tokenizer.ggml.tokens"])) == 32000


@pytest.mark.parametrize("type", ["Q4_0", "Q8_0", "F16", "F32"])
def test_random_blocks_have_the_spread_that_was_asked_for(synthetic: Any, type: str) -> None:
    kind = block_type(type)
    rows = synthetic.random_rows(np.random.default_rng(0), kind, 64, 1024, 0.02)
    values = Tensor(kind, (64, 1024), rows).dequantise()
    assert values.std() == pytest.approx(0.02, rel=0.05)
    assert abs(values.mean()) < 0.001


def test_shares_follow_a_power_law_of_the_right_mean(synthetic: Any) -> None:
    shares = synthetic.power_law(1000, 0.1)
    assert shares.mean() == pytest.approx(0.1) and (np.diff(shares) <= 0).all() and shares.max() <= 1
    tail = shares[shares < 1]
    assert tail[0] / tail[-1] > 20


@pytest.mark.parametrize("type", ["Q4_0", "Q8_0", "F16"])
def test_layouts_hold_the_same_weights(synthetic: Any, tmp_path: Path, type: str) -> None:
    shape = synthetic.Shape(512, 1376, 1, 8, 8, 1000, 256)
    weights = {}
    for layout in synthetic.LAYOUTS:
        path = tmp_path / layout
        synthetic.write(path, synthetic.Recipe(shape, type, 0.1, layout))
        with open_gguf(path) as file:
            assert file.magic == ("PWRI" if layout == "pwri" else "GGUF")
            assert ("hotcold.ffn.activation" in file.metadata) == (layout != "pwri")
            assert ("hotcold.ffn.down_layout" in file.metadata) == (layout == "by_neuron")
            weights[layout] = {name: file.load(name).dequantise() for name in file.tensors}
    stock = weights["by_output"]
    assert not stock["blk.0.ffn_down.weight"][-synthetic.RESERVED :].any()
    assert stock["blk.0.ffn_down.weight"].std() > 0
    by_neuron = stock | {"blk.0.ffn_down.weight": stock["blk.0.ffn_down.weight"].T}
    np.testing.assert_equal(weights["by_neuron"], by_neuron)
    pwri = {name.replace("down_t", "down"): values for name, values in weights["pwri"].items()}
    np.testing.assert_equal({name: pwri[name] for name in by_neuron}, by_neuron)
    assert pwri.keys() - by_neuron.keys() == {"blk.0.fc1.weight", "blk.0.fc2.weight"}


@pytest.mark.parametrize(
    ("predictor", "gated"), [("F16", True), ("F16", False), ("Q8_0", True), ("Q4_0", False)]
)
def test_a_predictor_finds_the_active_neurons(
    synthetic: Any, tmp_path: Path, predictor: str, gated: bool
) -> None:
    """It marks a tenth of the neurons, as computed from the file, and nearly all active ones."""
    shape = synthetic.Shape(512, 1376, 2, 8, 8, 1000, 256)
    path = tmp_path / "model.gguf"
    synthetic.write(path, synthetic.Recipe(shape, "Q4_0", 0.1, "pwri", predictor, gated=gated))
    with open_gguf(path) as file:
        x = file.load("token_embd.weight").dequantise()
        for layer in range(2):
            first, second = (file.load(f"blk.{layer}.fc{i}.weight").dequantise() for i in (1, 2))
            marked = np.maximum(x @ first.T, 0) @ second.T >= 0
            assert marked.mean() == pytest.approx(0.1, rel=0.1)
    tokens = np.random.default_rng(0).integers(259, 1000, 200).tolist()
    shares = {}
    for mode in ("exact", "predicted"):
        scorer = Scorer(load(path, LoadOptions(sparsity=mode)).session())
        score(scorer, tokens)
        shares[mode] = np.array(scorer.figures.active_share_by_layer)
    assert (shares["predicted"] / shares["exact"] > 0.97).all()
