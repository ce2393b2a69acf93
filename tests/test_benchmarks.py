"""The synthetic models that speed is measured on: complete, and as sparse as they claim."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from gguf import GGUFReader

from hotcold.engine.loading import LoadOptions, load
from hotcold.engine.scoring import Scorer, score
from hotcold.formats.blocks import Tensor, block_type


@pytest.fixture(scope="module")
def synthetic(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("synthetic", repository / "benchmarks/synthetic.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("active", [0.05, 0.2])
@pytest.mark.parametrize("type", ["Q4_0", "Q8_0", "F16"])
def test_the_share_of_neurons_that_fires(
    synthetic: ModuleType, tmp_path: Path, type: str, active: float
) -> None:
    """Counted while the model runs, on the bytes of the file, against the share that was asked for."""
    shape = synthetic.Shape(512, 1408, 3, 8, 4, 2000, 512)
    path = tmp_path / "sparse.gguf"
    synthetic.write(path, shape, type, active=active, vocabulary=None, seed=3)
    model = load(path, LoadOptions())
    assert model.sparsity == "exact"
    scorer = Scorer(model)
    score(scorer, np.random.default_rng(0).integers(259, 2000, 200).tolist())
    assert scorer.figures.active_share_by_layer == pytest.approx([active] * 3, rel=0.1)


def test_a_stock_file_runs_dense_and_has_all_that_llama_cpp_wants(
    synthetic: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "dense.gguf"
    shape = synthetic.Shape(512, 1408, 2, 8, 8, 1000, 256)
    synthetic.write(path, shape, "Q4_0", active=None, vocabulary=None, seed=1)
    assert load(path, LoadOptions()).sparsity == "off"
    fields = GGUFReader(path).fields
    assert not any(name.startswith("hotcold.") for name in fields)
    assert {"llama.rope.dimension_count", "llama.vocab_size", "tokenizer.ggml.token_type"} <= fields.keys()
    assert len(set(synthetic.synthetic_vocabulary(32000)["tokenizer.ggml.tokens"])) == 32000


@pytest.mark.parametrize("type", ["Q4_0", "Q8_0", "F16", "F32"])
def test_random_blocks_have_the_spread_that_was_asked_for(synthetic: ModuleType, type: str) -> None:
    kind = block_type(type)
    rows = synthetic.random_rows(np.random.default_rng(0), kind, 64, 1024, 0.02)
    values = Tensor(kind, (64, 1024), rows).dequantise()
    assert values.std() == pytest.approx(0.02, rel=0.05)
    assert abs(values.mean()) < 0.001


def test_shares_follow_a_power_law_of_the_right_mean(synthetic: ModuleType) -> None:
    shares = synthetic.power_law(1000, 0.1)
    assert shares.mean() == pytest.approx(0.1) and (np.diff(shares) <= 0).all() and shares.max() <= 1
    tail = shares[shares < 1]
    assert tail[0] / tail[-1] > 20
