"""Writes a model file of any shape with random weights, for speed measurements.

    python benchmarks/lib/models.py -o dense.gguf                  # a stock Q4_0 file: SiLU, down by output
    python benchmarks/lib/models.py -o sparse.gguf --active 0.1    # its twin: ReLU, down by neuron, sparse
    python benchmarks/lib/models.py -o stock.gguf --active 0.1 --layout by_output  # the same, as a stock file
    python benchmarks/lib/models.py -o sparse.pwri --active 0.1 --layout pwri      # PowerInfer's, predictor
    python benchmarks/lib/models.py -o arcee.gguf --active 0.1 --ungated           # squared ReLU, no gate

Blocks are written directly as random valid bytes, one tensor in memory at a time, so a file of a gigabyte
takes seconds. The same seed gives the same weights in every layout (F32, F16, BF16, Q8_0 and Q4_0: exactly;
in other types down by output is quantised once more).

In a sparse file the weights *cause* the activity: the last 256 dimensions of the residual stream are
reserved; each token's embedding has random features there which attention and FFN never overwrite, and a
constant. Gate row i is a random direction over the features and a bias on the constant, chosen so that it
fires for a share p_i of the tokens; p_i falls as a power law with the given mean. Over the other dimensions
gate rows are small noise. An ungated model is llama.cpp's ``arcee`` (squared ReLU): its up rows do what gate
rows do elsewhere.

The predictor of a PWRI file reads the same features s, which are -a or a: its first factor picks the reserved
dimensions, and w . s + b = 2 w . relu(s) + (b - a * sum(w)), so its second is the gate row over them with
another bias. What it cannot see is the noise, so its recall is high and not perfect. Shares and recall are
counted from the file as written, on the embeddings of random tokens.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import BlockType, Tensor, block_type, quantise
from hotcold.formats.gguf import open_gguf, write_gguf

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
POWER = 0.8  #: neuron of rank r fires in proportion to r ** -POWER
#: PowerInfer's predictors run through its ordinary matrix product; its sparse FFN takes F16 and Q4_0 alone.
PREDICTOR_TYPES = ("F32", "F16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
POWERINFER_TYPES = ("F16", "Q4_0")


@dataclass(frozen=True)
class Shape:
    dim: int
    neurons: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int


@dataclass(frozen=True)
class Recipe:
    """What to write. ``active`` is the mean share of neurons that fire; None makes a dense SiLU model."""

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
        if self.predictor not in PREDICTOR_TYPES:
            raise ValueError(f"predictor type {self.predictor}: choose from {', '.join(PREDICTOR_TYPES)}")

    @property
    def architecture(self) -> str:
        return "llama" if self.gated else "arcee"

    @property
    def deciding(self) -> str:
        """The matrix whose rows say which neurons fire."""
        return "ffn_gate.weight" if self.gated else "ffn_up.weight"

    @property
    def predictor(self) -> str:
        return self.predictor_type or (self.type if self.type in PREDICTOR_TYPES else "F16")


@dataclass(frozen=True)
class Figures:
    """Of one layer, counted on tokens: shares of all neurons, and of those that fire the share marked."""

    active: float
    marked: float | None = None
    recall: float | None = None


def random_rows(rng: np.random.Generator, type: BlockType, rows: int, columns: int, std: float) -> Bytes:
    """Random weights of mean 0 and about this standard deviation, ``(rows, row_bytes)``.

    Every block of Q4_0 and Q8_0 has the same scale, and codes are symmetric about 0, so that such a matrix
    can be transposed without a loss.
    """
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
    else:  # two codes of 4 bits, of which 8 stands for 0
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

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.shape, self.type = recipe, recipe.shape, block_type(recipe.type)
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
        shape = (part.rows, part.columns) if part.rows else (part.columns,)
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
        kv_dim = shape.kv_heads * (shape.dim // shape.heads)
        self._norm(prefix + "attn_norm.weight")
        for name, rows in (("attn_q", shape.dim), ("attn_k", kv_dim), ("attn_v", kv_dim)):
            self._matrix(f"{prefix}{name}.weight", rows, shape.dim)
        name = prefix + "attn_output.weight"
        self._add(name, shape.dim, shape.dim, lambda: self._attention_output(name))

    def _plan_ffn(self, prefix: str) -> None:
        dim, neurons, layout = self.shape.dim, self.shape.neurons, self.recipe.layout
        self._norm(prefix + "ffn_norm.weight")
        if self.recipe.gated:
            self._matrix(prefix + "ffn_up.weight", neurons, dim)
        if self.recipe.active is None:
            self._matrix(prefix + "ffn_gate.weight", neurons, dim)
        else:
            self._add(prefix + self.recipe.deciding, neurons, dim, lambda: self._sparse_gate(prefix))
        size = (dim, neurons) if layout == "by_output" else (neurons, dim)
        name = "ffn_down_t.weight" if layout == "pwri" else "ffn_down.weight"
        self._add(prefix + name, *size, lambda: self._down(prefix))
        if layout == "pwri":
            type = block_type(self.recipe.predictor)
            self._add(prefix + "fc1.weight", RESERVED, dim, lambda: self._first_factor(type), type)
            self._add(
                prefix + "fc2.weight", neurons, RESERVED, lambda: self._second_factor(prefix, type), type
            )

    def _add(
        self, name: str, rows: int, columns: int, make: Callable[[], Bytes], type: BlockType | None = None
    ) -> None:
        self._parts[name] = _Part(type or self.type, rows, columns, make)

    def _matrix(self, name: str, rows: int, columns: int) -> None:
        self._add(name, rows, columns, lambda: self._random(name, rows, columns, columns**-0.5))

    def _norm(self, name: str) -> None:
        ones = quantise(np.ones(self.shape.dim, np.float32), "F32")
        self._add(name, 0, self.shape.dim, lambda: ones.data, ones.type)

    def _random(self, name: str, rows: int, columns: int, std: float) -> Bytes:
        return random_rows(self._rng(name), self.type, rows, columns, std)

    def _rng(self, name: str) -> np.random.Generator:
        """By name, so that a tensor's values do not depend on the layout of the others."""
        return np.random.Generator(np.random.SFC64([self.recipe.seed, zlib.crc32(name.encode())]))

    def _random_features(self) -> Floats:
        """What embeddings hold in the reserved dimensions, ``(V, RESERVED)``: see FEATURE and CONSTANT."""
        signs = self._rng("features").integers(0, 2, (self.shape.vocab, RESERVED), np.int8) * 2 - 1
        features = signs * np.float32(FEATURE)
        features[:, ::32] = -1
        features[:, -CONSTANT:] = 1
        return features

    def _embedding(self) -> Bytes:
        rows = self._random("token_embd", self.shape.vocab, self.shape.dim, EMBEDDING_STD)
        set_reserved(rows, self._features, self.type)
        return rows

    def _attention_output(self, name: str) -> Bytes:
        rows = self._random(name, self.shape.dim, self.shape.dim, UPDATE_STD / self.shape.dim**0.5)
        rows[-RESERVED:] = quantise(np.zeros((1, self.shape.dim), np.float32), self.type).data
        return rows

    def _down(self, prefix: str) -> Bytes:
        """``(N, D)`` or, by output, ``(D, N)``; nothing is added to the reserved dimensions."""
        dim, neurons = self.shape.dim, self.shape.neurons
        std = UPDATE_STD / (neurons * (self.recipe.active or 1)) ** 0.5
        rows = self._random(prefix + "down", neurons, dim, std)
        if self.recipe.layout == "by_output":
            rows = transposed(rows, self.type, dim)
            rows[-RESERVED:] = quantise(np.zeros((1, neurons), np.float32), self.type).data
        else:
            set_reserved(rows, np.zeros((neurons, RESERVED), np.float32), self.type)
        return rows

    def _sparse_gate(self, prefix: str) -> Bytes:
        """Gate rows that fire for a share of the tokens that falls as a power law of mean ``active``."""
        shape, rng = self.shape, self._rng(prefix + "gate")
        # Reserved values are near 1 where the rest of the residual is small: the norm divides by about this.
        rms = ((RESERVED + (shape.dim - RESERVED) * EMBEDDING_STD**2) / shape.dim) ** 0.5
        std = rms / (RESERVED - CONSTANT) ** 0.5  # gates of about 1
        rows = random_rows(rng, self.type, shape.neurons, shape.dim, std / 8)
        values = rng.standard_normal((shape.neurons, RESERVED), np.float32) * std
        values[:, ::32] = 0
        values[:, -CONSTANT:] = 0
        as_stored = quantise(values, self.type).dequantise()
        sample = quantise(self._features[rng.integers(0, shape.vocab, 2000)], self.type).dequantise()
        gates = as_stored @ sample.T  # [N, tokens], before the bias
        assert self.recipe.active is not None
        shares = rng.permutation(power_law(shape.neurons, self.recipe.active))
        rank = np.clip(((1 - shares) * len(sample)).astype(int), 0, len(sample) - 1)
        bias = -np.take_along_axis(np.sort(gates), rank[:, None], axis=1)[:, 0]
        values[:, -CONSTANT:] = (bias / sample[:, -CONSTANT:].sum(axis=1).mean())[:, None]
        set_reserved(rows, values, self.type)
        self._gate = (prefix, quantise(values, self.type).dequantise())
        return rows

    def _first_factor(self, type: BlockType) -> Bytes:
        """``(RESERVED, D)``: picks the reserved dimensions."""
        values = np.zeros((RESERVED, self.shape.dim), np.float32)
        values[:, -RESERVED:] = np.eye(RESERVED)
        return quantise(values, type).data

    def _second_factor(self, prefix: str, type: BlockType) -> Bytes:
        """``(N, RESERVED)``, from the layer's gate as stored, which was made just before."""
        made, gate = self._gate
        assert made == prefix
        feature = quantise(self._features[:1], self.type).dequantise()[0, 1]
        values = 2 * gate
        bias = gate[:, -CONSTANT:].sum(axis=1) - np.abs(feature) * gate[:, :-CONSTANT].sum(axis=1)
        values[:, -CONSTANT:] = (bias / CONSTANT)[:, None]
        return quantise(values, type).data


def verify(path: Path, tokens: int = 256, seed: int = 0) -> list[Figures]:
    """Counts, layer by layer and from the bytes of a sparse file, on the embeddings of random tokens.

    What attention and earlier FFNs add to the residual stream is left out; it is small by design.
    """
    with open_gguf(path) as file:
        table = file.load("token_embd.weight")
        rows = np.random.default_rng(seed).choice(
            len(table.data), min(tokens, len(table.data)), replace=False
        )
        x = Tensor(table.type, (len(rows), table.shape[1]), table.data[rows]).dequantise()
        normed = x / np.sqrt((x**2).mean(axis=1, keepdims=True))
        threshold = file.metadata.get("powerinfer.sparse_threshold", 0.0)
        figures = []
        deciding = "ffn_gate" if "blk.0.ffn_gate.weight" in file.tensors else "ffn_up"
        for layer in range(file.metadata[f"{file.metadata['general.architecture']}.block_count"]):
            fired = product(normed, file.load(f"blk.{layer}.{deciding}.weight")) > 0
            if f"blk.{layer}.fc1.weight" not in file.tensors:
                figures.append(Figures(float(fired.mean())))
                continue
            hidden = np.maximum(product(x, file.load(f"blk.{layer}.fc1.weight")), 0)
            marked = product(hidden, file.load(f"blk.{layer}.fc2.weight")) >= threshold
            recall = (marked & fired).sum() / max(1, fired.sum())
            figures.append(Figures(float(fired.mean()), float(marked.mean()), float(recall)))
    return figures


def product(x: Floats, matrix: Tensor) -> Floats:
    """``x`` ``[T, D]`` times the rows of a matrix ``(N, D)``: ``[T, N]``."""
    out = np.empty((len(x), matrix.shape[0]), np.float32)
    for start in range(0, matrix.shape[0], 1024):
        data = matrix.data[start : start + 1024]
        rows = Tensor(matrix.type, (len(data), matrix.shape[1]), data).dequantise()
        out[:, start : start + len(data)] = x @ rows.T
    return out


def power_law(n: int, mean: float) -> npt.NDArray[np.float64]:
    """``min(1, c * rank ** -POWER)`` for n ranks, with c such that the mean is right."""
    ranks = np.arange(1, n + 1) ** -POWER
    low, high = 0.0, float(n)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1, middle * ranks).mean() < mean else (low, middle)
    return np.minimum(1, low * ranks)


def metadata(recipe: Recipe, name: str, vocabulary: Path | None) -> dict[str, Any]:
    shape, architecture = recipe.shape, recipe.architecture
    keys: dict[str, Any] = {
        "general.architecture": architecture,
        "general.name": name,
        "general.quantization_version": np.uint32(2),
        f"{architecture}.context_length": np.uint32(shape.context),
        f"{architecture}.embedding_length": np.uint32(shape.dim),
        f"{architecture}.block_count": np.uint32(shape.layers),
        f"{architecture}.feed_forward_length": np.uint32(shape.neurons),
        f"{architecture}.rope.dimension_count": np.uint32(shape.dim // shape.heads),
        f"{architecture}.rope.freq_base": np.float32(10000),
        f"{architecture}.attention.head_count": np.uint32(shape.heads),
        f"{architecture}.attention.head_count_kv": np.uint32(shape.kv_heads),
        f"{architecture}.attention.layer_norm_rms_epsilon": np.float32(1e-5),
        f"{architecture}.vocab_size": np.uint32(shape.vocab),
    }
    if recipe.layout == "pwri":
        keys["powerinfer.sparse_threshold"] = np.float32(0)
    elif recipe.active is not None and recipe.gated:
        keys["hotcold.ffn.activation"] = "relu"
    if recipe.layout == "by_neuron":
        keys["hotcold.ffn.down_layout"] = "by_neuron"
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


def write(path: Path, recipe: Recipe, vocabulary: Path | None = None) -> None:
    """Writes one model file. ``vocabulary`` is a GGUF file whose tokenizer to take, of as many tokens."""
    magic = "PWRI" if recipe.layout == "pwri" else "GGUF"
    write_gguf(path, metadata(recipe, path.stem, vocabulary), Weights(recipe), magic=magic)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add: Callable[..., Any] = parser.add_argument
    add("-o", "--output", type=Path, required=True)
    add("--type", default="Q4_0", help="block type of every matrix (Q4_0)")
    add("--active", type=float, help="mean share of neurons that fire; without it the model is dense (SiLU)")
    add("--layout", choices=LAYOUTS, help="of down (by_neuron if sparse, else by_output)")
    add("--ungated", action="store_true", help="with --active: squared ReLU, no gate")
    add("--predictor-type", choices=PREDICTOR_TYPES, help="with --layout pwri (as --type, else F16)")
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
    layout = args.layout or ("by_output" if args.active is None else "by_neuron")
    recipe = Recipe(shape, args.type, args.active, layout, args.predictor_type, args.seed, not args.ungated)
    write(args.output, recipe, args.vocabulary)
    print(f"{args.output}: {args.output.stat().st_size / 1e9:.3f} GB")
    if args.active is None:
        return
    figures = verify(args.output)
    print("of the neurons, on random tokens, by layer, from the file:")
    print("  fire            ", " ".join(f"{each.active:.3f}" for each in figures))
    if layout == "pwri":
        print("  marked          ", " ".join(f"{each.marked:.3f}" for each in figures))
        print("  recall of marked", " ".join(f"{each.recall:.3f}" for each in figures))


if __name__ == "__main__":
    main()
