"""Models of experts against transformers, and what their files may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.changed_models import changed, config_of
from support.expert_models import NAMES, expert_golden
from support.golden import Golden
from support.runner import Runner

from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.kernels import open_backend
from hotcold.kernels.backend import Backend
from hotcold.model.config import Config, ModelError


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return open_backend(str(request.param))


@pytest.fixture(scope="module", params=NAMES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return expert_golden(str(request.param), tmp_path_factory.mktemp("golden"))


def test_logits_are_those_of_transformers(tiny: Golden, backend: Backend) -> None:
    """Prompt at once, in chunks, as decode rows together, and step by step."""
    runner = Runner(tiny.path, backend, cache_type="f32")

    def close(logits: np.ndarray, expected: np.ndarray) -> None:
        np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)

    close(runner.run(tiny.prompt), tiny.prompt_logits)
    steps = [runner.run([int(token)], decode=True) for token in tiny.steps]
    close(np.vstack(steps), tiny.step_logits)
    chunks = runner.run_in_parts(tiny.prompt, 7)
    close(chunks, tiny.prompt_logits)
    runner.length = 0
    close(runner.run(tiny.prompt, decode=True), tiny.prompt_logits)


@pytest.mark.parametrize("name", ["tiny-mixtral", "tiny-turbosparse", "tiny-gpt-oss"])
def test_down_by_neuron_is_down_by_output(name: str, tmp_path: Path, backend: Backend) -> None:
    tiny = expert_golden(name, tmp_path, down="by_neuron")
    logits = Runner(tiny.path, backend, cache_type="f32").run(tiny.prompt)
    np.testing.assert_allclose(logits, tiny.prompt_logits, atol=1e-4, rtol=0)


def test_smallthinker_as_powerinfer_writes_it(tmp_path: Path, backend: Backend) -> None:
    """Its converter transposes down without a key that says so, and adds a predictor of the head."""
    tiny, neurons = expert_golden("tiny-smallthinker", tmp_path), 16
    by_output, by_neuron = tmp_path / "by_output.gguf", tmp_path / "by_neuron.gguf"
    with open_gguf(tiny.path) as file:
        sizes = dict.fromkeys(("feed_forward_length", "expert_feed_forward_length"), neurons)
        own = {key: value for key, value in file.metadata.items() if not key.startswith("hotcold.")}
        metadata = own | {f"smallthinker.{key}": np.uint32(value) for key, value in sizes.items()}
        arrays = {name: file.load(name).dequantise() for name in file.tensors}
    for name in [name for name in arrays if "_exps" in name]:
        arrays[name] = arrays[name][..., :neurons] if "down" in name else arrays[name][:, :neurons]
    write_gguf(by_output, metadata, {name: quantise(each, "F32") for name, each in arrays.items()})
    arrays = {name: each.swapaxes(1, 2) if "down_exps" in name else each for name, each in arrays.items()}
    arrays["lm_head_profiler.weight"] = np.ones((8, 32), np.float32)
    tensors = {name: quantise(np.ascontiguousarray(each), "F32") for name, each in arrays.items()}
    write_gguf(by_neuron, metadata, tensors)
    for path, layout in ((by_output, "by_output"), (by_neuron, "by_neuron")):
        with open_gguf(path) as file:
            assert Config.from_metadata(file.metadata, file.magic, file.tensors).down_layout == layout
    expected = Runner(by_output, backend, cache_type="f32").run(tiny.prompt)
    logits = Runner(by_neuron, backend, cache_type="f32").run(tiny.prompt)
    np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=0)
    assert logits.std() > 0.1


@pytest.mark.parametrize("type", ["MXFP4", "Q4_0"])
def test_experts_in_blocks(type: str, tmp_path: Path, backend: Backend) -> None:
    """Against their own values in F32; inputs of dots are rounded to int8, which is worth a few percent."""
    tiny = expert_golden("tiny-gpt-oss", tmp_path, type=type)
    with open_gguf(tiny.path) as file:
        assert file.tensors["blk.0.ffn_down_exps.weight"].type.name == type
        twin = {key: quantise(file.load(key).dequantise(), "F32") for key in file.tensors}
        write_gguf(tmp_path / "twin.gguf", file.metadata, twin)
    actual, expected = (
        Runner(path, backend, cache_type="f32").run(tiny.prompt[:8])
        for path in (tiny.path, tmp_path / "twin.gguf")
    )
    off = np.sqrt(((actual - expected) ** 2).mean() / (expected**2).mean())
    assert 1e-5 < off < 0.05


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 2000}, "expert_count is 2000: a whole number from 0 to 1024 is needed"),
        ({"llama.expert_count": 5}, r"ffn_gate_inp.weight has shape \(4, 32\)"),
        ({"llama.expert_used_count": 5}, "expert_used_count is 5: a whole number from 1 to 4 is needed"),
        ({"llama.expert_used_count": None}, "expert_used_count is missing"),
        ({"llama.expert_gating_func": 4}, "expert_gating_func is 4: a whole number from 0 to 3 is needed"),
        ({"llama.expert_weights_norm": 1}, "expert_weights_norm is 1: a truth value is needed"),
        ({"llama.expert_weights_scale": "x"}, "expert_weights_scale is 'x'"),
        (
            {"llama.expert_group_count": 8},
            "expert_group_count is 8: 4 experts in 8 groups: a divisor of them",
        ),
        ({"llama.leading_dense_block_count": 1}, "tensor blk.0.ffn_up.weight is missing"),
        ({"llama.expert_feed_forward_length": 1 << 20}, "a whole number from 1 to 262144 is needed"),
        (
            {"llama.feed_forward_length": np.array([np.inf, np.inf])},
            r"length\[0\] is inf: a whole number",
        ),
        ({"llama.feed_forward_length": np.array([32.5, 32.5])}, r"length\[0\] is 32.5: a whole number"),
        (
            {"llama.feed_forward_length": np.array([96, 96, 96])},
            "an array of 3: one number or 2 are needed",
        ),
        (
            {"llama.feed_forward_length": np.array([96, 48])},
            "is 48 in some layers and 96 in others",
        ),
        ({"llama.feed_forward_length": ["a", "b"]}, r"feed_forward_length\[0\] is 'a': a whole number"),
        ({"llama.feed_forward_length": 95}, r"has shape \(4, 96, 32\): the metadata asks for \(4, 95, 32\)"),
        ({"llama.expert_shared_feed_forward_length": 64}, "tensor blk.0.ffn_up_shexp.weight is missing"),
        ({"llama.expert_count": None}, "tensor blk.0.ffn_up.weight is missing"),
        ({"llama.expert_shared_count": np.array([1, 2])}, r"expert_shared_count is .*: a whole number"),
    ],
)
def test_files_that_are_wrong(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny = expert_golden("tiny-mixtral", tmp_path)
    with pytest.raises(ModelError, match=message):
        config_of(changed(tiny.path, tmp_path / "changed.gguf", metadata))


@pytest.mark.parametrize("name", ["ffn_gate_inp", "ffn_up_exps"])
def test_a_tensor_that_is_missing(name: str, tmp_path: Path) -> None:
    tiny = expert_golden("tiny-mixtral", tmp_path)
    with pytest.raises(ModelError, match=f"tensor blk.1.{name}.weight is missing"):
        config_of(changed(tiny.path, tmp_path / "changed.gguf", {}, {f"blk.1.{name}.weight": None}))


def test_what_a_file_may_state(tmp_path: Path) -> None:
    """Keys are stronger than the family's facts; a list of layers may give the neurons."""
    tiny = expert_golden("tiny-mixtral", tmp_path)
    implied = config_of(tiny.path).experts
    assert implied is not None
    assert (implied.score, implied.normalise, implied.scale) == ("softmax", True, 1.0)
    keys = {
        "expert_gating_func": 2, "expert_weights_norm": False, "expert_weights_scale": 2.5,
        "expert_feed_forward_length": np.array([96, 96], np.uint32),
    }  # fmt: skip
    stated = config_of(
        changed(tiny.path, tmp_path / "changed.gguf", {f"llama.{key}": value for key, value in keys.items()})
    )
    assert stated.experts is not None and stated.neurons == (384, 384)
    assert (stated.experts.score, stated.experts.normalise, stated.experts.scale) == ("sigmoid", False, 2.5)
    zero = {
        "llama.expert_weights_scale": 0.0,
        "llama.expert_gating_func": 3,
        "llama.expert_weights_norm": False,
    }
    chosen = config_of(changed(tiny.path, tmp_path / "changed.gguf", zero)).experts
    assert chosen == implied


@pytest.mark.parametrize("name", ["tiny-qwen2moe", "tiny-qwen3moe"])
def test_files_that_leave_out_the_neurons_of_an_expert(name: str, tmp_path: Path, backend: Backend) -> None:
    """llama.cpp's first ones: ``feed_forward_length`` is that of the experts that a token gets, together."""
    tiny = expert_golden(name, tmp_path)
    stated = config_of(tiny.path).experts
    assert stated is not None
    arch = name.removeprefix("tiny-")
    keys = {
        "feed_forward_length": stated.neurons * stated.chosen,
        "expert_feed_forward_length": None,
        "expert_shared_feed_forward_length": None,
    }
    absent = {f"{arch}.{key}": value for key, value in keys.items()}
    old = changed(tiny.path, tmp_path / "changed.gguf", absent)
    assert config_of(old).experts == stated and (stated.shared > 0) is (name == "tiny-qwen2moe")
    logits = Runner(old, backend, cache_type="f32").run(tiny.prompt)
    np.testing.assert_allclose(logits, tiny.prompt_logits, atol=1e-4, rtol=0)
    absent[f"{arch}.feed_forward_length"] = (stated.neurons + 1) * stated.chosen
    with pytest.raises(ModelError, match=r"_exps\.weight has shape"):
        config_of(changed(tiny.path, tmp_path / "changed.gguf", absent))


def test_a_selection_bias_moves_the_choice_and_no_factor(tmp_path: Path) -> None:
    """With a bias that decides alone, every token gets the same experts, whose factors are their own."""
    tiny = expert_golden("tiny-mixtral", tmp_path)
    with open_gguf(tiny.path) as file:
        tensors = {name: file.load(name) for name in file.tensors}
        bias = quantise(np.array([0, 9, 0, 5], np.float32), "F32")
        tensors |= {f"blk.{i}.exp_probs_b.bias": bias for i in range(2)}
        write_gguf(tmp_path / "biased.gguf", file.metadata, tensors)
    backend = open_backend("reference")
    runner = Runner(tmp_path / "biased.gguf", backend, cache_type="f32")
    runner.run(tiny.prompt[:5])
    assert len(runner.transformer.chosen) == 2
    for chosen in runner.transformer.chosen:
        assert (backend.read(chosen.ids, 0, 5) == (1, 3)).all()
        factors = backend.read(chosen.factors, 0, 5)
        assert (np.abs(factors.sum(1) - 1) < 1e-5).all()
        assert len(np.unique(factors[:, 0])) == 5
