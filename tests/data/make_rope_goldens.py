"""Writes ``rope_goldens.json``: what transformers makes of rotary settings in all the forms that checkpoints
have them.

pip install torch==2.13.0 transformers==5.24.0 && python tests/data/make_rope_goldens.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.smollm3.modeling_smollm3 import SmolLM3RotaryEmbedding

CLASSES = {
    "llama": (transformers.LlamaConfig, LlamaRotaryEmbedding),
    "mixtral": (transformers.MixtralConfig, MixtralRotaryEmbedding),
    "phi3": (transformers.Phi3Config, Phi3RotaryEmbedding),
    "smollm3": (transformers.SmolLM3Config, SmolLM3RotaryEmbedding),
    "gpt_oss": (transformers.GptOssConfig, GptOssRotaryEmbedding),
    "gemma3_text": (transformers.Gemma3TextConfig, Gemma3RotaryEmbedding),
    "olmo3": (transformers.Olmo3Config, Olmo3RotaryEmbedding),
}
SHAPE = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    "intermediate_size": 64, "num_hidden_layers": 6, "vocab_size": 32, "max_position_embeddings": 256,
}  # fmt: skip

_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONG = {"short_factor": [1.0] * 7 + [1.5], "long_factor": [1.0 + i for i in range(8)]}
_WINDOWS = {"sliding_window": 8}
_LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
_PARTIAL = {"rope_type": "default", "partial_rotary_factor": 0.5}
_CONTEXT = {"original_max_position_embeddings": 64}

#: Name -> model_type, and the keys of config.json beside the shape.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing": ("llama", {}),
    "theta": ("llama", {"rope_theta": 500000.0}),
    "theta inside": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
    "theta twice": ("llama", {"rope_theta": 100.0, "rope_parameters": {"rope_theta": 5000.0}}),
    "linear by type": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "linear by rope_type": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "rope_type is stronger": (
        "llama", {"rope_scaling": {"type": "dynamic", "rope_type": "linear", "factor": 2.0}}
    ),
    "rope_type default is stronger": (
        "llama", {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}}
    ),
    "a factor without a type": ("llama", {"rope_scaling": {"factor": 4.0}}),
    "a factor without a type in new keys": (
        "llama", {"rope_parameters": {"factor": 4.0, "rope_theta": 500.0}}
    ),
    "dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "old beside new": (
        "llama",
        {
            "rope_theta": 700.0,
            "rope_scaling": {"type": "linear", "factor": 4.0},
            "rope_parameters": _LINEAR,
        },
    ),
    "old is empty": (
        "llama",
        {"rope_scaling": {}, "rope_parameters": _LINEAR},
    ),
    "old is null": (
        "llama",
        {"rope_scaling": None, "rope_parameters": _LINEAR},
    ),
    "partial": ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "partial twice": (
        "phi3",
        {"partial_rotary_factor": 0.25, "rope_parameters": _PARTIAL},
    ),
    "partial beside": ("phi3", {"partial_rotary_factor": 0.25}),
    "llama3": ("llama", {"rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 64}}),
    "llama3, the context beside it": (
        "llama", {"rope_scaling": dict(_LLAMA3), "original_max_position_embeddings": 64}
    ),
    "llama3, two contexts": (
        "llama",
        {
            "rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 128},
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn": ("llama", {"rope_scaling": {"rope_type": "yarn", **_YARN}}),
    "yarn, zero betas": (
        "llama", {"rope_scaling": {"rope_type": "yarn", **_YARN, "beta_fast": 0, "beta_slow": None}}
    ),
    "yarn, betas": (
        "llama", {"rope_scaling": {"type": "yarn", **_YARN, "beta_fast": 8.0, "beta_slow": 2.0}}
    ),
    "yarn, mscale": (
        "llama", {"rope_scaling": {"type": "yarn", **_YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}
    ),
    "yarn, mscale zero": (
        "llama", {"rope_scaling": {"type": "yarn", **_YARN, "mscale": 1.0, "mscale_all_dim": 0}}
    ),
    "yarn, factor null": ("llama", {"rope_scaling": {"rope_type": "yarn", **_YARN, "factor": None}}),
    "yarn, attention factor": (
        "llama", {"rope_scaling": {"rope_type": "yarn", **_YARN, "attention_factor": 1.25}}
    ),
    "mixtral's theta": ("mixtral", {}),
    "smollm3's theta": ("smollm3", {}),
    "phi3 su": ("phi3", {"rope_scaling": {"type": "su", **_LONG, "original_max_position_embeddings": 64}}),
    "phi3 longrope": (
        "phi3", {"rope_scaling": {"type": "longrope", **_LONG}, "original_max_position_embeddings": 64}
    ),
    "phi3 yarn": ("phi3", {"rope_scaling": {"type": "yarn", **_LONG}, **_CONTEXT}),
    "phi3 factor": (
        "phi3",
        {"rope_scaling": {"type": "longrope", "factor": 8.0, **_LONG}, **_CONTEXT},
    ),
    "gpt-oss's": ("gpt_oss", {**_WINDOWS}),
    "gpt-oss": (
        "gpt_oss",
        {**_WINDOWS, "rope_theta": 9000.0, "rope_scaling": {"rope_type": "yarn", **_YARN, "truncate": False}},
    ),
    "gemma3's": ("gemma3_text", {**_WINDOWS}),
    "gemma3, old keys": (
        "gemma3_text",
        {
            **_WINDOWS, "rope_theta": 5e5, "rope_local_base_freq": 300.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma3, new keys": (
        "gemma3_text",
        {
            **_WINDOWS, "rope_theta": 1.0, "rope_local_base_freq": 2.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma3, both": (
        "gemma3_text",
        {
            **_WINDOWS,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "olmo3's": ("olmo3", {**_WINDOWS}),
    "olmo3, yarn": (
        "olmo3",
        {
            **_WINDOWS,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 6000.0, **_YARN},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
}  # fmt: skip


def computed(kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    make, rotary = CLASSES[kind]
    config = make(**json.loads(json.dumps({**SHAPE, **changes})))
    found = rotary(config)
    if kind in ("gemma3_text", "olmo3"):
        return {
            layers: {
                "steps": getattr(found, f"{layers}_inv_freq").tolist(),
                "magnitude": getattr(found, f"{layers}_attention_scaling"),
            }
            for layers in ("full_attention", "sliding_attention")
        }
    result = {"full_attention": {"steps": found.inv_freq.tolist(), "magnitude": found.attention_scaling}}
    if "long_factor" in (config.rope_parameters or {}):
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        steps, magnitude = ROPE_INIT_FUNCTIONS["longrope"](config, None, seq_len=65)
        result["beyond"] = {"steps": steps.tolist(), "magnitude": magnitude}
    return result


def main() -> None:
    goldens = {
        name: {"model_type": kind, "config": {**SHAPE, **changes}, "layers": computed(kind, changes)}
        for name, (kind, changes) in CASES.items()
    }
    text = json.dumps({"transformers": transformers.__version__, "cases": goldens}, indent=1)
    Path(__file__).with_name("rope_goldens.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
