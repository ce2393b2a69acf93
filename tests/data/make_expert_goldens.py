"""Makes the golden models of experts beside this file, as make_goldens.py makes the others.

    python tests/data/make_expert_goldens.py

Each folder has what a published checkpoint has, its tensors' names and layouts among them, and golden.npz.
transformers computes them; what it lacks is computed by modules here, from what the models' publishers say:
TurboSparse-Mixtral (arXiv 2406.05955: ReLU on gate and up of each expert), and SmallThinker (2507.20984:
the router reads a layer's input before attention).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from golden_configs import COMMON, VOCAB
from make_goldens import STEPS, golden
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

SMALL: dict[str, Any] = COMMON | {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "torch_dtype": "bfloat16", "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip

MIXTRAL: dict[str, Any] = SMALL | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "intermediate_size": 96,
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip

#: Folder -> config.json as the model's publishers write it.
GOLDENS: dict[str, dict[str, Any]] = {
    "tiny-mixtral": MIXTRAL,
    "tiny-turbosparse": MIXTRAL | {
        "architectures": ["TurboSparseMixtralForCausalLM"], "model_type": "turbosparsemixtral",
        "hidden_act": "relu",
    },
    # Three of five layers see a few positions alone, and only those rotate; factors are sigmoids.
    "tiny-smallthinker": SMALL | {
        "architectures": ["SmallThinkerForCausalLM"], "model_type": "smallthinker", "head_dim": 16,
        "num_hidden_layers": 5, "hidden_size": 32, "moe_ffn_hidden_size": 32, "moe_num_primary_experts": 6,
        "moe_num_active_primary_experts": 3, "moe_primary_router_apply_softmax": False,
        "norm_topk_prob": True, "sliding_window_size": 24, "sliding_window_layout": [0, 1, 1, 1, 0],
        "rope_layout": [0, 1, 1, 1, 0], "rope_theta": 1500000.0, "tie_word_embeddings": True,
    },
    "tiny-qwen3moe": SMALL | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16,
        "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6, "use_sliding_window": False,
    },
    # A shared expert with a factor of its own; the factors of the others do not add up to 1.
    "tiny-qwen2moe": SMALL | {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "intermediate_size": 96,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "num_experts": 5,
        "num_experts_per_tok": 2, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "rms_norm_eps": 1e-6, "use_sliding_window": False, "qkv_bias": True,
    },
    # The window is shorter than the prompt, and positions reach beyond YaRN's original context.
    "tiny-gpt-oss": SMALL | {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 16,
        "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True,
        "rope_theta": 150000.0, "swiglu_limit": 7.0, "hidden_act": "silu",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                         "truncate": False, "original_max_position_embeddings": 32},
    },
}  # fmt: skip


def set_randomly(model: nn.Module, seed: int) -> None:
    """Weights that bfloat16 holds exactly; each part matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("bias", "sinks")):
                values = 0.3 * noise
            elif parameter.ndim == 1:  # norms
                values = 1 + 0.3 * noise
            elif "embed" in name:
                values = 0.25 * noise
            else:
                values = 1.6 * noise / min(parameter.shape[-2:]) ** 0.5
            parameter.copy_(values.to(torch.bfloat16).float())


class DReluExperts(nn.Module):
    """TurboSparse-Mixtral's experts: ReLU on gate and up; all else is Mixtral's."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for t in range(len(x)):
            for expert, factor in zip(chosen[t].tolist(), factors[t], strict=True):
                gate, up = (self.gate_up_proj[expert] @ x[t]).relu().chunk(2)
                out[t] += factor * (self.down_proj[expert] @ (gate * up))
        return out


class SmallThinker(nn.Module):
    """A whole model, computed anew for all positions at each step."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        dim, head = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        n, experts = config["moe_ffn_hidden_size"], config["moe_num_primary_experts"]

        def matrix(rows: int, columns: int) -> nn.Linear:
            return nn.Linear(columns, rows, bias=False)

        def layer() -> nn.ModuleDict:
            attention = {
                "q_proj": matrix(heads * head, dim), "k_proj": matrix(kv_heads * head, dim),
                "v_proj": matrix(kv_heads * head, dim), "o_proj": matrix(dim, heads * head),
            }  # fmt: skip
            ffns = [
                nn.ModuleDict({"gate": matrix(n, dim), "up": matrix(n, dim), "down": matrix(dim, n)})
                for _ in range(experts)
            ]
            block = {"primary_router": matrix(experts, dim), "experts": nn.ModuleList(ffns)}
            return nn.ModuleDict(
                {
                    "self_attn": nn.ModuleDict(attention),
                    "block_sparse_moe": nn.ModuleDict(block),
                    "input_layernorm": nn.RMSNorm(dim, config["rms_norm_eps"]),
                    "post_attention_layernorm": nn.RMSNorm(dim, config["rms_norm_eps"]),
                }
            )

        parts = {
            "embed_tokens": nn.Embedding(VOCAB, dim),
            "layers": nn.ModuleList(layer() for _ in range(config["num_hidden_layers"])),
            "norm": nn.RMSNorm(dim, config["rms_norm_eps"]),
        }
        self.model = nn.ModuleDict(parts)

    def forward(self, ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:
        """``past_key_values`` are the ids before."""
        ids = ids if past_key_values is None else torch.cat([past_key_values, ids], 1)
        x = self.model.embed_tokens(ids[0])
        for i, layer in enumerate(self.model.layers):
            routing = layer.block_sparse_moe.primary_router(x)
            x = x + self.attention(i, layer.self_attn, layer.input_layernorm(x))
            x = x + self.experts(layer.block_sparse_moe, layer.post_attention_layernorm(x), routing)
        logits = self.model.norm(x) @ self.model.embed_tokens.weight.T
        return SimpleNamespace(logits=logits[None], past_key_values=ids)

    def attention(self, index: int, part: Any, x: torch.Tensor) -> torch.Tensor:
        head, positions = self.config["head_dim"], torch.arange(len(x))
        q, k, v = (
            each(x).view(len(x), -1, head).transpose(0, 1) for each in (part.q_proj, part.k_proj, part.v_proj)
        )
        if self.config["rope_layout"][index]:
            half = head // 2
            angles = positions[:, None] * self.config["rope_theta"] ** -(torch.arange(half) / half)
            turn = torch.polar(torch.ones_like(angles), angles)

            def turned(y: torch.Tensor) -> torch.Tensor:
                z = torch.complex(y[..., :half], y[..., half:]) * turn
                return torch.cat([z.real, z.imag], -1)

            q, k = turned(q), turned(k)
        back = positions[:, None] - positions
        visible = back >= 0
        if self.config["sliding_window_layout"][index]:
            visible &= back < self.config["sliding_window_size"]
        groups = len(q) // len(k)
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        scores = (q @ k.transpose(1, 2) / head**0.5).masked_fill(~visible, -torch.inf)
        return part.o_proj((scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1))

    def experts(self, block: Any, x: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        factors, chosen = routing.topk(self.config["moe_num_active_primary_experts"], -1)
        factors = factors.sigmoid()
        factors = factors / factors.sum(-1, keepdim=True)
        out = []
        for row, ids, weights in zip(x, chosen.tolist(), factors, strict=True):
            some = [block.experts[e] for e in ids]
            out.append(
                sum(
                    w * e.down(functional.relu(e.gate(row)) * e.up(row))
                    for w, e in zip(weights, some, strict=True)
                )
            )
        return torch.stack(out)


def build(config: dict[str, Any], seed: int) -> Any:
    if config["model_type"] == "smallthinker":
        model: Any = SmallThinker(config)
        set_randomly(model, seed)
        return model.eval()
    settings = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    kind = config["model_type"].replace("turbosparse", "")
    settings = AutoConfig.for_model(kind, **settings | {"torch_dtype": "float32"})
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="eager")
    set_randomly(model, seed)
    if kind != config["model_type"]:
        for layer in model.model.layers:
            layer.mlp.experts = DReluExperts(layer.mlp.experts)
    return model.eval()


#: How published checkpoints name an expert's gate, up and down.
NAMES = {
    "mixtral": (
        "block_sparse_moe.experts.{}.w1",
        "block_sparse_moe.experts.{}.w3",
        "block_sparse_moe.experts.{}.w2",
    ),
} | dict.fromkeys(
    ("qwen2_moe", "qwen3_moe"),
    ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
)


def published(config: dict[str, Any], model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's tensors as published checkpoints have them: transformers joins experts."""
    kind = config["model_type"].replace("turbosparse", "")
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        at, _, part = name.rpartition("mlp.experts.")
        if not at or kind not in NAMES:
            tensors[name.replace("mlp.gate.", "block_sparse_moe.gate.") if kind == "mixtral" else name] = (
                value
            )
            continue
        for expert, own in enumerate(value):
            parts = own.chunk(2) if part == "gate_up_proj" else (own,)
            names = NAMES[kind][:2] if part == "gate_up_proj" else NAMES[kind][2:]
            for each, weights in zip(names, parts, strict=True):
                tensors[f"{at}{each.format(expert)}.weight"] = weights
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    return {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()}


def main() -> None:
    torch.set_num_threads(1)
    for seed, (name, config) in enumerate(GOLDENS.items(), start=501):
        folder = Path(__file__).parent / name
        folder.mkdir(exist_ok=True)
        model = build(config, seed)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        save_file(published(config, model), folder / "model.safetensors", metadata={"format": "pt"})
        arrays = golden(model, 40, seed)
        np.savez_compressed(folder / "golden.npz", **arrays)
        spread, different = float(arrays["prompt_logits"].std()), len(set(arrays["steps"].tolist()))
        print(f"{name}: logits spread {spread:.2f}, {different} of {STEPS} greedy ids differ")


if __name__ == "__main__":
    main()
