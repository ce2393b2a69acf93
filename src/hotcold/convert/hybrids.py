"""Adapts ``config.json`` of families whose layers differ: which layers have attention, a state, an FFN or
experts.

As in ``adapting``, a function for Llama's keys returns the changed keys, and one for GGUF's keys returns the
keys that only this family has. ``attention_layers``, ``dense_layers`` and ``expert_layers`` are lists of
truth values, which rules of ``hybrids.json`` name; ``ssm`` has the sizes of Mamba-2."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hotcold.convert.adapting import Facts, expert_keys, granite_keys, refuse_others
from hotcold.convert.settings import Settings

_NO_BOUND = 1e30  # of time steps: larger than any real step

#: The publishers' names of the kinds of layers -> their names here.
_KINDS = {
    "conv": "state", "mamba": "state", "linear_attention": "state", "M": "state",
    "full_attention": "attention", "attention": "attention", "*": "attention",
    "moe": "experts", "E": "experts", "mlp": "dense", "-": "dense",
}  # fmt: skip

#: Sizes of Mamba-2 -> the keys of each publisher.
_NEMOTRON = {
    "heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "state": "ssm_state_size",
    "groups": "n_groups", "taps": "conv_kernel",
}  # fmt: skip
_GRANITE = {
    "heads": "mamba_n_heads", "head_dim": "mamba_d_head", "state": "mamba_d_state",
    "groups": "mamba_n_groups", "taps": "mamba_d_conv",
}  # fmt: skip
_MAMBA2 = {
    "heads": "num_heads", "head_dim": "head_dim", "state": "state_size", "groups": "n_groups",
    "taps": "conv_kernel",
}  # fmt: skip


def _kinds(config: Settings, key: str, implied: list[str] | None = None) -> list[str]:
    """The kind of each layer, from a list, or from a text with one letter for each layer."""
    stated: Any = config.get(key)
    if stated is None and implied is not None:
        return implied
    layers = [*stated] if isinstance(stated, list | str) else []
    if not layers or any(not isinstance(each, str) or each not in _KINDS for each in layers):
        raise config.error(key, f"a list, each {', '.join(_KINDS)}")
    return [_KINDS[each] for each in layers]


def _layers(config: Settings, kinds: list[str]) -> Facts:
    """The lists that say which layers have attention; checks their length."""
    layers = config.integer("num_hidden_layers", len(kinds))
    if len(kinds) != layers:
        raise config.error("num_hidden_layers", f"{len(kinds)}, the number of kinds of layers,")
    attention = [kind == "attention" for kind in kinds]
    return {"attention_layers": attention, "state_layers": [kind == "state" for kind in kinds]}


def _kv_heads(config: Settings) -> list[int]:
    heads = config.integer("num_key_value_heads", config.integer("num_attention_heads"))
    return [heads * each for each in config.values["attention_layers"]]


def lfm2(config: Settings) -> Facts:
    count = config.integer("num_hidden_layers")
    attends: Any = config.get("full_attn_idxs")
    implied = None
    if isinstance(attends, list):
        implied = ["attention" if i in attends else "state" for i in range(count)]
    width = config.integer("block_ff_dim", config.integer("intermediate_size"))
    if config.text("model_type") == "lfm2" and config.flag("block_auto_adjust_ff_dim", True):
        width = int(config.number("block_ffn_dim_multiplier") * (2 * width // 3))
        multiple = config.integer("block_multiple_of")
        width = -(-width // multiple) * multiple
    dense = min(config.integer("num_dense_layers"), count) if "num_experts" in config else count
    facts = {
        "hidden_act": "silu",
        "intermediate_size": width,
        "tie_word_embeddings": config.flag("tie_embedding", config.flag("tie_word_embeddings", True)),
        "dense_layers": [i < dense for i in range(count)],
        "expert_layers": [i >= dense for i in range(count)],
        **_layers(config, _kinds(config, "layer_types", implied)),
    }
    if "num_experts" in config:
        if not config.flag("norm_topk_prob", True):
            raise config.error("norm_topk_prob", "true")
        facts |= {
            "num_local_experts": config.integer("num_experts"),
            "moe_intermediate_size": config.integer("moe_intermediate_size"),
            "leading_dense": dense,
        }
    return facts


def lfm2_keys(config: Settings) -> Facts:
    keys: Facts = {
        "attention.head_count_kv": _kv_heads(config),
        "shortconv.l_cache": config.integer("conv_L_cache"),
    }
    if "num_local_experts" in config:
        keys |= expert_keys(config) | {
            "leading_dense_block_count": config.values["leading_dense"],
            "expert_gating_func": 2,
        }
        if (scale := config.number("routed_scaling_factor")) != 1:
            keys["expert_weights_scale"] = np.float32(scale)
    return keys


def qwen35(config: Settings) -> Facts:
    """Qwen3.5 and Qwen3-Next."""
    count = config.integer("num_hidden_layers")
    period = config.integer("full_attention_interval", 4)
    implied = ["attention" if (i + 1) % period == 0 else "state" for i in range(count)]
    facts: Facts = {"sliding_window": None, **_layers(config, _kinds(config, "layer_types", implied))}
    if "num_experts" in config:
        facts |= {
            "intermediate_size": config.integer("moe_intermediate_size"),
            "num_local_experts": config.integer("num_experts"),
            "shared_width": config.integer("shared_expert_intermediate_size"),
        }
        if not config.flag("norm_topk_prob", True):
            raise config.error("norm_topk_prob", "true")
        refuse_others(config, decoder_sparse_step=1, mlp_only_layers=[])
    return facts


def qwen35_keys(config: Settings) -> Facts:
    values, width = config.integer("linear_num_value_heads"), config.integer("linear_value_head_dim")
    key_heads = config.integer("linear_num_key_heads")
    if values % key_heads:
        raise config.error("linear_num_value_heads", f"a multiple of linear_num_key_heads {key_heads}")
    attends = config.values["attention_layers"]
    keys: Facts = {
        "ssm.conv_kernel": config.integer("linear_conv_kernel_dim"),
        "ssm.state_size": config.integer("linear_key_head_dim"),
        "ssm.group_count": key_heads,
        "ssm.time_step_rank": values,
        "ssm.inner_size": values * width,
    }
    period = attends.index(True) + 1 if True in attends else len(attends) + 1
    if attends == [(i + 1) % period == 0 for i in range(len(attends))]:
        keys["full_attention_interval"] = period
    else:
        keys["attention.recurrent_layers"] = [not each for each in attends]
    sections: Any = config.section("rope_parameters").get("mrope_section")
    if config.text("model_type").startswith("qwen3_5"):
        # The sections matter for images only; in text all sections have the same positions.
        parts = [n for n in sections if type(n) is int][:4] if isinstance(sections, list) else [11, 11, 10]
        keys["rope.dimension_sections"] = [*parts, 0, 0, 0][:4]
    return keys | (expert_keys(config) if "num_local_experts" in config else {})


def _ssm(config: Settings, names: Mapping[str, str], prefix: str, **further: Any) -> Facts:
    """Sizes of Mamba-2; ``names`` are the publishers'. ConvertError: time steps have bounds."""
    limits: Any = config.get("time_step_limit", [0.0, math.inf])
    most = limits[1] if isinstance(limits, list) and len(limits) == 2 else None
    most = most.get("__float__") if isinstance(most, dict) else most  # as transformers writes infinity
    unbounded = most == "Infinity" or (isinstance(most, float) and most >= _NO_BOUND)
    if not unbounded or limits[0] != 0:
        raise config.error("time_step_limit", "[0.0, Infinity]")
    return {
        "ssm": {key: config.integer(theirs) for key, theirs in names.items()} | {"prefix": prefix} | further
    }


def _ssm_keys(config: Settings) -> Facts:
    ssm = config.values["ssm"]
    return {
        "ssm.conv_kernel": ssm["taps"],
        "ssm.state_size": ssm["state"],
        "ssm.group_count": ssm["groups"],
        "ssm.time_step_rank": ssm["heads"],
        "ssm.inner_size": ssm["heads"] * ssm["head_dim"],
    }


def nemotron_h(config: Settings) -> Facts:
    refuse_others(config, mamba_hidden_act="silu", mlp_bias=False)
    key = "layers_block_type" if "layers_block_type" in config else "hybrid_override_pattern"
    kinds = _kinds(config, key)
    facts = {
        "num_hidden_layers": len(kinds),
        "hidden_act": config.text("mlp_hidden_act"),
        "norm_eps": config.number("layer_norm_epsilon"),
        "no_rope": True,
        "experts": "experts" in kinds,
        "architecture": "nemotron_h_moe" if "experts" in kinds else "nemotron_h",
        "dense_layers": [kind == "dense" for kind in kinds],
        "expert_layers": [kind == "experts" for kind in kinds],
        **_layers(Settings(config.path, {}), kinds),
        **_ssm(
            config,
            _NEMOTRON,
            "backbone.layers.{}.mixer.",
            conv_bias=config.flag("use_conv_bias", True),
            bias=config.flag("use_bias", False),
        ),
    }
    if facts["experts"]:
        for group in ("n_group", "topk_group"):
            if config.integer(group) != 1:
                raise config.error(group, "1")
        if facts["dense_layers"].count(True):
            raise config.error(key, "a model with experts in all of its FFNs")
        shared = config.integer("moe_shared_expert_intermediate_size")
        facts |= {
            "num_local_experts": config.integer("n_routed_experts"),
            "moe_intermediate_size": config.integer("moe_intermediate_size"),
            "shared_width": shared * config.integer("n_shared_experts"),
            "latent": "moe_latent_size" in config,
        }
    return facts


def nemotron_h_keys(config: Settings) -> Facts:
    values = config.values
    width = config.integer("moe_intermediate_size" if values["experts"] else "intermediate_size")
    kinds = zip(values["dense_layers"], values["expert_layers"], strict=True)
    keys: Facts = {
        "feed_forward_length": [width * (dense or experts) for dense, experts in kinds],
        "attention.head_count_kv": _kv_heads(config),
        "attention.layer_norm_epsilon": np.float32(config.number("norm_eps")),
        **_ssm_keys(config),
    }
    if values["experts"]:
        keys |= expert_keys(config) | {
            "expert_shared_count": config.integer("n_shared_experts"),
            "expert_weights_norm": config.flag("norm_topk_prob", True),
            "expert_weights_scale": np.float32(config.number("routed_scaling_factor")),
            "expert_group_count": 1,
            "expert_group_used_count": 1,
        }
        if values["latent"]:
            keys["moe_latent_size"] = config.integer("moe_latent_size")
    return keys


def granite_hybrid(config: Settings) -> Facts:
    """Granite 4. As in llama.cpp's files, models with attention in all layers have the names of Granite 3."""
    refuse_others(config, normalization_function="rmsnorm")
    kinds = _kinds(config, "layer_types")
    experts = bool(config.get("num_local_experts"))
    rotates = config.text("position_embedding_type", "nope") == "rope"
    facts = {"no_rope": not rotates, "experts": experts, **_layers(config, kinds)}
    if "state" in kinds:
        facts |= _ssm(
            config,
            _GRANITE,
            "model.layers.{}.mamba.",
            conv_bias=config.flag("mamba_conv_bias", True),
            bias=config.flag("mamba_proj_bias", False),
        )
    else:
        facts["architecture"] = "granitemoe" if experts else "granite"
        config.skip(*(key for key in config.values if key.startswith(("mamba_", "time_step_"))))
    shared = config.integer("shared_intermediate_size")
    if experts:
        return facts | {"shared_width": shared, "moe_intermediate_size": config.integer("intermediate_size")}
    config.skip("num_experts_per_tok")
    return facts | {"intermediate_size": shared, "num_local_experts": None}


def granite_hybrid_keys(config: Settings) -> Facts:
    keys = granite_keys(config)
    if any(config.values["state_layers"]):
        keys |= _ssm_keys(config) | {"attention.head_count_kv": _kv_heads(config)}
    if config.values["no_rope"]:
        keys["rope.scaling.finetuned"] = False
    return keys | (expert_keys(config) if config.values["experts"] else {})


def granite_moe(config: Settings) -> Facts:
    """Granite 3 with experts; ``granitemoeshared`` may have a shared expert, too."""
    facts = _layers(config, ["attention"] * config.integer("num_hidden_layers"))
    shared = "shared_intermediate_size"
    if config.text("model_type") == "granitemoeshared" and config.get(shared) != 0:
        facts["shared_width"] = config.integer(shared)
    return facts


def granite_moe_keys(config: Settings) -> Facts:
    return granite_keys(config) | expert_keys(config)


def falcon_h1(config: Settings) -> Facts:
    if config.flag("mamba_norm_before_gate", False) and config.flag("mamba_rms_norm", False):
        raise config.error("mamba_norm_before_gate", "false")
    ssm = _ssm(
        config,
        _GRANITE,
        "model.layers.{}.mamba.",
        conv_bias=config.flag("mamba_conv_bias", True),
        bias=config.flag("mamba_proj_bias", False),
        out_bias=config.flag("projectors_bias", False),
        norm=config.flag("mamba_rms_norm", False),
    )
    layers = config.integer("num_hidden_layers")
    if "head_dim" not in config:
        ssm["head_dim"] = config.integer("hidden_size") // config.integer("num_attention_heads")
    return ssm | {
        "state_layers": [True] * layers,
        "attention_layers": [True] * layers,
        "factors": _falcon_h1_factors(config),
    }


def _falcon_h1_factors(config: Settings) -> dict[str, tuple[float, float]]:
    """Factors of a matrix's input and output, by its name in GGUF; ``ssm_in`` has one for each of the rows of
    z, x, B, C and dt. Files hold the weights times both factors, and a bias times the second factor."""
    gate, down = _numbers(config, "mlp_multipliers", 2)
    attention = config.number("attention_in_multiplier")
    into = config.number("ssm_in_multiplier")
    rows = _numbers(config, "ssm_multipliers", 5)
    return {
        "token_embd": (1, config.number("embedding_multiplier")),
        "output": (1, config.number("lm_head_multiplier")),
        "attn_q": (attention, 1),
        "attn_k": (attention, config.number("key_multiplier")),
        "attn_v": (attention, 1),
        "attn_output": (1, config.number("attention_out_multiplier")),
        "ssm_out": (1, config.number("ssm_out_multiplier")),
        "ffn_gate": (1, gate),
        "ffn_down": (1, down),
        **{f"ssm_in {part}": (into, factor) for part, factor in zip("zxBCd", rows, strict=True)},
    }


def _numbers(config: Settings, key: str, count: int) -> list[float]:
    values: Any = config.get(key) or [1.0] * count
    if not isinstance(values, list) or len(values) != count:
        raise config.error(key, f"a list of {count} numbers above 0")
    return [Settings(config.path, {key: each}).number(key) for each in values]


def falcon_h1_keys(config: Settings) -> Facts:
    return _ssm_keys(config)


def mamba2(config: Settings) -> Facts:
    refuse_others(config, hidden_act="silu")
    layers = config.integer("num_hidden_layers")
    return _ssm(
        config,
        _MAMBA2,
        "backbone.layers.{}.mixer.",
        conv_bias=config.flag("use_conv_bias", True),
        bias=config.flag("use_bias", False),
    ) | {
        "hidden_act": "silu",
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "intermediate_size": 1,
        "no_rope": True,
        "max_position_embeddings": config.integer("max_position_embeddings", 1 << 20),
        "norm_eps": config.number("layer_norm_epsilon"),
        "state_layers": [True] * layers,
    }


def mamba2_keys(config: Settings) -> Facts:
    none = {
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.head_count_kv": None,
        "attention.key_length": None,
        "attention.value_length": None,
    }
    return none | _ssm_keys(config)
