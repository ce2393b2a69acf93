"""Writes a model file of any shape with random weights, for speed measurements.

Blocks are written directly as random valid bytes, one tensor in memory at a time, so a file of a gigabyte
takes seconds. The same seed gives the same weights in every layout (F32, F16, BF16, Q8_0 and Q4_0: exactly;
in other types down by output is quantised once more).

In a sparse file the weights *cause* the activity: the last 256 dimensions of the residual stream are
reserved; each token's embedding has random features there which attention and FFN never overwrite, and a
constant. Gate row i is a random direction over the features and a bias on the constant, chosen so that it is
active for a share p_i of the tokens; p_i falls as a power law with the given mean. Over the other dimensions
gate rows are small noise. An ungated model is llama.cpp's ``arcee`` (squared ReLU): its up rows do what gate
rows do elsewhere. Which experts a router chooses follows from the features, too.

The predictor of a PWRI file reads the same features s, which are -a or a: its first factor picks the reserved
dimensions, and w . s + b = 2 w . relu(s) + (b - a * sum(w)), so its second is the gate row over them with
another bias. What it cannot see is the noise, so its recall is high and not perfect. The predictor of experts
lies beside the file (``*.predictor.gguf``): their gates over the features alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import BlockType, Tensor, block_type, quantise
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.kernels.backend import PredictorTensors
from hotcold.sparse.predictor import write_sidecar
from lib.random_blocks import random_block_rows

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

LAYOUTS = ("by_output", "by_neuron", "pwri")
RESERVED = 256  #: residual dimensions that only embeddings write; a multiple of every block's length
CONSTANT = 32  #: of these, the last ones, which are 1 for every token
#: Features are this or its negative, and the first of each 32 dimensions is -1, so that Q4_0, whose scale
#: is an eighth of the value farthest from 0, holds both signs exactly.
FEATURE = 0.875
#: Standard deviation of the unreserved part of an embedding, and of what one layer's attention or FFN adds to
#: it, against features of 1: small, so that the norm hardly changes from layer to layer.
EMBEDDING_STD, UPDATE_STD = 0.1, 0.02
POWER = 0.8  #: neuron of rank r is active in proportion to r ** -POWER
#: PowerInfer's predictors run through its ordinary matrix product; its sparse FFN takes F16 and Q4_0 alone.
PREDICTOR_TYPES = ("F32", "F16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
POWERINFER_TYPES = ("F16", "Q4_0")


@dataclass(frozen=True)
class Shape:
    """``neurons`` are those of one expert, where there are experts."""

    dim: int
    neurons: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    architecture: str = "llama"
    experts: int = 0
    chosen: int = 0
    width: int = 0  #: of a head, where it is not ``dim // heads``
    qk_norm: bool = False

    @property
    def head_dim(self) -> int:
        return self.width or self.dim // self.heads


#: Mixtral's (8 experts, 2 chosen) and Qwen3 30B A3B's (128, 8 chosen), with few layers and a vocabulary cut
#: alike, so that experts, attention and head have about their share of what a token reads.
EXPERT_SHAPES = {
    "mixtral": Shape(4096, 14336, 2, 32, 8, 8192, 2048, "llama", 8, 2),
    "qwen3moe": Shape(2048, 768, 4, 32, 4, 16000, 2048, "qwen3moe", 128, 8, 128, qk_norm=True),
}
ROUTER_STD = 0.15  #: of a router's weights over the features: logits of about 2


@dataclass(frozen=True)
class Recipe:
    """The model to write. ``active`` is the mean share of active neurons; None makes a dense SiLU
    model."""

    shape: Shape
    type: str = "Q4_0"
    active: float | None = None
    layout: str = "by_output"  #: of :data:`LAYOUTS`
    predictor_type: str | None = None  #: None: as the matrices if PowerInfer computes with that, else F16
    seed: int = 1
    gated: bool = True  #: False: squared ReLU of up alone, which only a sparse model can have

    def __post_init__(self) -> None:
        if self.active is None and not self.gated:
            raise ValueError("an ungated model is sparse: give the active share")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout {self.layout!r}: choose from {', '.join(LAYOUTS)}")
        if self.active is None and self.layout != "by_output":
            raise ValueError(f"layout {self.layout} needs a sparse model: give the active share")
        if self.shape.experts and (self.layout != "by_output" or not self.gated):
            raise ValueError("experts have a gate, and down by output")
        if self.active is not None and not self.written:
            raise ValueError(f"{self.type} is not written: a sparse model needs a type that is")
        if self.predictor not in PREDICTOR_TYPES:
            raise ValueError(f"predictor type {self.predictor}: choose from {', '.join(PREDICTOR_TYPES)}")

    @property
    def architecture(self) -> str:
        return self.shape.architecture if self.gated else "arcee"

    @property
    def written(self) -> bool:
        """True if given values can be packed into its blocks, as the features of tokens must be."""
        return block_type(self.type).encode is not None

    @property
    def deciding(self) -> str:
        """The matrix whose rows say which neurons are active."""
        return "ffn_gate" if self.gated else "ffn_up"

    @property
    def predictor(self) -> str:
        return self.predictor_type or (self.type if self.type in PREDICTOR_TYPES else "F16")


def random_rows(rng: np.random.Generator, type: BlockType, rows: int, columns: int, std: float) -> Bytes:
    """Random weights of mean 0 and about this standard deviation, ``(rows, row_bytes)``.

    Every block of Q4_0 and Q8_0 has the same scale, and codes are symmetric about 0, so that such a matrix
    can be transposed without a loss. Types that nothing here quantises to get random blocks, too.
    """
    if type.encode is None:
        return random_block_rows(rng, type, rows, columns, std)
    if type.name in _CODES:
        blocks = np.empty((rows * columns // 32, type.nbytes), np.uint8)
        blocks[:, 2:] = _random_codes(rng, type, rows * columns).reshape(len(blocks), -1)
        blocks[:, :2] = np.array([std / _CODES[type.name][1]], "<f2").view(np.uint8)
        return blocks.reshape(rows, -1)
    if type.weights == 1:
        values = quantise(rng.standard_normal(1 << 16, np.float32) * std, type).data
        picked: Bytes = values.view(f"u{type.nbytes}")[0][_random_bytes(rng, 2 * rows * columns).view("<u2")]
        return picked.view(np.uint8).reshape(rows, -1)
    out = np.empty((rows, type.row_bytes(columns)), np.uint8)
    for start in range(0, rows, 256):
        stop = min(rows, start + 256)
        out[start:stop] = quantise(rng.standard_normal((stop - start, columns), np.float32) * std, type).data
    return out


#: Bytes of codes of a block, and the standard deviation of random codes: 0 is twice as likely as the others.
_CODES = {"Q4_0": (16, (2 * 140 / 16) ** 0.5), "Q8_0": (32, (2 * 690880 / 256) ** 0.5)}


def _random_bytes(rng: np.random.Generator, n: int) -> Bytes:
    return rng.integers(0, 1 << 64, -(-n // 8), np.uint64).view(np.uint8)[:n]


def _random_codes(rng: np.random.Generator, type: BlockType, n: int) -> Bytes:
    """Random codes of ``n`` weights without the lowest, which has no opposite: 0 takes its place."""
    codes = _random_bytes(rng, n // 32 * _CODES[type.name][0])
    if type.name == "Q8_0":
        codes[codes == 0x80] = 0
    else:  # two codes of 4 bits; code 8 is 0
        codes += (codes & 0x0F == 0).view(np.uint8) * np.uint8(0x08)
        codes += (codes & 0xF0 == 0).view(np.uint8) * np.uint8(0x80)
    return codes


def transposed(rows: Bytes, type: BlockType, columns: int) -> Bytes:
    """The matrix ``(rows, columns)`` of :func:`random_rows` as ``(columns, rows)``, blocks along ``rows``."""
    if type.weights == 1:
        return np.ascontiguousarray(rows.view(f"u{type.nbytes}").T).view(np.uint8)
    if type.name not in _CODES:
        return quantise(Tensor(type, (len(rows), columns), rows).dequantise().T, type).data
    blocks = rows.reshape(len(rows), -1, type.nbytes)
    codes = blocks[:, :, 2:]
    if type.name == "Q4_0":
        codes = np.concatenate([codes & 15, codes >> 4], axis=2)
    codes = np.ascontiguousarray(codes.reshape(len(rows), columns).T).reshape(columns, -1, 32)
    out = np.empty((columns, len(rows) // 32, type.nbytes), np.uint8)
    out[:, :, :2] = blocks[0, 0, :2]
    out[:, :, 2:] = codes if type.name == "Q8_0" else codes[:, :, :16] | codes[:, :, 16:] << 4
    return out.reshape(columns, -1)


def set_reserved(rows: Bytes, values: Floats, type: BlockType) -> None:
    """Writes ``values`` ``(rows, RESERVED)`` into the last columns, whole blocks at a time."""
    packed = quantise(values, type).data
    rows[:, rows.shape[1] - packed.shape[1] :] = packed


def reserved_dimensions(dim: int) -> Floats:
    """``(RESERVED, D)``: picks them."""
    return np.eye(RESERVED, dim, dim - RESERVED, np.float32)


@dataclass(frozen=True)
class _Part:
    """A tensor to be: what :func:`write_gguf` needs to know first, and how to make its bytes."""

    type: BlockType
    rows: int
    columns: int
    make: Callable[[], Bytes]


class Weights(Mapping[str, Tensor]):
    """The tensors of one model, made one at a time, for :func:`write_gguf`.

    That function takes each twice, for its shape and then for its data: the first is an empty promise.
    """

    def __init__(self, recipe: Recipe, type: BlockType | None = None) -> None:
        self.recipe, self.shape, self.type = recipe, recipe.shape, type or block_type(recipe.type)
        self._parts: dict[str, _Part] = {}
        self._promised: set[str] = set()
        self._features = self._random_features()
        self._gate: tuple[str, Floats] = ("", self._features[:0])
        self._plan()

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __getitem__(self, name: str) -> Tensor:
        part = self._parts[name]
        shape: tuple[int, ...] = (part.rows, part.columns) if part.rows else (part.columns,)
        if "_exps." in name:
            shape = (self.shape.experts, part.rows // self.shape.experts, part.columns)
        if name not in self._promised:
            self._promised.add(name)
            return Tensor(
                part.type, shape, np.empty((part.rows or 1, part.type.row_bytes(part.columns)), np.uint8)
            )
        return Tensor(part.type, shape, part.make())

    def _plan(self) -> None:
        shape = self.shape
        self._add("token_embd.weight", shape.vocab, shape.dim, self._embedding)
        for layer in range(shape.layers):
            self._plan_attention(f"blk.{layer}.")
            self._plan_ffn(f"blk.{layer}.")
        self._norm("output_norm.weight")
        self._matrix("output.weight", shape.vocab, shape.dim)

    def _plan_attention(self, prefix: str) -> None:
        shape = self.shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._norm(prefix + "attn_norm.weight")
        for name, rows in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
            self._matrix(f"{prefix}{name}.weight", rows, shape.dim)
        for part in ("q", "k") if shape.qk_norm else ():
            self._norm(f"{prefix}attn_{part}_norm.weight", shape.head_dim)
        name = prefix + "attn_output.weight"
        self._add(name, shape.dim, q, lambda: self._attention_output(name, q))

    def _plan_ffn(self, prefix: str) -> None:
        shape, layout, recipe = self.shape, self.recipe.layout, self.recipe
        rows, end = shape.neurons * max(1, shape.experts), "_exps.weight" if shape.experts else ".weight"
        self._norm(prefix + "ffn_norm.weight")
        if shape.experts:
            name = prefix + "ffn_gate_inp.weight"
            self._add(name, shape.experts, shape.dim, lambda: self._router(prefix), block_type("F32"))
        for name in ("ffn_gate", "ffn_up") if recipe.gated else ("ffn_up",):
            if recipe.active is not None and name == recipe.deciding:
                make = lambda: self._each_expert(self._sparse_gate, prefix)  # noqa: E731
                self._add(prefix + name + end, rows, shape.dim, make)
            else:
                self._matrix(prefix + name + end, rows, shape.dim)
        size = (rows, shape.dim)
        if layout == "by_output":
            size = (shape.dim * max(1, shape.experts), shape.neurons)
        name = "ffn_down_t" if layout == "pwri" else "ffn_down"
        self._add(prefix + name + end, *size, lambda: self._each_expert(self._down, prefix))
        if layout == "pwri":
            type = block_type(recipe.predictor)
            self._add(prefix + "fc1.weight", RESERVED, shape.dim, lambda: self._first_factor(type), type)
            second = lambda: self._second_factor(prefix, type)  # noqa: E731
            self._add(prefix + "fc2.weight", shape.neurons, RESERVED, second, type)

    def _each_expert(self, make: Callable[[str], Bytes], prefix: str) -> Bytes:
        """Returns the rows of all experts, one after another."""
        experts = [f"{prefix}{expert}." for expert in range(self.shape.experts)]
        return np.concatenate([make(name) for name in experts or [prefix]])

    def _add(
        self, name: str, rows: int, columns: int, make: Callable[[], Bytes], type: BlockType | None = None
    ) -> None:
        self._parts[name] = _Part(type or self.type, rows, columns, make)

    def _matrix(self, name: str, rows: int, columns: int) -> None:
        self._add(name, rows, columns, lambda: self._random(name, rows, columns, columns**-0.5))

    def _norm(self, name: str, length: int = 0) -> None:
        ones = quantise(np.ones(length or self.shape.dim, np.float32), "F32")
        self._add(name, 0, length or self.shape.dim, lambda: ones.data, ones.type)

    def _random(self, name: str, rows: int, columns: int, std: float) -> Bytes:
        return random_rows(self._rng(name), self.type, rows, columns, std)

    def _rng(self, name: str) -> np.random.Generator:
        """By name, so that a tensor's values do not depend on the layout of the others."""
        return np.random.Generator(np.random.SFC64([self.recipe.seed, zlib.crc32(name.encode())]))

    def _random_features(self) -> Floats:
        """The values that embeddings hold in the reserved dimensions, ``(V, RESERVED)``: see FEATURE and
        CONSTANT."""
        signs = self._rng("features").integers(0, 2, (self.shape.vocab, RESERVED), np.int8) * 2 - 1
        features = signs * np.float32(FEATURE)
        features[:, ::32] = -1
        features[:, -CONSTANT:] = 1
        return features

    def _embedding(self) -> Bytes:
        rows = self._random("token_embd", self.shape.vocab, self.shape.dim, EMBEDDING_STD)
        if not self.recipe.written:
            return rows
        set_reserved(rows, self._features, self.type)
        return rows

    def _attention_output(self, name: str, columns: int) -> Bytes:
        rows = self._random(name, self.shape.dim, columns, UPDATE_STD / columns**0.5)
        if self.recipe.written:
            rows[-RESERVED:] = quantise(np.zeros((1, columns), np.float32), self.type).data
        return rows

    def _router(self, prefix: str) -> Bytes:
        values = np.zeros((self.shape.experts, self.shape.dim), np.float32)
        size = self.shape.experts, RESERVED - CONSTANT
        values[:, -RESERVED:-CONSTANT] = ROUTER_STD * self._rng(prefix + "router").standard_normal(size)
        return quantise(values, "F32").data

    def _down(self, prefix: str) -> Bytes:
        """``(N, D)`` or, by output, ``(D, N)``; nothing is added to the reserved dimensions."""
        dim, neurons = self.shape.dim, self.shape.neurons
        std = UPDATE_STD / (neurons * (self.recipe.active or 1)) ** 0.5
        if not self.recipe.written:
            return self._random(prefix + "down", dim, neurons, std)
        rows = self._random(prefix + "down", neurons, dim, std)
        if self.recipe.layout == "by_output":
            rows = transposed(rows, self.type, dim)
            rows[-RESERVED:] = quantise(np.zeros((1, neurons), np.float32), self.type).data
        else:
            set_reserved(rows, np.zeros((neurons, RESERVED), np.float32), self.type)
        return rows

    def _sparse_gate(self, prefix: str) -> Bytes:
        """Rows over the features, with a bias on the constant, and noise elsewhere."""
        shape, rng = self.shape, self._rng(prefix + "gate")
        # Reserved values are near 1 where the rest of the residual is small: the norm divides by about this.
        rms = ((RESERVED + (shape.dim - RESERVED) * EMBEDDING_STD**2) / shape.dim) ** 0.5
        std = rms / (RESERVED - CONSTANT) ** 0.5  # gates of about 1
        rows = self._random(prefix + "gate noise", shape.neurons, shape.dim, std / 8)
        values: Floats = rng.standard_normal((shape.neurons, RESERVED), np.float32) * np.float32(std)
        values[:, ::32] = 0
        values[:, -CONSTANT:] = 0
        constant = quantise(self._features[:1], self.type).dequantise()[0, -CONSTANT:].sum()
        bias = self._biases(rng, quantise(values, self.type).dequantise())
        values[:, -CONSTANT:] = (bias / constant)[:, None]
        set_reserved(rows, values, self.type)
        self._gate = (prefix, quantise(values, self.type).dequantise())
        return rows

    def _biases(self, rng: np.random.Generator, gates: Floats) -> npt.NDArray[np.float64]:
        """With which the rows are active for a share of the tokens that falls as a power law of mean
        ``active``: counted on some tokens."""
        sample = quantise(self._features[rng.integers(0, self.shape.vocab, 2000)], self.type).dequantise()
        assert self.recipe.active is not None
        shares = rng.permutation(power_law(len(gates), self.recipe.active))
        rank = np.clip(((1 - shares) * len(sample)).astype(int), 0, len(sample) - 1)
        firing = np.sort(gates @ sample.T)  # [N, tokens], before the bias
        biases: npt.NDArray[np.float64] = -np.take_along_axis(firing, rank[:, None], axis=1)[:, 0]
        return biases

    def _first_factor(self, type: BlockType) -> Bytes:
        return quantise(reserved_dimensions(self.shape.dim), type).data

    def _second_factor(self, prefix: str, type: BlockType) -> Bytes:
        """``(N, RESERVED)``, from the layer's gate as stored, which was made just before."""
        made, gate = self._gate
        assert made == prefix
        feature = quantise(self._features[:1], self.type).dequantise()[0, 1]
        values = 2 * gate
        bias = gate[:, -CONSTANT:].sum(axis=1) - np.abs(feature) * gate[:, :-CONSTANT].sum(axis=1)
        values[:, -CONSTANT:] = (bias / CONSTANT)[:, None]
        return quantise(values, type).data


def power_law(n: int, mean: float) -> npt.NDArray[np.float64]:
    """``min(1, c * rank ** -POWER)`` for n ranks, with c such that the mean is right."""
    ranks = np.arange(1, n + 1) ** -POWER
    low, high = 0.0, float(n)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1, middle * ranks).mean() < mean else (low, middle)
    return np.minimum(1, low * ranks)


def metadata(recipe: Recipe, name: str) -> dict[str, Any]:
    shape, architecture = recipe.shape, recipe.architecture
    keys: dict[str, Any] = {
        "general.architecture": architecture,
        "general.name": name,
        "general.quantization_version": np.uint32(2),
        f"{architecture}.context_length": np.uint32(shape.context),
        f"{architecture}.embedding_length": np.uint32(shape.dim),
        f"{architecture}.block_count": np.uint32(shape.layers),
        f"{architecture}.feed_forward_length": np.uint32(shape.neurons),
        f"{architecture}.rope.dimension_count": np.uint32(shape.head_dim),
        f"{architecture}.rope.freq_base": np.float32(10000),
        f"{architecture}.attention.head_count": np.uint32(shape.heads),
        f"{architecture}.attention.head_count_kv": np.uint32(shape.kv_heads),
        f"{architecture}.attention.layer_norm_rms_epsilon": np.float32(1e-5),
        f"{architecture}.vocab_size": np.uint32(shape.vocab),
    }
    if shape.experts:
        sizes = {
            "expert_count": shape.experts, "expert_used_count": shape.chosen,
            "expert_feed_forward_length": shape.neurons, "attention.key_length": shape.head_dim,
            "attention.value_length": shape.head_dim,
        }  # fmt: skip
        keys |= {f"{architecture}.{key}": np.uint32(value) for key, value in sizes.items()}
    if recipe.layout == "pwri":
        keys["powerinfer.sparse_threshold"] = np.float32(0)
    elif recipe.active is not None and recipe.gated:
        keys["hotcold.ffn.activation"] = "relu"
    if recipe.layout == "by_neuron":
        keys["hotcold.ffn.down_layout"] = "by_neuron"
    return keys | synthetic_vocabulary(shape.vocab)


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


def write(path: Path, recipe: Recipe) -> None:
    """The file and, of sparse experts, the predictor beside it."""
    magic = "PWRI" if recipe.layout == "pwri" else "GGUF"
    write_gguf(path, metadata(recipe, path.stem), Weights(recipe), magic=magic)
    if recipe.active is None or not recipe.shape.experts:
        return
    layers, type = [], block_type(recipe.type)
    first = quantise(reserved_dimensions(recipe.shape.dim), "Q8_0")
    with open_gguf(path) as file:
        for layer in range(recipe.shape.layers):
            gate = file.load(f"blk.{layer}.ffn_gate_exps.weight").data
            columns = np.ascontiguousarray(gate[:, -type.row_bytes(RESERVED) :])
            second, none = Tensor(type, (len(gate), RESERVED), columns), np.zeros(len(gate), np.float32)
            layers.append(PredictorTensors(first, second, none, relu=False))
        facts = {"input": "normed"}
        write_sidecar(path.with_suffix(".predictor.gguf"), file.fingerprint(), layers, facts)
