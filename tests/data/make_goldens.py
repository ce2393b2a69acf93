"""Makes the golden models and logits beside this file: tiny random checkpoints, run by transformers.

    pip install torch==2.13.0 && pip install transformers==5.23.0
    python tests/data/make_goldens.py [NAME ...]

Weights are stored as F16 or BF16 to keep the repository small and computed with in float32, which holds them
exactly. Each folder gets what a Hugging Face checkpoint has (config.json, model.safetensors, tokenizer.model)
and golden.npz:

    prompt         [P] int32       token ids, beginning with BOS
    prompt_logits  [P, V] float32  logits at every prompt position
    steps          [S] int32       the greedy ids that follow
    step_logits    [S, V] float32  logits after each of them, one token a step on the KV cache
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

VOCAB = 288
STEPS = 24

COMMON: dict[str, Any] = {
    "hidden_size": 64, "vocab_size": VOCAB, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip

SMALL = COMMON | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
}

#: Sizes that fit no vector, and a longer context than the original one where a family has both.
ODD = COMMON | {
    "hidden_size": 40, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "torch_dtype": "bfloat16",
}  # fmt: skip

MOE: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 3}

#: Qwen3-VL's text model, and as small an image model as there is.
QWEN3VL: dict[str, Any] = ODD | {
    "hidden_act": "silu", "head_dim": 12, "attention_bias": False, "pad_token_id": 0,
    "rope_theta": 5000000.0, "rms_norm_eps": 1e-6,
    "rope_scaling": {"rope_type": "default", "mrope_section": [2, 2, 2], "mrope_interleaved": True},
}  # fmt: skip
#: Qwen2-VL's and 2.5-VL's text model.
QWEN2VL: dict[str, Any] = ODD | {
    "hidden_act": "silu", "pad_token_id": 0, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
    "use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1, "hidden_size": 48,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]},
}  # fmt: skip
QWEN3VL_VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 40,
    "deepstack_visual_indexes": [0], "num_position_embeddings": 4, "patch_size": 2,
}  # fmt: skip

#: Latent attention (MLA) with experts after the first layer.
LATENT: dict[str, Any] = ODD | {
    "hidden_act": "silu", "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "attention_bias": False, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
YARN: dict[str, Any] = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip

#: Folder -> stored dtype, prompt length, and config.json as the model's publishers write it.
GOLDENS: dict[str, tuple[torch.dtype, int, dict[str, Any]]] = {
    "tiny-llama": (torch.float16, 40, COMMON | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "torch_dtype": "float16",
        "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rope_theta": 10000.0,
    }),
    "tiny-drelu": (torch.float16, 40, COMMON | {
        "architectures": ["BambooForCausalLM"], "model_type": "bamboo", "hidden_act": "relu",
        "torch_dtype": "float16",
        "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rope_theta": 10000.0,
    }),
    # head_dim differs from hidden_size / heads; 8 query heads share one kv head; a tied head; biases.
    "tiny-llama3": (torch.bfloat16, 72, COMMON | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 1,
        "head_dim": 16, "tie_word_embeddings": True, "attention_bias": True, "rope_theta": 100000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    }),
    # The window is as long as all that is run: up to it, attention with one is attention without.
    "tiny-mistral": (torch.bfloat16, 40, SMALL | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu",
        "intermediate_size": 96, "num_key_value_heads": 2, "sliding_window": 64, "head_dim": 12,
    }),
    "tiny-qwen2": (torch.bfloat16, 40, SMALL | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
        "intermediate_size": 96, "num_key_value_heads": 2, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
        "use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1,
    }),
    "tiny-qwen3": (torch.bfloat16, 40, SMALL | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
        "intermediate_size": 96, "num_key_value_heads": 2, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
        "head_dim": 16, "tie_word_embeddings": True, "attention_bias": False,
    }),
    # Falcon 40B's grouped queries and two norms, with biases; ReLU-fied.
    "tiny-falcon40": (torch.bfloat16, 40, SMALL | {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", "activation": "relu",
        "multi_query": True, "new_decoder_architecture": True, "parallel_attn": True, "bias": True,
        "num_kv_heads": 2, "alibi": False, "layer_norm_epsilon": 1e-5, "ffn_hidden_size": 96,
    }),
    # One kv head, one norm for both halves of a layer; GELU in the form that GGUF's models have.
    "tiny-falcon": (torch.bfloat16, 40, SMALL | {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", "activation": "gelu_pytorch_tanh",
        "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True, "bias": False,
        "alibi": False, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    }),
    # ProSparse: a ReLU with a threshold, FATReLU.
    "tiny-prosparse": (torch.bfloat16, 20, ODD | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "fatrelu",
        "hidden_act_param": 0.3,
    }),
    # MiniCPM-S: embedding, residual stream and logits are scaled.
    "tiny-minicpm": (torch.bfloat16, 20, ODD | {
        "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "hidden_act": "fatrelu",
        "hidden_act_param": 0.1, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 20,
    }),
    "tiny-opt": (torch.bfloat16, 20, {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "activation_function": "relu",
        "hidden_size": 40, "ffn_dim": 52, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "word_embed_proj_dim": 40, "vocab_size": VOCAB,
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "do_layer_norm_before": True, "tie_word_embeddings": True,
    }),
    # Partial rotary positions; LayerNorms whose weights are stored less one.
    "tiny-nemotron": (torch.bfloat16, 20, ODD | {
        "architectures": ["NemotronForCausalLM"], "model_type": "nemotron", "hidden_act": "relu2",
        "hidden_size": 48, "norm_eps": 1e-5, "partial_rotary_factor": 0.5,
    }),
    "tiny-arcee": (torch.bfloat16, 20, ODD | {
        "architectures": ["ArceeForCausalLM"], "model_type": "arcee", "hidden_act": "relu2",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                         "beta_fast": 4.0, "beta_slow": 1.0},
    }),
    "tiny-jais2": (torch.bfloat16, 20, ODD | {
        "architectures": ["Jais2ForCausalLM"], "model_type": "jais2", "hidden_act": "relu2",
        "layer_norm_eps": 1e-5,
    }),
    # Six of seven layers have a window, with another rotary base and without the linear factor.
    "tiny-gemma3": (torch.bfloat16, 20, ODD | {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 24,
        "hidden_activation": "gelu_pytorch_tanh", "intermediate_size": 28, "num_hidden_layers": 7,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10, "query_pre_attn_scalar": 10,
        "sliding_window": 8, "sliding_window_pattern": 6, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
    }),
    # Phi-4 mini: fused matrices, partial rotary positions, LongRoPE beyond the original context; a window.
    "tiny-phi3": (torch.bfloat16, 20, ODD | {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_act": "silu", "hidden_size": 48,
        "max_position_embeddings": 64, "original_max_position_embeddings": 16, "sliding_window": 12,
        "partial_rotary_factor": 0.5, "pad_token_id": 0, "rope_scaling": {
            "type": "longrope", "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 1.5, 3.0]},
    }),
    "tiny-olmo2": (torch.bfloat16, 20, ODD | {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_act": "silu",
        "attention_bias": False, "pad_token_id": 0, "rope_theta": 500000.0,
    }),
    # OLMo 2 with windows, whose layers have no YaRN.
    "tiny-olmo3": (torch.bfloat16, 20, ODD | {
        "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "hidden_act": "silu",
        "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 4, "num_attention_heads": 3,
        "num_key_value_heads": 1, "attention_bias": False, "pad_token_id": 0, "rope_theta": 500000.0,
        "sliding_window": 8,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                         "beta_fast": 4.0, "beta_slow": 1.0, "attention_factor": 1.2},
    }),
    "tiny-granite": (torch.bfloat16, 20, ODD | {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", "hidden_act": "silu",
        "attention_bias": False, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.25, "logits_scaling": 3.0, "tie_word_embeddings": True,
    }),
    # Every fourth layer has no positions.
    "tiny-smollm3": (torch.bfloat16, 20, ODD | {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "hidden_act": "silu",
        "num_hidden_layers": 5, "no_rope_layer_interval": 4, "tie_word_embeddings": True, "pad_token_id": 0,
        "rope_theta": 2000000.0,
    }),
    # Norms before and after; neighbours are rotated, in half of each head.
    "tiny-glm4": (torch.bfloat16, 20, ODD | {
        "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "hidden_act": "silu", "head_dim": 12,
        "attention_bias": True, "partial_rotary_factor": 0.5, "pad_token_id": 0,
    }),
    "tiny-seed-oss": (torch.bfloat16, 20, ODD | {
        "architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "hidden_act": "silu",
        "head_dim": 12, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False,
        "pad_token_id": 0,
    }),
    "tiny-starcoder2": (torch.bfloat16, 20, ODD | {
        "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "norm_epsilon": 1e-5,
        "hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": 8, "tie_word_embeddings": True,
    }),
    # Caps that bend what is computed; scores are scaled by another length than the head's.
    "tiny-gemma2": (torch.bfloat16, 20, ODD | {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_hidden_layers": 3,
        "hidden_activation": "gelu_pytorch_tanh", "head_dim": 10, "query_pre_attn_scalar": 16,
        "sliding_window": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True, "pad_token_id": 0,
    }),
    # Command R+: norms of q and k whose weights differ by head.
    "tiny-command-r": (torch.bfloat16, 20, ODD | {
        "architectures": ["CohereForCausalLM"], "model_type": "cohere", "hidden_act": "silu",
        "layer_norm_eps": 1e-5, "logit_scale": 0.3, "use_qk_norm": True, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "pad_token_id": 0,
    }),
    # The fourth layer sees all, and is not rotated.
    "tiny-cohere2": (torch.bfloat16, 20, ODD | {
        "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "hidden_act": "silu",
        "num_hidden_layers": 4, "layer_norm_eps": 1e-5, "logit_scale": 0.3, "sliding_window": 8,
        "sliding_window_pattern": 4, "tie_word_embeddings": True, "pad_token_id": 0,
    }),
    "tiny-ernie4_5": (torch.bfloat16, 20, ODD | {
        "architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "hidden_act": "silu",
        "head_dim": 12, "use_bias": False, "tie_word_embeddings": True, "rope_theta": 500000.0,
    }),
    # Scores grow with the positions of queries, beyond 8 of them.
    "tiny-mistral3": (torch.bfloat16, 20, ODD | {
        "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "hidden_act": "silu",
        "head_dim": 12, "sliding_window": None, "rope_parameters": {
            "rope_type": "yarn", "type": "yarn", "rope_theta": 1000000.0, "factor": 16.0,
            "original_max_position_embeddings": 8, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    }),
    # Norms of q and k after the rotation, whose base an alpha has stretched.
    "tiny-hunyuan-dense": (torch.bfloat16, 20, ODD | {
        "architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense",
        "hidden_act": "silu", "head_dim": 10, "attention_bias": False, "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1,
                         "mscale": 1.0, "mscale_all_dim": 1.0},
    }),
    "tiny-qwen3vl": (torch.bfloat16, 20, {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
        "tie_word_embeddings": False, "text_config": QWEN3VL | {"model_type": "qwen3_vl_text"},
        "vision_config": QWEN3VL_VISION | {"model_type": "qwen3_vl"},
    }),
    "tiny-qwen3vlmoe": (torch.bfloat16, 20, {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe",
        "tie_word_embeddings": False, "text_config": QWEN3VL | MOE | {
            "model_type": "qwen3_vl_moe_text", "num_experts": 6, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "norm_topk_prob": True},
        "vision_config": QWEN3VL_VISION | {"model_type": "qwen3_vl_moe"},
    }),
    "tiny-granitemoe": (torch.bfloat16, 20, ODD | {
        "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "hidden_act": "silu",
        "intermediate_size": 20, "num_local_experts": 6, "num_experts_per_tok": 3, "attention_bias": False,
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.25,
        "logits_scaling": 3.0, "tie_word_embeddings": True,
    }),
    # One norm of all heads of q, of k; sigmoids choose by a bias; a half of each head is rotated.
    "tiny-minimax-m2": (torch.bfloat16, 20, ODD | {
        "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_act": "silu",
        "head_dim": 12, "rotary_dim": 6, "intermediate_size": 20, "num_local_experts": 6,
        "num_experts_per_tok": 3, "use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True,
        "rope_theta": 5000000.0,
    }),
    "tiny-hunyuan-moe": (torch.bfloat16, 20, ODD | {
        "architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "hidden_act": "silu",
        "head_dim": 10, "intermediate_size": 20, "num_experts": 4, "moe_topk": [2, 2],
        "moe_intermediate_size": [20, 20], "num_shared_expert": [1, 1], "attention_bias": False,
        "use_qk_norm": True, "tie_word_embeddings": True, "rope_theta": 10000.0,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    }),
    # The first layer is dense; a bias chooses experts, all of which but the shared one are scaled.
    "tiny-glm4moe": (torch.bfloat16, 20, ODD | {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_act": "silu",
        "num_hidden_layers": 3, "head_dim": 12, "attention_bias": True, "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 1,
        "topk_group": 1, "use_qk_norm": True, "num_nextn_predict_layers": 1, "pad_token_id": 0,
    }),
    "tiny-ernie4_5moe": (torch.bfloat16, 20, ODD | {
        "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "hidden_act": "silu",
        "num_hidden_layers": 3, "use_bias": False, "moe_num_experts": 6, "moe_k": 3,
        "moe_intermediate_size": 20, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
        "moe_layer_end_index": 2, "moe_layer_interval": 1, "tie_word_embeddings": True,
        "rope_theta": 500000.0,
    }),
    # Latent attention: without a latent of queries, a softmax whose factors stay as they are; with one and
    # groups of experts; with a sigmoid, groups and YaRN's factor of scores; without groups; with an index
    # that reaches beyond the golden's tokens.
    "tiny-deepseek2-lite": (torch.bfloat16, 20, LATENT | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": None,
        "norm_topk_prob": False, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    }),
    "tiny-deepseek2": (torch.bfloat16, 20, LATENT | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": 24,
        "norm_topk_prob": False, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
    }),
    "tiny-deepseek3": (torch.bfloat16, 20, LATENT | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": 24,
        "norm_topk_prob": True, "n_group": 4, "topk_group": 2, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    }),
    "tiny-glm4-flash": (torch.bfloat16, 20, LATENT | {
        "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "q_lora_rank": 24,
        "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5,
    }),
    "tiny-deepseek32": (torch.bfloat16, 20, LATENT | {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "q_lora_rank": 24,
        "norm_topk_prob": True, "n_group": 4, "topk_group": 2, "index_n_heads": 2, "index_head_dim": 16,
        "index_topk": 48,
    }),
    # Norms after; the fourth layer sees all, and is not rotated.
    "tiny-exaone4": (torch.bfloat16, 20, ODD | {
        "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "hidden_act": "silu",
        "num_hidden_layers": 5, "head_dim": 12, "sliding_window": 8, "sliding_window_pattern": "LLLG",
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 2, "pad_token_id": 0,
        "rope_theta": 1000000.0, "rope_scaling": {
            "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32},
    }),
    # As older files have it: the text model's settings outside.
    "tiny-qwen2vl": (torch.bfloat16, 20, QWEN2VL | {
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl",
        "tie_word_embeddings": True,
        "vision_config": {"depth": 1, "embed_dim": 8, "hidden_size": 48, "num_heads": 1, "mlp_ratio": 1,
                          "patch_size": 2, "model_type": "qwen2_vl"},
    }),
    "tiny-qwen2_5vl": (torch.bfloat16, 20, {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
        "tie_word_embeddings": False, "text_config": QWEN2VL | {"model_type": "qwen2_5_vl_text"},
        "vision_config": {"depth": 1, "hidden_size": 8, "out_hidden_size": 48, "num_heads": 1,
                          "intermediate_size": 8, "patch_size": 2, "fullatt_block_indexes": [0],
                          "model_type": "qwen2_5_vl"},
    }),
    # Chunks of 8; every other layer has experts; the fourth layer sees all, and is not rotated.
    "tiny-llama4": (torch.bfloat16, 20, ODD | {
        "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "hidden_act": "silu",
        "num_hidden_layers": 4, "head_dim": 10, "intermediate_size": 20, "intermediate_size_mlp": 52,
        "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8, "use_qk_norm": True, "attn_temperature_tuning": True, "floor_scale": 4,
        "attn_scale": 0.3, "attention_bias": False, "pad_token_id": 0, "rope_theta": 500000.0,
    }),
    # Norms of what the output matrix and down read.
    "tiny-bitnet": (torch.bfloat16, 20, ODD | {
        "architectures": ["BitNetForCausalLM"], "model_type": "bitnet", "hidden_act": "relu2",
        "tie_word_embeddings": True, "rope_theta": 500000.0,
    }),
    # GLM-5: tiny-deepseek32 without groups.
    "tiny-glm-dsa": (torch.bfloat16, 20, LATENT | {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "q_lora_rank": 24,
        "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "index_n_heads": 2,
        "index_head_dim": 16, "index_topk": 48,
    }),
}  # fmt: skip


class DReluMLP(nn.Module):
    """Bamboo's FFN: ReLU on gate and up (arXiv 2406.05955); everything else of a Bamboo layer is Llama's."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.relu(self.gate_proj(x)) * torch.relu(self.up_proj(x)))


class FatRelu(nn.Module):
    """x where it is greater than the threshold, else 0 (arXiv 2402.13516)."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > self.threshold, x, 0.0)


def build(config: dict[str, Any], dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """A float32 model with random weights that ``dtype`` holds exactly; each part matters."""
    settings = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    threshold = settings.get("hidden_act_param", 0.0) if settings.get("hidden_act") == "fatrelu" else None
    if threshold is not None:
        settings["hidden_act"] = "relu"
    implementation = config["model_type"].replace("bamboo", "llama")  # transformers has none
    if implementation == "minicpm":  # nor of it, but of one that scales at the same places
        implementation, settings = "granite", settings | _as_granite(settings)
    settings = AutoConfig.for_model(implementation, **settings | {"torch_dtype": "float32"})
    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    model = kind.from_config(settings, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                values = 0.3 * noise
            elif parameter.ndim == 1 or "_norm." in name:
                values = (config["model_type"] not in _LESS_ONE) + 0.3 * noise
            elif "embed" in name:
                values = 0.25 * noise
            else:
                values = 1.6 * noise / parameter.shape[-1 if parameter.ndim == 3 else 1] ** 0.5
            parameter.copy_(values.to(dtype).float())
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_((0.3 * torch.randn(buffer.shape, generator=generator)).to(dtype).float())
    if config["model_type"] == "bamboo":
        for layer in model.model.layers:
            layer.mlp = DReluMLP(layer.mlp)
    if threshold is not None:
        for layer in model.model.layers:
            layer.mlp.act_fn = FatRelu(threshold)
    return model.eval()


#: Their norms scale by weight + 1.
_LESS_ONE = ("gemma2", "gemma3_text", "nemotron")


def _as_granite(config: dict[str, Any]) -> dict[str, Any]:
    """MiniCPM's scales (arXiv 2404.06395, table 2) under Granite's names."""
    heads = config["hidden_size"] // config["num_attention_heads"]
    return {
        "embedding_multiplier": float(config["scale_emb"]),
        "residual_multiplier": config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        "attention_multiplier": heads**-0.5,
        "logits_scaling": config["hidden_size"] / config["dim_model_base"],
        "attention_bias": False,
    }


@torch.no_grad()
def golden(
    model: PreTrainedModel, prompt_length: int, seed: int, count: int = STEPS
) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(seed).integers(3, VOCAB, prompt_length)
    ids[0] = 1
    prompt = torch.tensor(ids)[None]
    whole = model(prompt).logits
    cached = model(prompt, use_cache=True)
    steps, step_logits = [], []
    next_id, cache = int(whole[0, -1].argmax()), cached.past_key_values
    for _ in range(count):
        result = model(torch.tensor([[next_id]]), past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        steps.append(next_id)
        step_logits.append(result.logits[0, -1].numpy())
        next_id = int(result.logits[0, -1].argmax())
    return {
        "prompt": ids.astype(np.int32), "prompt_logits": whole[0].numpy(),
        "steps": np.array(steps, np.int32), "step_logits": np.stack(step_logits),
    }  # fmt: skip


def published(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A model's tensors as published checkpoints have them, with one of an image model's."""
    named = revert_weight_conversion(model, model.state_dict())
    image = [name for name in named if name.startswith("model.visual.")]
    if model.config.model_type == "qwen3_vl_moe":  # whose stacks of experts transformers turns
        turned = {name: each.swapaxes(1, 2) for name, each in named.items() if ".mlp.experts." in name}
        named |= turned
    return {name: each.to(dtype).contiguous() for name, each in named.items() if name not in image[1:]}


def tokenizer_model() -> bytes:
    """A SentencePiece BPE model in protobuf's wire format: 3 control pieces, 256 bytes, 29 words."""
    words = ["\u2581", *"etaoinshrdlu", "th", "the", "\u2581the", "an", "and", "\u2581and", "in", "ing",
             "er", "re", "on", "\u2581a", "\u2581t", "he", "st", "is"]  # fmt: skip
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3)] + [(f"<0x{byte:02X}>", 6) for byte in range(256)]
    pieces += [(word, 1) for word in words]
    assert len(pieces) == VOCAB, len(pieces)
    data = b""
    for index, (text, kind) in enumerate(pieces):
        score = float(259 - index) if kind == 1 else 0.0
        piece = _bytes_field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + _varint_field(3, kind)
        data += _bytes_field(1, piece)
    trainer = _varint_field(3, 2) + _varint_field(35, 1)  # model_type BPE, byte_fallback
    normaliser = _bytes_field(1, b"identity") + _varint_field(
        4, 0
    )  # remove_extra_whitespaces false, as in Llama
    return data + _bytes_field(2, trainer) + _bytes_field(3, normaliser)


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def main() -> None:
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or GOLDENS
    for seed, (name, (dtype, prompt_length, config)) in enumerate(GOLDENS.items(), start=1):
        if name not in chosen:
            continue
        folder = Path(__file__).parent / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        model = build(config, dtype, seed)  # which changes the settings of rotations
        (folder / "tokenizer.model").write_bytes(tokenizer_model())
        tensors = published(model, dtype)
        if config["tie_word_embeddings"]:
            tensors.pop("lm_head.weight", None)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        arrays = golden(model, prompt_length, seed, STEPS if prompt_length > 20 else 12)
        np.savez_compressed(folder / "golden.npz", **arrays)
        spread = float(arrays["prompt_logits"].std())
        print(
            f"{name}: logits spread {spread:.2f}, {len(set(arrays['steps'].tolist()))} different greedy ids"
        )


if __name__ == "__main__":
    main()
