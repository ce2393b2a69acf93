"""Plans of models whose layers keep states."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.file_sizes import file_sizes
from support.hybrid_models import KINDS, write_hybrid

from hotcold.formats.gguf import open_gguf
from hotcold.model.config import Config
from hotcold.placement.costs import Costs
from hotcold.placement.hardware import find_hardware
from hotcold.placement.placement import read_placement, write_placement
from hotcold.placement.profiles import find_profile
from hotcold.placement.solver import Solver


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_billed_and_a_layer_may_have_no_neurons(kind: str, tmp_path: Path) -> None:
    """On a GPU with room for all, each layer is whole: its states lie there, those after guesses too."""
    path = write_hybrid(tmp_path / f"{kind}.gguf", kind)
    with open_gguf(path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        sizes = file_sizes(file, config, 64, "f16", sequences=3, slots=12)
    states = [sum(4 * math.prod(shape) for shape, _ in mixer.slot_arrays()) for mixer in config.mixers]
    assert sizes.states is not None and sizes.states.tolist() == [12 * each for each in states]
    assert 0 < sum(states) == config.slot_bytes
    profile = find_profile(sizes, None, path)
    costs = Costs.expected(sizes, profile, find_hardware("rtx4090-i9"))
    assert (sizes.dense == sizes.attention + sizes.kv + 2 * np.array(states)).all()
    slow = replace(costs, cpu=replace(costs.cpu, dense=costs.cpu.dense * 1e6))
    placement = Solver(sizes, profile, slow).solve(1 << 30)
    assert placement.where == (0,) * config.layers
    bill = placement.bill(sizes)
    assert [row["gpu_bytes"] for row in bill if row["kind"] == "states"] == sizes.states.tolist()
    write_placement(tmp_path / "placed.gpuidx", sizes, placement)
    again = read_placement(tmp_path / "placed.gpuidx", sizes)
    assert again.where == placement.where
    assert all(np.array_equal(*pair) for pair in zip(again.hot, placement.hot, strict=True))
