"""Adapts ``config.json`` of models with latent attention (MLA, arXiv 2405.04434), and lists its tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hotcold.convert.adapting import Facts, expert_keys, refuse_others
from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.settings import Settings
from hotcold.convert.source import Source, loaded
from hotcold.convert.stateful import down_source, minus_exp
from hotcold.convert.tensor_files import Array

Sizes = Mapping[str, int]

_TYPES = "mlp_layer_types"

_DELTA = "linear_attn_config"
#: Sizes in ``linear_attn_config``, and the keys of transformers outside it.
_KIMI_DELTA = {
    "head_dim": "linear_head_dim", "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}  # fmt: skip

#: Keys of Kimi Linear, by those of DeepSeek-V3.
_KIMI = {
    "n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts", "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize", "max_position_embeddings": "model_max_length",
}  # fmt: skip


def deepseek_v2(config: Settings) -> Facts:
    """DeepSeek-V2, V2.5 and V2-Lite."""
    refuse_others(config, norm_topk_prob=False, scoring_func="softmax")
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.error("topk_method", "greedy or group_limited_greedy")
    grouped = method == "group_limited_greedy"
    return _latent(config) | {
        "norm_topk_prob": False,
        "groups": _groups(config) if grouped else (1, 1),
        "score": 1,
    }


def deepseek_v3(config: Settings) -> Facts:
    """DeepSeek-V3, R1 and V3.2, Kimi K2, GLM-4.7-Flash and GLM-5."""
    refuse_others(config, scoring_func="sigmoid", topk_method="noaux_tc", rope_interleave=True)
    return _latent(config) | {"groups": _groups(config), "score": 2}


def kimi_linear(config: Settings) -> Facts:
    """Adapts Kimi Linear, whose layers have latent attention without rotation, or Kimi delta attention."""
    refuse_others(config, mla_use_nope=True, moe_router_activation_func="sigmoid")
    named = {ours: config.get(theirs) for ours, theirs in _KIMI.items() if theirs in config}
    config = config.having(named)
    delta, heads = config.section(_DELTA), config.integer("num_attention_heads")
    config.skip(*_KIMI_DELTA.values())  # used where the object lacks them
    attention = _attends(config, delta)
    sizes = {
        ours: delta.integer(ours) if ours in delta else config.integer(theirs)
        for ours, theirs in _KIMI_DELTA.items()
    }
    if sizes["num_heads"] != heads:
        raise delta.error("num_heads", f"num_attention_heads {heads}")
    facts = named | _latent(config) | {"groups": _groups(config), "score": 2, _DELTA: sizes}
    return facts | {"attention_layers": attention, "state_layers": [not each for each in attention]}


def _attends(config: Settings, delta: Settings) -> list[bool]:
    """Returns, for each layer, if it has latent attention: by ``layer_types``, which transformers writes,
    or by the publishers' lists."""
    layers, kinds = config.integer("num_hidden_layers"), config.get("layer_types")
    if kinds is not None:
        delta.skip("full_attn_layers", "kda_layers")
        known = ("full_attention", "linear_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
            raise config.error("layer_types", f"a list of {layers}, each {' or '.join(known)}")
        return [kind == "full_attention" for kind in kinds]
    if _DELTA not in config:
        raise config.error(_DELTA, "an object with full_attn_layers and kda_layers, or layer_types,")
    attends = _numbers(delta, "full_attn_layers", layers)
    kept = sorted([*attends, *_numbers(delta, "kda_layers", layers)])
    if kept != [*range(1, layers + 1)]:
        raise delta.error("kda_layers", f"a list of those of {layers} layers that full_attn_layers lacks")
    return [i + 1 in attends for i in range(layers)]


def _numbers(config: Settings, key: str, layers: int) -> list[int]:
    """Reads a list of layers, which are numbered from 1."""
    values: Any = config.get(key)
    if not isinstance(values, list) or any(type(n) is not int or not 1 <= n <= layers for n in values):
        raise config.error(key, f"a list of numbers from 1 to {layers}")
    return values


def _latent(config: Settings) -> Facts:
    refuse_others(config, attention_bias=False, mlp_bias=False, moe_layer_freq=1)
    layers, first = config.integer("num_hidden_layers"), config.get("first_k_dense_replace")
    key, kinds = "first_k_dense_replace", config.get(_TYPES)
    if isinstance(kinds, list):
        key, first = _TYPES, kinds.count("dense")
        if kinds != ["dense"] * first + ["sparse"] * (layers - first):
            raise config.error(_TYPES, f"a list of {layers}, first dense, then sparse")
    if type(first) is not int or not 0 <= first <= layers:
        raise config.error(key, "a number of layers")
    width = config.integer("moe_intermediate_size")
    rotated = config.integer("qk_rope_head_dim")
    return {
        "dense_layers": [i < first for i in range(layers)],
        "expert_layers": [i >= first for i in range(layers)],
        "head_dim": rotated,
        "num_key_value_heads": 1,
        "num_local_experts": config.integer("n_routed_experts"),
        "shared_width": width * config.integer("n_shared_experts"),
    }


def _groups(config: Settings) -> tuple[int, int]:
    return config.integer("n_group"), config.integer("topk_group")


def _scaling(config: Settings) -> Settings:
    """The object with the parameters of rotary scaling, under either of its names."""
    return config.section("rope_scaling" if config.get("rope_scaling") else "rope_parameters")


def latent_keys(config: Settings) -> Facts:
    """The keys of llama.cpp's newer files, whose cache has one head."""
    values, heads = config.values, config.integer("num_attention_heads")
    latent, rotated = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
    keys: Facts = expert_keys(config) | {
        "leading_dense_block_count": values["dense_layers"].count(True),
        "attention.head_count": heads,
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rotated,
        "attention.value_length": latent,
        "attention.key_length_mla": config.integer("qk_nope_head_dim") + rotated,
        "attention.value_length_mla": config.integer("v_head_dim"),
        "expert_gating_func": values["score"],
        "expert_shared_count": config.integer("n_shared_experts"),
        "expert_weights_norm": config.flag("norm_topk_prob", True),
        "expert_weights_scale": np.float32(config.number("routed_scaling_factor")),
        "expert_group_count": values["groups"][0],
        "expert_group_used_count": values["groups"][1],
    }
    if values.get("q_lora_rank"):
        keys["attention.q_lora_rank"] = config.integer("q_lora_rank")
    scaling = _scaling(config)
    everywhere = scaling.get("mscale_all_dim")
    if everywhere and scaling.text("rope_type", scaling.text("type", "default")) == "yarn":
        keys["rope.scaling.yarn_log_multiplier"] = np.float32(0.1 * scaling.number("mscale_all_dim"))
    return keys


def kimi_linear_keys(config: Settings) -> Facts:
    delta = config.section(_DELTA)
    return latent_keys(config) | {
        "attention.head_count_kv": [int(each) for each in config.values["attention_layers"]],
        "kda.head_dim": delta.integer("head_dim"),
        "ssm.conv_kernel": delta.integer("short_conv_kernel_size"),
    }


def indexed_keys(config: Settings) -> Facts:
    return latent_keys(config) | {
        "attention.indexer.head_count": config.integer("index_n_heads"),
        "attention.indexer.key_length": config.integer("index_head_dim"),
        "attention.indexer.top_k": config.integer("index_topk"),
    }


def latent_attention(checkpoint: Checkpoint, layer: int, sizes: Sizes, down_layout: str) -> list[Source]:
    """A layer's attention, and the router's selection bias if it has one."""
    sources = _attention(checkpoint, layer, sizes["D"])
    return sources + _router_bias(checkpoint, layer, sizes, "mlp")


def _router_bias(checkpoint: Checkpoint, layer: int, sizes: Sizes, mlp: str) -> list[Source]:
    """The router's selection bias, if a layer has one; ``mlp`` is HF's name of the FFN."""
    config, target = checkpoint.config, f"blk.{layer}.exp_probs_b.bias"
    if not config.values["expert_layers"][layer] or config.values["score"] != 2:
        return []
    origin = f"model.layers.{layer}.{mlp}.gate.e_score_correction_bias"
    return [loaded(checkpoint, target, [origin], (sizes["E"],))]


def _attention(checkpoint: Checkpoint, layer: int, dim: int) -> list[Source]:
    config = checkpoint.config
    hf, blk = f"model.layers.{layer}.self_attn.", f"blk.{layer}."
    heads, latent = config.integer("num_attention_heads"), config.integer("kv_lora_rank")
    rotated, plain = config.integer("qk_rope_head_dim"), config.integer("qk_nope_head_dim")
    value, rank = config.integer("v_head_dim"), config.get("q_lora_rank")

    def one(target: str, origin: str, *shape: int) -> Source:
        return loaded(checkpoint, f"{blk}{target}.weight", [f"{hf}{origin}.weight"], shape)

    def keys(array: Array) -> Array:
        turned: Array = array.reshape(heads, -1, latent)[:, :plain].transpose(0, 2, 1)
        return turned

    def values(array: Array) -> Array:
        rows: Array = array.reshape(heads, -1, latent)[:, plain:]
        return rows

    queries = heads * (plain + rotated)
    if rank:
        query = [
            one("attn_q_a", "q_a_proj", rank, dim),
            one("attn_q_a_norm", "q_a_layernorm", rank),
            one("attn_q_b", "q_b_proj", queries, rank),
        ]
    else:
        query = [one("attn_q", "q_proj", queries, dim)]
    origin, shape = [f"{hf}kv_b_proj.weight"], (heads * (plain + value), latent)
    return [
        *query,
        one("attn_kv_a_mqa", "kv_a_proj_with_mqa", latent + rotated, dim),
        one("attn_kv_a_norm", "kv_a_layernorm", latent),
        loaded(checkpoint, f"{blk}attn_k_b.weight", origin, shape, keys, (heads, latent, plain)),
        loaded(checkpoint, f"{blk}attn_v_b.weight", origin, shape, values, (heads, value, latent)),
        one("attn_output", "o_proj", dim, heads * value),
    ]


def kimi_layer(checkpoint: Checkpoint, layer: int, sizes: Sizes, down_layout: str) -> list[Source]:
    """A layer's attention of either kind, its FFN if it has no experts, and the bias of its router."""
    values, dim, n = checkpoint.config.values, sizes["D"], sizes["N"]
    sources = (_kimi_delta if values["state_layers"][layer] else _attention)(checkpoint, layer, dim)
    if values["dense_layers"][layer]:
        hf, blk = f"model.layers.{layer}.", f"blk.{layer}."
        # transformers 5.23 saves it under the experts' name.
        saved = f"{hf}mlp.gate_proj.weight" not in checkpoint.files
        mlp = f"{hf}block_sparse_moe." if saved else f"{hf}mlp."
        for part in ("gate", "up"):
            origin = f"{mlp}{part}_proj.weight"
            sources.append(loaded(checkpoint, f"{blk}ffn_{part}.weight", [origin], (n, dim)))
        down = f"{blk}ffn_down.weight", f"{mlp}down_proj.weight"
        sources.append(down_source(checkpoint, *down, (dim, n), down_layout))
    return sources + _router_bias(checkpoint, layer, sizes, "block_sparse_moe")


def _kimi_delta(checkpoint: Checkpoint, layer: int, dim: int) -> list[Source]:
    delta, hf, blk = checkpoint.config.section(_DELTA), f"model.layers.{layer}.self_attn.", f"blk.{layer}."
    heads, length = delta.integer("num_heads"), delta.integer("head_dim")
    rows, taps = heads * length, delta.integer("short_conv_kernel_size")
    matrices = {
        "attn_q": ("q_proj", (rows, dim)),
        "attn_k": ("k_proj", (rows, dim)),
        "attn_v": ("v_proj", (rows, dim)),
        "ssm_f_a": ("f_a_proj", (length, dim)),
        "ssm_f_b": ("f_b_proj", (rows, length)),
        "ssm_g_a": ("g_a_proj", (length, dim)),
        "ssm_g_b": ("g_b_proj", (rows, length)),
        "ssm_beta": ("b_proj", (heads, dim)),
        "ssm_norm": ("o_norm", (length,)),
        "attn_output": ("o_proj", (dim, rows)),
    }

    def conv(array: Array) -> Array:
        return array.reshape(1, rows, 1, taps)

    def decay(array: Array) -> Array:
        return minus_exp(array.reshape(heads, 1))

    tensors = [
        loaded(checkpoint, f"{blk}{target}.weight", [f"{hf}{origin}.weight"], shape)
        for target, (origin, shape) in matrices.items()
    ]
    for part in "qkv":
        target, origin = f"{blk}ssm_conv1d_{part}.weight", [f"{hf}{part}_conv1d.weight"]
        tensors.append(loaded(checkpoint, target, origin, (rows, 1, taps), conv, (1, rows, 1, taps)))
    tensors.append(loaded(checkpoint, f"{blk}ssm_dt.bias", [f"{hf}dt_bias"], (rows,)))
    shape = 1, 1, heads, 1
    return [*tensors, loaded(checkpoint, f"{blk}ssm_a", [f"{hf}A_log"], shape, decay, (heads, 1))]


def indexed_attention(checkpoint: Checkpoint, layer: int, sizes: Sizes, down_layout: str) -> list[Source]:
    """Latent attention with the index's tensors, which some layers of GLM-5.2 lack."""
    config, dim = checkpoint.config, sizes["D"]
    hf, blk = f"model.layers.{layer}.self_attn.indexer.", f"blk.{layer}.indexer."
    heads, length = config.integer("index_n_heads"), config.integer("index_head_dim")
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
        "wq_b.weight": ("attn_q_b.weight", (heads * length, config.integer("q_lora_rank"))),
        "wk.weight": ("attn_k.weight", (length, dim)),
        "k_norm.weight": ("k_norm.weight", (length,)),
        "k_norm.bias": ("k_norm.bias", (length,)),
        "weights_proj.weight": ("proj.weight", (heads, dim)),
    }
    return latent_attention(checkpoint, layer, sizes, down_layout) + [
        loaded(checkpoint, blk + target, [hf + origin], shape)
        for origin, (target, shape) in shapes.items()
        if hf + origin in checkpoint.files
    ]
