"""Made-up models of experts of Qwen3-30B-A3B's and Mixtral's shapes, with fewer layers and words.

Weights are random, so its text is noise. How often each expert is routed to is not: one direction of the
residual stream is about the same for all tokens, and each router reads from it a bias of its own for every
expert, normally distributed. What a token adds to that has a standard deviation of 1.

Of Mixtral's shape there are a sparse model (ReLU above a threshold, down by neuron), whose neurons are active
for as many tokens as the assumed power law says, the most active first in each expert, and one with SiLU in
the usual layout, which llama.cpp computes: as many bytes.

Beside the sparse model lies a predictor of rank 512, 4 % of the experts' bytes: a gate owes 95 % of its
variance to the last 512 values of its input, and the predictor reads these alone. So it names 1.26 neurons
for each active one, and misses a few. 7.8 % are active: the law's 10 % minus the share that the hottest lack,
since none is active for more than 45 % of tokens; cold ones follow the law.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from hotcold.demo import model_path
from hotcold.formats.blocks import Tensor, block_type, quantise
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.formats.words import HOT_FIRST_KEY, SIDE_BY_SIDE, SIDE_BY_SIDE_KEY
from hotcold.kernels.backend import PredictorTensors
from hotcold.placement.sizes import SHAPES, power_law
from hotcold.sparse.predictor import write_sidecar


@dataclass(frozen=True)
class Shape:
    arch: str
    dim: int
    heads: int
    kv_heads: int
    experts: int
    chosen: int
    neurons: int  #: of an expert
    sparse: bool = False
    head_dim: int = 128


MODELS = {
    "qwen3": Shape("qwen3moe", 2048, 32, 4, 128, 8, 768),
    "mixtral": Shape("llama", 4096, 32, 8, 8, 2, 14336),
    "sparse-mixtral": Shape("llama", 4096, 32, 8, 8, 2, 14336, sparse=True),
}
CONTEXT = 4096
_MOST_FIRING = 0.45  #: of tokens: a threshold above 0 lets no neuron be active for more than half
_RANK = 512  #: of the predictor of a sparse model: values that it reads, the last ones
_SEEN = 0.95  #: of the variance of a gate: what these give
_NAMING = 0.85  #: threshold of the predictor, where that of gates is 1
_PARTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_STEADY = 8.0  # of the direction that all tokens share, where others have a deviation of 1
_SCALE = 0.005  # of blocks, whose levels are drawn alike: what a matrix gives then is about as large as x


def write_experts(
    path: Path,
    layers: int,
    skew: float = 0.5,
    seed: int = 1,
    shape: str = "qwen3",
    *,
    side_by_side: bool = False,
) -> None:
    """Writes a model and, of a sparse one, its predictor; ``skew`` is the standard deviation of experts'
    biases: 0 routes to all alike; with 0.5 a quarter of 128 experts gets 57 % of all choices.
    ``side_by_side``: the rows of a sparse model's neuron lie together."""
    random, model = np.random.default_rng(seed), MODELS[shape]
    with open_gguf(model_path()) as file:
        metadata = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
        vocab = file.tensors["token_embd.weight"].shape[0]
    sizes = {
        "block_count": layers, "context_length": CONTEXT, "embedding_length": model.dim,
        "feed_forward_length": model.neurons, "expert_feed_forward_length": model.neurons,
        "expert_count": model.experts, "expert_used_count": model.chosen, "attention.head_count": model.heads,
        "attention.head_count_kv": model.kv_heads, "attention.key_length": model.head_dim,
        "attention.value_length": model.head_dim, "rope.dimension_count": model.head_dim,
    }  # fmt: skip
    metadata |= {f"{model.arch}.{key}": np.uint32(value) for key, value in sizes.items()}
    metadata |= {
        "general.architecture": model.arch,
        f"{model.arch}.attention.layer_norm_rms_epsilon": np.float32(1e-6),
        f"{model.arch}.rope.freq_base": np.float32(1e6),
    }
    if model.sparse:
        metadata |= {
            "hotcold.ffn.activation": "relu",
            "hotcold.ffn.threshold": np.float32(1),
            "hotcold.ffn.down_layout": "by_neuron",
            HOT_FIRST_KEY: True,
        }
        if side_by_side:
            metadata[SIDE_BY_SIDE_KEY] = list(_PARTS)
    tensors = _Tensors(model, layers, vocab, skew, random, side_by_side)
    write_gguf(path, metadata, tensors)
    if model.sparse:
        _write_predictor(path, model, layers, tensors.gate)


class _Tensors(Mapping[str, Tensor]):
    """Makes tensors on demand. Matrices of one shape are the same in all layers."""

    def __init__(
        self,
        model: Shape,
        layers: int,
        vocab: int,
        skew: float,
        random: np.random.Generator,
        side_by_side: bool,
    ) -> None:
        embedding = random.standard_normal((vocab, model.dim), np.float32)
        embedding[:, 0] = _STEADY
        head = random.standard_normal((vocab, model.dim), np.float32) / np.float32(model.dim**0.5)
        self._found = {
            "token_embd.weight": quantise(embedding, "Q8_0"),
            "output.weight": quantise(head, "Q8_0"),
            "output_norm.weight": _ones(model.dim),
        }
        queries, keys, neurons = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.neurons
        down = (neurons, model.dim) if model.sparse else (model.dim, neurons)
        alike = {
            "attn_norm": _ones(model.dim),
            "ffn_norm": _ones(model.dim),
            "attn_q": _blocks(random, queries, model.dim),
            "attn_k": _blocks(random, keys, model.dim),
            "attn_v": _blocks(random, keys, model.dim),
            "attn_output": _blocks(random, model.dim, queries, scale=_SCALE / 5),
            "ffn_gate_exps": _blocks(random, model.experts, neurons, model.dim),
            "ffn_up_exps": _blocks(random, model.experts, neurons, model.dim),
            "ffn_down_exps": _blocks(random, model.experts, *down, scale=_SCALE),
        }
        self.gate = alike["ffn_gate_exps"]
        if model.sparse:
            _scale_gates(self.gate, model)
        if side_by_side:
            three = [alike.pop(name).data for name in _PARTS]
            rows = np.stack(three, axis=1).reshape(3 * len(three[0]), -1)
            alike[SIDE_BY_SIDE] = Tensor(self.gate.type, (model.experts, 3 * neurons, model.dim), rows)
        if model.arch == "qwen3moe":
            alike |= {"attn_q_norm": _ones(model.head_dim), "attn_k_norm": _ones(model.head_dim)}
        for layer in range(layers):
            router = random.standard_normal((model.experts, model.dim), np.float32) / np.float32(
                model.dim**0.5
            )
            router[:, 0] = random.standard_normal(model.experts) * skew / _STEADY
            tensors = alike | {"ffn_gate_inp": quantise(router, "F32")}
            self._found |= {f"blk.{layer}.{name}.weight": tensor for name, tensor in tensors.items()}

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


def _deviations(model: Shape) -> Any:
    """Standard deviations of gates, with which they exceed the threshold of 1 for their shares of tokens."""
    law = SHAPES["mistral-7b"]
    shares = np.minimum(power_law(model.neurons, law.scale, law.exponent), _MOST_FIRING)
    return np.array([1 / NormalDist().inv_cdf(1 - share) for share in shares])


def _scale_gates(gate: Tensor, model: Shape) -> None:
    """Scales rows so that each exceeds the threshold of 1 for its share of tokens."""
    codes = 4.33  # the deviation of codes of 4 bits, 1 to 15 less 8
    blocks: Any = gate.data.reshape(model.experts, model.neurons, -1, gate.type.nbytes)
    block_count = _RANK // gate.type.weights
    for part_blocks, part, width in (
        (blocks[:, :, :-block_count], 1 - _SEEN, model.dim - _RANK),
        (blocks[:, :, -block_count:], _SEEN, _RANK),
    ):
        scales = _deviations(model) * (part / width) ** 0.5 / codes
        part_blocks[..., :2] = scales.astype(np.float16).view(np.uint8).reshape(1, -1, 1, 2)


def _write_predictor(path: Path, model: Shape, layers: int, gate: Tensor) -> None:
    """Beside the model, for all layers, whose gates are the same."""
    first = quantise(np.eye(_RANK, model.dim, model.dim - _RANK, np.float32), "Q8_0")
    columns = np.ascontiguousarray(gate.data[:, -gate.type.row_bytes(_RANK) :])
    second = Tensor(gate.type, (len(columns), _RANK), columns)
    one = PredictorTensors(first, second, np.full(len(columns), _NAMING, np.float32), relu=False)
    shares = [1 - NormalDist(0, deviation * _SEEN**0.5).cdf(_NAMING) for deviation in _deviations(model)]
    named = np.full(layers, np.mean(shares), np.float32)
    with open_gguf(path) as file:
        facts = {"input": "normed", "candidates": named}
        write_sidecar(path.with_suffix(".predictor.gguf"), file.fingerprint(), [one] * layers, facts)
