"""Files of small block types that `quantize` writes: they run, and give what their weights are worth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.plain_forward import Model, forward
from support.runner import Runner

from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend
from hotcold.quantize.quantization import QuantizeOptions, quantize

TOKENS = np.array([3, 17, 5, 11, 8, 2, 30, 1, 9, 4, 22, 7])


@pytest.mark.parametrize(
    ("mixture", "type"), [("Q2_K", "Q2_K"), ("Q3_K_M", "Q3_K"), ("IQ4_XS", "IQ4_XS"), ("TQ2_0", "TQ2_0")]
)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_file_that_was_written_runs(mixture: str, type: str, activation: str, tmp_path: Path) -> None:
    model = Model(
        dim=256, heads=4, head_dim=64, rotary=64, neurons=(256, 512), activation=activation, type="F32"
    )
    path = tmp_path / "new.gguf"
    quantize(model.write(tmp_path / "model.gguf"), path, QuantizeOptions(mixture))
    with open_gguf(path) as file:
        tensors = {name: file.load(name) for name in file.tensors}
    assert type in {tensor.type.name for tensor in tensors.values()}
    expected = forward(model, tensors, TOKENS, np.float16)
    runner = Runner(path, open_backend("cpu"))
    logits = np.concatenate([runner.run(TOKENS[:9]), runner.run(TOKENS[9:], decode=True)])
    assert np.abs(logits - expected).max() < 0.02 * np.abs(expected).max()
