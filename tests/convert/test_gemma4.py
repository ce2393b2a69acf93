"""Gemma 4's checkpoints: names, shapes by kind of layer, keys, and what is refused or left out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.checkpoints import change_config, copy_checkpoint, tensors_of, write_safetensors
from support.golden import GEMMA4, golden
from support.runner import Runner, exact

from hotcold.convert import ConvertError, ConvertOptions, convert
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend


def converted(checkpoint: Path, **options: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata and tensors of the file that a checkpoint gives, exactly."""
    out = checkpoint.parent / "out.gguf"
    convert(checkpoint, out, ConvertOptions(**{"type": "F32", "force": True} | options))
    with open_gguf(out) as file:
        return dict(file.metadata), {name: file.load(name).dequantise() for name in file.tensors}


@pytest.mark.parametrize("name", GEMMA4)
def test_names_are_those_of_the_gguf_package(name: str, tmp_path: Path) -> None:
    """It has no names of the router's scales; facts of llama.cpp's converter say them."""
    _, tensors = converted(copy_checkpoint(tmp_path, name))
    known = {gguf.TENSOR_NAMES[each] for each in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.GEMMA4]}
    plain = {re.sub(r"^blk\.\d+", "blk.{bid}", re.sub(r"\.(weight|scale)$", "", each)) for each in tensors}
    assert plain <= known


def test_keys(tmp_path: Path) -> None:
    dense, wide, experts = (converted(copy_checkpoint(tmp_path, name)) for name in GEMMA4)
    keys = {key.removeprefix("gemma4."): value for key, value in dense[0].items()}
    assert keys["attention.head_count_kv"].tolist() == [2, 2, 1] * 2
    assert list(keys["attention.sliding_window_pattern"]) == [True, True, False] * 2
    facts = {
        "attention.key_length": 16, "attention.value_length": 16, "attention.key_length_swa": 10,
        "attention.value_length_swa": 10, "rope.dimension_count": 16, "rope.dimension_count_swa": 10,
        "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "attention.sliding_window": 8,
        "attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0, "feed_forward_length": 28,
        "final_logit_softcapping": 3.0,
    }  # fmt: skip
    assert {key: keys[key] for key in facts} == facts
    factors = dense[1]["rope_freqs.weight"]
    np.testing.assert_array_equal(factors, np.array([1, 1, *[1e30] * 6], np.float32))
    assert "blk.2.attn_v.weight" not in dense[1]
    assert "blk.1.attn_v.weight" in dense[1]
    assert wide[0]["gemma4.feed_forward_length"].tolist() == [28] * 3 + [56] * 3
    assert wide[0]["gemma4.attention.shared_kv_layers"] == 3
    assert wide[0]["gemma4.embedding_length_per_layer_input"] == 8
    counts = {
        key: experts[0][f"gemma4.expert_{key}"] for key in ("count", "used_count", "feed_forward_length")
    }
    assert counts == {"count": 6, "used_count": 3, "feed_forward_length": 20}
    assert experts[1]["blk.0.ffn_gate_up_exps.weight"].shape == (6, 40, 24)


def test_a_model_of_images_and_sound(tmp_path: Path) -> None:
    """As it is published: a part of config.json, other prefixes, keys and values that nothing reads."""
    checkpoint = copy_checkpoint(tmp_path, "tiny-gemma4-e")
    expected = converted(checkpoint)
    text = json.loads((checkpoint / "config.json").read_text())
    del text["architectures"]
    whole = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": {"hidden_size": 16},
    }
    (checkpoint / "config.json").write_text(json.dumps(whole))
    stored = tensors_of(checkpoint)
    arrays = {name.replace("model.", "model.language_model.", 1): each for name, each in stored.items()}
    some = stored["model.norm.weight"]
    arrays |= dict.fromkeys(
        ("model.vision_tower.x", "model.audio_tower.x", "model.embed_vision.x", "model.embed_audio.x"), some
    )
    arrays["model.language_model.layers.3.self_attn.k_proj.weight"] = some
    arrays["model.language_model.layers.5.self_attn.k_norm.weight"] = some
    write_safetensors(checkpoint / "model.safetensors", arrays)
    metadata, tensors = converted(checkpoint)
    assert metadata.keys() == expected[0].keys()
    assert tensors.keys() == expected[1].keys()
    for name, values in expected[1].items():
        np.testing.assert_array_equal(tensors[name], values)


@pytest.mark.parametrize("name", ["tiny-gemma4", "tiny-gemma4-moe"])
def test_both_layouts_of_down(name: str, tmp_path: Path) -> None:
    """A model that was made sparse computes the same in both, and neurons without effect are left out."""
    checkpoint = copy_checkpoint(tmp_path, name)
    change_config(checkpoint, hidden_activation="relu")
    logits = []
    for down, how in (("by_output", ()), ("by_neuron", ()), ("by_neuron", (exact,))):
        converted(checkpoint, down=down)
        logits.append(Runner(tmp_path / "out.gguf", open_backend("cpu"), *how).run(range(3, 13), decode=True))
    np.testing.assert_array_equal(logits[1], logits[2])
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tiny-gemma4", {"attention_bias": True}, "attention_bias is True: false"),
        ("tiny-gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ("tiny-gemma4", {"layer_types": ["sliding_attention"] * 6}, "full_attention in the last layer"),
        ("tiny-gemma4", {"head_dim": 9}, "has heads of 9: an even number"),
        ("tiny-gemma4-e", {"hidden_activation": "relu"}, "gelu_pytorch_tanh in a model of"),
        ("tiny-gemma4-e", {"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4: fewer"),
        ("tiny-gemma4-e", {"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1: an integer from 0"),
        ("tiny-gemma4-e", {"vocab_size_per_layer_input": 200}, "is 200: vocab_size 288 is needed"),
        ("tiny-gemma4-e", {"use_double_wide_mlp": False}, "config.json implies"),
        ("tiny-gemma4-moe", {"top_k_experts": 7}, "at most 6"),
    ],
)
def test_configurations_that_are_wrong(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoint = copy_checkpoint(tmp_path, name)
    change_config(checkpoint, **changes)
    with pytest.raises(ConvertError, match=message):
        converted(checkpoint)


@pytest.mark.parametrize("type", ["F16", "BF16"])
def test_smaller_types_change_little(type: str, tmp_path: Path) -> None:
    """Embeddings by layer are read from tables of any type whose blocks fit them."""
    tiny = golden("tiny-gemma4-e", tmp_path, type=type)
    logits = Runner(tiny.path, open_backend("cpu"), cache_type="f32").run(tiny.prompt)
    np.testing.assert_allclose(logits, tiny.prompt_logits, atol=1e-4, rtol=0)
