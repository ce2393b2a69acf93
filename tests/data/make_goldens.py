"""Makes the golden models and logits beside this file: tiny random checkpoints, run by transformers.

    pip install torch==2.13.0 && pip install transformers==5.23.0
    python tests/data/make_goldens.py [NAME ...]

Weights are stored as F16 or BF16 to keep the repository small and computed with in float32, which holds them
exactly. Each folder gets the config.json and model.safetensors of a Hugging Face checkpoint; all share
tiny_tokenizer.model. Its golden.npz holds:

    prompt         [P] int32       token ids, beginning with BOS
    prompt_logits  [P, V] float32  logits at every prompt position
    steps          [S] int32       the greedy ids that follow
    step_logits    [S, V] float32  logits after each of them, one token a step on the KV cache
"""

from __future__ import annotations

import copy
import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden_configs import GOLDENS, VOCAB
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

STEPS = 24


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
_LESS_ONE = ("gemma", "gemma2", "gemma3_text", "nemotron")


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
    image = [name for name in named if re.search(r"\b(visual|vision_tower|m\w*_projector)\.", name)]
    if model.config.model_type == "kimi_k25":  # whose layers transformers saves under an image model's name
        named = {name.replace(".model.blocks.", ".model.layers."): each for name, each in named.items()}
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
    (Path(__file__).parent / "tiny_tokenizer.model").write_bytes(tokenizer_model())
    for seed, (name, (dtype, prompt_length, config)) in enumerate(GOLDENS.items(), start=1):
        if name not in chosen:
            continue
        folder = Path(__file__).parent / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        model = build(copy.deepcopy(config), dtype, seed)  # which changes the settings of rotations
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
