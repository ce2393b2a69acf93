"""All weights of all predictors are checked: none is left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotcold.demo import model_path
from hotcold.formats.blocks import Tensor, quantise
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.backend import PredictorTensors
from hotcold.kernels.reference import ReferenceBackend
from hotcold.model.config import Config
from hotcold.sparse import predictor

RANK = 32


def weights(rows: int, columns: int, spoilt: int | None) -> Tensor:
    values = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
    if spoilt is not None:
        values[spoilt, -1] = np.nan
    return quantise(values, "F16")


@pytest.mark.parametrize("spoilt", [None, 500, 1023])
def test_one_weight_that_is_not_finite(spoilt: int | None, tmp_path: Path) -> None:
    with open_gguf(model_path()) as file:
        config, fingerprint = (
            Config.from_metadata(file.metadata, file.magic, file.tensors),
            file.fingerprint(),
        )
    zeros = np.zeros(1024, np.float32)
    first = weights(RANK, config.dim, None)
    layers = [
        PredictorTensors(first, weights(n, RANK, spoilt if i == 5 else None), zeros, relu=False)
        for i, n in enumerate(config.neurons)
    ]
    path = tmp_path / "x.predictor.gguf"
    facts = {"input": "normed"}
    predictor.write_sidecar(path, fingerprint, layers, facts)
    with open_gguf(path) as file:
        if spoilt is None:
            assert len(predictor.load_predictors(file, config, ReferenceBackend(), fingerprint)) == 6
            return
        with pytest.raises(predictor.PredictorError, match=r"blk\.5\.predictor\.second .* not finite"):
            predictor.load_predictors(file, config, ReferenceBackend(), fingerprint)
