"""Adapts a family's ``config.json``: to Llama's keys, and to the keys that GGUF has for the family.

A function for Llama's keys returns only the changed keys: keys that the publishers named otherwise, values
that they left to the class, and ``windows``, a list that marks layers with sliding-window attention. A value
that GGUF cannot express is refused; the error names the value that it must have."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hotcold.convert.quantised import Quantised
from hotcold.convert.settings import Settings

Facts = dict[str, Any]


def refuse_others(config: Settings, **needed: Any) -> None:
    """Raises ConvertError if a key is present with another value."""
    for key, value in needed.items():
        if key in config and config.values[key] != value:
            raise config.error(key, str(value).lower() if isinstance(value, bool) else repr(value))


def windows_of(config: Settings, implied: Sequence[bool]) -> list[bool]:
    """Returns, for each layer, if it has the window: ``layer_types``, or what the class implies."""
    if "layer_types" not in config:
        return list(implied)
    types, layers = config.values["layer_types"], config.integer("num_hidden_layers")
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise config.error("layer_types", f"a list of {layers}, each {' or '.join(known)}")
    return [kind == "sliding_attention" for kind in types]


def everywhere(config: Settings) -> list[bool]:
    return [True] * config.integer("num_hidden_layers")


def mistral(config: Settings) -> Facts:
    return {"windows": everywhere(config)} if "sliding_window" in config else {}


def ministral(config: Settings) -> Facts:
    """Adapts Ministral of 2024, whose layers differ in their window."""
    return {"windows": windows_of(config, everywhere(config))} if "sliding_window" in config else {}


def mixtral(config: Settings) -> Facts:
    return mistral(config)


def phi3(config: Settings) -> Facts:
    key = "original_max_position_embeddings"  # the class always has a value
    # Its class takes either name for longrope.
    return mistral(config) | {key: config.integer(key, 4096), "rope_names": {"yarn": "longrope"}}


def qwen(config: Settings) -> Facts:
    if not config.flag("use_sliding_window", False) or "sliding_window" not in config:
        config.read.update(("layer_types", "max_window_layers"))  # without effect in this case
        return {"sliding_window": None}
    layers = config.integer("num_hidden_layers")
    first = config.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise config.error("max_window_layers", "a number of layers")
    return {"windows": windows_of(config, [i >= first for i in range(layers)])}


def qwen2_moe(config: Settings) -> Facts:
    refuse_others(config, norm_topk_prob=False)
    return _qwen_moe(config) | {
        "shared_width": config.integer("shared_expert_intermediate_size"),
    }


def qwen3_moe(config: Settings) -> Facts:
    if not config.flag("norm_topk_prob", False):
        raise config.error("norm_topk_prob", "true")
    return _qwen_moe(config)


def _qwen_moe(config: Settings) -> Facts:
    refuse_others(config, decoder_sparse_step=1, mlp_only_layers=[])
    experts = "num_experts" if "num_experts" in config else "num_local_experts"
    return qwen(config) | {
        "num_local_experts": config.integer(experts),
        "moe_intermediate_size": config.integer("moe_intermediate_size"),
    }


def smallthinker(config: Settings) -> Facts:
    layers, width = config.integer("num_hidden_layers"), config.integer("moe_ffn_hidden_size")
    every = [1] * layers
    # llama.cpp's files have one rule: without a window all layers rotate, else only layers with the window.
    spaced = [int(i % 4 != 0) for i in range(layers)]
    windows, rotates = config.get("sliding_window_layout"), config.get("rope_layout")
    if not isinstance(windows, list | None):
        raise config.error("sliding_window_layout", f"a list of {layers}")
    windows = windows if windows and any(windows) else None
    if windows is not None and windows != spaced:
        raise config.error("sliding_window_layout", f"{[0] * layers} or {spaced}")
    if (rotates or every) != (every if windows is None else spaced):
        raise config.error("rope_layout", str(every if windows is None else spaced))
    refuse_others(config, norm_topk_prob=True)
    return {
        "hidden_act": "relu",
        "intermediate_size": width,
        "moe_intermediate_size": width,
        "num_local_experts": config.integer("moe_num_primary_experts"),
        "num_experts_per_tok": config.integer("moe_num_active_primary_experts"),
        "sliding_window": config.integer("sliding_window_size", 4096) if windows else None,
        "windows": [bool(window) for window in windows or [0] * layers],
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
    }


def gpt_oss(config: Settings) -> Facts:
    refuse_others(config, swiglu_limit=7.0, swiglu_alpha=1.702, attention_bias=True)
    layers, hidden_act = config.integer("num_hidden_layers"), config.text("hidden_act", "silu")
    facts: Facts = {
        # config.json says silu; the class computes what OpenAI's code does.
        "hidden_act": "swiglu_oai" if hidden_act == "silu" else hidden_act,
        "attention_bias": True,
        "moe_intermediate_size": config.integer("intermediate_size"),
        "windows": windows_of(config, [i % 2 == 0 for i in range(layers)]),
    }
    if (stored := config.section("quantization_config")).values:
        if stored.text("quant_method", "") != "mxfp4":
            raise stored.error("quant_method", "mxfp4")
        facts |= {"quantization_config": None, "mxfp4": True, "quantised": Quantised("mxfp4", ("U8",))}
    return facts


def falcon(config: Settings) -> Facts:
    for key, needed in (("alibi", False), ("parallel_attn", True)):
        if config.flag(key, needed) is not needed:
            raise config.error(key, str(needed).lower())
    grouped, heads = config.flag("new_decoder_architecture", False), config.integer("num_attention_heads")
    shared = config.flag("multi_query", True) and not grouped
    two_norms = grouped and config.integer("num_ln_in_parallel_attn", 2) == 2
    return {
        "num_key_value_heads": 1 if shared else config.integer("num_kv_heads", heads),
        "intermediate_size": config.integer("ffn_hidden_size", 4 * config.integer("hidden_size")),
        "hidden_act": config.text("activation"),
        "one_norm": not two_norms,
        "two_norms": two_norms,
    }


def falcon_keys(config: Settings) -> Facts:
    return {"tensor_data_layout": "jploski"}  # llama.cpp's name of this order of q, k and v


def opt(config: Settings) -> Facts:
    width = config.integer("hidden_size")
    needed = {"_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True}
    refuse_others(config, do_layer_norm_before=True, word_embed_proj_dim=width, **needed)
    return {
        "intermediate_size": config.integer("ffn_dim"),
        "hidden_act": config.text("activation_function"),
        "layer_norm_eps": 1e-5,
        "learned_positions": True,
    }


def minicpm(config: Settings) -> Facts:
    refuse_others(config, num_experts=0)
    return {"tie_word_embeddings": config.flag("tie_word_embeddings", True)}


def minicpm_keys(config: Settings) -> Facts:
    width, layers = config.integer("hidden_size"), config.integer("num_hidden_layers")
    return {
        "embedding_scale": np.float32(config.number("scale_emb", 1)),
        "residual_scale": np.float32(config.number("scale_depth", 1) / math.sqrt(layers)),
        "logit_scale": np.float32(width / config.integer("dim_model_base", 1)),
    }


def granite_keys(config: Settings) -> Facts:
    keys = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    return {key: np.float32(config.number(theirs)) for key, theirs in keys.items()}


def check_nested(config: Settings) -> None:
    """Raises ConvertError if rotary parameters are not by kind of layer: the class would ignore them."""
    rope, kinds = config.section("rope_parameters"), ("full_attention", "sliding_attention")
    if rope.values and not any(kind in rope for kind in kinds):
        raise config.error("rope_parameters", f"an object with {' and '.join(kinds)}")


def gemma3(config: Settings) -> Facts:
    check_nested(config)
    refuse_others(config, use_bidirectional_attention=False, attn_logit_softcapping=None)
    if config.text("model_type") == "gemma3":  # its class has no cap, unlike the text model's class
        refuse_others(config, final_logit_softcapping=None)
    period, layers = config.integer("sliding_window_pattern", 6), config.integer("num_hidden_layers")
    return {
        "hidden_act": config.text("hidden_activation"),
        "windows": windows_of(config, [bool((i + 1) % period) for i in range(layers)]),
    }


def gemma3_keys(config: Settings) -> Facts:
    local = config.section("rope_parameters").section("sliding_attention")
    base = local.number("rope_theta", config.number("rope_local_base_freq"))
    keys = {"rope.freq_base_swa": np.float32(base)}
    if (scalar := config.number("query_pre_attn_scalar")) != config.integer("head_dim"):
        keys["attention.scale"] = np.float32(scalar**-0.5)
    if "final_logit_softcapping" in config:
        keys["final_logit_softcapping"] = np.float32(config.number("final_logit_softcapping"))
    return keys


def phi3_keys(config: Settings) -> Facts:
    # llama.cpp's files mark Phi-4 by a window of 0.
    return {} if "sliding_window" in config else {"attention.sliding_window": 0}


def olmo3(config: Settings) -> Facts:
    check_nested(config)
    if "rope_parameters" not in config:
        refuse_others(config, rope_theta=500000.0)  # the class uses it only in layers without a window
    layers = config.integer("num_hidden_layers")
    return {"windows": windows_of(config, [(i + 1) % 4 != 0 for i in range(layers)])}


def smollm3(config: Settings) -> Facts:
    refuse_others(config, use_sliding_window=False)
    layers, period = config.integer("num_hidden_layers"), config.integer("no_rope_layer_interval")
    rotates = config.get("no_rope_layers") or [int((i + 1) % period != 0) for i in range(layers)]
    needed = [int((i + 1) % 4 != 0) for i in range(layers)]
    if rotates != needed:
        key = "no_rope_layers" if "no_rope_layers" in config else "no_rope_layer_interval"
        raise config.error(key, str(needed) if key == "no_rope_layers" else "4")
    return {"sliding_window": None}


def expert_keys(config: Settings) -> Facts:
    keys = {
        "expert_count": config.integer("num_local_experts"),
        "expert_used_count": config.integer("num_experts_per_tok"),
    }
    if "moe_intermediate_size" in config:
        keys["expert_feed_forward_length"] = config.integer("moe_intermediate_size")
    if "shared_width" in config:
        keys["expert_shared_feed_forward_length"] = config.integer("shared_width")
    if keys["expert_used_count"] > keys["expert_count"]:
        raise config.error("num_experts_per_tok", f"at most {keys['expert_count']}")
    return keys


def smallthinker_keys(config: Settings) -> Facts:
    # llama.cpp's numbers: 1 softmax, 2 sigmoid
    softmax = config.flag("moe_primary_router_apply_softmax", False)
    return expert_keys(config) | {"expert_gating_func": 1 if softmax else 2}
