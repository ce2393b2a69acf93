"""The built-in model: what it is, and that its checkpoint still gives these bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.file_sizes import file_sizes

from hotcold.convert import ConvertOptions, convert
from hotcold.demo import model_path
from hotcold.formats.gguf import open_gguf
from hotcold.model.config import Config
from hotcold.placement.profiles import read_profile


def test_it_is_a_sparse_model_of_some_8_mb() -> None:
    file = open_gguf(model_path())
    assert 7e6 < file.size < 9e6
    metadata = file.metadata
    assert (metadata["general.architecture"], metadata["general.name"]) == ("bamboo", "fable-7m")
    assert metadata["general.license"] == "mit"
    assert metadata["hotcold.ffn.activation"] == "drelu"
    assert metadata["hotcold.ffn.down_layout"] == "by_neuron"
    down = file.tensors["blk.5.ffn_down.weight"]
    assert (down.type.name, down.shape) == ("Q8_0", (1024, 256))
    weights = sum(info.nbytes * info.type.weights // info.type.nbytes for info in file.tensors.values())
    assert round(weights / 1e6, 2) == 7.34


def test_its_model_card_is_beside_it() -> None:
    card = model_path().with_name("fable-7m.md").read_text(encoding="utf-8")
    assert "MIT" in card and model_path().name in card


def test_its_profile_is_small_and_its_own() -> None:
    """As sparse in each layer as the card says of the two texts."""
    path = model_path().with_suffix(".profile.gguf")
    with open_gguf(model_path()) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        firing = read_profile(path, file_sizes(file, config, 256, "f16")).firing
    card = ((0.155, 0.062, 0.079, 0.086, 0.094, 0.126), (0.143, 0.054, 0.077, 0.079, 0.101, 0.154))
    assert path.stat().st_size < 20_000
    assert [each.mean() for each in firing] == pytest.approx(np.mean(card, axis=0), rel=0.03)


def test_conversion_gives_its_bytes_again(test_data: Path, tmp_path: Path) -> None:
    convert(test_data / "models/fable-7m", tmp_path / "again.gguf", ConvertOptions("Q8_0", license="mit"))
    assert (tmp_path / "again.gguf").read_bytes() == model_path().read_bytes()
