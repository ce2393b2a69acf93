"""Writes a model file of any shape with random weights, for speed measurements.

    python benchmarks/synthetic.py -o dense.gguf                  # a stock Q4_0 file: SiLU, down by output
    python benchmarks/synthetic.py -o sparse.gguf --active 0.1    # its twin: ReLU, down by neuron, sparse

Blocks are written directly as random valid bytes, so a file of a gigabyte takes seconds. In a sparse file
the weights *cause* the activity: the last 256 dimensions of the residual stream are reserved; each token's
embedding has random features there which attention and FFN never overwrite, and a constant. Gate row i is a
random direction over the features and a bias on the constant, chosen so that it fires for a share p_i of the
tokens; p_i falls as a power law with the given mean. The share is then counted from the bytes as written.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import BlockType, Tensor, block_type, quantise
from hotcold.formats.gguf import open_gguf, write_gguf

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

RESERVED = 256  #: residual dimensions that only embeddings write; a multiple of every block's length
CONSTANT = 32  #: of these, the last ones, which are the same for every token
#: Standard deviation of the unreserved part of an embedding, and of what one layer's attention or FFN adds to
#: it, against features of 1: small, so that the norm hardly changes from layer to layer.
EMBEDDING_STD, UPDATE_STD = 0.1, 0.02
POWER = 0.8  #: neuron of rank r fires in proportion to r ** -POWER


@dataclass(frozen=True)
class Shape:
    dim: int
    neurons: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int


def random_rows(rng: np.random.Generator, type: BlockType, rows: int, columns: int, std: float) -> Bytes:
    """Random weights of mean 0 and about this standard deviation, ``(rows, row_bytes)``."""
    if type.name in ("Q4_0", "Q8_0"):
        blocks = rng.integers(0, 256, (rows * columns // 32, type.nbytes), np.uint8)
        # Codes are uniform: 16 or 256 steps, of variance (n * n - 1) / 12. Signs undo their mean of -1/2.
        scale = std * (12 / (255 if type.name == "Q4_0" else 65535)) ** 0.5
        signs = rng.integers(0, 2, len(blocks)) * 2 - 1
        blocks[:, :2] = (signs * scale).astype("<f2")[:, None].view(np.uint8)
        return blocks.reshape(rows, -1)
    out = np.empty((rows, type.row_bytes(columns)), np.uint8)
    for start in range(0, rows, 256):
        stop = min(rows, start + 256)
        out[start:stop] = quantise(rng.standard_normal((stop - start, columns), np.float32) * std, type).data
    return out


def set_reserved(rows: Bytes, values: Floats, type: BlockType) -> None:
    """Writes ``values`` ``(rows, RESERVED)`` into the last columns, whole blocks at a time."""
    packed = quantise(values, type).data
    rows[:, rows.shape[1] - packed.shape[1] :] = packed


class Weights:
    """The tensors of one model."""

    def __init__(self, shape: Shape, type: BlockType, active: float | None, seed: int) -> None:
        self.shape, self.type, self.active = shape, type, active
        self.rng = np.random.default_rng(seed)
        self.tensors: dict[str, Tensor] = {}
        self.shares: list[float] = []  #: counted share of firing gates, by layer
        self.features = self._features()

    def build(self) -> dict[str, Tensor]:
        shape = self.shape
        embedding = random_rows(self.rng, self.type, shape.vocab, shape.dim, EMBEDDING_STD)
        set_reserved(embedding, self.features, self.type)
        self._put("token_embd.weight", embedding, shape.dim)
        for layer in range(shape.layers):
            self._attention(f"blk.{layer}.")
            self._ffn(f"blk.{layer}.")
        self._norm("output_norm.weight")
        self._put("output.weight", self._matrix(shape.vocab, shape.dim, 1.0), shape.dim)
        return self.tensors

    def _features(self) -> Floats:
        """What embeddings hold in the reserved dimensions, ``(V, RESERVED)``: signs, and the constant."""
        signs = self.rng.integers(0, 2, (self.shape.vocab, RESERVED)).astype(np.float32) * 2 - 1
        signs[:, -CONSTANT:] = 1
        return signs

    def _attention(self, prefix: str) -> None:
        shape = self.shape
        kv_dim = shape.kv_heads * (shape.dim // shape.heads)
        self._norm(prefix + "attn_norm.weight")
        for name, rows in (("attn_q", shape.dim), ("attn_k", kv_dim), ("attn_v", kv_dim)):
            self._put(f"{prefix}{name}.weight", self._matrix(rows, shape.dim, 1.0), shape.dim)
        output = self._matrix(shape.dim, shape.dim, UPDATE_STD)
        output[-RESERVED:] = 0
        self._put(prefix + "attn_output.weight", output, shape.dim)

    def _ffn(self, prefix: str) -> None:
        shape = self.shape
        self._norm(prefix + "ffn_norm.weight")
        self._put(prefix + "ffn_up.weight", self._matrix(shape.neurons, shape.dim, 1.0), shape.dim)
        if self.active is None:
            self._put(prefix + "ffn_gate.weight", self._matrix(shape.neurons, shape.dim, 1.0), shape.dim)
            down = self._matrix(shape.dim, shape.neurons, UPDATE_STD)
            down[-RESERVED:] = 0
            self._put(prefix + "ffn_down.weight", down, shape.neurons)
            return
        self._put(prefix + "ffn_gate.weight", self._sparse_gate(self.active), shape.dim)
        std = UPDATE_STD / (shape.neurons * self.active) ** 0.5
        down = random_rows(self.rng, self.type, shape.neurons, shape.dim, std)
        set_reserved(down, np.zeros((shape.neurons, RESERVED), np.float32), self.type)
        self._put(prefix + "ffn_down.weight", down, shape.dim)

    def _sparse_gate(self, active: float) -> Bytes:
        """Gate rows that fire for a share of the tokens that falls as a power law of mean ``active``."""
        shape, rng = self.shape, self.rng
        # Reserved values are 1 where the rest of the residual is small, so the norm divides by about this.
        rms = ((RESERVED + (shape.dim - RESERVED) * EMBEDDING_STD**2) / shape.dim) ** 0.5
        std = rms / (RESERVED - CONSTANT) ** 0.5  # gates of about 1
        rows = random_rows(rng, self.type, shape.neurons, shape.dim, std / 8)
        values = rng.standard_normal((shape.neurons, RESERVED), np.float32) * std
        values[:, -CONSTANT:] = 0
        as_stored = quantise(values, self.type).dequantise()
        sample = quantise(self.features[rng.integers(0, shape.vocab, 2000)], self.type).dequantise()
        gates = sample @ as_stored.T  # [tokens, N], before the bias
        shares = rng.permutation(power_law(shape.neurons, active))
        rank = np.clip(((1 - shares) * len(sample)).astype(int), 0, len(sample) - 1)
        bias = -np.take_along_axis(np.sort(gates, axis=0), rank[None], axis=0)[0]
        values[:, -CONSTANT:] = (bias / sample[:, -CONSTANT:].sum(axis=1).mean())[:, None]
        set_reserved(rows, values, self.type)
        as_stored = quantise(values, self.type).dequantise()
        self.shares.append(float((sample @ as_stored.T > 0).mean()))
        return rows

    def _matrix(self, rows: int, columns: int, gain: float) -> Bytes:
        return random_rows(self.rng, self.type, rows, columns, gain / columns**0.5)

    def _norm(self, name: str) -> None:
        self.tensors[name] = quantise(np.ones(self.shape.dim, np.float32), "F32")

    def _put(self, name: str, rows: Bytes, columns: int) -> None:
        self.tensors[name] = Tensor(self.type, (len(rows), columns), rows)


def power_law(n: int, mean: float) -> npt.NDArray[np.float64]:
    """``min(1, c * rank ** -POWER)`` for n ranks, with c such that the mean is right."""
    ranks = np.arange(1, n + 1) ** -POWER
    low, high = 0.0, float(n)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1, middle * ranks).mean() < mean else (low, middle)
    return np.minimum(1, low * ranks)


def metadata(shape: Shape, name: str, vocabulary: Path | None, active: float | None) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "general.architecture": "llama",
        "general.name": name,
        "general.quantization_version": np.uint32(2),
        "llama.context_length": np.uint32(shape.context),
        "llama.embedding_length": np.uint32(shape.dim),
        "llama.block_count": np.uint32(shape.layers),
        "llama.feed_forward_length": np.uint32(shape.neurons),
        "llama.rope.dimension_count": np.uint32(shape.dim // shape.heads),
        "llama.rope.freq_base": np.float32(10000),
        "llama.attention.head_count": np.uint32(shape.heads),
        "llama.attention.head_count_kv": np.uint32(shape.kv_heads),
        "llama.attention.layer_norm_rms_epsilon": np.float32(1e-5),
        "llama.vocab_size": np.uint32(shape.vocab),
    }
    if active is not None:
        keys |= {"hotcold.ffn.activation": "relu", "hotcold.ffn.down_layout": "by_neuron"}
    return keys | (vocabulary_of(vocabulary) if vocabulary else synthetic_vocabulary(shape.vocab))


def vocabulary_of(path: Path) -> dict[str, Any]:
    """The tokenizer of another GGUF file."""
    return {key: value for key, value in open_gguf(path).metadata.items() if key.startswith("tokenizer.")}


def synthetic_vocabulary(size: int) -> dict[str, Any]:
    """SentencePiece style: three control tokens, 256 bytes, and made-up words."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = "etaoinshrdlcumwfgypbvkjxqz"
    n = len(tokens)
    tokens += [("\u2581" if i % 2 else "") + _word(i // 2, letters) for i in range(size - n)]
    types = np.array([2, 3, 3, *[6] * 256, *[1] * (size - n)], np.int32)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": -np.arange(size, dtype=np.float32),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": np.uint32(1),
        "tokenizer.ggml.eos_token_id": np.uint32(2),
        "tokenizer.ggml.unknown_token_id": np.uint32(0),
    }


def _word(number: int, letters: str) -> str:
    """A different word for every number, the shortest first."""
    word = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, len(letters))
        word += letters[letter]
    return word


def write(
    path: Path, shape: Shape, type: str, *, active: float | None, vocabulary: Path | None, seed: int
) -> Weights:
    """Writes one model file and returns what it was made of."""
    weights = Weights(shape, block_type(type), active, seed)
    keys = metadata(shape, path.stem, vocabulary, active)
    write_gguf(path, keys, weights.build())
    return weights


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add: Callable[..., Any] = parser.add_argument
    add("-o", "--output", type=Path, required=True)
    add("--type", default="Q4_0", help="block type of every matrix (Q4_0)")
    add("--active", type=float, help="mean share of neurons that fire; without it the model is dense (SiLU)")
    add("--dim", type=int, default=4096)
    add("--neurons", type=int, default=11008)
    add("--layers", type=int, default=8)
    add("--heads", type=int, default=32)
    add("--kv-heads", type=int, default=32)
    add("--vocab", type=int, default=32000)
    add("--context", type=int, default=2048)
    add("--vocabulary", type=Path, help="GGUF file whose tokenizer to take; of --vocab tokens")
    add("--seed", type=int, default=1)
    args = parser.parse_args()
    shape = Shape(args.dim, args.neurons, args.layers, args.heads, args.kv_heads, args.vocab, args.context)
    weights = write(
        args.output, shape, args.type, active=args.active, vocabulary=args.vocabulary, seed=args.seed
    )
    print(f"{args.output}: {args.output.stat().st_size / 1e9:.3f} GB")
    if weights.shares:
        shares = " ".join(f"{share:.3f}" for share in weights.shares)
        print(f"share of gates that fire on random tokens, by layer: {shares}")


if __name__ == "__main__":
    main()
