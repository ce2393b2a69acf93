"""Attention (arXiv 1706.03762): its shape, its tensors in a GGUF file, and its ops in a step."""

from collections.abc import Container, Sequence
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np

from hotcold.formats.blocks import BLOCK_TYPES
from hotcold.kernels.backend import PAGE, AttentionCall, Batch, Buffer, Matrix, Norm
from hotcold.model.keys import ModelError
from hotcold.model.mixers.device_buffers import DeviceBuffers, Mixer
from hotcold.model.mixers.mixer import Arrays, Heads, MixerShape, Tensors
from hotcold.model.mixers.rope import Growth, Rope
from hotcold.model.reading import Shape, TensorReader

#: Types of cached keys and values by the block type's name, with the type of their arrays.
CACHE_TYPES = {"f16": np.float16, "q8_0": np.uint8, "f32": np.float32}


@dataclass(frozen=True)
class AttentionShape(MixerShape):
    """Attention of one layer: H ``heads``, K ``kv_heads``."""

    heads: int
    kv_heads: int
    head_dim: int
    _: KW_ONLY
    scale: float = 1.0  #: of scores
    softcap: float | None = None  #: of scores
    rope: Rope | None = None  #: None: queries and keys are not rotated
    window: int | None = None  #: positions that a row attends to, its own included; None: all up to its own
    growth: Growth | None = None  #: of scores, with the positions of queries
    qk_norm: str = "head"  #: as :attr:`Family.qk_norm`
    rotated_norms: bool = False  #: as :attr:`Family.rotated_norms`
    plain_norms: bool = False  #: q and k are normalised without weights
    chunked: bool = False  #: as in ``Backend.attention``
    #: a gate's sigmoid multiplies attention's output; each head has its rows of q, then of the gate
    gated: bool = False
    norm_values: bool = False  #: values are normalised without weights
    norm_output: bool = False  #: the input of the output matrix is normalised, all heads together
    pages_of: int | None = None

    @property
    def attention(self) -> Heads:
        return self.heads, self.kv_heads, self.head_dim

    @property
    def query_rope(self) -> Rope | None:
        """The rotation of queries. It also makes scores grow, even without rotating."""
        if self.rope is None and self.growth is not None:
            return Rope(self.head_dim, 1.0, False, factored=False, growth=self.growth, still=True)
        return self.rope and replace(self.rope, growth=self.growth)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        rotations = (self.query_rope, self.rope)
        return tuple(dict.fromkeys(rope for rope in rotations if rope is not None))

    @property
    def q_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def buffers(self) -> dict[str, Shape]:
        """Row shapes of the buffers that a step needs between ops, by their names
        (:meth:`DeviceBuffers.buffer`)."""
        q, kv = (self.heads, self.head_dim), (self.kv_heads, self.head_dim)
        buffers: dict[str, Shape] = {"q": q, "k": kv, "v": kv, "mixed": q}
        return buffers | ({"gate": q} if self.gated else {})

    def page_arrays(self, type: str) -> Arrays:
        """Returns shape and type of a page's arrays: K and V as in ``Backend.store_kv``, of a type in
        :data:`CACHE_TYPES`. ModelError: its blocks do not fit the heads."""
        if self.pages_of is not None:
            return []
        block, dtype = BLOCK_TYPES[type.upper()], np.dtype(CACHE_TYPES[type])
        if self.head_dim % block.weights:
            got = f"its blocks of {block.weights} do not fit heads of {self.head_dim}"
            raise ModelError(f"KV cache of type {type} (`cache_type`): {got}: use f16")
        return [((self.kv_heads, PAGE, block.row_bytes(self.head_dim) // dtype.itemsize), dtype)] * 2

    def tensors(self, dim: int, blk: str, present: Container[str]) -> Tensors:
        return attention_shapes(self, dim, blk, present)

    def read(self, reader: TensorReader, blk: str) -> "AttentionWeights":
        return read_attention(reader, self, blk)


@dataclass(frozen=True)
class AttentionWeights:
    shape: AttentionShape
    q: Matrix  # (H * head_dim, D)
    k: Matrix | None  # (K * head_dim, D); None if another layer's pages are read
    v: Matrix | None  # (K * head_dim, D); None if values come from the product for keys
    o: Matrix  # (D, H * head_dim)
    q_norm: Norm | None  # over head_dim, or over H * head_dim
    k_norm: Norm | None
    sinks: Buffer | None  # [H] float32
    gate: Matrix | None = None  # (H * head_dim, D)
    v_norm: Norm | None = None  # over head_dim, without a weight
    o_norm: Norm | None = None  # over H * head_dim

    @property
    def matrices(self) -> list[Matrix]:
        return [*self._inputs, self.o]

    @property
    def _inputs(self) -> list[Matrix]:
        return [each for each in (self.q, self.k, self.v, self.gate) if each is not None]

    def names(self, blk: str, present: Container[str]) -> list[str]:
        fused = f"{blk}attn_qkv.weight" in present
        matrices = {"q": self.q, "k": self.k, "v": self.v}
        parts = ["qkv"] * 3 if fused else [part for part, each in matrices.items() if each is not None]
        parts += ["q"] if self.gate is not None else []
        return [f"{blk}attn_{part}.weight" for part in (*parts, "output")]

    def mixer(self, device: DeviceBuffers, state: Sequence[Buffer]) -> Mixer:
        """Makes the mixer on a backend, with the layer's part of :class:`SequenceState`."""
        ops, shape, (k_cache, v_cache) = device.ops, self.shape, state
        buffers = {name: device.buffer(name, *row) for name, row in shape.buffers.items()}
        q, k, v, mixed = (buffers[name] for name in ("q", "k", "v", "mixed"))
        matrices = {"q": self.q, "k": self.k, "v": self.v, "gate": self.gate}
        inputs = [buffers[name] for name, each in matrices.items() if each is not None]
        turned = [(q, shape.query_rope, self.q_norm)]
        if self.k is not None:
            turned.append((k, shape.rope, self.k_norm))

        def normalise(batch: Batch) -> None:
            for rows, _, norm in turned:
                if norm is not None:
                    ops.norm(rows, norm, batch, rows)

        def mix(read: Buffer, batch: Batch, out: Buffer, *, add: bool) -> None:
            ops.linear(read, self._inputs, batch, inputs)
            if self.v_norm is not None and self.k is not None:
                ops.norm(k if self.v is None else v, self.v_norm, batch, v)
            # A GPU computes neighbouring ops at the same time if they share no buffer.
            if not shape.rotated_norms:
                normalise(batch)
            for rows, rope, _ in turned:
                if rope is not None:
                    ops.rope(rows, device.ropes[rope], batch)
            if shape.rotated_norms:
                normalise(batch)
            if self.k is not None:
                ops.store_kv(k, v, batch, k_cache, v_cache)
            ops.attention(
                AttentionCall(
                    q,
                    k_cache,
                    v_cache,
                    batch,
                    mixed,
                    shape.scale,
                    window=shape.window,
                    chunked=shape.chunked and shape.window is not None,
                    sinks=self.sinks,
                    softcap=shape.softcap,
                )
            )
            if shape.gated:
                ops.multiply(mixed, buffers["gate"], batch, mixed, activation="sigmoid")
            if self.o_norm is not None:
                ops.norm(mixed, self.o_norm, batch, mixed)
            ops.linear(mixed, [self.o], batch, [out], accumulate=add)

        return mix


def attention_shapes(
    shape: AttentionShape, dim: int, blk: str, present: Container[str]
) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Returns shapes by name of a layer's required and of its optional tensors."""
    matrices = {f"{blk}attn_{part}": (rows, dim) for part, rows in _inputs(shape, blk, present)}
    matrices[f"{blk}attn_output"] = dim, shape.q_dim
    norms: dict[str, tuple[Shape, Shape]] = {
        "head": ((shape.head_dim,), (shape.head_dim,)),
        "each": ((shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim)),
        "all": ((shape.q_dim,), (shape.kv_dim,)),
    }
    q, k = norms[shape.qk_norm]
    optional: dict[str, Shape] = {f"{name}.bias": rows[:1] for name, rows in matrices.items()}
    optional |= {f"{blk}attn_q_norm.weight": q, f"{blk}attn_k_norm.weight": k}
    optional[f"{blk}attn_sinks.weight"] = (shape.heads,)
    if shape.pages_of is not None:  # in old files; no code reads them
        optional |= {f"{blk}attn_{part}.weight": (shape.kv_dim, dim) for part in ("k", "v")}
    required: dict[str, Shape] = {f"{name}.weight": each for name, each in matrices.items()}
    if shape.norm_output:
        required[f"{blk}attn_sub_norm.weight"] = (shape.q_dim,)
    return required, optional


def _inputs(shape: AttentionShape, blk: str, present: Container[str]) -> list[tuple[str, int]]:
    """Returns the matrices that q, k and v come from, and their rows: one each, or one for all (Falcon)."""
    if f"{blk}attn_qkv.weight" in present and not shape.gated:
        return [("qkv", shape.q_dim + 2 * shape.kv_dim)]
    if shape.pages_of is not None:
        return [("q", shape.q_dim)]
    if shape.norm_values and f"{blk}attn_v.weight" not in present:
        return [("q", shape.q_dim), ("k", shape.kv_dim)]
    return [("q", (1 + shape.gated) * shape.q_dim), ("k", shape.kv_dim), ("v", shape.kv_dim)]


def read_attention(reader: TensorReader, shape: AttentionShape, blk: str) -> AttentionWeights:
    """Reads a layer's weights; errors as in :func:`load_weights`."""
    gate = None
    q: Matrix | None
    k: Matrix | None
    v: Matrix | None
    if shape.gated:
        q, gate = _read_gated(reader, shape, blk)
        k, v = (reader.matrix(f"{blk}attn_{part}") for part in ("k", "v"))
    else:
        q, k, v = [*_read_inputs(reader, shape, blk), None, None][:3]
        assert q is not None
    plain = Norm(None, None, reader.norm_eps)
    return AttentionWeights(
        shape=shape,
        q=q,
        k=k,
        v=v,
        o=reader.matrix(f"{blk}attn_output"),
        q_norm=plain if shape.plain_norms else reader.own_norm(f"{blk}attn_q_norm"),
        k_norm=plain if shape.plain_norms else None if k is None else reader.own_norm(f"{blk}attn_k_norm"),
        sinks=reader.buffer(f"{blk}attn_sinks.weight"),
        gate=gate,
        v_norm=plain if shape.norm_values else None,
        o_norm=reader.norm(f"{blk}attn_sub_norm") if shape.norm_output else None,
    )


def _read_gated(reader: TensorReader, shape: AttentionShape, blk: str) -> list[Matrix]:
    """Reads the matrices of q and of the gate, whose rows alternate by heads."""
    rows = np.arange(2 * shape.q_dim).reshape(shape.heads, 2, shape.head_dim)
    return reader.cut(f"{blk}attn_q", [rows[:, part].reshape(-1) for part in (0, 1)])


def _read_inputs(reader: TensorReader, shape: AttentionShape, blk: str) -> list[Matrix | None]:
    """Reads the matrices of q, k and v that the layer has."""
    names = [name for name, _ in _inputs(shape, blk, reader.file.tensors)]
    if names != ["qkv"]:
        return [reader.matrix(f"{blk}attn_{name}") for name in names]
    kv = shape.kv_dim
    return [*reader.cut(f"{blk}attn_qkv", [slice(0, -2 * kv), slice(-2 * kv, -kv), slice(-kv, None)])]
