"""Golden models with experts (tests/data/make_expert_goldens.py) as GGUF files.

Independently of ``convert``, this says which tensor of a published checkpoint is which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from support.checkpoints import golden_checkpoint
from support.golden import DATA, Golden

from hotcold.convert.checkpoint import Checkpoint, open_checkpoint
from hotcold.convert.vocabulary import vocabulary_metadata
from hotcold.formats.blocks import Tensor, block_type, quantise
from hotcold.formats.gguf import write_gguf

#: Each in one point or more unlike the others; tests/data/make_expert_goldens.py says in which.
NAMES = (
    "tiny-mixtral", "tiny-turbosparse", "tiny-smallthinker", "tiny-qwen3moe", "tiny-qwen2moe", "tiny-gpt-oss",
)  # fmt: skip

ARCHITECTURES = {
    "mixtral": "llama", "turbosparsemixtral": "llama", "smallthinker": "smallthinker",
    "qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "gpt_oss": "gpt-oss",
}  # fmt: skip

#: Shapes of an expert: gate, up, down.
_EXPERT = {
    "mixtral": (
        "block_sparse_moe.experts.{}.w1",
        "block_sparse_moe.experts.{}.w3",
        "block_sparse_moe.experts.{}.w2",
    ),
    "smallthinker": tuple("block_sparse_moe.experts.{}." + part for part in ("gate", "up", "down")),
    "qwen": tuple(f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")),
}

_ROUTERS = ("block_sparse_moe.gate", "block_sparse_moe.primary_router", "mlp.gate", "mlp.router")

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
} | dict.fromkeys(_ROUTERS, "ffn_gate_inp")  # fmt: skip


def expert_golden(
    name: str, folder: Path, *, type: str = "F32", down: str = "by_output", **more: Any
) -> Golden:
    """One of :data:`NAMES` with experts of this type, all else in F32; ``more`` is metadata."""
    checkpoint = open_checkpoint(golden_checkpoint(name))
    path = folder / f"{name}-{type}-{down}.gguf"
    values = arrays(checkpoint)
    if down == "by_neuron":
        values |= {
            key: each.swapaxes(-1, -2)
            for key, each in values.items()
            if "ffn_down" in key and each.ndim > 1 and "weight" in key
        }
    write_gguf(
        path,
        metadata(checkpoint, down) | more,
        {key: packed(key, each, type) for key, each in values.items()},
    )
    with np.load(DATA / name / "golden.npz", allow_pickle=False) as stored:
        return Golden(path, **{key: stored[key] for key in stored.files})


def packed(name: str, values: np.ndarray, type: str) -> Tensor:
    narrow = "_exps.weight" not in name or values.shape[-1] % block_type(type).weights
    return quantise(np.ascontiguousarray(values), "F32" if narrow else type)


def arrays(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Tensors by GGUF's names."""
    settings = checkpoint.config.values
    kind = settings["model_type"].replace("turbosparse", "")
    found: dict[str, np.ndarray] = {}
    loaded = {name: checkpoint.load(name).astype(np.float32) for name in checkpoint.files}
    for name, values in loaded.items():
        stem, _, last = name.rpartition(".")
        blk, stem = _layer(stem)
        if stem in _NAMES:
            found[f"{blk}{_NAMES[stem]}.{last}"] = values[0] if stem.endswith("expert_gate") else values
        elif stem == "post_attention_layernorm":
            norm = "post_attention_norm" if kind == "gpt_oss" else "ffn_norm"
            found[f"{blk}{norm}.{last}"] = values
        elif last == "sinks":
            found[f"{blk}attn_sinks.weight"] = values
    for layer in range(settings["num_hidden_layers"]):
        found |= _of_gpt_oss(loaded, layer) if kind == "gpt_oss" else _of_experts(loaded, kind, layer)
    if kind == "mixtral":
        for name in [each for each in found if "attn_q." in each or "attn_k." in each]:
            heads = settings["num_attention_heads" if "attn_q" in name else "num_key_value_heads"]
            found[name] = interleaved(found[name], heads)
    return found


def _layer(name: str) -> tuple[str, str]:
    """GGUF's prefix, and the rest."""
    if not name.startswith("model.layers."):
        return "", name
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.", rest


def _of_experts(loaded: dict[str, np.ndarray], kind: str, layer: int) -> dict[str, np.ndarray]:
    found = {}
    for part, name in zip(("gate", "up", "down"), _EXPERT[kind if kind in _EXPERT else "qwen"], strict=True):
        own = [loaded.get(f"model.layers.{layer}.{name.format(e)}.weight") for e in range(8)]
        found[f"blk.{layer}.ffn_{part}_exps.weight"] = np.stack([each for each in own if each is not None])
    return found


def _of_gpt_oss(loaded: dict[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    """Rows of gate and up take turns, and matrices have their inputs first."""
    at, found = f"model.layers.{layer}.mlp.experts.", {}
    both, bias = loaded[f"{at}gate_up_proj"].swapaxes(1, 2), loaded[f"{at}gate_up_proj_bias"]
    for i, part in enumerate(("gate", "up")):
        found[f"blk.{layer}.ffn_{part}_exps.weight"] = both[:, i::2]
        found[f"blk.{layer}.ffn_{part}_exps.bias"] = bias[:, i::2]
    found[f"blk.{layer}.ffn_down_exps.weight"] = loaded[f"{at}down_proj"].swapaxes(1, 2)
    found[f"blk.{layer}.ffn_down_exps.bias"] = loaded[f"{at}down_proj_bias"]
    return found


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rotary pairs (i, i + half) of each head as neighbours."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def metadata(checkpoint: Checkpoint, down: str) -> dict[str, Any]:
    config = checkpoint.config.values
    kind = config["model_type"]
    arch = ARCHITECTURES[kind]
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"], "attention.key_length": head_dim,
        "attention.value_length": head_dim, "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": head_dim, "rope.freq_base": config["rope_theta"],
        "feed_forward_length": config.get("intermediate_size", 32),
    }  # fmt: skip
    experts = ("num_local_experts", "num_experts", "moe_num_primary_experts")
    keys["expert_count"] = next(config[key] for key in experts if key in config)
    used = ("num_experts_per_tok", "moe_num_active_primary_experts")
    keys["expert_used_count"] = next(config[key] for key in used if key in config)
    for key in ("moe_intermediate_size", "moe_ffn_hidden_size"):
        if key in config:
            keys["expert_feed_forward_length"] = config[key]
    if kind == "qwen2_moe":
        keys["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if kind == "smallthinker":
        keys |= {"expert_gating_func": 2, "attention.sliding_window": config["sliding_window_size"]}
    if kind == "gpt_oss":
        scaling = config["rope_scaling"]
        keys |= {
            "attention.sliding_window": config["sliding_window"], "rope.scaling.type": "yarn",
            "rope.scaling.factor": scaling["factor"],
            "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
            "expert_feed_forward_length": config["intermediate_size"],
        }  # fmt: skip
    whole: dict[str, Any] = {"general.architecture": arch, "hotcold.ffn.down_layout": down}
    if kind == "turbosparsemixtral":
        whole["hotcold.ffn.activation"] = "drelu"
    whole |= {f"{arch}.{key}": value for key, value in keys.items()}
    tokenizer = {
        k: v for k, v in vocabulary_metadata(checkpoint, config["vocab_size"]).items() if v is not None
    }
    return whole | tokenizer
