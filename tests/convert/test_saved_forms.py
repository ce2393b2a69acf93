"""Checkpoints as transformers 5.23 saves them where published ones are otherwise.

benchmarks/quality/convert_keys.py lets transformers save each golden model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import change_config, copy_checkpoint, tensors_of, write_safetensors
from support.golden import DATA
from support.runner import Runner

from hotcold.convert import ConvertError, ConvertOptions, convert
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend


def check(folder: Path, down: str | None = None) -> None:
    """Compares the logits of the converted file with those of the golden model of the folder's name."""
    out = folder.parent / "out.gguf"
    convert(folder, out, ConvertOptions("F32", down, force=True))
    with np.load(DATA / folder.name / "golden.npz", allow_pickle=False) as arrays:
        logits = Runner(out, open_backend("cpu"), cache_type="f32").run(arrays["prompt"])
        np.testing.assert_allclose(logits, arrays["prompt_logits"], atol=1e-4, rtol=0)


#: Gemma 4's keys of layers that see all positions, which transformers 5.23 does not save.
GLOBAL: dict[str, Any] = {"global_head_dim": ..., "num_global_key_value_heads": ...}


@pytest.mark.parametrize("names", [("2", "5"), ("02", "05")])
def test_keys_of_single_layers(names: tuple[str, str], tmp_path: Path) -> None:
    """Numbers have as many digits as the largest one."""
    for golden in ("tiny-gemma4", "tiny-gemma4-moe"):
        folder = copy_checkpoint(tmp_path, golden)
        own = {"head_dim": 16, "num_key_value_heads": 1}
        change_config(folder, **GLOBAL, per_layer_config=dict.fromkeys(names, own))
        check(folder)


def test_keys_of_all_layers(tmp_path: Path) -> None:
    """Layers may state what the model states, and the model may state what layers with a window do not."""
    folder = copy_checkpoint(tmp_path, "tiny-gemma4")
    kinds = [{"head_dim": 10}, {"head_dim": 10, "num_key_value_heads": 2}, {"num_key_value_heads": 1}] * 2
    changes = {"per_layer_config": {str(i): own for i, own in enumerate(kinds)}, "head_dim": 16}
    change_config(folder, **GLOBAL, **changes)
    check(folder)


@pytest.mark.parametrize(
    ("name", "layers", "message"),
    [
        ("tiny-gemma4", {"2": {"head_dim": 16}, "5": {"head_dim": 12}}, "one head_dim for each kind of"),
        ("tiny-gemma4", {"6": {"head_dim": 16}}, "an object with numbers of layers below 6"),
        ("tiny-gemma4", {"two": {"head_dim": 16}}, "an object with numbers of layers below 6"),
        ("tiny-gemma4", {"2": {"intermediate_size": 16}}, "each with head_dim or num_key_value_heads"),
        ("tiny-gemma4", {"2": 16}, "2 is 16: an object"),
        ("tiny-gemma4", [16], "per_layer_config is .*: an object"),
        ("tiny-gemma4", {}, "has shape"),
        ("tiny-llama", {"1": {"intermediate_size": 96}}, "per_layer_config is .*: none, or an empty object"),
    ],
)
def test_keys_of_layers_that_cannot_be_read(name: str, layers: object, message: str, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, name)
    change_config(folder, **(GLOBAL if name != "tiny-llama" else {}), per_layer_config=layers)
    with pytest.raises(ConvertError, match=message):
        check(folder)


def turned(arrays: dict[str, Any]) -> dict[str, Any]:
    """Stacks of experts with rows and columns in the other order."""
    return {name: each.swapaxes(1, 2) if ".experts." in name else each for name, each in arrays.items()}


@pytest.mark.parametrize("down", ["by_output", "by_neuron"])
def test_stacks_of_experts_as_the_class_has_them(down: str, tmp_path: Path) -> None:
    """Qwen3-VL's published stacks are turned; ``num_local_experts`` is the saved name of ``num_experts``."""
    folder = copy_checkpoint(tmp_path, "tiny-qwen3vlmoe")
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"num_experts"', '"num_local_experts"'))
    write_safetensors(folder / "model.safetensors", turned(tensors_of(folder)))
    check(folder, down)


@pytest.mark.parametrize("width", [20, 40])
def test_square_stacks_of_experts(width: int, tmp_path: Path) -> None:
    """Where one of two stacks is square (2 x 20 and 40), the other tells whether both are turned."""
    folder = copy_checkpoint(tmp_path, "tiny-qwen3vlmoe")
    path = folder / "config.json"
    path.write_text(re.sub(r'("moe_intermediate_size": )\d+', rf"\g<1>{width}", path.read_text()))
    rng, arrays = np.random.default_rng(7), tensors_of(folder)
    shapes = {"gate_up_proj": (6, 40, 2 * width), "down_proj": (6, width, 40)}
    published = {
        name: rng.standard_normal(shape).astype(np.float32)
        if (shape := shapes.get(name.rpartition(".")[2]))
        else each
        for name, each in arrays.items()
    }
    for stored in (published, turned(published)):
        write_safetensors(folder / "model.safetensors", stored)
        convert(folder, tmp_path / "out.gguf", ConvertOptions("F32", "by_output", force=True))
        both = published["model.language_model.layers.1.mlp.experts.gate_up_proj"]
        down = published["model.language_model.layers.1.mlp.experts.down_proj"]
        expected = {"gate": both[..., :width], "up": both[..., width:], "down": down}
        with open_gguf(tmp_path / "out.gguf") as file:
            for part, each in expected.items():
                values = file.load(f"blk.1.ffn_{part}_exps.weight").dequantise()
                np.testing.assert_array_equal(values, each.swapaxes(1, 2))


def saved_kimi(parent: Path) -> Path:
    """Dense layers under the experts' name."""
    folder = copy_checkpoint(parent, "tiny-kimi-linear")
    dense = re.compile(r"\.mlp\.(?=(gate|up|down)_proj)")
    arrays = {dense.sub(".block_sparse_moe.", name): each for name, each in tensors_of(folder).items()}
    write_safetensors(folder / "model.safetensors", arrays)
    return folder


def test_kimi_linear(tmp_path: Path) -> None:
    """Dense layers have the experts' name; a new model lacks the publishers' keys."""
    folder = saved_kimi(tmp_path)
    check(folder)
    new = {
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", *["sparse"] * 3], "linear_head_dim": 8, "linear_num_heads": 3,
        "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    change_config(folder, linear_attn_config=..., first_k_dense_replace=..., **new)
    check(folder)


def test_kimi_linear_with_both_names(tmp_path: Path) -> None:
    folder = saved_kimi(tmp_path)
    arrays = tensors_of(folder)
    name = "model.layers.0.{}.gate_proj.weight"
    arrays[name.format("mlp")] = arrays[name.format("block_sparse_moe")]
    write_safetensors(folder / "model.safetensors", arrays)
    with pytest.raises(ConvertError, match=r"no tensor 'model\.layers\.0\.mlp\.up_proj"):
        check(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types is .*: a list of 4, each full_attention or"),
        ({"layer_types": ["attention"] * 4}, "layer_types is .*: a list of 4, each full_attention or"),
        ({"layer_types": ["full_attention"] * 4}, r"q_proj.weight' has shape \[24, 24\]: .* \[60, 24\]$"),
        ({"linear_attn_config": ...}, "linear_attn_config is missing: an object with full_attn_layers"),
    ],
)
def test_kinds_of_layers_that_are_wrong(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = saved_kimi(tmp_path)
    change_config(folder, **changes)
    with pytest.raises(ConvertError, match=message):
        check(folder)
