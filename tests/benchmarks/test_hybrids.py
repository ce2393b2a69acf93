"""Files of families with states that benchmarks compare: complete, and as sparse as they claim."""

from __future__ import annotations

import dataclasses
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

pytestmark = pytest.mark.usefixtures("benchmarks")

#: Instead of the published widths; of Nemotron rows that are no multiple of 256, as in its files.
_STATES = {"inner": 512, "state": 64, "groups": 4, "state_heads": 8}
_SMALL: dict[str, dict[str, int]] = {
    "nemotron": {"dim": 544, "neurons": 96, "experts": 8, "chosen": 2, "shared": 160, "width": 64} | _STATES,
    "qwen35moe": {"dim": 512, "neurons": 256, "experts": 8, "chosen": 2, "shared": 256, "width": 128}
    | _STATES,
    "lfm2moe": {"dim": 512, "neurons": 256, "experts": 8, "chosen": 2, "dense": 512},
    "qwen35": {"dim": 512, "neurons": 512, "dense": 512, "width": 128} | _STATES,
}


@pytest.fixture(scope="module")
def hybrids() -> Any:
    return importlib.import_module("lib.hybrids")


def small(hybrids: Any, name: str) -> Any:
    return dataclasses.replace(hybrids.HYBRIDS[name], **_SMALL[name], heads=4, kv_heads=2, vocab=600)


def generated(session: Session) -> tuple[list[int], Figures]:
    tokens = np.random.default_rng(4).integers(259, 600, 20).tolist()
    request = Request(Job(tokens, SamplingParams(temperature=0), max_tokens=12, ignore_eos=True))
    Engine(session).run([request])
    return request.output, Figures.from_counters(session.counters, session.footprint)


@pytest.mark.parametrize("layout", ["by_output", "by_neuron"])
def test_zeros_in_experts(hybrids: Any, layout: str, tmp_path: Path) -> None:
    """A tenth of the neurons of the chosen experts, a quarter of all, is active."""
    hybrids.write(tmp_path / "m.gguf", hybrids.HybridRecipe(small(hybrids, "nemotron"), "Q4_0", 0.1, layout))
    model = load(tmp_path / "m.gguf", LoadOptions(threads=1, sparsity="exact"))
    exact, figures = generated(model.session("exact"))
    assert exact == generated(model.session("off"))[0]
    assert figures.active_share == pytest.approx(0.025, rel=0.3)


@pytest.mark.parametrize("name", ["qwen35moe", "lfm2moe", "qwen35"])
def test_others_run(hybrids: Any, name: str, tmp_path: Path) -> None:
    hybrids.write(tmp_path / "m.gguf", hybrids.HybridRecipe(small(hybrids, name), "Q4_K_M"))
    session = load(tmp_path / "m.gguf", LoadOptions(threads=1, sparsity="off")).session()
    output, figures = generated(session)
    assert len(set(output)) > 1
    shares = {"qwen35moe": 0.25, "lfm2moe": (1 + 7 * 0.25) / 8, "qwen35": 1}
    assert figures.active_share == shares[name]


def test_types_are_those_of_published_files(hybrids: Any, tmp_path: Path) -> None:
    """Rows that are no multiple of 256 weights get types of 32."""
    hybrids.write(tmp_path / "m.gguf", hybrids.HybridRecipe(small(hybrids, "nemotron"), "Q4_K_M", 0.1))
    types = {each.name: each.tensor_type.name for each in GGUFReader(tmp_path / "m.gguf").tensors}
    assert types["blk.1.ffn_up_exps.weight"] == types["blk.0.ssm_in.weight"] == "Q5_0"
    assert types["blk.1.ffn_down_exps.weight"] == types["output.weight"] == "Q8_0"
    assert types["blk.4.ffn_down_exps.weight"] == "Q5_0"
    assert types["blk.0.ssm_out.weight"] == "Q4_K"


def test_random_blocks_have_the_deviation(hybrids: Any) -> None:
    blocks = importlib.import_module("lib.random_blocks")
    for name in blocks.HALVES:
        kind = block_type(name)
        data = blocks.random_block_rows(np.random.default_rng(1), kind, 16, 1024, 0.02)
        values = Tensor(kind, (16, 1024), data).dequantise()
        assert values.std() == pytest.approx(0.02, rel=0.1), name
        assert abs(values.mean()) < 0.004, name


def test_a_model_of_one_type_that_is_only_read(tmp_path: Path) -> None:
    synthetic = importlib.import_module("lib.models")
    shape = synthetic.Shape(512, 1024, 1, 8, 4, 600, 256)
    synthetic.write(tmp_path / "m.gguf", synthetic.Recipe(shape, "IQ3_S"))
    with open_gguf(tmp_path / "m.gguf") as file:
        wide = {info.type.name for info in file.tensors.values() if len(info.shape) == 2}
    assert wide == {"IQ3_S"}
    output, _ = generated(load(tmp_path / "m.gguf", LoadOptions(threads=1, sparsity="off")).session())
    assert len(output) == 12
    with pytest.raises(ValueError, match="IQ3_S is not written"):
        synthetic.Recipe(shape, "IQ3_S", 0.1)
