"""A made-up model of experts of Qwen3-30B-A3B's shape, with fewer layers and a smaller vocabulary.

Weights are random, so its text is noise. How often each expert is routed to is not: one direction of the
residual stream is about the same for all tokens, and each router reads from it a bias of its own for every
expert, normally distributed. What a token adds to that has a standard deviation of 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.demo import model_path
from hotcold.formats.blocks import Tensor, block_type, quantise
from hotcold.formats.gguf import open_gguf, write_gguf

DIM, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, CHOSEN, NEURONS = 2048, 32, 4, 128, 128, 8, 768
CONTEXT = 4096
_STEADY = 8.0  # of the direction that all tokens share, where others have a deviation of 1
_SCALE = 0.005  # of blocks, whose levels are drawn alike: what a matrix gives then is about as large as x


def write_experts(path: Path, layers: int, skew: float = 0.5, seed: int = 1) -> None:
    """Writes the model; ``skew`` is the standard deviation of experts' biases: 0 routes to all
    alike; with 0.5 a quarter of the experts gets 57 % of all choices."""
    random = np.random.default_rng(seed)
    with open_gguf(model_path()) as file:
        metadata = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
        vocab = file.tensors["token_embd.weight"].shape[0]
    arch = "qwen3moe"
    sizes = {
        "block_count": layers, "context_length": CONTEXT, "embedding_length": DIM,
        "feed_forward_length": NEURONS, "expert_feed_forward_length": NEURONS, "expert_count": EXPERTS,
        "expert_used_count": CHOSEN, "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM,
        "rope.dimension_count": HEAD_DIM,
    }  # fmt: skip
    metadata |= {f"{arch}.{key}": np.uint32(value) for key, value in sizes.items()}
    metadata |= {
        "general.architecture": arch,
        f"{arch}.attention.layer_norm_rms_epsilon": np.float32(1e-6),
        f"{arch}.rope.freq_base": np.float32(1e6),
    }
    write_gguf(path, metadata, _Tensors(layers, vocab, skew, random))


class _Tensors(Mapping[str, Tensor]):
    """Makes tensors on demand. Matrices of one shape are the same in all layers."""

    def __init__(self, layers: int, vocab: int, skew: float, random: np.random.Generator) -> None:
        embedding = random.standard_normal((vocab, DIM), np.float32)
        embedding[:, 0] = _STEADY
        head = random.standard_normal((vocab, DIM), np.float32) / np.float32(DIM**0.5)
        self._found = {
            "token_embd.weight": quantise(embedding, "Q8_0"),
            "output.weight": quantise(head, "Q8_0"),
            "output_norm.weight": _ones(DIM),
        }
        alike = {
            "attn_norm": _ones(DIM),
            "ffn_norm": _ones(DIM),
            "attn_q_norm": _ones(HEAD_DIM),
            "attn_k_norm": _ones(HEAD_DIM),
            "attn_q": _blocks(random, HEADS * HEAD_DIM, DIM),
            "attn_k": _blocks(random, KV_HEADS * HEAD_DIM, DIM),
            "attn_v": _blocks(random, KV_HEADS * HEAD_DIM, DIM),
            "attn_output": _blocks(random, DIM, HEADS * HEAD_DIM, scale=_SCALE / 5),
            "ffn_gate_exps": _blocks(random, EXPERTS, NEURONS, DIM),
            "ffn_up_exps": _blocks(random, EXPERTS, NEURONS, DIM),
            "ffn_down_exps": _blocks(random, EXPERTS, DIM, NEURONS),
        }
        for layer in range(layers):
            router = random.standard_normal((EXPERTS, DIM), np.float32) / np.float32(DIM**0.5)
            router[:, 0] = random.standard_normal(EXPERTS) * skew / _STEADY
            own = alike | {"ffn_gate_inp": quantise(router, "F32")}
            self._found |= {f"blk.{layer}.{name}.weight": tensor for name, tensor in own.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def _ones(n: int) -> Tensor:
    return quantise(np.ones(n, np.float32), "F32")


def _blocks(random: np.random.Generator, *shape: int, scale: float = _SCALE) -> Tensor:
    """Q4_0 blocks of random codes of 4 bits, whose mean is 0: 1 to 15."""
    kind = block_type("Q4_0")
    rows, cols = kind.data_shape(shape)
    both = np.array([low | high << 4 for high in range(1, 16) for low in range(1, 16)], np.uint8)
    data: Any = both[random.integers(0, len(both), (rows, cols), np.uint8)]
    data.reshape(rows, -1, kind.nbytes)[:, :, :2] = np.array([scale], np.float16).view(np.uint8)
    return Tensor(kind, shape, data)
