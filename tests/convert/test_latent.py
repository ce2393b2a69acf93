"""Checkpoints with latent attention: names, keys, where the matrix of keys and values goes, and what is
refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.checkpoints import change_config, copy_checkpoint, tensors_of
from support.golden import LATENT, golden
from support.runner import Runner

from hotcold.convert import ConvertError, ConvertOptions, convert
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend


@pytest.mark.parametrize("name", LATENT[:-2])
def test_names_are_those_of_the_gguf_package(name: str, tmp_path: Path) -> None:
    with open_gguf(golden(name, tmp_path).path) as file:
        tensors = [*file.tensors]
    known = gguf.MODEL_TENSORS[gguf.MODEL_ARCH.DEEPSEEK2]
    plain = {re.sub(r"^blk\.\d+", "blk.{bid}", re.sub(r"\.(weight|bias)$", "", each)) for each in tensors}
    assert plain <= {gguf.TENSOR_NAMES[each] for each in known}


def test_keys_that_llama_cpp_reads(tmp_path: Path) -> None:
    alike = {
        "attention.head_count_kv": 1, "attention.key_length": 24, "attention.value_length": 16,
        "attention.key_length_mla": 20, "attention.value_length_mla": 10, "attention.kv_lora_rank": 16,
        "rope.dimension_count": 8, "leading_dense_block_count": 1,
    }  # fmt: skip
    own: dict[str, dict[str, Any]] = {
        "tiny-deepseek2-lite": {"expert_gating_func": 1, "expert_weights_norm": False},
        "tiny-deepseek3": {
            "attention.q_lora_rank": 24, "expert_gating_func": 2, "expert_group_count": 4,
            "expert_group_used_count": 2, "rope.scaling.yarn_log_multiplier": np.float32(0.1),
        },
        "tiny-deepseek32": {
            "attention.indexer.head_count": 2, "attention.indexer.key_length": 16,
            "attention.indexer.top_k": 48,
        },
        "tiny-glm-dsa": {"attention.indexer.top_k": 48, "expert_gating_func": 2},
    }  # fmt: skip
    for name, keys in own.items():
        with open_gguf(golden(name, tmp_path).path) as file:
            arch = file.metadata["general.architecture"]
            assert {key: file.metadata[f"{arch}.{key}"] for key in alike | keys} == alike | keys


def test_keys_are_turned_and_values_are_not(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, "tiny-deepseek3")
    both = np.asarray(tensors_of(folder)["model.layers.1.self_attn.kv_b_proj.weight"], np.float32)
    with open_gguf(golden("tiny-deepseek3", tmp_path).path) as file:
        keys, values = (file.load(f"blk.1.attn_{part}.weight").dequantise() for part in ("k_b", "v_b"))
    for head in range(4):
        own = both[head * 22 : (head + 1) * 22]
        np.testing.assert_array_equal(keys[head], own[:12].T)
        np.testing.assert_array_equal(values[head], own[12:])


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0"])
def test_quantised_files_run(type: str, tmp_path: Path) -> None:
    """Their blocks do not fit the tiny latents everywhere: what does not fit stays as it was."""
    tiny = golden("tiny-deepseek3", tmp_path, type=type)
    logits = Runner(tiny.path, open_backend("reference"), cache_type="f32").run(tiny.prompt)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tiny-deepseek2", {"norm_topk_prob": True}, "norm_topk_prob is True: false is needed"),
        ("tiny-deepseek2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc': greedy or"),
        ("tiny-deepseek3", {"scoring_func": "softmax"}, "scoring_func is 'softmax': 'sigmoid'"),
        ("tiny-deepseek3", {"moe_layer_freq": 2}, "moe_layer_freq is 2: 1 is needed"),
        ("tiny-deepseek3", {"attention_bias": True}, "attention_bias is True: false is needed"),
        ("tiny-deepseek3", {"first_k_dense_replace": 9}, "first_k_dense_replace is 9: a number of layers"),
        (
            "tiny-glm4-flash",
            {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            "mlp_layer_types is .*: a list of 3, first dense, then sparse",
        ),
    ],
)
def test_what_gguf_cannot_express(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, name)
    change_config(folder, **changes)
    with pytest.raises(ConvertError, match=message):
        convert(folder, tmp_path / "out.gguf", ConvertOptions())
    assert not (tmp_path / "out.gguf").exists()
