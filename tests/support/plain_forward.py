"""A forward pass in float64, straight from the definition, and random models of any shape to try it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from support import op_truth
from support.random_blocks import random_blocks

from hotcold.formats.blocks import Tensor, quantise
from hotcold.formats.gguf import write_gguf


@dataclass(frozen=True)
class Model:
    """A random model. Optional parts are there when their flag is set; dimensions are odd on purpose.

    ``arch`` is what the file says; the flags ``layer_norm``, ``parallel`` and ``interleaved`` must be what
    the family of that name implies.
    """

    arch: str = "llama"
    dim: int = 48
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 10
    neurons: tuple[int, ...] = (70, 90)
    vocab: int = 61
    activation: str = "silu"
    threshold: float = 0.0
    gated: bool = True
    biases: bool = False
    qk_norm: bool = False
    tied: bool = False
    layer_norm: bool = False
    parallel: bool = False
    interleaved: bool = True
    rotary: int = 10
    linear_factor: float = 1.0
    type: str = "F32"
    extra: dict[str, Any] = field(default_factory=dict)  #: more metadata, or keys to replace

    def metadata(self) -> dict[str, Any]:
        eps = "layer_norm_epsilon" if self.layer_norm else "layer_norm_rms_epsilon"
        keys: dict[str, Any] = {
            "block_count": len(self.neurons),
            "context_length": 96,
            "embedding_length": self.dim,
            "feed_forward_length": np.array(self.neurons, np.uint32),
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            f"attention.{eps}": 1e-5,
            "rope.dimension_count": self.rotary,
            "rope.freq_base": 5000.0,
        }
        if self.linear_factor != 1:
            keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": self.linear_factor}
        metadata: dict[str, Any] = {"general.architecture": self.arch}
        metadata |= {f"{self.arch}.{key}": value for key, value in keys.items()}
        metadata |= {"hotcold.ffn.activation": self.activation, "hotcold.ffn.threshold": self.threshold}
        return metadata | self.extra

    def tensors(self, seed: int = 0) -> dict[str, Tensor]:
        random = np.random.default_rng(seed)
        tensors: dict[str, Tensor] = {}

        def matrix(name: str, *shape: int) -> None:
            tensors[f"{name}.weight"] = random_blocks(random, self.type, *shape, scale=shape[-1] ** -0.5)
            if self.biases and "blk" in name:
                vector(f"{name}.bias", shape[0], 0.1)

        def vector(name: str, size: int, scale: float = 0.2, mean: float = 0.0) -> None:
            tensors[name] = quantise((mean + scale * random.standard_normal(size)).astype(np.float32), "F32")

        def norm(name: str, size: int) -> None:
            vector(f"{name}.weight", size, mean=1.0)
            if self.layer_norm:
                vector(f"{name}.bias", size)

        matrix("token_embd", self.vocab, self.dim)
        norm("output_norm", self.dim)
        if not self.tied:
            matrix("output", self.vocab, self.dim)
        for i, n in enumerate(self.neurons):
            blk = f"blk.{i}."
            norm(blk + "attn_norm", self.dim)
            matrix(blk + "attn_q", self.heads * self.head_dim, self.dim)
            matrix(blk + "attn_k", self.kv_heads * self.head_dim, self.dim)
            matrix(blk + "attn_v", self.kv_heads * self.head_dim, self.dim)
            matrix(blk + "attn_output", self.dim, self.heads * self.head_dim)
            if self.qk_norm:
                norm(blk + "attn_q_norm", self.head_dim)
                norm(blk + "attn_k_norm", self.head_dim)
            if not self.parallel:
                norm(blk + "ffn_norm", self.dim)
            if self.gated:
                matrix(blk + "ffn_gate", n, self.dim)
            matrix(blk + "ffn_up", n, self.dim)
            matrix(blk + "ffn_down", self.dim, n)
        return tensors

    def write(self, path: Path, tensors: Mapping[str, Tensor] | None = None, magic: str = "GGUF") -> Path:
        write_gguf(path, self.metadata(), self.tensors() if tensors is None else tensors, magic=magic)
        return path


def fuse_qkv(tensors: dict[str, Tensor]) -> None:
    """Puts q, k and v of each layer into one matrix, as Falcon's files have them."""
    for blk in {name.partition("attn_q.")[0] for name in tensors if ".attn_q." in name}:
        for part in ("weight", "bias"):
            if f"{blk}attn_q.{part}" in tensors:
                parts = [tensors.pop(f"{blk}attn_{letter}.{part}") for letter in "qkv"]
                axis = 0 if part == "weight" else 1  # a vector is one row
                data = np.concatenate([each.data for each in parts], axis)
                shape = (sum(each.shape[0] for each in parts), *parts[0].shape[1:])
                tensors[f"{blk}attn_qkv.{part}"] = Tensor(parts[0].type, shape, data)


def forward(
    model: Model, tensors: Mapping[str, Tensor], tokens: list[int], kv_dtype: npt.DTypeLike = np.float64
) -> np.ndarray:
    """Logits ``[T, V]`` float64; inputs of weights in blocks, and keys and values, are rounded."""
    step = _Pass(model, tensors, kv_dtype)
    x = step.values("token_embd.weight")[tokens]
    for i in range(len(model.neurons)):
        blk = f"blk.{i}."
        normed = step.norm(blk + "attn_norm", x)
        if model.parallel:
            x = x + step.attention(blk, normed) + step.ffn(blk, normed)
        else:
            x = x + step.attention(blk, normed)
            x = x + step.ffn(blk, step.norm(blk + "ffn_norm", x))
    head = "output" if "output.weight" in tensors else "token_embd"
    return step.linear(head, step.norm("output_norm", x))


@dataclass(frozen=True)
class _Pass:
    model: Model
    tensors: Mapping[str, Tensor]
    kv_dtype: npt.DTypeLike

    def values(self, name: str) -> np.ndarray:
        return self.tensors[name].dequantise().astype(np.float64)

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        bias = self.tensors.get(f"{name}.bias")
        answer = op_truth.dot(x, self.tensors[f"{name}.weight"], None if bias is None else bias.dequantise())
        return answer.values

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        if self.model.layer_norm:
            x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * self.values(f"{name}.weight")
        return x + self.values(f"{name}.bias") if self.model.layer_norm else x

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """``[T, heads, head_dim]``; row t is position t."""
        rotary, half = self.model.rotary, self.model.rotary // 2
        steps = 5000.0 ** -(np.arange(half) / half) / self.model.linear_factor
        first, second = slice(0, half), slice(half, rotary)
        if self.model.interleaved:
            first, second = slice(0, rotary, 2), slice(1, rotary, 2)
        turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * np.arange(len(x))[:, None, None] * steps)
        x = x.copy()
        x[..., first], x[..., second] = turned.real, turned.imag
        return x

    def attention(self, blk: str, x: np.ndarray) -> np.ndarray:
        head_dim = self.model.head_dim
        q, k, v = (self.linear(f"{blk}attn_{part}", x).reshape(len(x), -1, head_dim) for part in "qkv")
        if self.model.qk_norm:
            q, k = self.norm(blk + "attn_q_norm", q), self.norm(blk + "attn_k_norm", k)
        q = self.rotate(q)
        k, v = (part.astype(self.kv_dtype).astype(np.float64).swapaxes(0, 1) for part in (self.rotate(k), v))
        mixed = [
            op_truth.attention(q[t], k[:, : t + 1], v[:, : t + 1], head_dim**-0.5) for t in range(len(x))
        ]
        return self.linear(blk + "attn_output", np.stack(mixed).reshape(len(x), -1))

    def ffn(self, blk: str, x: np.ndarray) -> np.ndarray:
        model = self.model
        up = self.linear(blk + "ffn_up", x)
        gate = self.linear(blk + "ffn_gate", x) if model.gated else up
        hidden = op_truth.activate(model.activation, gate, model.threshold)
        if model.gated:
            hidden = hidden * (np.maximum(up, 0) if model.activation == "drelu" else up)
        down = self.tensors[blk + "ffn_down.weight"].type
        if model.activation not in ("relu", "drelu", "relu2") or not down.panels:
            return self.linear(blk + "ffn_down", hidden)
        bias = self.tensors.get(blk + "ffn_down.bias")  # coefficients are not rounded where zeros are skipped
        return hidden @ self.values(blk + "ffn_down.weight").T + (0 if bias is None else bias.dequantise())


def transposed(tensor: Tensor) -> Tensor:
    """A matrix of a float type with rows and columns exchanged; no value changes."""
    rows, columns = tensor.shape
    values = tensor.data.view(f"u{tensor.type.nbytes}")  # one element per weight
    return Tensor(tensor.type, (columns, rows), np.ascontiguousarray(values.T).view(np.uint8))
