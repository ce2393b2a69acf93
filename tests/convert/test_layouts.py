"""Names, keys, shapes and row orders of the Hugging Face layouts, against their definitions."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import change_config, change_tensors, copy_checkpoint, tensors_of, write_safetensors

from hotcold.convert import ConvertError
from hotcold.convert.checkpoint import Checkpoint, open_checkpoint
from hotcold.convert.finding import activation, find_layout
from hotcold.convert.layouts import LAYOUTS
from hotcold.convert.metadata import dimensions, model_metadata, rope_tables
from hotcold.convert.settings import Settings
from hotcold.convert.source import Source
from hotcold.convert.tensor_files import Safetensors, stored_in
from hotcold.convert.tensors import interleave_rotary, sources, ungroup_heads
from hotcold.model.families import FAMILIES

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 64,
    "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "vocab_size": 288,
}  # fmt: skip


def settings(**changes: Any) -> Settings:
    return Settings(Path("config.json"), {**LLAMA, **changes})


def read(**changes: Any) -> dict[str, Any]:
    layout, config = find_layout(settings(**changes))
    return model_metadata(config, layout)


def test_interleaved_rows_turn_as_the_halves_did() -> None:
    """Rotating Hugging Face's halves, then reordering, equals reordering, then rotating neighbours."""
    rng = np.random.default_rng(0)
    heads, head_dim, dim = 3, 8, 5
    weight, x = rng.normal(size=(heads * head_dim, dim)), rng.normal(size=dim)
    angles = rng.normal(size=head_dim // 2)
    cos, sin = np.cos(angles), np.sin(angles)

    q = (weight @ x).reshape(heads, head_dim)
    first, second = q[:, : head_dim // 2], q[:, head_dim // 2 :]
    halves = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)

    q = (interleave_rotary(weight, heads) @ x).reshape(heads, head_dim)
    even, odd = q[:, 0::2], q[:, 1::2]
    np.testing.assert_allclose(even * cos - odd * sin, halves[:, : head_dim // 2])
    np.testing.assert_allclose(odd * cos + even * sin, halves[:, head_dim // 2 :])


def test_interleaved_row_order_by_hand() -> None:
    rows = np.arange(12)[:, None] * np.ones(2)
    assert interleave_rotary(rows, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_metadata_of_llama() -> None:
    assert read(head_dim=16, rope_theta=5e5) == {
        "llama.vocab_size": 288,
        "llama.context_length": 512,
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 160,
        "llama.attention.head_count": 8,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": np.float32(1e-5),
        "llama.attention.key_length": 16,
        "llama.attention.value_length": 16,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": np.float32(5e5),
    }


def test_metadata_prefix_is_the_architecture() -> None:
    metadata = read(model_type="bamboo", architectures=["BambooForCausalLM"], hidden_act="relu")
    assert {key.partition(".")[0] for key in metadata} == {"bamboo"}


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({}, 1e4),
        ({"rope_theta": 1e6}, 1e6),
        ({"rope_parameters": {"rope_theta": 2e6, "rope_type": "default"}}, 2e6),
    ],
)
def test_rope_base(changes: dict[str, Any], theta: float) -> None:
    assert read(**changes)["llama.rope.freq_base"] == np.float32(theta)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_linear_rope_scaling(key: str, kind: str) -> None:
    changes = {key: {kind: "linear", "factor": 4.0}}
    metadata = read(**changes)
    assert metadata["llama.rope.scaling.type"] == "linear"
    assert metadata["llama.rope.scaling.factor"] == np.float32(4)
    assert rope_tables(settings(**changes)) == {}


def test_llama3_rope_factors_follow_the_release() -> None:
    """The loop of Meta's release, over one frequency at a time; Llama 3.1's own numbers."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    tables = rope_tables(settings(head_dim=128, rope_theta=500000.0, rope_scaling=scaling))
    factors = tables["rope_freqs.weight"]
    assert factors.dtype == np.float32 and factors.shape == (64,)
    for i, factor in enumerate(factors):
        frequency = 500000.0 ** (-2 * i / 128)
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            scaled = frequency
        elif wavelength > 8192 / 1:
            scaled = frequency / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            scaled = (1 - smooth) * frequency / 8 + smooth * frequency
        assert factor == pytest.approx(frequency / scaled, rel=1e-6)
    assert factors[0] == 1 and factors[-1] == 8 and 1 < factors[31] < 8  # all three branches are met


def test_windows() -> None:
    """All layers' (Mistral), none (Qwen by default), some, by a period that readers know or listed."""

    def windows(model_type: str, implementation: str, **changes: Any) -> dict[str, Any]:
        found = read(model_type=model_type, architectures=[implementation], sliding_window=64, **changes)
        return {key.split(".")[-1]: value for key, value in found.items() if "sliding" in key}

    assert windows("mistral", "MistralForCausalLM") == {"sliding_window": 64}
    assert windows("qwen2", "Qwen2ForCausalLM") == {}
    some = {"use_sliding_window": True, "num_hidden_layers": 3, "max_window_layers": 1}
    pattern = {"sliding_window": 64, "sliding_window_pattern": [False, True, True]}
    assert windows("qwen2", "Qwen2ForCausalLM", **some) == pattern
    gemma = {"hidden_act": "gelu_pytorch_tanh", "num_hidden_layers": 7, "head_dim": 8}
    assert windows("gemma3_text", "Gemma3ForCausalLM", **gemma) == {"sliding_window": 64}
    listed = ["full_attention"] + ["sliding_attention"] * 6
    metadata = windows("gemma3_text", "Gemma3ForCausalLM", **gemma, layer_types=listed)
    assert metadata["sliding_window_pattern"] == [False] + [True] * 6


@pytest.mark.parametrize(
    ("model_type", "hidden_act", "extra", "expected"),
    [
        ("llama", "silu", {}, ("silu", 0.0)),
        ("llama", "relu", {}, ("relu", 0.0)),
        ("llama", "fatrelu", {"hidden_act_param": 0.01}, ("relu", 0.01)),
        ("bamboo", "relu", {}, ("drelu", 0.0)),
        ("qwen2", "drelu", {}, ("drelu", 0.0)),
        ("mixtral", "drelu", {"hidden_act_param": 0.02}, ("drelu", 0.02)),
        ("gemma3_text", "fatrelu", {"hidden_act_param": 0.01}, ("relu", 0.01)),
        ("falcon", "gelu_pytorch_tanh", {}, ("gelu", 0.0)),
    ],
)
def test_activations(
    model_type: str, hidden_act: str, extra: dict[str, Any], expected: tuple[str, float]
) -> None:
    assert activation(settings(hidden_act=hidden_act, **extra), LAYOUTS[model_type]) == expected


FALCON: dict[str, Any] = {
    "model_type": "falcon", "architectures": ["FalconForCausalLM"], "hidden_size": 64, "vocab_size": 288,
    "num_hidden_layers": 2, "num_attention_heads": 8, "layer_norm_epsilon": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "kv_heads"),
    [({}, 1), ({"multi_query": False}, 8), ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2)],
)
def test_metadata_of_falcon(changes: dict[str, Any], kv_heads: int) -> None:
    """The class has defaults that its config.json does not state; the keys are those of llama.cpp's
    converter."""
    layout, config = find_layout(Settings(Path("config.json"), FALCON | changes))
    assert activation(config, layout) == ("gelu_erf", 0.0) and config.flag("tie_word_embeddings", False)
    metadata = model_metadata(config, layout)
    assert {
        key: metadata[f"falcon.{key}"]
        for key in (
            "tensor_data_layout",
            "context_length",
            "feed_forward_length",
            "attention.head_count_kv",
            "attention.layer_norm_epsilon",
        )
    } == {
        "tensor_data_layout": "jploski",
        "context_length": 2048,
        "feed_forward_length": 256,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_epsilon": np.float32(1e-5),
    }


@pytest.mark.parametrize(("key", "value"), [("alibi", True), ("parallel_attn", False)])
def test_other_falcons_are_refused(key: str, value: bool) -> None:
    with pytest.raises(ConvertError, match=f"{key} is {value}: {str(not value).lower()} is needed"):
        find_layout(Settings(Path("config.json"), FALCON | {key: value}))


def test_fused_rows_come_in_groups() -> None:
    """Two groups of two heads of q, a k and a v, of two rows each."""
    rows = np.arange(16)[:, None] * np.ones(3)
    order = [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    assert ungroup_heads(rows, kv_heads=2, head_dim=2)[:, 0].tolist() == order
    assert ungroup_heads(np.arange(16), 2, 2).tolist() == order  # a bias


def test_rows_turn_only_for_architectures_whose_pairs_are_neighbours(tmp_path: Path) -> None:
    for name, turned in (("tiny-qwen2", False), ("tiny-qwen3", False), ("tiny-mistral", True)):
        folder = copy_checkpoint(tmp_path, name)
        stored = tensors_of(folder)["model.layers.1.self_attn.q_proj.weight"]
        loaded = {source.name: source.load() for source in found_sources(folder)}["blk.1.attn_q.weight"]
        assert np.array_equal(stored, loaded) is not turned


def test_dimensions() -> None:
    assert dimensions(settings(num_key_value_heads=None)) == {
        "D": 64,
        "H": 8,
        "G": 8,
        "d": 8,
        "Q": 64,
        "K": 64,
        "F": 192,
        "N": 160,
        "U": 320,
        "W": 128,
        "C": 128,
        "V": 288,
        "L": 2,
    }
    assert dimensions(settings(head_dim=16))["K"] == 32


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown model": ({"model_type": "gpt_neox"}, "'gpt_neox' is not supported: it needs parallel"),
    "a model type of nobody": ({"model_type": "x"}, "model_type 'x' is not supported: docs/convert.md lists"),
    "no model type": ({"model_type": ...}, "model_type is missing"),
    "model type is a number": ({"model_type": 3}, "model_type is 3: a string"),
    "another class": ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    "a class that disagrees": ({"architectures": ["BambooForCausalLM"]}, "architectures"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantised by a method without a name, which"),
    "quantised by name": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "by modelopt (NVFP4)",
    ),
    "with an older key": ({"compression_config": {"quant_method": "ct", "format": "f"}}, "by ct (f), which"),
    "unknown activation": ({"hidden_act": "gelu"}, "one of silu, relu, fatrelu"),
    "fatrelu without threshold": ({"hidden_act": "fatrelu"}, "hidden_act_param is missing"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "2^31 layers": ({"num_hidden_layers": 1 << 31}, "num_hidden_layers is 2147483648"),
    "heads as text": ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
    "heads do not divide": ({"num_attention_heads": 5}, "num_key_value_heads is 2: a divisor of"),
    "kv heads do not divide": ({"num_key_value_heads": 3}, "num_key_value_heads is 3: a divisor"),
    "head_dim odd": ({"head_dim": 15}, "head_dim is 15: an even number"),
    "eps zero": ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    "eps negative": ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
    "theta is true": ({"rope_theta": True}, "rope_theta is True"),
    "another scaling": ({"rope_scaling": {"rope_type": "ntk", "factor": 2}}, "one of default, linear, ll"),
    "yarn without factor": ({"rope_scaling": {"rope_type": "yarn"}}, "factor is missing"),
    "yarn that does not truncate": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate is False: true",
    ),
    "longrope without factors": ({"rope_scaling": {"type": "su"}}, "long_factor is missing: a list of 8 num"),
    "linear without factor": ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    "scaling is a list": ({"rope_scaling": [1]}, "rope_scaling is [1]: an object"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: 1, since the model's"),
    "llama3 with equal bounds": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
                          "original_max_position_embeddings": 64}},
        "high_freq_factor is 4: a number above",
    ),
    "tie as text": ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
    "another vocabulary": ({"vocab_size": 289}, "has shape [288, 64]: config.json implies [289, 64]"),
    "another width": ({"intermediate_size": 128}, "mlp.gate_proj.weight' has shape [160, 64]"),
    "more layers than tensors": ({"num_hidden_layers": 4}, "no tensor 'model.layers.3.input_layernorm"),
    "fewer layers than tensors": ({"num_hidden_layers": 2}, "not supported for this model (9, such as"),
    "absent biases": ({"attention_bias": True}, "no tensor 'model.layers.0.self_attn.q_proj.bias'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_configs_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    changes, message = BAD_CONFIGS[case]
    folder = copy_checkpoint(tmp_path)
    change_config(folder, **changes)
    with pytest.raises(ConvertError) as caught:
        checkpoint = open_checkpoint(folder)
        layout, config = find_layout(checkpoint.config)
        activation(config, layout)
        model_metadata(config, layout)
        sources(replace(checkpoint, config=config), layout, "by_output")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def found_sources(folder: Path, down_layout: str = "by_output") -> list[Source]:
    checkpoint = open_checkpoint(folder)
    layout, config = find_layout(checkpoint.config)
    return sources(replace(checkpoint, config=config), layout, down_layout)


def test_tensors_of_a_layer_and_their_order(tmp_path: Path) -> None:
    found = found_sources(copy_checkpoint(tmp_path), "by_neuron")
    shapes = {source.name: source.shape for source in found}
    assert list(shapes)[:10] == [
        "token_embd.weight",
        "blk.0.attn_norm.weight",
        "blk.0.attn_q.weight",
        "blk.0.attn_k.weight",
        "blk.0.attn_v.weight",
        "blk.0.attn_output.weight",
        "blk.0.ffn_norm.weight",
        "blk.0.ffn_gate.weight",
        "blk.0.ffn_up.weight",
        "blk.0.ffn_down.weight",
    ]
    assert list(shapes)[-2:] == ["output_norm.weight", "output.weight"]
    assert shapes["blk.2.attn_k.weight"] == (32, 64)
    assert shapes["blk.2.ffn_down.weight"] == (160, 64)
    by_output = found_sources(tmp_path / "tiny-llama")
    assert {source.name: source.shape for source in by_output}["blk.2.ffn_down.weight"] == (64, 160)


def test_norms_that_are_stored_less_one_are_stored_whole(tmp_path: Path) -> None:
    """All of them and nothing else, also where one was added to a half; by the definition of Gemma's norm."""
    folder = copy_checkpoint(tmp_path)
    small = np.float16(2.0**-11) * np.ones_like(tensors_of(folder)["model.norm.weight"]).astype(np.float16)
    change_tensors(folder, model__norm__weight=small)
    plain = {source.name: source.load() for source in found_sources(folder)}
    checkpoint = open_checkpoint(folder)
    layout, config = find_layout(checkpoint.config)
    found = sources(replace(checkpoint, config=config), replace(layout, norms_less_one=True), "by_output")
    for source in found:
        added = 1 if source.name.endswith("_norm.weight") else 0
        np.testing.assert_array_equal(source.load(), plain[source.name].astype(np.float64) + added)
    whole = {source.name: source.load() for source in found}["output_norm.weight"]
    assert whole.dtype == np.float32 and (whole == np.float32(1 + 2.0**-11)).all()


def test_redundant_tensors_are_left_out(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, "tiny-llama3")
    before = found_sources(folder)
    change_tensors(
        folder,
        lm_head__weight=tensors_of(folder)["model.embed_tokens.weight"],
        model__layers__0__self_attn__rotary_emb__inv_freq=np.zeros(8, "<f4"),
    )
    assert found_sources(folder) == before
    change_tensors(folder, model__layers__0__self_attn__q_norm__weight=np.ones(16, "<f4"))
    with pytest.raises(ConvertError, match=r"not supported for this model \(1, such as '.*q_norm.weight'\)"):
        found_sources(folder)


def test_the_version_of_an_opt(tmp_path: Path) -> None:
    """A number that fairseq kept beside the weights, under either beginning of names."""
    folder = copy_checkpoint(tmp_path, "tiny-opt")
    before = found_sources(folder)
    for name in ("decoder__version", "model__decoder__version"):
        change_tensors(folder, **{name: np.array([3], "<f4")})
        assert found_sources(folder) == before


def test_smallthinker_ties_its_head_where_it_is_silent(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, "tiny-smallthinker")
    change_config(folder, tie_word_embeddings=...)
    assert "output.weight" not in {source.name for source in found_sources(folder)}
    change_config(folder, tie_word_embeddings=False)
    change_tensors(folder, lm_head__weight=tensors_of(folder)["model.embed_tokens.weight"])
    assert "output.weight" in {source.name for source in found_sources(folder)}


def test_readers_agree_on_norms_and_rotary_pairs() -> None:
    for layout in LAYOUTS.values():
        if (family := FAMILIES.get(layout.architecture)) is not None:
            assert family.rope_interleaved is layout.interleaved
            assert (family.norm == "layer") is layout.layer_norm


def test_gemma_3_of_a_vision_model(tmp_path: Path) -> None:
    """Its config.json has the text's facts in a section, without the facts that the class implies."""
    text = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "sliding_window": 16,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0}}  # fmt: skip
    values = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
    }
    layout, config = find_layout(Settings(Path("config.json"), values))
    found = model_metadata(config, layout)
    assert activation(config, layout) == ("gelu", 0.0)
    assert (found["gemma3.attention.head_count"], found["gemma3.attention.key_length"]) == (8, 256)
    assert found["gemma3.rope.freq_base"] == np.float32(1e6)
    assert found["gemma3.rope.freq_base_swa"] == np.float32(1e4)
    assert found["gemma3.rope.scaling.factor"] == np.float32(8)
    assert "gemma3.attention.scale" not in found
    scaled = values | {"text_config": text | {"query_pre_attn_scalar": 168}}
    layout, config = find_layout(Settings(Path("config.json"), scaled))
    assert model_metadata(config, layout)["gemma3.attention.scale"] == np.float32(168**-0.5)
    names = ("language_model.model.norm.weight", "model.language_model.norm.weight", "vision_tower.x.weight")
    for name in names[:2]:
        write_safetensors(tmp_path / "a", {name: np.ones(3, "<f4"), names[2]: np.ones(3, "<f4")})
        opened = Checkpoint(tmp_path, config, stored_in(Safetensors(tmp_path / "a")))
        renamed = opened.renamed(layout.prefixes, layout.ignored)
        assert list(renamed.files) == ["model.norm.weight"]
        assert renamed.load("model.norm.weight").tolist() == [1, 1, 1]


#: Facts of config.json that GGUF files of these architectures cannot express, and what they must be.
INEXPRESSIBLE: list[tuple[str, str, dict[str, Any], str]] = [
    ("smollm3", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0]: [1, 1] is"),
    ("smollm3", "SmolLM3ForCausalLM", {"use_sliding_window": True}, "use_sliding_window is True: false"),
    ("qwen3_moe", "Qwen3MoeForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob is False: true"),
    (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {"norm_topk_prob": True, "mlp_only_layers": [0]},
        "mlp_only_layers is [0]",
    ),
    ("gpt_oss", "GptOssForCausalLM", {"swiglu_limit": 6.0}, "swiglu_limit is 6.0: 7.0 is needed"),
    ("gpt_oss", "GptOssForCausalLM", {"layer_types": ["a", "b"]}, "layer_types is ['a', 'b']: a list of 2"),
    ("opt", "OPTForCausalLM", {"do_layer_norm_before": False}, "do_layer_norm_before is False: true"),
    ("opt", "OPTForCausalLM", {"word_embed_proj_dim": 32}, "word_embed_proj_dim is 32: 64 is needed"),
    ("minicpm", "MiniCPMForCausalLM", {"dim_model_base": 1e-37}, "dim_model_base is 1e-37: an integer"),
    (
        "smallthinker",
        "SmallThinkerForCausalLM",
        {"moe_ffn_hidden_size": 8, "sliding_window_layout": [1, 0]},
        "sliding_window_layout is [1, 0]: [0, 0] or [0, 1] is needed",
    ),
    (
        "smallthinker",
        "SmallThinkerForCausalLM",
        {"moe_ffn_hidden_size": 8, "sliding_window_layout": 1},
        "sliding_window_layout is 1: a list of 2 is needed",
    ),
    (
        "smallthinker",
        "SmallThinkerForCausalLM",
        {"moe_ffn_hidden_size": 8, "rope_layout": [1, 0]},
        "rope_layout is [1, 0]: [1, 1] is needed",
    ),
]


@pytest.mark.parametrize(("model_type", "implementation", "changes", "message"), INEXPRESSIBLE)
def test_what_gguf_cannot_express(
    model_type: str, implementation: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConvertError) as caught:
        read(model_type=model_type, architectures=[implementation], **changes)
    assert message in str(caught.value)


def test_scales_and_partial_rotation() -> None:
    """MiniCPM's and Granite's factors under llama.cpp's keys, Nemotron's share of a head."""
    found = read(model_type="minicpm", architectures=["MiniCPMForCausalLM"], scale_emb=12, scale_depth=1.4,
                 dim_model_base=256)  # fmt: skip
    assert found["minicpm.embedding_scale"] == 12
    assert found["minicpm.residual_scale"] == np.float32(1.4 / math.sqrt(2))
    assert found["minicpm.logit_scale"] == np.float32(64 / 256)
    found = read(model_type="granite", architectures=["GraniteForCausalLM"], attention_multiplier=0.25,
                 embedding_multiplier=3, residual_multiplier=0.5, logits_scaling=4)  # fmt: skip
    assert [found[f"granite.{key}"] for key in ("attention.scale", "embedding_scale", "residual_scale")] == [
        0.25,
        3,
        0.5,
    ]
    assert found["granite.logit_scale"] == 4
    nemotron = {"model_type": "nemotron", "architectures": ["NemotronForCausalLM"], "head_dim": 32}
    assert read(**nemotron)["nemotron.rope.dimension_count"] == 16
    assert read(**nemotron, partial_rotary_factor=0.25)["nemotron.rope.dimension_count"] == 8


def test_yarn_and_longrope() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16}
    found = {key.removeprefix("llama.rope.scaling."): v for key, v in read(rope_scaling=yarn).items()}
    assert (found["type"], found["factor"], found["original_context_length"]) == ("yarn", 4, 128)
    assert found["yarn_beta_fast"] == 16 and "yarn_beta_slow" not in found and "yarn_attn_factor" not in found
    # DeepSeek's two temperatures; a reader of GGUF has one.
    both = read(rope_scaling=yarn | {"mscale": 1.0, "mscale_all_dim": 0.5})
    factor = (1 + 0.1 * math.log(4)) / (1 + 0.05 * math.log(4))
    assert both["llama.rope.scaling.yarn_attn_factor"] == np.float32(factor)
    longrope = {"type": "su", "long_factor": [1.5] * 4, "short_factor": [1, 1, 1, 2]}
    changes = {"rope_scaling": longrope, "original_max_position_embeddings": 128}
    found = {key.removeprefix("llama.rope.scaling."): v for key, v in read(**changes).items()}
    assert (found["type"], found["original_context_length"]) == ("longrope", 128)
    assert found["attn_factor"] == np.float32(math.sqrt(1 + math.log(4) / math.log(128)))
    tables = rope_tables(settings(**changes))
    assert tables["rope_factors_long.weight"].tolist() == [1.5] * 4
    assert tables["rope_factors_short.weight"].tolist() == [1, 1, 1, 2]
