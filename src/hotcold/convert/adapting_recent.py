"""Adapts ``config.json`` of families published since 2024, as :mod:`hotcold.convert.adapting` does."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hotcold.convert.adapting import (
    Facts,
    expert_keys,
    mistral,
    qwen,
    refuse_others,
    windows_of,
)
from hotcold.convert.settings import Settings

_ORIGINAL = "original_max_position_embeddings"


def _rope(config: Settings) -> Settings:
    """The object with the rotary parameters, under either of its names."""
    return config.section("rope_scaling" if "rope_scaling" in config else "rope_parameters")


def _alike(config: Settings, key: str, default: int | None = None) -> int:
    """A number, also if config.json repeats it for each layer."""
    value = config.get(key)
    if not isinstance(value, list):
        return config.integer(key, default)
    if not value or any(each != value[0] for each in value):
        raise config.error(key, "one number for all layers")
    return Settings(config.path, {key: value[0]}).integer(key)


def gemma(config: Settings) -> Facts:
    """Adapts Gemma 1. Its ``gelu`` is the tanh form, as in its class."""
    tanh = "gelu_pytorch_tanh"
    refuse_others(config, use_bidirectional_attention=False, hidden_activation=tanh)
    return {"hidden_act": tanh} if config.text("hidden_act") == "gelu" else {}


def gemma2(config: Settings) -> Facts:
    refuse_others(config, use_bidirectional_attention=False)
    layers = config.integer("num_hidden_layers")
    return {
        "hidden_act": config.text("hidden_activation"),
        "windows": windows_of(config, [i % 2 == 0 for i in range(layers)]),
    }


def gemma2_keys(config: Settings) -> Facts:
    keys: Facts = {}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        keys[key] = np.float32(config.number(key))  # readers take a default where a file has none
    if (scalar := config.number("query_pre_attn_scalar")) != config.integer("head_dim"):
        keys["attention.scale"] = np.float32(scalar**-0.5)
    return keys


def starcoder2_keys(config: Settings) -> Facts:
    # Where the key is missing, readers take the window of the published models.
    return {} if "sliding_window" in config else {"attention.sliding_window": 0}


def cohere2(config: Settings) -> Facts:
    layers = config.integer("num_hidden_layers")
    period = config.integer("sliding_window_pattern", config.integer("layer_switch", 4))
    return {"windows": windows_of(config, [(i + 1) % period != 0 for i in range(layers)])}


def cohere_keys(config: Settings) -> Facts:
    return {"logit_scale": np.float32(config.number("logit_scale"))}


def mistral3(config: Settings) -> Facts:
    """Adapts Ministral 3, and image models with a text model of Ministral 3 or Mistral."""
    if config.text("model_type") == "mistral3":
        if "text_config" not in config:
            raise config.error("text_config", "an object with the keys of the text model")
        text = config.section("text_config")
        if text.text("model_type", "mistral") not in ("mistral", "ministral3"):
            raise text.error("model_type", "mistral or ministral3")
    return mistral(config)


def mistral3_keys(config: Settings) -> Facts:
    text = config.section("text_config") if "text_config" in config else config
    if text.text("model_type", "mistral") == "mistral":
        return {}
    rope = _rope(config)
    keys: Facts = {}
    if "llama_4_scaling_beta" in rope:
        keys["attention.temperature_scale"] = np.float32(rope.number("llama_4_scaling_beta"))
        keys["attention.temperature_length"] = rope.integer(_ORIGINAL)
    if "mscale_all_dim" in rope and "mscale" in rope:
        keys["rope.scaling.yarn_log_multiplier"] = np.float32(rope.number("mscale_all_dim"))
    return keys


def hunyuan(config: Settings) -> Facts:
    refuse_others(config, use_qk_norm=True, use_cla=False)
    rope = _rope(config)
    if "alpha" not in rope or rope.text("rope_type", rope.text("type", "default")) != "dynamic":
        return {}
    # The alpha of NTK-aware scaling changes only the base.
    head_dim = config.integer(
        "head_dim", config.integer("hidden_size") // config.integer("num_attention_heads")
    )
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    stretched = theta * rope.number("alpha") ** (head_dim / (head_dim - 2))
    return {"rope_theta": stretched, "rope_scaling": None, "rope_parameters": None}


def hunyuan_moe(config: Settings) -> Facts:
    if _alike(config, "num_shared_expert", 1) != 1:
        raise config.error("num_shared_expert", "1")
    width = config.integer("intermediate_size")
    if _alike(config, "moe_intermediate_size", width) != width:
        raise config.error("moe_intermediate_size", f"intermediate_size {width}")
    return hunyuan(config) | {
        "num_local_experts": _alike(config, "num_experts"),
        "num_experts_per_tok": _alike(config, "moe_topk"),
        "moe_intermediate_size": width,
        "shared_width": width,
    }


def minimax_m2(config: Settings) -> Facts:
    refuse_others(config, use_qk_norm=True, scoring_func="sigmoid", use_routing_bias=True)
    facts: Facts = {
        "moe_intermediate_size": config.integer("intermediate_size"),
    }
    if "rotary_dim" in config:
        facts["partial_rotary_factor"] = config.integer("rotary_dim") / config.integer("head_dim")
    return facts


def minimax_m2_keys(config: Settings) -> Facts:
    return expert_keys(config) | {"expert_gating_func": 2}  # llama.cpp's number of sigmoids


def exaone4(config: Settings) -> Facts:
    """Adapts EXAONE 4. GGUF has one rule: if some layers have a window, the other layers do not rotate."""
    if "sliding_window" not in config:
        return {"sliding_window": None}
    layers, pattern = config.integer("num_hidden_layers"), config.get("sliding_window_pattern")
    period = len(pattern) if isinstance(pattern, str) else pattern
    if type(period) is not int or period < 1:
        raise config.error("sliding_window_pattern", "a number of layers, or a text such as LLLG")
    implied = [(i + 1) % period != 0 for i in range(layers)]
    return {"windows": windows_of(config, implied)}


def llama4(config: Settings) -> Facts:
    """Adapts Llama 4 and its image models. GGUF has one rule: three of four layers rotate and have chunks."""
    layers, experts = config.integer("num_hidden_layers"), config.integer("num_local_experts")
    step = config.integer("interleave_moe_layer_step")
    mixed = [(i + 1) % step == 0 for i in range(layers)]
    rotates = [int((i + 1) % 4 != 0) for i in range(layers)]
    needed: dict[str, Any] = {
        "use_qk_norm": experts != 128,  # readers know Maverick by its 128 experts
        "no_rope_layers": rotates,
        "layer_types": ["chunked_attention" if each else "full_attention" for each in rotates],
        "moe_layers": [i for i, each in enumerate(mixed) if each],
        "num_experts_per_tok": 1,
    }
    for key, value in needed.items():
        if config.get(key) not in (None, [], value):
            raise config.error(key, str(value).lower() if isinstance(value, bool) else str(value))
    if config.integer("no_rope_layer_interval") != 4:
        raise config.error("no_rope_layer_interval", "4")
    if not config.get("attn_temperature_tuning"):
        raise config.error("attn_temperature_tuning", "true")
    width = config.integer("intermediate_size")
    return {
        "intermediate_size": config.integer("intermediate_size_mlp"),
        "moe_intermediate_size": width,
        "shared_width": width,
        "dense_layers": [not each for each in mixed],
        "expert_layers": mixed,
    }


def llama4_keys(config: Settings) -> Facts:
    keys = expert_keys(config) | {
        "interleave_moe_layer_step": config.integer("interleave_moe_layer_step"),
        "expert_gating_func": 2,
    }
    if (chunk := config.integer("attention_chunk_size")) != 8192:
        keys["attention.sliding_window"] = chunk
    if (rate := config.number("attn_scale")) != 0.1:
        keys["attention.temperature_scale"] = np.float32(rate)
    if (length := config.integer("floor_scale")) != 8192:
        keys["attention.temperature_length"] = length
    return keys


def qwen2vl(config: Settings) -> Facts:
    """Adapts Qwen2-VL and 2.5-VL, whose text models are Qwen2's. Older files have no ``text_config``."""
    return qwen(config) | {"rope_names": {"mrope": "default", "axial": "default"}}


def qwen2vl_keys(config: Settings, implied: Sequence[int] = ()) -> Facts:
    """The numbers of pairs rotated by time, height and width. Without images these positions are equal."""
    rope, key = _rope(config), "mrope_section"
    sections = rope.get(key) if key in rope else [*implied]
    if not isinstance(sections, list) or not sections:
        return {}
    if len(sections) > 4 or any(type(n) is not int or not 0 <= n < 1 << 31 for n in sections):
        raise rope.error(key, "a list of at most 4 numbers of pairs")
    return {"rope.dimension_sections": np.array([*sections, 0, 0, 0, 0][:4], np.int32)}


def glm4v(config: Settings) -> Facts:
    """Adapts GLM-4.1V. Files with sections of pairs have rows of q and k in half-split order."""
    refuse_others(config, attention_bias=True)
    return {"attention_bias": True, "halves": True}


def glm4v_keys(config: Settings) -> Facts:
    rope, share = _rope(config), "partial_rotary_factor"
    keys = qwen2vl_keys(config, [8, 12, 12])
    head = config.integer("head_dim", config.integer("hidden_size") // config.integer("num_attention_heads"))
    pairs = int(head * rope.number(share, config.number(share))) // 2
    if np.sum(keys.get("rope.dimension_sections", 0), dtype=np.int64) != pairs:
        raise rope.error("mrope_section", f"a list with the sum {pairs}, the number of rotated pairs,")
    return keys


def qwen3vl(config: Settings) -> Facts:
    return {"sliding_window": None}


def qwen3vl_keys(config: Settings) -> Facts:
    """The keys of Qwen3-VL. Without images, all sections have equal positions, and layers are Qwen3's."""
    layers = config.section("vision_config").get("deepstack_visual_indexes")
    return qwen2vl_keys(config) | {"n_deepstack_layers": len(layers) if isinstance(layers, list) else 0}


def qwen3vl_moe(config: Settings) -> Facts:
    refuse_others(config, decoder_sparse_step=1, mlp_only_layers=[])
    config.skip("norm_topk_prob")  # its class always normalises
    return qwen3vl(config)


def qwen3vl_moe_keys(config: Settings) -> Facts:
    return qwen3vl_keys(config) | expert_keys(config)


def _first_dense(config: Settings, dense: int) -> Facts:
    layers = config.integer("num_hidden_layers")
    return {
        "dense_layers": [i < dense for i in range(layers)],
        "expert_layers": [i >= dense for i in range(layers)],
    }


def _mixed_keys(config: Settings) -> Facts:
    return expert_keys(config) | {"leading_dense_block_count": config.values["dense_layers"].count(True)}


def ernie4_5_moe(config: Settings) -> Facts:
    layers, width = config.integer("num_hidden_layers"), config.integer("moe_intermediate_size")
    refuse_others(config, moe_layer_interval=1, moe_use_aux_free=True)
    last, first = config.get("moe_layer_end_index"), config.get("moe_layer_start_index")
    if last not in (-1, layers - 1):
        raise config.error("moe_layer_end_index", str(layers - 1))
    if type(first) is not int or not 0 <= first <= layers:
        raise config.error("moe_layer_start_index", "a number of layers")
    return {
        **_first_dense(config, first),
        "num_local_experts": config.integer("moe_num_experts"),
        "num_experts_per_tok": config.integer("moe_k"),
        "moe_intermediate_size": width,
        "shared_width": width * config.integer("moe_num_shared_experts"),
    }


def ernie4_5_moe_keys(config: Settings) -> Facts:
    return _mixed_keys(config) | {"interleave_moe_layer_step": 1, "expert_gating_func": 1}


def glm4_moe(config: Settings) -> Facts:
    refuse_others(config, n_group=1, topk_group=1)
    dense, layers = config.get("first_k_dense_replace"), config.integer("num_hidden_layers")
    if type(dense) is not int or not 0 <= dense <= layers:
        raise config.error("first_k_dense_replace", "a number of layers")
    return {
        **_first_dense(config, dense),
        "num_local_experts": config.integer("n_routed_experts"),
        "shared_width": config.integer("moe_intermediate_size") * config.integer("n_shared_experts"),
    }


def glm4v_moe(config: Settings) -> Facts:
    refuse_others(config, use_qk_norm=False)
    return glm4_moe(config) | {"use_qk_norm": False}


def glm4v_moe_keys(config: Settings) -> Facts:
    return glm4_moe_keys(config) | glm4v_keys(config)


def glm4_moe_keys(config: Settings) -> Facts:
    return _mixed_keys(config) | {
        "expert_gating_func": 2,
        "expert_shared_count": config.integer("n_shared_experts"),
        "expert_weights_norm": config.flag("norm_topk_prob", True),
        "expert_weights_scale": np.float32(config.number("routed_scaling_factor")),
    }
