"""Writes files of families whose layers keep states, with random weights, for speed measurements.

Widths, heads, states, experts and their number are those of the published model, layers are few: of each kind
about its share. The vocabulary is cut like the layers, so that the head has its share, too. llama.cpp's
quantiser chooses the types: a head in Q6_K, 8 bits where rows are no multiple of 256; of Q4_K_M half
of the values and downs in Q6_K, and Q5_0 and Q8_0 in their places where rows are no multiple of 256.

Where the activation gives zeros, weights *cause* them as in lib/models.py: rows of up read features of the
token that nothing overwrites, and are active for a share of the tokens that is a power law's. Only
``DISTINCT`` experts of a layer differ, the others are copies of them elsewhere in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from hotcold.formats.blocks import BlockType, block_type, quantise
from hotcold.formats.gguf import write_gguf
from lib.models import (
    CONSTANT,
    EMBEDDING_STD,
    RESERVED,
    UPDATE_STD,
    Bytes,
    Recipe,
    Shape,
    Weights,
    power_law,
    random_rows,
    set_reserved,
    synthetic_vocabulary,
    transposed,
)
from lib.random_blocks import random_block_rows

DISTINCT = 4
#: Beside block types; see above.
MIXTURES = ("Q4_K_M",)


@dataclass(frozen=True)
class Hybrid(Shape):
    """``parts`` are those of each layer: a mixer, an FFN, or both; ``neurons`` are those of an expert, or of
    the FFN where there are no experts."""

    name: str = ""
    parts: tuple[tuple[str, ...], ...] = ()
    inner: int = 0  #: values of a layer with a state
    state: int = 0
    groups: int = 0  #: of a state's keys, or heads of keys
    state_heads: int = 0
    shared: int = 0  #: neurons of the shared expert
    dense: int = 0  #: neurons of layers without experts
    tied: bool = False
    ungated: bool = False  #: squared ReLU, which gives zeros


def _hybrid(
    name: str, architecture: str, parts: tuple[tuple[str, ...], ...], vocab: int, **further: Any
) -> Hybrid:
    """``vocab`` is what layers of that number have of the published model's vocabulary."""
    return Hybrid(
        layers=len(parts), vocab=vocab, context=4096, architecture=architecture, name=name, parts=parts,
        **further,
    )  # fmt: skip


_MAMBA, _EXPERTS, _ATTENTION = ("mamba",), ("experts",), ("attention",)
#: Nemotron has 23, 23 and 6 layers of its kinds; Qwen3.5 attention in every fourth layer; LFM2 has 18
#: convolutions and 6 attentions, and dense FFNs in the first 2.
HYBRIDS = {
    "nemotron": _hybrid(
        "Nemotron 3 Nano", "nemotron_h_moe",
        (_MAMBA, _EXPERTS, _MAMBA, _ATTENTION, _EXPERTS, _MAMBA, _EXPERTS), 17088, dim=2688, neurons=1856,
        heads=32, kv_heads=2, width=128, experts=128, chosen=6, shared=3712, inner=4096, state=128, groups=8,
        state_heads=64, ungated=True,
    ),
    "qwen35moe": _hybrid(
        "Qwen3.5-35B-A3B", "qwen35moe", (("delta", "experts"),) * 3 + (("attention", "experts"),), 24832,
        dim=2048, neurons=512, heads=16, kv_heads=2, width=256, experts=256, chosen=8, shared=512, inner=4096,
        state=128, groups=16, state_heads=32,
    ),
    "lfm2moe": _hybrid(
        "LFM2-8B-A1B", "lfm2moe",
        (
            ("conv", "dense"), ("conv", "experts"), ("attention", "experts"), ("conv", "experts"),
            ("conv", "experts"), ("conv", "experts"), ("attention", "experts"), ("conv", "experts"),
        ), 21760, dim=2048, neurons=1792, heads=32, kv_heads=8, experts=32, chosen=4, dense=7168, tied=True,
    ),
    "qwen35": _hybrid(
        "Qwen3.5-9B", "qwen35", (("delta", "dense"),) * 3 + (("attention", "dense"),), 31040, dim=4096,
        neurons=12288, dense=12288, heads=16, kv_heads=4, width=256, inner=4096, state=128, groups=16,
        state_heads=32,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class HybridRecipe(Recipe):
    """``type`` may be one of :data:`MIXTURES`; ``layout`` is that of down where there are zeros."""

    def __post_init__(self) -> None:
        if self.layout == "by_neuron" and self.active is None:
            raise ValueError("layout by_neuron needs a model with zeros")

    @property
    def architecture(self) -> str:
        return self.shape.architecture

    @property
    def written(self) -> bool:
        return True

    def type_of(self, columns: int, *, more_bits: bool = False) -> BlockType:
        """Returns a matrix's type by the weights of a row; ``more_bits`` where a mixture has more bits."""
        whole = columns % 256 == 0
        if self.type in MIXTURES:
            return block_type(
                ("Q6_K" if more_bits else "Q4_K") if whole else ("Q8_0" if more_bits else "Q5_0")
            )
        return block_type(self.type)


class HybridWeights(Weights):
    """The tensors of one model, made one at a time, for :func:`write_gguf`."""

    recipe: HybridRecipe
    shape: Hybrid

    def __init__(self, recipe: HybridRecipe) -> None:
        self._sparse = recipe.active is not None
        super().__init__(recipe, recipe.type_of(recipe.shape.dim))

    def _plan(self) -> None:
        shape = self.shape
        self._add("token_embd.weight", shape.vocab, shape.dim, self._tokens, self._table_type())
        for layer, parts in enumerate(shape.parts):
            blk = f"blk.{layer}."
            self._norm(f"{blk}attn_norm.weight")
            for part in parts:
                getattr(self, f"_plan_{part}")(blk, layer % 2 == 1)
        self._norm("token_embd_norm.weight" if shape.tied else "output_norm.weight")
        if not shape.tied:
            self._typed("output.weight", shape.vocab, shape.dim, self._head_type())

    def _head_type(self) -> BlockType:
        if self.recipe.type in ("Q8_0", "F16", "F32"):
            return self.type
        return block_type("Q8_0" if self.shape.dim % 256 else "Q6_K")

    def _table_type(self) -> BlockType:
        return self._head_type() if self.shape.tied else self.type

    def _plan_attention(self, blk: str, more_bits: bool) -> None:
        shape, recipe = self.shape, self.recipe
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        gated = 1 + (shape.architecture in ("qwen35", "qwen35moe"))
        for name, rows in (("q", gated * q), ("k", kv), ("v", kv)):
            type = recipe.type_of(shape.dim, more_bits=more_bits and name == "v")
            self._typed(f"{blk}attn_{name}.weight", rows, shape.dim, type)
        for part in () if shape.ungated else ("q", "k"):
            self._norm(f"{blk}attn_{part}_norm.weight", shape.head_dim)
        self._out(f"{blk}attn_output.weight", q)

    def _plan_mamba(self, blk: str, more_bits: bool) -> None:
        shape = self.shape
        mixed = shape.inner + 2 * shape.groups * shape.state
        self._typed(f"{blk}ssm_in.weight", shape.inner + mixed + shape.state_heads, shape.dim)
        self._floats(f"{blk}ssm_conv1d.weight", mixed, 4, 0.5)
        self._floats(f"{blk}ssm_conv1d.bias", 0, mixed, 0.1)
        self._floats(f"{blk}ssm_dt.bias", 0, shape.state_heads, 0.5)
        self._floats(f"{blk}ssm_a", shape.state_heads, 1, 0.1, -0.5)
        self._floats(f"{blk}ssm_d", shape.state_heads, 1, 0.1, 1.0)
        self._floats(f"{blk}ssm_norm.weight", shape.groups, shape.inner // shape.groups, 0.0, 1.0)
        self._out(f"{blk}ssm_out.weight", shape.inner)

    def _plan_delta(self, blk: str, more_bits: bool) -> None:
        shape = self.shape
        mixed = shape.inner + 2 * shape.groups * shape.state
        type = self.recipe.type_of(shape.dim, more_bits=more_bits)
        self._typed(f"{blk}attn_qkv.weight", mixed, shape.dim, type)
        self._typed(f"{blk}attn_gate.weight", shape.inner, shape.dim)
        for part in ("alpha", "beta"):
            self._typed(f"{blk}ssm_{part}.weight", shape.state_heads, shape.dim)
        self._floats(f"{blk}ssm_conv1d.weight", mixed, 4, 0.5)
        self._floats(f"{blk}ssm_dt.bias", 0, shape.state_heads, 0.5)
        self._floats(f"{blk}ssm_a", 0, shape.state_heads, 0.1, -0.5)
        self._floats(f"{blk}ssm_norm.weight", 0, shape.state, 0.0, 1.0)
        self._out(f"{blk}ssm_out.weight", shape.inner)

    def _plan_conv(self, blk: str, more_bits: bool) -> None:
        dim = self.shape.dim
        self._typed(f"{blk}shortconv.in_proj.weight", 3 * dim, dim)
        self._floats(f"{blk}shortconv.conv.weight", dim, 3, 0.5)
        self._out(f"{blk}shortconv.out_proj.weight", dim)

    def _plan_dense(self, blk: str, more_bits: bool) -> None:
        self._ffn_norm(blk)
        self._plan_gated(blk, "", self.shape.dense, 1, more_bits)

    def _plan_experts(self, blk: str, more_bits: bool) -> None:
        shape = self.shape
        make: Callable[[], Bytes] = lambda: self._router(blk)  # noqa: E731
        self._add(f"{blk}ffn_gate_inp.weight", shape.experts, shape.dim, make, block_type("F32"))
        if shape.architecture != "qwen35moe":
            self._floats(f"{blk}exp_probs_b.bias", 0, shape.experts, 0.0)
        if shape.ungated:
            self._plan_ungated(blk, "_exps", shape.neurons, shape.experts, more_bits)
            self._plan_ungated(blk, "_shexp", shape.shared, 1, more_bits)
            return
        self._ffn_norm(blk)
        self._plan_gated(blk, "_exps", shape.neurons, shape.experts, more_bits)
        if shape.shared:
            self._plan_gated(blk, "_shexp", shape.shared, 1, more_bits)
            self._floats(f"{blk}ffn_gate_inp_shexp.weight", 0, shape.dim, shape.dim**-0.5)

    def _ffn_norm(self, blk: str) -> None:
        name = "ffn_norm" if self.shape.tied else "post_attention_norm"
        self._norm(f"{blk}{name}.weight")

    def _plan_gated(self, blk: str, end: str, neurons: int, experts: int, more_bits: bool) -> None:
        dim = self.shape.dim
        for part in ("gate", "up"):
            self._typed(f"{blk}ffn_{part}{end}.weight", experts * neurons, dim)
        type = self.recipe.type_of(neurons, more_bits=more_bits)
        self._typed(f"{blk}ffn_down{end}.weight", experts * dim, neurons, type)

    def _plan_ungated(self, blk: str, end: str, neurons: int, experts: int, more_bits: bool) -> None:
        dim, name = self.shape.dim, f"{blk}ffn_up{end}.weight"
        distinct = min(DISTINCT, experts)

        def copies(make: Callable[[str, int], Bytes], name: str) -> Bytes:
            made = [make(f"{name} {i}", neurons) for i in range(distinct)]
            return np.concatenate([made[i % distinct] for i in range(experts)])

        self._add(name, experts * neurons, dim, lambda: copies(self._firing, name))
        down, by_neuron = f"{blk}ffn_down{end}.weight", self.recipe.layout == "by_neuron"
        type = self.recipe.type_of(dim if by_neuron else neurons, more_bits=more_bits)
        size = (neurons, dim) if by_neuron else (dim, neurons)
        make = lambda name, neurons: self._zeroed_down(name, neurons, type)  # noqa: E731
        self._add(down, experts * size[0], size[1], lambda: copies(make, down), type)

    def _typed(self, name: str, rows: int, columns: int, type: BlockType | None = None) -> None:
        type = type or self.recipe.type_of(columns)
        make = lambda: _rows(self._rng(name), type, rows, columns, columns**-0.5)  # noqa: E731
        self._add(name, rows, columns, make, type)

    def _floats(self, name: str, rows: int, columns: int, std: float, mean: float = 0.0) -> None:
        def make() -> Bytes:
            values = self._rng(name).standard_normal((max(rows, 1), columns), np.float32) * np.float32(std)
            return quantise(values + np.float32(mean), "F32").data

        self._add(name, rows, columns, make, block_type("F32"))

    def _out(self, name: str, columns: int) -> None:
        """Adds the matrix that writes into the residual stream, and nothing into its reserved dimensions."""
        if not self._sparse:
            self._typed(name, self.shape.dim, columns)
            return
        type = self.recipe.type_of(columns)

        def make() -> Bytes:
            rows = _rows(self._rng(name), type, self.shape.dim, columns, UPDATE_STD / columns**0.5)
            rows[-RESERVED:] = _zeros(type, columns)
            return rows

        self._add(name, self.shape.dim, columns, make, type)

    def _tokens(self) -> Bytes:
        if self._sparse:
            return self._embedding()
        shape, type = self.shape, self._table_type()
        # As a head, too, it would say the token itself once more, were it what most of the sum is.
        std = shape.dim**-0.5 if shape.tied else 1.0
        return _rows(self._rng("token_embd"), type, shape.vocab, shape.dim, std)

    def _router(self, prefix: str) -> Bytes:
        if self._sparse:
            return super()._router(prefix)
        shape = self.shape
        values = self._rng(prefix + "router").standard_normal((shape.experts, shape.dim), np.float32)
        return quantise(values * np.float32(1.5 * shape.dim**-0.5), "F32").data

    def _firing(self, name: str, neurons: int) -> Bytes:
        """Rows of up, each active as often as the power law says: sums over features of random signs
        are nearly normal."""
        dim, rng = self.shape.dim, self._rng(name)
        rms = ((RESERVED + (dim - RESERVED) * EMBEDDING_STD**2) / dim) ** 0.5
        std = rms / (RESERVED - CONSTANT) ** 0.5
        rows = _rows(rng, self.type, neurons, dim, std / 8)
        values = rng.standard_normal((neurons, RESERVED), np.float32) * np.float32(std)
        values[:, ::32] = 0
        values[:, -CONSTANT:] = 0
        features = quantise(self._features, self.type).dequantise()
        assert self.recipe.active is not None
        shares = rng.permutation(power_law(neurons, self.recipe.active)).clip(1e-4, 0.995)
        deviations = (quantise(values, self.type).dequantise() * np.abs(features[0])).astype(np.float64)
        normal = NormalDist()
        bounds = np.array([normal.inv_cdf(float(share)) for share in shares])
        bias = bounds * np.linalg.norm(deviations, axis=1) / features[0, -CONSTANT:].sum()
        values[:, -CONSTANT:] = bias[:, None]
        set_reserved(rows, values, self.type)
        return rows

    def _zeroed_down(self, name: str, neurons: int, type: BlockType) -> Bytes:
        """``(N, D)``, or by output ``(D, N)``, with the same weights where the type is the same."""
        dim, active = self.shape.dim, self.recipe.active
        assert active is not None
        std = UPDATE_STD / (neurons * active) ** 0.5
        rows = random_rows(self._rng(name), type, neurons, dim, std)
        if self.recipe.layout == "by_neuron":
            set_reserved(rows, np.zeros((neurons, RESERVED), np.float32), type)
            return rows
        turned = transposed(rows, type, dim)
        turned[-RESERVED:] = _zeros(type, neurons)
        return turned


def _rows(rng: np.random.Generator, type: BlockType, rows: int, columns: int, std: float) -> Bytes:
    """Random blocks also of Q5_0, whose quantising takes a while."""
    make = random_block_rows if type.name == "Q5_0" else random_rows
    return make(rng, type, rows, columns, std)


def _zeros(type: BlockType, columns: int) -> Bytes:
    """A row; of types that are not written, of the smallest blocks that there are."""
    if type.encode is None:
        return random_block_rows(np.random.default_rng(0), type, 1, columns, 0.0)
    return quantise(np.zeros((1, columns), np.float32), type).data


def metadata(recipe: HybridRecipe) -> dict[str, Any]:
    shape = recipe.shape
    assert isinstance(shape, Hybrid)
    keys: dict[str, Any] = {
        "context_length": shape.context,
        "embedding_length": shape.dim,
        "block_count": shape.layers,
        "feed_forward_length": shape.dense or shape.neurons,
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": np.float32(1e6),
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": np.float32(1e-5),
        "vocab_size": shape.vocab,
    }
    if shape.experts:
        keys |= {"expert_count": shape.experts, "expert_used_count": shape.chosen}
        keys["expert_feed_forward_length"] = shape.neurons
    if shape.shared:
        keys["expert_shared_feed_forward_length"] = shape.shared
    if shape.state:
        keys |= {"ssm.conv_kernel": 4, "ssm.state_size": shape.state, "ssm.group_count": shape.groups}
        keys |= {"ssm.time_step_rank": shape.state_heads, "ssm.inner_size": shape.inner}
    attends = np.array(["attention" in parts for parts in shape.parts])
    if shape.ungated:
        keys["attention.layer_norm_epsilon"] = np.float32(1e-5)
        keys["feed_forward_length"] = np.array(["experts" in each for each in shape.parts]) * shape.neurons
        keys |= {"expert_shared_count": 1, "expert_weights_norm": True}
        keys["expert_weights_scale"] = np.float32(2.5)
    if shape.ungated or shape.tied:
        keys["attention.head_count_kv"] = attends * shape.kv_heads
    if shape.tied:
        keys |= {"shortconv.l_cache": 3, "expert_gating_func": 2}
        keys["leading_dense_block_count"] = sum("dense" in parts for parts in shape.parts)
    if shape.architecture.startswith("qwen35"):
        keys |= {"full_attention_interval": 4, "rope.dimension_count": 64}
        keys["rope.dimension_sections"] = np.array([11, 11, 10, 0], np.int32)
    facts: dict[str, Any] = {
        "general.architecture": shape.architecture,
        "general.name": f"{shape.name}, {shape.layers} layers of random weights",
        "general.quantization_version": np.uint32(2),
    }
    facts |= {f"{shape.architecture}.{key}": _stored(value) for key, value in keys.items()}
    if recipe.layout == "by_neuron":
        facts["hotcold.ffn.down_layout"] = "by_neuron"
    return facts | synthetic_vocabulary(shape.vocab)


def _stored(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.astype(np.int32)
    return np.uint32(value) if type(value) is int else value


def write(path: Path, recipe: HybridRecipe) -> None:
    write_gguf(path, metadata(recipe), HybridWeights(recipe))
