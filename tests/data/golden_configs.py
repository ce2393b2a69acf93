"""The configurations of the golden models beside this file; make_goldens.py makes the models."""

from __future__ import annotations

from typing import Any

import torch

VOCAB = 288

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

#: The text model of GLM-4.1V to 4.6V, and as small an image model as there is.
GLM4V: dict[str, Any] = ODD | {
    "hidden_size": 48, "hidden_act": "silu", "attention_bias": True, "pad_token_id": 0,
    "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 1]},
}  # fmt: skip
GLM4V_VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 8, "out_hidden_size": 48, "num_heads": 1, "intermediate_size": 8,
    "patch_size": 2, "image_size": 8,
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
    # The first layer is dense; a bias chooses experts; all except the shared one are scaled.
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
    # Heads are longer than D / H; GELU under its old name.
    "tiny-gemma": (torch.bfloat16, 20, ODD | {
        "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": "gelu", "head_dim": 12,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "pad_token_id": 0,
    }),
    # Neighbours are rotated, in half of each head; no norms after.
    "tiny-glm": (torch.bfloat16, 20, ODD | {
        "architectures": ["GlmForCausalLM"], "model_type": "glm", "hidden_act": "silu", "hidden_size": 48,
        "head_dim": 12, "attention_bias": True, "partial_rotary_factor": 0.5, "pad_token_id": 0,
        "rms_norm_eps": 1.5625e-7, "rope_theta": 10000.0,
    }),
    # One layer sees all positions.
    "tiny-ministral": (torch.bfloat16, 20, ODD | {
        "architectures": ["MinistralForCausalLM"], "model_type": "ministral", "hidden_act": "silu",
        "num_hidden_layers": 3, "sliding_window": 8, "rope_theta": 100000000.0, "head_dim": 12,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    }),
    "tiny-glm4v": (torch.bfloat16, 20, {
        "architectures": ["Glm4vForConditionalGeneration"], "model_type": "glm4v",
        "tie_word_embeddings": False, "text_config": GLM4V | {"model_type": "glm4v_text"},
        "vision_config": GLM4V_VISION | {"model_type": "glm4v_vision"},
    }),
    "tiny-glm46v": (torch.bfloat16, 20, {
        "architectures": ["Glm46VForConditionalGeneration"], "model_type": "glm46v",
        "tie_word_embeddings": True, "text_config": GLM4V | {"model_type": "glm4v_text"},
        "vision_config": GLM4V_VISION | {"model_type": "glm4v_vision"},
    }),
    "tiny-glm4vmoe": (torch.bfloat16, 20, {
        "architectures": ["Glm4vMoeForConditionalGeneration"], "model_type": "glm4v_moe",
        "tie_word_embeddings": False, "text_config": GLM4V | {
            "model_type": "glm4v_moe_text", "moe_intermediate_size": 20, "n_routed_experts": 6,
            "num_experts_per_tok": 3, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
            "use_qk_norm": False,
        },
        "vision_config": GLM4V_VISION | {"model_type": "glm4v_moe_vision"},
    }),
    # Its publishers call the text model kimi_k2.
    "tiny-kimi-k25": (torch.bfloat16, 20, {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
        "tie_word_embeddings": False, "text_config": LATENT | {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "num_hidden_layers": 2,
            "q_lora_rank": 24, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
            "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_theta": 50000.0,
            "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        "vision_config": {
            "model_type": "kimi_k25_vision", "hidden_size": 8, "num_hidden_layers": 1, "patch_size": 2,
            "num_attention_heads": 1, "intermediate_size": 8, "pos_emb_height": 2, "pos_emb_width": 2,
            "pos_emb_time": 1,
        },
    }),
    "tiny-lfm2vl": (torch.bfloat16, 20, {
        "architectures": ["Lfm2VlForConditionalGeneration"], "model_type": "lfm2_vl",
        "tie_word_embeddings": True, "projector_hidden_size": 8, "text_config": ODD | {
            "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "norm_eps": 1e-5,
            "layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "conv_bias": False,
            "intermediate_size": 40, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 4, "rope_theta": 1000000.0, "pad_token_id": 0,
            "tie_word_embeddings": True,
        },
        "vision_config": {
            "model_type": "siglip2_vision_model", "hidden_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 1, "intermediate_size": 8, "patch_size": 2, "num_patches": 4,
            "vision_use_head": False,
        },
    }),
    # Its publishers call the text model exaone4_5_text.
    "tiny-exaone4_5": (torch.bfloat16, 20, {
        "architectures": ["Exaone4_5_ForConditionalGeneration"], "model_type": "exaone4_5",
        "tie_word_embeddings": False, "text_config": ODD | {
            "model_type": "exaone4_5_text", "hidden_act": "silu", "num_hidden_layers": 4, "head_dim": 12,
            "sliding_window": 8, "sliding_window_pattern": "LLLG", "pad_token_id": 0,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "rope_theta": 1000000.0,
            "num_nextn_predict_layers": 1,
        },
        "vision_config": {
            "model_type": "exaone4_5_vision", "depth": 1, "hidden_size": 8, "num_heads": 1,
            "num_key_value_heads": 1, "intermediate_size": 8, "patch_size": 2, "out_hidden_size": 40,
            "fullatt_block_indexes": [0],
        },
    }),
}  # fmt: skip
