"""Models with negated channels are equal models, so their roundings can be compared."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
from support.stories260k import write_stories260k

from hotcold.demo import model_path
from hotcold.formats.gguf import open_gguf
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks.scoring import Scorer

pytestmark = pytest.mark.usefixtures("benchmarks")


@pytest.mark.parametrize("layout", ["by_neuron", "by_output"])
def test_negated_models_have_equal_logits(layout: str, tmp_path: Path) -> None:
    """A product of two negated numbers has the same bits, so all sums have."""
    pytest.importorskip("scipy", reason="intervals need scipy")
    quantised = importlib.import_module("quality.quantised")
    source = Path(model_path())
    if layout == "by_output":
        source = tmp_path / "source.gguf"
        write_stories260k(source)
    logits, weights = [], []
    for seed in (1, 2):
        path = tmp_path / f"{seed}.gguf"
        quantised.write_negated(source, path, seed)
        with open_gguf(path) as file:
            weights.append([file.load(name).dequantise() for name in file.tensors])
        model = load(path, LoadOptions(sparsity="off", context=64, gpu="off"))
        logits.append(np.concatenate(list(Scorer(model.session()).logits([1, *range(300, 320)]))))
        model.close()
    assert np.array_equal(*logits)
    assert any(not np.array_equal(*pair) for pair in zip(*weights, strict=True))
