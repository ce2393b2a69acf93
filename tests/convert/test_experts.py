"""Checkpoints of experts: where each expert's rows go, gpt-oss's MXFP4, and experts that are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.checkpoints import change_config, copy_checkpoint, tensors_of, write_safetensors

from hotcold.convert import ConvertError, ConvertOptions, convert
from hotcold.convert.gpt_oss import pack_mxfp4
from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf

E, D, N, V = 3, 64, 32, 288
MIXTRAL = "model.layers.{}.block_sparse_moe."


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("<f2")


def mixtral(folder: Path, **changes: Any) -> Path:
    """A Mixtral of three layers whose attention is tiny-llama's."""
    copy = copy_checkpoint(folder)
    kept = {name: values for name, values in tensors_of(copy).items() if ".mlp." not in name}
    for layer in range(3):
        block = MIXTRAL.format(layer)
        kept[f"{block}gate.weight"] = numbers(layer, E, D)
        for expert in range(E):
            for part, shape in (("w1", (N, D)), ("w3", (N, D)), ("w2", (D, N))):
                seed = 100 * layer + 10 * expert + int(part[1])
                kept[f"{block}experts.{expert}.{part}.weight"] = numbers(seed, *shape)
    kept |= {name.replace("__", "."): values for name, values in changes.items()}
    write_safetensors(copy / "model.safetensors", {n: v for n, v in kept.items() if v is not ...})
    kind = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "intermediate_size": N}
    change_config(copy, **kind, num_local_experts=E, num_experts_per_tok=2, sliding_window=None)
    return copy


def values(path: Path) -> dict[str, np.ndarray]:
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    return {
        name: gguf.dequantize(tensor.data, tensor.tensor_type).reshape([int(n) for n in tensor.shape[::-1]])
        for name, tensor in found.items()
    }


@pytest.mark.parametrize("down", ["by_output", "by_neuron"])
def test_experts_lie_one_after_the_other(down: str, tmp_path: Path) -> None:
    folder = mixtral(tmp_path)
    convert(folder, tmp_path / "out.gguf", ConvertOptions("F16", down))
    source, found = tensors_of(folder), values(tmp_path / "out.gguf")
    block = MIXTRAL.format(1)
    np.testing.assert_array_equal(found["blk.1.ffn_gate_inp.weight"], source[f"{block}gate.weight"])
    for target, part in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        each = [source[f"{block}experts.{expert}.{part}.weight"] for expert in range(E)]
        each = [matrix.T for matrix in each] if (part, down) == ("w2", "by_neuron") else each
        np.testing.assert_array_equal(found[f"blk.1.ffn_{target}_exps.weight"], np.stack(each))
    file = open_gguf(tmp_path / "out.gguf")
    types = {file.tensors[f"blk.1.ffn_{name}.weight"].type.name for name in ("gate_exps", "down_exps")}
    assert types == {"F16"} and file.tensors["blk.1.ffn_gate_inp.weight"].type.name == "F32"
    assert (file.metadata["llama.expert_count"], file.metadata["llama.expert_used_count"]) == (E, 2)


def test_a_missing_expert_and_one_too_many(tmp_path: Path) -> None:
    name = "model.layers.2.block_sparse_moe.experts.1.w3.weight"
    folder = mixtral(tmp_path / "a", **{name.replace(".", "__"): ...})
    with pytest.raises(ConvertError, match=r"has no tensor '.*experts\.1\.w3\.weight': .* not complete"):
        convert(folder, tmp_path / "out.gguf")
    folder = mixtral(tmp_path / "b", **{name.replace("1.w3", "3.w3").replace(".", "__"): numbers(1, N, D)})
    with pytest.raises(
        ConvertError, match=r"not supported for this model \(1, such as '.*experts\.3\.w3\.weight'\)"
    ):
        convert(folder, tmp_path / "out.gguf")
    change_config(folder, num_experts_per_tok=4)
    with pytest.raises(ConvertError, match="num_experts_per_tok is 4: at most 3"):
        convert(folder, tmp_path / "out.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


# --- gpt-oss ---


def blocks_of(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """MXFP4 as a checkpoint keeps it, of rows that ggml's rule quantises: codes of neighbours in a byte."""
    data = quantise(weights, "MXFP4").data.reshape(*weights.shape[:-1], -1, 17)
    codes = np.concatenate([data[..., 1:] & 15, data[..., 1:] >> 4], axis=-1)
    return codes[..., 0::2] | codes[..., 1::2] << 4, data[..., 0]


def test_mxfp4_by_hand() -> None:
    """The k-th value has code k % 16, so the first half's codes are those of the second."""
    blocks = np.array([[[0x10 + 0x22 * k for k in range(8)] * 2]], np.uint8)
    packed = pack_mxfp4(blocks, np.array([[130]], np.uint8))
    assert packed.tolist() == [[130, *(0x11 * k for k in range(16))]]


def gpt_oss(folder: Path, *, mxfp4: bool, n: int = N) -> tuple[Path, np.ndarray, np.ndarray]:
    """A checkpoint of one layer, with what its experts' gates and ups, and downs, are as numbers."""
    copy = copy_checkpoint(folder)
    source = tensors_of(copy)
    kept = {name: v for name, v in source.items() if "layers" not in name or ".layers.0." in name}
    kept = {name: v for name, v in kept.items() if ".mlp." not in name}
    layer = "model.layers.0."
    for part in ("q", "k", "v", "o"):
        rows = len(kept[f"{layer}self_attn.{part}_proj.weight"])
        kept[f"{layer}self_attn.{part}_proj.bias"] = numbers(rows, rows)
    kept[f"{layer}self_attn.sinks"] = numbers(1, 4)
    kept |= {f"{layer}mlp.router.weight": numbers(2, E, D), f"{layer}mlp.router.bias": numbers(3, E)}
    gate_up, down = (quantise(numbers(4, *s), "MXFP4").dequantise() for s in ((E, 2 * n, D), (E, D, n)))
    experts = f"{layer}mlp.experts."
    kept[f"{experts}gate_up_proj_bias"] = numbers(5, E, 2 * n)
    kept[f"{experts}down_proj_bias"] = numbers(6, E, D)

    for name, weights in (("gate_up_proj", gate_up), ("down_proj", down)):
        if mxfp4:
            kept[f"{experts}{name}_blocks"], kept[f"{experts}{name}_scales"] = blocks_of(weights)
        else:
            kept[f"{experts}{name}"] = weights.swapaxes(1, 2).astype("<f2")
    write_safetensors(copy / "model.safetensors", kept)
    kind = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 1}
    sizes = {"num_local_experts": E, "num_experts_per_tok": 2, "intermediate_size": n, "sliding_window": 16}
    stored = {"quant_method": "mxfp4"} if mxfp4 else None
    change_config(copy, **kind, **sizes, head_dim=16, num_key_value_heads=2, quantization_config=stored)
    return copy, gate_up, down


@pytest.mark.parametrize("mxfp4", [True, False])
def test_gpt_oss(mxfp4: bool, tmp_path: Path) -> None:
    """Rows of gate and up take turns; blocks are moved, not computed, whatever type is asked for."""
    folder, gate_up, down = gpt_oss(tmp_path, mxfp4=mxfp4)
    convert(folder, tmp_path / "out.gguf", ConvertOptions("F32"))
    found, source = values(tmp_path / "out.gguf"), tensors_of(folder)
    wanted = {"gate": gate_up[:, 0::2], "up": gate_up[:, 1::2], "down": down}
    file = open_gguf(tmp_path / "out.gguf")
    for part, weights in wanted.items():
        np.testing.assert_array_equal(found[f"blk.0.ffn_{part}_exps.weight"], weights)
        assert file.tensors[f"blk.0.ffn_{part}_exps.weight"].type.name == ("MXFP4" if mxfp4 else "F32")
    bias = source["model.layers.0.mlp.experts.gate_up_proj_bias"]
    np.testing.assert_array_equal(found["blk.0.ffn_gate_exps.bias"], bias[:, 0::2])
    np.testing.assert_array_equal(found["blk.0.ffn_up_exps.bias"], bias[:, 1::2])
    np.testing.assert_array_equal(found["blk.0.attn_sinks.weight"], source["model.layers.0.self_attn.sinks"])
    assert file.metadata["gpt-oss.rope.scaling.type"] == "yarn"  # as the class has it


@pytest.mark.parametrize("mxfp4", [True, False])
def test_gpt_oss_has_no_rows_of_down_by_neuron(mxfp4: bool, tmp_path: Path) -> None:
    """Where D = N no shape would tell that what the file calls by neuron is by output."""
    folder, *_ = gpt_oss(tmp_path, mxfp4=mxfp4, n=D)
    with pytest.raises(ConvertError, match="by_neuron is not possible for gpt-oss: by_output is needed"):
        convert(folder, tmp_path / "out.gguf", ConvertOptions("F32", "by_neuron"))
    assert not (tmp_path / "out.gguf").exists()


def test_blocks_of_another_shape(tmp_path: Path) -> None:
    folder, *_ = gpt_oss(tmp_path, mxfp4=True)
    change_config(folder, intermediate_size=2 * N)
    with pytest.raises(ConvertError, match=r"gate_up_proj_blocks' has shape \[3, 64, 2, 16\]: config\.json"):
        convert(folder, tmp_path / "out.gguf")
    change_config(folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ConvertError, match="quant_method is 'gptq': mxfp4 is needed"):
        convert(folder, tmp_path / "out.gguf")
