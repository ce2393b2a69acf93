"""Tokens of a model's first layers: what is loaded is the model with those layers alone, and times of two
sizes give that of all layers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.many_experts import many_experts

from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.model.config import Config
from hotcold.runtime.loading import load, load_open
from hotcold.tasks import first_layers
from hotcold.tasks.first_layers import TokenTime, in_turns, sizes_to_time, time_tokens

OPTIONS = {"threads": 1, "context": 64, "draft_max": 0, "gpu": "off"}


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """A model of six layers, each scaled by another factor."""
    path = many_experts("tiny-qwen3moe", tmp_path, type="F32", down="by_output", count=8)
    with open_gguf(path) as file:
        metadata = dict(file.metadata)
        own = int(metadata["qwen3moe.block_count"])
        tensors = {}
        for name in file.tensors:
            tensor = file.load(name)
            if not name.startswith("blk."):
                tensors[name] = tensor
                continue
            _, layer, rest = name.split(".", 2)
            for copy in range(6 // own):
                scaled = tensor.data.view(np.float32) * np.float32(1 + 0.1 * copy)
                data = scaled.view(np.uint8).reshape(tensor.data.shape)
                tensors[f"blk.{int(layer) + own * copy}.{rest}"] = type(tensor)(
                    tensor.type, tensor.shape, data
                )
    assert 6 % own == 0
    deep = tmp_path / "deep.gguf"
    write_gguf(deep, metadata | {"qwen3moe.block_count": 6}, tensors)
    return deep


def test_first_layers_are_a_model_of_their_own(deep: Path, tmp_path: Path) -> None:
    """Beside a file that has these layers and no others."""
    with open_gguf(deep) as file:
        kept = [name for name in file.tensors if not name.startswith(("blk.3", "blk.4", "blk.5"))]
        alone = tmp_path / "alone.gguf"
        write_gguf(alone, file.metadata | {"qwen3moe.block_count": 3}, {n: file.load(n) for n in kept})
        three = load_open(first_layers.first_layers(file, 3), OPTIONS)
        one = first_layers._with_layers(three, first_layers.first_layers(file, 1), 1)
        single = load_open(first_layers.first_layers(file, 1), OPTIONS)
        assert int(file.metadata["qwen3moe.block_count"]) == 6 and len(file.tensors) > len(kept)
    assert three.config.layers == 3 and one.config.layers == 1
    assert logits(three) == logits(load(alone, OPTIONS))
    assert logits(one) == logits(single) != logits(three)


def logits(model: Any) -> list[float]:
    session = model.session()
    batch = session.transformer.batch
    batch.put(0, 0, 0, [5], [0])
    batch.counts[:] = 1, 1, 1, 1
    batch.lengths[0] = 1
    session.run()
    found: list[float] = model.devices.head.read(session.transformer.logits, 0, 1)[0].tolist()
    return found


@given(
    first=st.integers(0, 3),
    period=st.sampled_from([1, 2, 3, 4]),
    times=st.integers(2, 4),
    costs=st.lists(st.floats(0.001, 0.1), min_size=5, max_size=5),
)
def test_two_sizes_give_all_layers(first: int, period: int, times: int, costs: list[float]) -> None:
    """Layers of a few kinds in turns, some leading ones of another kind: the sum over all layers."""
    more = max(2, period)
    kinds = [9] * first + [i % period for i in range(more * times)]
    bytes_of = [0] * first + [64] * (more * times)
    config: Any = SimpleNamespace(mixers=kinds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_layers, "expert_bytes", lambda file, config: tuple(bytes_of))
        sizes = sizes_to_time(None, config)  # type: ignore[arg-type]
    if len(kinds) < max(first, 2) + more:
        assert sizes is None
        return
    assert sizes is not None
    few, large = sizes
    assert few == max(first, 2)

    def seconds(layers: int) -> float:
        return 0.005 + sum(0.2 if kind == 9 else costs[kind] for kind in kinds[:layers])

    found = TokenTime(few, large, seconds(few), (seconds(large) - seconds(few)) / (large - few), 14)
    # Of what is not a whole number of turns, the mean stands for its layers.
    left = (len(kinds) - few) % (large - few)
    assert found.token_s(len(kinds)) == pytest.approx(seconds(len(kinds)), abs=left * 0.1 + 1e-9)
    assert left or found.token_s(len(kinds)) == pytest.approx(seconds(len(kinds)))


def test_too_few_layers() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_layers, "expert_bytes", lambda file, config: (64, 64))
        config: Any = SimpleNamespace(mixers=[1, 1])
        assert sizes_to_time(None, config) is None  # type: ignore[arg-type]


def test_tokens_are_timed(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up clock, by which a step takes 7 ms and 3 for each layer; of one round something else ran."""
    rounds: list[list[float]] = []

    def turns(runs: list[Any]) -> list[list[float]]:
        layers = [run.__self__.engine.model.config.layers for run in runs]
        assert all(run() > 0 for run in runs)
        rounds.extend([0.007 + 0.003 * n + noise for n in layers] for noise in (0.0, 0.05, 0.0))
        rounds[-1][1] += 0.2
        return rounds

    monkeypatch.setattr(first_layers, "in_turns", turns)
    with open_gguf(deep) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        sizes = sizes_to_time(file, config)
        assert sizes == (2, 4)
        found = time_tokens(file, sizes, OPTIONS)
    assert found.token_s(6) == pytest.approx(0.007 + 6 * 0.003) and found.besides_s == pytest.approx(0.007)
    assert "3.00 ms a layer and 7.0 ms besides, by the first 4 layers" in str(found)


def test_runs_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_layers, "_SECONDS", 0.0)
    ran: list[int] = []

    def run(number: int) -> float:
        ran.append(number)
        return float(len(ran))

    assert in_turns([lambda: run(1), lambda: run(2)]) == [[3, 4], [5, 6], [7, 8]] and ran == [1, 2] * 4
