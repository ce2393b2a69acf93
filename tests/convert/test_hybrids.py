"""Checkpoints of families whose layers keep a state: names, shapes, orders, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.checkpoints import change_config, change_tensors, copy_checkpoint, tensors_of, write_safetensors
from support.golden import CPU_HYBRIDS, HYBRIDS, LATENT_HYBRIDS

from hotcold.convert import ConvertError, ConvertOptions, convert
from hotcold.formats.gguf import open_gguf


def converted(checkpoint: Path, **options: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata and tensors of the file that a checkpoint gives, exactly."""
    out = checkpoint.parent / "out.gguf"
    convert(checkpoint, out, ConvertOptions(**{"type": "F32", "force": True} | options))
    with open_gguf(out) as file:
        return dict(file.metadata), {name: file.load(name).dequantise() for name in file.tensors}


def types(path: Path) -> dict[str, str]:
    with open_gguf(path) as file:
        return {name: info.type.name for name, info in file.tensors.items()}


@pytest.mark.parametrize("name", (*HYBRIDS, *LATENT_HYBRIDS, *CPU_HYBRIDS))
def test_names_are_those_of_the_gguf_package(name: str, tmp_path: Path) -> None:
    metadata, tensors = converted(copy_checkpoint(tmp_path, name))
    architectures = {text: key for key, text in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.MODEL_TENSORS[architectures[metadata["general.architecture"]]]
    plain = {re.sub(r"^blk\.\d+", "blk.{bid}", re.sub(r"\.(weight|bias)$", "", each)) for each in tensors}
    assert plain <= {gguf.TENSOR_NAMES[each] for each in known}


@pytest.mark.parametrize(
    "name", ["tiny-lfm2", "tiny-qwen35", "tiny-nemotron-h", "tiny-mamba2", "tiny-kimi-linear"]
)
def test_what_states_are_computed_with_stays_float32(name: str, tmp_path: Path) -> None:
    convert(copy_checkpoint(tmp_path, name), tmp_path / "out.gguf", ConvertOptions("F16"))
    small = re.compile(
        r"(ssm_(conv1d(_[qkv])?|norm|dt|a|d)|ffn_gate_inp|exp_probs_b|shortconv\.conv|_norm)\b(?!\.proj)"
    )
    for tensor, type in types(tmp_path / "out.gguf").items():
        assert type == ("F32" if small.search(tensor) else "F16"), tensor


def test_heads_of_v_change_places(tmp_path: Path) -> None:
    """Row by row, by the rule of docs/convert.md: head h has the k head h modulo their number."""
    checkpoint = copy_checkpoint(tmp_path, "tiny-qwen35")
    stored = {name: np.asarray(each, np.float32) for name, each in tensors_of(checkpoint).items()}
    hf, (_, tensors) = "model.layers.1.linear_attn.", converted(checkpoint)
    keys, values, rows = 2, 6, 8
    for head in range(values):
        old = head % keys * (values // keys) + head // keys
        new, was = slice(head * rows, head * rows + rows), slice(old * rows, old * rows + rows)
        alike = {
            "blk.1.attn_qkv.weight": ("in_proj_qkv.weight", slice(32 + new.start, 32 + new.stop),
                                      slice(32 + was.start, 32 + was.stop)),
            "blk.1.attn_gate.weight": ("in_proj_z.weight", new, was),
            "blk.1.ssm_beta.weight": ("in_proj_b.weight", head, old),
            "blk.1.ssm_alpha.weight": ("in_proj_a.weight", head, old),
            "blk.1.ssm_dt.bias": ("dt_bias", head, old),
        }  # fmt: skip
        for name, (origin, here, there) in alike.items():
            np.testing.assert_array_equal(tensors[name][here], stored[hf + origin][there])
        np.testing.assert_array_equal(
            tensors["blk.1.ssm_out.weight"][:, new], stored[f"{hf}out_proj.weight"][:, was]
        )
        assert tensors["blk.1.ssm_a"][head] == -np.exp(stored[f"{hf}A_log"][old])
    np.testing.assert_array_equal(
        tensors["blk.1.attn_qkv.weight"][:32], stored[f"{hf}in_proj_qkv.weight"][:32]
    )
    # Norms hold weight + 1, except the one after the delta rule.
    np.testing.assert_array_equal(tensors["blk.1.ssm_norm.weight"], stored[f"{hf}norm.weight"])
    norm = stored["model.layers.1.post_attention_layernorm.weight"]
    np.testing.assert_array_equal(tensors["blk.1.post_attention_norm.weight"], norm + 1)


def test_a_vision_models_language_model(tmp_path: Path) -> None:
    """Qwen3.5 as it is published: a part of config.json, other prefixes, experts joined, drafting blocks."""
    checkpoint = copy_checkpoint(tmp_path, "tiny-qwen35moe")
    expected = converted(checkpoint)
    text = json.loads((checkpoint / "config.json").read_text())
    own = {key: text.pop(key) for key in ("architectures", "model_type", "tie_word_embeddings")}
    whole = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": own["tie_word_embeddings"],
        "text_config": text | {"model_type": own["model_type"]},
        "vision_config": {"hidden_size": 16},
    }
    (checkpoint / "config.json").write_text(json.dumps(whole))
    stored, arrays = tensors_of(checkpoint), {}
    for name, values in stored.items():
        if ".experts." not in name:
            arrays[name.replace("model.", "model.language_model.", 1)] = values
    for layer in range(4):
        at, to = f"model.layers.{layer}.mlp.experts.", f"model.language_model.layers.{layer}.mlp.experts."
        names = {part: [f"{at}{e}.{part}_proj.weight" for e in range(6)] for part in ("gate", "up", "down")}
        gate, up, down = (np.stack([stored[name] for name in each]) for each in names.values())
        arrays |= {f"{to}gate_up_proj": np.concatenate([gate, up], 1), f"{to}down_proj": down}
    arrays |= {
        "mtp.fc.weight": stored["lm_head.weight"],
        "model.visual.patch.weight": stored["lm_head.weight"],
    }
    write_safetensors(checkpoint / "model.safetensors", arrays)
    metadata, tensors = converted(checkpoint)
    assert metadata.keys() == expected[0].keys()
    assert tensors.keys() == expected[1].keys()
    for name, values in expected[1].items():
        np.testing.assert_array_equal(tensors[name], values)


def test_keys_of_kimi_linear_that_llama_cpp_reads(tmp_path: Path) -> None:
    metadata, tensors = converted(copy_checkpoint(tmp_path, "tiny-kimi-linear"))
    wanted = {
        "attention.head_count": 3, "attention.kv_lora_rank": 16, "attention.key_length": 24,
        "attention.value_length": 16, "attention.key_length_mla": 20, "attention.value_length_mla": 10,
        "rope.dimension_count": 8, "kda.head_dim": 8, "ssm.conv_kernel": 4, "leading_dense_block_count": 1,
        "expert_shared_count": 1, "expert_gating_func": 2, "expert_feed_forward_length": 20,
        "context_length": 128,
    }  # fmt: skip
    assert {key: metadata[f"kimi-linear.{key}"] for key in wanted} == wanted
    assert [*metadata["kimi-linear.attention.head_count_kv"]] == [0, 0, 1, 0]
    assert tensors["blk.0.ssm_conv1d_v.weight"].shape == (1, 24, 1, 4)
    assert (tensors["blk.0.ssm_a"] < 0).all()


def test_types_of_rwkv(tmp_path: Path) -> None:
    """Decays are computed in float32; small matrices have 16 bits at least."""
    convert(copy_checkpoint(tmp_path, "tiny-rwkv7"), tmp_path / "out.gguf", ConvertOptions("Q8_0"))
    matrix = re.compile(r"output\.weight|token_embd\.weight|.*(receptance|key|value|mix_output)\.weight")
    small = re.compile(r".*time_mix_[avg][12]\.weight")
    for tensor, type in types(tmp_path / "out.gguf").items():
        wanted = "Q8_0" if matrix.fullmatch(tensor) else "F16" if small.fullmatch(tensor) else "F32"
        assert type == wanted, tensor


def test_rwkv_in_other_forms(tmp_path: Path) -> None:
    """Ranks and neurons that follow from D, mixes in one tensor, and a pair in the first layer."""
    checkpoint = copy_checkpoint(tmp_path, "tiny-rwkv7")
    expected, tensors = converted(checkpoint)
    stored = tensors_of(checkpoint)
    for i in range(3):
        hf = f"model.layers.{i}.attn."
        stored[f"{hf}x_x"] = np.concatenate([stored.pop(f"{hf}x_{part}")[0] for part in "rwkvag"])
    stored["model.layers.0.attn.v_lora.lora.0.weight"] = stored["lm_head.weight"]
    write_safetensors(checkpoint / "model.safetensors", stored)
    found, others = converted(checkpoint)
    assert str(found) == str(expected)
    for name, values in tensors.items():
        np.testing.assert_array_equal(others[name], values)
    change_config(checkpoint, decay_low_rank_dim=..., intermediate_size=None)
    with pytest.raises(ConvertError, match=r"has shape .52, 64.: config.json implies .256, 64."):
        converted(checkpoint)
    change_config(checkpoint, intermediate_size=52)
    with pytest.raises(ConvertError, match=r"has shape .5, 64.: config.json implies .32, 64."):
        converted(checkpoint)


def test_the_vocabulary_of_rwkv(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint(tmp_path, "tiny-rwkv7")
    metadata, _ = converted(checkpoint)
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    assert ids == {"bos": 0, "eos": 0, "eot": 257, "eom": None}
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"].tolist()
    assert (tokens[0], tokens[11], tokens[256], tokens[257]) == ("<s>", r"\n", r"\xff", r"\n\n")
    assert tokens[-1] == "[PAD287]" and (kinds[0], kinds[1], kinds[-1]) == (3, 1, 5)
    assert metadata["tokenizer.chat_template"].startswith("{{ bos_token }}")
    path = checkpoint / "rwkv_vocab_v20230424.txt"
    lines = path.read_text(encoding="utf-8").split("\n")
    for wrong in ("12 'a' 1", "11 'a' 2", "11 a 1", "11 (b'a'", "11 '' 0", "11"):
        path.write_text("\n".join([*lines[:10], wrong, *lines[11:]]), encoding="utf-8")
        with pytest.raises(ConvertError, match=r"line 11 is .*: the id 11 of 288, a token and the number"):
            converted(checkpoint)
    path.write_bytes(b"1 '\xff' 1\n")
    with pytest.raises(ConvertError, match=r"is not UTF-8 text: byte 0xff at 3"):
        converted(checkpoint)


def test_experts_with_fewer_dimensions_by_neuron_and_by_output(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint(tmp_path, "tiny-nemotron-latent")
    by_neuron, by_output = (converted(checkpoint, down=down)[1] for down in ("by_neuron", "by_output"))
    assert by_neuron["blk.1.ffn_down_exps.weight"].shape == (6, 20, 16)
    for name, values in by_output.items():
        turned = "_down_exps" in name or "_down_shexp" in name
        np.testing.assert_array_equal(values.swapaxes(-1, -2) if turned else values, by_neuron[name])


def test_kinds_of_layers_in_other_words(tmp_path: Path) -> None:
    """transformers 5 writes lists where publishers have letters, and numbers where they have lists."""
    checkpoint = copy_checkpoint(tmp_path, "tiny-nemotron-h-moe")
    expected = converted(checkpoint)
    kinds = ["linear_attention", "moe", "linear_attention", "full_attention", "moe"]
    change_config(checkpoint, hybrid_override_pattern=..., layers_block_type=kinds, num_hidden_layers=...)
    found = converted(checkpoint)
    assert found[1].keys() == expected[1].keys()
    assert str(found[0]) == str(expected[0])
    checkpoint = copy_checkpoint(tmp_path, "tiny-lfm2")
    expected = converted(checkpoint)
    change_config(checkpoint, layer_types=..., full_attn_idxs=[2])
    assert str(converted(checkpoint)[0]) == str(expected[0])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tiny-lfm2", {"layer_types": ["conv", "other"]}, "layer_types is .*: a list, each conv, mamba"),
        ("tiny-lfm2", {"layer_types": ["conv"] * 3}, "num_hidden_layers is 4: 3, the number of kinds"),
        ("tiny-lfm2", {"layer_types": 7}, "layer_types is 7"),
        ("tiny-lfm2moe", {"norm_topk_prob": False}, "norm_topk_prob is False: true"),
        ("tiny-qwen35", {"linear_num_value_heads": ...}, "config.json lacks linear_num_value_heads"),
        ("tiny-qwen35moe", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]: \[\] is needed"),
        ("tiny-nemotron-h", {"hybrid_override_pattern": "M-X*-"}, "hybrid_override_pattern is 'M-X"),
        ("tiny-nemotron-h-moe", {"hybrid_override_pattern": "MEM*-"}, "experts in all of its FFNs"),
        ("tiny-nemotron-h-moe", {"n_group": 2}, "n_group is 2: 1 is needed"),
        ("tiny-granite-h", {"layer_types": ["attention"] * 4}, "no tensor 'model.layers.0.self_attn.q_proj"),
        ("tiny-granite4", {"layer_types": ["mamba"] * 2}, "no tensor 'model.layers.0.mamba.in_proj"),
        ("tiny-granite4", {"normalization_function": "layernorm"}, "is 'layernorm': 'rmsnorm' is needed"),
        ("tiny-falcon-h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers is .*: a list of 2 numbers"),
        ("tiny-falcon-h1", {"mamba_norm_before_gate": True}, "mamba_norm_before_gate is True: false"),
        ("tiny-mamba2", {"n_groups": 0}, "n_groups is 0"),
        ("tiny-mamba2", {"hidden_act": "gelu"}, "hidden_act is 'gelu': 'silu'"),
        ("tiny-mamba2", {"time_step_limit": [0.0, 0.1]}, r"time_step_limit is .*: \[0.0, Infinity\]"),
        ("tiny-nemotron-h", {"time_step_limit": [0.001, float("inf")]}, "time_step_limit is"),
        ("tiny-falcon-h1", {"time_step_limit": "none"}, "time_step_limit is 'none'"),
        ("tiny-nemotron-h", {"mamba_hidden_act": "relu"}, "mamba_hidden_act is 'relu': 'silu'"),
        ("tiny-kimi-linear", {"mla_use_nope": False}, "mla_use_nope is False: true"),
        ("tiny-kimi-linear", {"moe_router_activation_func": "softmax"}, "is 'softmax': 'sigmoid'"),
        ("tiny-kimi-linear", {"linear_attn_config": ...}, "linear_attn_config is missing: an object with"),
        ("tiny-kimi-linear", {"num_hidden_layers": 5}, "kda_layers is .*: a list of those of 5 layers"),
        ("tiny-kimi-linear", {"num_attention_heads": 2}, "num_heads is 3: num_attention_heads 2"),
        ("tiny-rwkv7", {"hidden_act": "relu"}, "hidden_act is 'relu': 'sqrelu' is needed"),
        ("tiny-rwkv7", {"head_dim": 24}, "head_dim is 24: a divisor of hidden_size 64"),
        ("tiny-rwkv7", {"attn": {"layers": [1]}}, "attn is .*: None is needed"),
        (
            "tiny-qwen35",
            {"linear_num_value_heads": 5},
            "linear_num_value_heads is 5: a multiple of linear_num_key",
        ),
    ],
)
def test_configurations_that_are_wrong(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoint = copy_checkpoint(tmp_path, name)
    change_config(checkpoint, **changes)
    with pytest.raises(ConvertError, match=message):
        converted(checkpoint)


def test_tensors_that_are_wrong(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint(tmp_path, "tiny-mamba2")
    change_tensors(checkpoint, backbone__layers__0__mixer__D=np.zeros(5, np.float32))
    with pytest.raises(ConvertError, match=r"mixer\.D' has shape .5.: config.json implies .6."):
        converted(checkpoint)
    change_tensors(checkpoint, backbone__layers__0__mixer__D=...)
    with pytest.raises(ConvertError, match=r"has no tensor 'backbone\.layers\.0\.mixer\.D'"):
        converted(checkpoint)
