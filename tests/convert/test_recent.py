"""Checkpoints of families published since 2024: where stacks of experts go, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import change_config, copy_checkpoint, tensors_of, write_safetensors
from support.golden import golden
from support.runner import Runner

from hotcold.convert import ConvertError, ConvertOptions, convert
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend


@pytest.mark.parametrize(
    "name",
    [
        "tiny-granitemoe",
        "tiny-granitemoeshared",
        "tiny-kimi-linear",
        "tiny-qwen3vlmoe",
        "tiny-glm4moe",
        "tiny-llama4",
    ],
)
def test_stacks_of_experts_by_neuron(name: str, tmp_path: Path) -> None:
    """Gate and up are one stack; Qwen3-VL's is transposed, too."""
    tiny = golden(name, tmp_path, down="by_neuron")
    logits = Runner(tiny.path, open_backend("reference"), cache_type="f32").run(tiny.prompt)
    np.testing.assert_allclose(logits, tiny.prompt_logits, atol=1e-4, rtol=0)


def test_blocks_that_draft_tokens_are_left_out(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, "tiny-glm4moe")
    tensors = tensors_of(folder)
    more = {"model.layers.3.eh_proj.weight": np.zeros((40, 80), "<f2")}
    write_safetensors(folder / "model.safetensors", tensors | more)
    convert(folder, tmp_path / "out.gguf", ConvertOptions("F32"))
    with open_gguf(tmp_path / "out.gguf") as file:
        assert file.metadata["glm4moe.block_count"] == 3
        assert not any("blk.3." in name for name in file.tensors)
    write_safetensors(
        folder / "model.safetensors", tensors | {"model.layers.4.eh_proj.weight": more.popitem()[1]}
    )
    with pytest.raises(ConvertError, match=r"such as 'model\.layers\.4\.eh_proj\.weight'"):
        convert(folder, tmp_path / "out.gguf", ConvertOptions("F32", force=True))


def test_keys_that_llama_cpp_reads(tmp_path: Path) -> None:
    expected: dict[str, dict[str, Any]] = {
        "tiny-gemma2": {"final_logit_softcapping": 3, "attn_logit_softcapping": 2, "attention.scale": 0.25},
        "tiny-starcoder2": {"attention.sliding_window": 8},
        "tiny-command-r": {"logit_scale": np.float32(0.3)},
        "tiny-mistral3": {"attention.temperature_scale": np.float32(0.1), "attention.temperature_length": 8},
        "tiny-llama4": {
            "attention.sliding_window": 8,
            "interleave_moe_layer_step": 2,
            "feed_forward_length": 52,
            "expert_feed_forward_length": 20,
            "attention.temperature_length": 4,
        },
        "tiny-exaone4": {"attention.sliding_window": 8, "attention.key_length": 12},
        "tiny-qwen2vl": {"rope.freq_base": 1e6, "context_length": 128},
        "tiny-hunyuan-dense": {"rope.freq_base": np.float32(10000.0 * 1000.0 ** (10 / 8))},
        "tiny-minimax-m2": {"rope.dimension_count": 6, "expert_gating_func": 2},
        "tiny-glm4moe": {"leading_dense_block_count": 1, "expert_gating_func": 2, "expert_shared_count": 1},
    }
    for name, keys in expected.items():
        with open_gguf(golden(name, tmp_path).path) as file:
            arch = file.metadata["general.architecture"]
            assert {key: file.metadata[f"{arch}.{key}"] for key in keys} == keys
            norms = [info for name, info in file.tensors.items() if "_norm." in name]
            assert {info.type.name for info in norms} == {"F32"}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tiny-gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping is missing: a finite"),
        ("tiny-gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True: false"),
        ("tiny-hunyuan-moe", {"moe_topk": [1, 2]}, r"moe_topk is \[1, 2\]: one number for all layers"),
        ("tiny-hunyuan-moe", {"num_shared_expert": 2}, "num_shared_expert is 2: 1 is needed"),
        ("tiny-hunyuan-moe", {"moe_intermediate_size": 24}, "moe_intermediate_size is 24: intermediate_size"),
        ("tiny-hunyuan-dense", {"use_cla": True}, "use_cla is True: false is needed"),
        ("tiny-ernie4_5moe", {"moe_layer_interval": 2}, "moe_layer_interval is 2: 1 is needed"),
        ("tiny-ernie4_5moe", {"moe_layer_end_index": 1}, "moe_layer_end_index is 1: 2 is needed"),
        ("tiny-ernie4_5moe", {"moe_layer_start_index": "x"}, "moe_layer_start_index is 'x': a number"),
        ("tiny-exaone4", {"layer_types": None, "sliding_window_pattern": 0}, "pattern is 0: a number of"),
        ("tiny-qwen2vl", {"rope_scaling": {"type": "x"}}, "type is 'x': one of default"),
        ("tiny-qwen2vl", {"rope_scaling": {"mrope_section": [4, 1e30]}}, "a list of at most 4 numbers"),
        ("tiny-qwen2vl", {"rope_scaling": {"mrope_section": [1] * 5}}, "a list of at most 4 numbers"),
        ("tiny-llama4", {"num_experts_per_tok": 2}, "num_experts_per_tok is 2: 1 is needed"),
        ("tiny-llama4", {"use_qk_norm": False}, "use_qk_norm is False: true is needed"),
        ("tiny-llama4", {"no_rope_layers": [1, 1, 1, 1]}, r"is \[1, 1, 1, 1\]: \[1, 1, 1, 0\] is needed"),
        ("tiny-llama4", {"moe_layers": [0]}, r"moe_layers is \[0\]: \[1, 3\] is needed"),
        (
            "tiny-llama4",
            {"attn_temperature_tuning": False},
            "attn_temperature_tuning is False: true is needed",
        ),
        ("tiny-glm4moe", {"n_group": 2}, "n_group is 2: 1 is needed"),
        ("tiny-glm4moe", {"first_k_dense_replace": 9}, "first_k_dense_replace is 9: a number of layers"),
        ("tiny-minimax-m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax': 'sigmoid' is needed"),
        ("tiny-qwen3vlmoe", {"text_config": {"num_experts": 5000}}, "num_local_experts is 5000: at most"),
    ],
)
def test_what_gguf_cannot_express(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, name)
    change_config(folder, **changes)
    with pytest.raises(ConvertError, match=message):
        convert(folder, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()
