"""Makes the golden models beside this file whose layers keep a state, or are of several kinds (Gemma 4), as
make_goldens.py makes the others.

    python tests/data/make_hybrid_goldens.py [NAME ...]

Each folder has what a published checkpoint has, its tensors' names among them, and golden.npz. Every
parameter is random: the classes' own norms, decays and biases would hide errors."""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from golden_configs import COMMON
from make_goldens import golden
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

#: Sizes that fit no vector.
SMALL: dict[str, Any] = {key: value for key, value in COMMON.items() if key != "rms_norm_eps"} | {
    "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 1,
    "torch_dtype": "bfloat16", "pad_token_id": 0,
}  # fmt: skip

LFM2: dict[str, Any] = SMALL | {
    "norm_eps": 1e-5, "conv_L_cache": 3, "conv_bias": False, "rope_theta": 1000000.0,
    "layer_types": ["conv", "conv", "full_attention", "conv"], "tie_word_embeddings": True,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip

#: Three v heads share a k head; a quarter of a head rotates.
DELTA: dict[str, Any] = SMALL | {
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "head_dim": 16, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "attention_bias": False,
}  # fmt: skip
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                                "mrope_section": [2, 1, 1], "mrope_interleaved": True}}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 12, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip

NEMOTRON: dict[str, Any] = SMALL | {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "head_dim": 10,
    "intermediate_size": 28, "layer_norm_epsilon": 1e-5, "ssm_state_size": 16, "mamba_num_heads": 6,
    "mamba_head_dim": 8, "n_groups": 2, "conv_kernel": 4, "chunk_size": 8, "mlp_hidden_act": "relu2",
    "use_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip
NEMOTRON_MOE: dict[str, Any] = NEMOTRON | {
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 24, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip

GRANITE: dict[str, Any] = SMALL | {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "layer_types": ["mamba", "attention", "mamba", "mamba"], "mamba_n_heads": 6,
    "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_chunk_size": 8, "mamba_conv_bias": True, "mamba_proj_bias": False, "attention_bias": False,
    "embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.6,
    "attention_multiplier": 0.25, "shared_intermediate_size": 28, "position_embedding_type": "nope",
    "tie_word_embeddings": True,
}  # fmt: skip

#: Heads, their length and the rotation differ by the kind of layer.
GEMMA4: dict[str, Any] = SMALL | {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "rms_norm_eps": 1e-6,
    "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 28,
    "hidden_activation": "gelu_pytorch_tanh", "head_dim": 10, "global_head_dim": 16, "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": 3.0, "tie_word_embeddings": True, "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 288, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                           "rope_theta": 1000000.0}},
}  # fmt: skip
#: Gates of two layers are cut; the last two layers read the keys and values of others.
GEMMA3N: dict[str, Any] = SMALL | {
    "architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text", "rms_norm_eps": 1e-6,
    "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 96,
    "hidden_activation": "gelu_pytorch_tanh", "head_dim": 10, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2,
    "final_logit_softcapping": 3.0, "tie_word_embeddings": True, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 288, "laurel_rank": 6, "altup_num_inputs": 4, "altup_active_idx": 0,
    "altup_correct_scale": True, "altup_coef_clip": 120.0,
    "activation_sparsity_pattern": [0.95, 0.8, 0.0, 0.0, 0.0, 0.0], "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0}},
}  # fmt: skip
GEMMA4_KEYS: dict[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}

#: Folder -> config.json as the model's publishers write it.
GOLDENS: dict[str, dict[str, Any]] = {
    "tiny-lfm2": LFM2 | {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "intermediate_size": 40,
        "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 4,
    },
    # The first layer has an ordinary FFN.
    "tiny-lfm2moe": LFM2 | {
        "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "intermediate_size": 28,
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "num_dense_layers": 1,
        "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    },
    "tiny-qwen35": DELTA | SECTIONS | {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "intermediate_size": 28,
        "tie_word_embeddings": True,
    },
    "tiny-qwen35moe": DELTA | SECTIONS | EXPERTS | {
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text",
    },
    "tiny-qwen3next": DELTA | EXPERTS | {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "intermediate_size": 28,
        "partial_rotary_factor": 0.25, "rope_theta": 10000.0,
    },
    # A layer is a mixer or an FFN.
    "tiny-nemotron-h": NEMOTRON | {"num_hidden_layers": 5, "hybrid_override_pattern": "M-M*-"},
    "tiny-nemotron-h-moe": NEMOTRON_MOE | {"num_hidden_layers": 5, "hybrid_override_pattern": "MEM*E"},
    # Experts have fewer dimensions than the model (Nemotron 3 Super).
    "tiny-nemotron-latent": NEMOTRON_MOE | {
        "num_hidden_layers": 4, "hybrid_override_pattern": "ME*E", "moe_latent_size": 16,
    },
    "tiny-granite-h": GRANITE | {"num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": 28},
    "tiny-granite-h-moe": GRANITE | {
        "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 20,
    },
    # Attention and Mamba-2 side by side; factors of all matrices.
    "tiny-falcon-h1": SMALL | {
        "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "hidden_act": "silu",
        "num_hidden_layers": 2, "head_dim": 10, "intermediate_size": 28, "rms_norm_eps": 1e-5,
        "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16,
        "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 8, "mamba_conv_bias": True,
        "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_proj_bias": False,
        "attention_in_multiplier": 0.9, "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.1,
        "ssm_out_multiplier": 0.7, "key_multiplier": 0.5, "mlp_multipliers": [0.9, 0.6],
        "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.36], "embedding_multiplier": 5.6,
        "lm_head_multiplier": 0.7, "rope_theta": 100000.0,
    },
    "tiny-mamba2": {key: value for key, value in SMALL.items() if "heads" not in key} | {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "num_hidden_layers": 2,
        "state_size": 16, "num_heads": 6, "head_dim": 8, "n_groups": 2, "expand": 2, "conv_kernel": 4,
        "chunk_size": 8, "layer_norm_epsilon": 1e-5, "use_conv_bias": True, "use_bias": False,
        "rms_norm": True, "max_position_embeddings": 128,
    },
    # Values are made of what keys are made of, where a layer sees all positions.
    "tiny-gemma4": GEMMA4 | GEMMA4_KEYS,
    # Embeddings by layer; half of the layers read the keys and values of others, and have wider FFNs.
    "tiny-gemma4-e": GEMMA4 | {
        "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
    },
    "tiny-gemma4-moe": GEMMA4 | GEMMA4_KEYS | {
        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 20,
    },
    "tiny-gemma3n": GEMMA3N,
    # Layers with a decay of each channel, and one with latent attention without rotation; its eps is not that
    # of its latents.
    "tiny-kimi-linear": {key: value for key, value in SMALL.items() if key != "max_position_embeddings"} | {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_act": "silu",
        "num_key_value_heads": 3, "intermediate_size": 28, "rms_norm_eps": 1e-5, "head_dim": 8,
        "linear_attn_config": {
            "full_attn_layers": [3], "kda_layers": [1, 2, 4], "head_dim": 8, "num_heads": 3,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True, "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12, "v_head_dim": 10, "model_max_length": 128, "first_k_dense_replace": 1,
        "moe_intermediate_size": 20, "moe_layer_freq": 1, "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1, "num_experts": 6,
        "num_experts_per_token": 3, "num_shared_experts": 1, "num_nextn_predict_layers": 0,
        "routed_scaling_factor": 2.5, "rope_scaling": None, "rope_theta": 10000.0,
    },
    # Granite 4.0 350M, 1B and Micro: the class of the hybrids, with attention in all layers.
    "tiny-granite4": GRANITE | {
        "num_hidden_layers": 2, "layer_types": ["attention"] * 2, "num_local_experts": 0,
        "num_experts_per_tok": 0, "intermediate_size": 28, "position_embedding_type": "rope",
        "rope_theta": 10000000.0, "init_method": "mup", "normalization_function": "rmsnorm",
    },
    "tiny-granitemoeshared": {
        key: value for key, value in GRANITE.items()
        if not key.startswith(("mamba_", "layer_types", "position_"))
    } | {
        "architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared",
        "num_hidden_layers": 2, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 20,
        "rope_theta": 10000.0,
    },
}  # fmt: skip

#: Their norms scale by weight + 1, those after the delta rule excepted.
_LESS_ONE = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
#: Their classes compute prompts by the delta rule in chunks, which rounds more than the others do.
_IN_CHUNKS = (*_LESS_ONE, "kimi_linear")


def set_randomly(model: nn.Module, kind: str, seed: int) -> None:
    """Weights that bfloat16 holds exactly; each part matters."""
    generator = torch.Generator().manual_seed(seed)
    kept = "expert_bias", "correction_bias", "layer_scalar"
    biases = [each for each in model.named_buffers() if each[0].endswith(kept)]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *biases]:
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                values = 0.7 * noise
            elif name.endswith("dt_bias"):
                values = 0.7 * noise - 1
            elif name.endswith("bias"):
                values = 0.3 * noise
            elif parameter.ndim == 1:  # norms, and the D of Mamba-2
                less_one = kind in _LESS_ONE and "linear_attn" not in name
                values = (not less_one) + 0.3 * noise
            elif "embed" in name:
                values = 0.25 * noise
            elif "conv" in name and "proj" not in name:
                values = 0.5 * noise
            else:
                gain = 1.0 if kind in _IN_CHUNKS else 1.6
                values = gain * noise / min(parameter.shape[-2:]) ** 0.5
            parameter.copy_(values.to(torch.bfloat16).float())


def build(config: dict[str, Any], seed: int) -> Any:
    settings = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    settings = AutoConfig.for_model(config["model_type"], **settings | {"torch_dtype": "float32"})
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="eager")
    for part in model.modules():
        if hasattr(part, "time_step_limit"):
            # Nemotron-H's class clamps time steps in prompts alone; its publishers' code does not.
            part.time_step_limit = (0.0, math.inf)
    set_randomly(model, config["model_type"], seed)
    return model.eval()


def published(model: Any) -> dict[str, torch.Tensor]:
    """A model's tensors as published checkpoints have them."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
    # The class of Kimi Linear saves dense layers under the experts' name; its publishers' code reads ``mlp``.
    dense = re.compile(r"\.block_sparse_moe\.(?=(gate|up|down)_proj)")
    named = {dense.sub(".mlp.", name): value for name, value in tensors.items()}
    return {name: value.to(torch.bfloat16).contiguous() for name, value in named.items()}


class Anew(nn.Module):
    """A model that computes all positions anew at each step: Mamba-2's class has a cache of another kind."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:
        """``past_key_values`` are the ids before."""
        ids = ids if past_key_values is None else torch.cat([past_key_values, ids], 1)
        return SimpleNamespace(logits=self.model(ids).logits, past_key_values=ids)


def main() -> None:
    torch.set_num_threads(1)
    for seed, (name, config) in enumerate(GOLDENS.items(), start=801):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        folder = Path(__file__).parent / name
        folder.mkdir(exist_ok=True)
        model = build(config, seed)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        save_file(published(model), folder / "model.safetensors", metadata={"format": "pt"})
        run = Anew(model) if config["model_type"] == "mamba2" else model
        arrays = golden(run, 20, seed, 12)
        np.savez_compressed(folder / "golden.npz", **arrays)
        spread, different = float(arrays["prompt_logits"].std()), len(set(arrays["steps"].tolist()))
        print(f"{name}: logits spread {spread:.2f}, {different} of 12 greedy ids differ")


if __name__ == "__main__":
    main()
