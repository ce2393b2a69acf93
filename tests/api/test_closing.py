"""A closed LLM leaves nothing behind, even when something still refers to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.file_sizes import file_sizes
from support.threads import begun_threads

from hotcold import LLM
from hotcold.demo import model_path
from hotcold.formats.gguf import open_gguf
from hotcold.model.config import Config
from hotcold.placement.placement import Placement, write_placement


def test_closing_ends_the_cold_side_though_somebody_keeps_the_engine(tmp_path: Path) -> None:
    with open_gguf(model_path()) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        sizes = file_sizes(file, config, 256, "f16")
    hot = [np.arange(n) < n // 2 for n in sizes.neurons]
    write_placement(tmp_path / "half.gpuidx", sizes, Placement.on_one(hot, range(config.layers), True))
    begun = begun_threads()
    llm = LLM(placement=tmp_path / "half.gpuidx", hot_backend="cpu", threads=1)
    engine = llm.engine
    assert len(begun()) == 1
    llm.close()
    assert not begun()
    del engine


def test_closing_twice_is_harmless() -> None:
    with LLM() as llm:
        llm.close()
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        llm.generate("Once")
