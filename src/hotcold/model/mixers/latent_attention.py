"""Attention with a latent cache (MLA, arXiv 2405.04434): its shape, tensors and ops.

Keys and values of all heads come from one vector for each position, the latent, and one rotated key that
heads share. Both are cached, as one kv head. Instead of expanding the cache, a head's key matrix multiplies
its queries (absorption), and its value matrix multiplies sums of latents. Attention sums the keys as values;
the sums of the rotated part are not used."""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotcold.formats.gguf import TensorInfo
from hotcold.kernels.backend import AttentionCall, Batch, Buffer, Matrix, Norm
from hotcold.model.families import Family
from hotcold.model.keys import Keys, ModelError
from hotcold.model.mixers.attention import AttentionShape
from hotcold.model.mixers.device_buffers import DeviceBuffers, Mixer
from hotcold.model.mixers.mixer import Arrays, Heads, MixerShape, Tensors
from hotcold.model.mixers.positions import latent_growth, read_positions
from hotcold.model.mixers.rope import Rope
from hotcold.model.reading import Shape, TensorReader, made_matrix

_EPS = 1e-6  # of the norms of latents in the publishers' code; other norms have the file's
_MOST = 1 << 14  # limit of a head's query values, and of a query latent


@dataclass(frozen=True)
class LatentShape(MixerShape):
    """Latent attention of one layer: H ``heads``."""

    heads: int
    latent: int  #: width of a position's latent, the source of keys and values
    rotated: int  #: values of a head that rotate
    plain: int  #: values of a head's queries and keys that do not rotate
    value_dim: int  #: of a head
    query_latent: int  #: width of the latent of queries; 0: queries come from the layer's input
    scale: float = 1.0  #: of scores
    rope: Rope | None = None  #: None: ``rotated`` values do not rotate either (Kimi Linear)
    index: tuple[int, int] | None = None  #: heads and head length of the index, whose tensors are not read

    @property
    def cached(self) -> int:
        """Values of a position in the cache: the rotated ones, then the latent."""
        return self.rotated + self.latent

    @property
    def head_columns(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.plain, self.latent

    @property
    def attention(self) -> Heads:
        return self.heads, 1, self.cached

    @property
    def buffers(self) -> dict[str, Shape]:
        h = self.heads
        return {
            "mla rotated": (h, self.rotated),
            "mla plain": (h, self.plain),
            "mla absorbed": (h, self.latent),
            "mla q": (h, self.cached),
            "mla key": (1, self.rotated),
            "mla latent": (1, self.latent),
            "mla k": (1, self.cached),
            "mla mixed": (h, self.cached),
            "mla values": (h, self.value_dim),
        } | ({"mla q latent": (self.query_latent,)} if self.query_latent else {})

    def page_arrays(self, type: str) -> Arrays:
        return AttentionShape(*self.attention).page_arrays(type)[:1]

    def made_bytes(self, blk: str, present: Mapping[str, TensorInfo]) -> int:
        """Returns the added bytes of the half of an old file's matrix that becomes float32."""
        whole = present.get(f"{blk}attn_kv_b.weight")
        if whole is None or f"{blk}attn_k_b.weight" in present:
            return 0
        rows = self.heads * self.plain
        return rows * (4 * self.latent - whole.nbytes // whole.shape[0])

    def tensors(self, dim: int, blk: str, present: Container[str]) -> Tensors:
        h, rows = self.heads, self.heads * (self.plain + self.rotated)
        matrices: dict[str, Shape]
        if r := self.query_latent:
            matrices = {"attn_q_a": (r, dim), "attn_q_a_norm": (r,), "attn_q_b": (rows, r)}
        else:
            matrices = {"attn_q": (rows, dim)}
        matrices |= {"attn_kv_a_mqa": (self.cached, dim), "attn_kv_a_norm": (self.latent,)}
        if f"{blk}attn_kv_b.weight" in present:  # in old files, and in some new ones with the other two
            matrices["attn_kv_b"] = h * (self.plain + self.value_dim), self.latent
        if f"{blk}attn_kv_b.weight" not in present or f"{blk}attn_k_b.weight" in present:
            matrices |= {
                "attn_k_b": (h, self.latent, self.plain),
                "attn_v_b": (h, self.value_dim, self.latent),
            }
        matrices["attn_output"] = dim, h * self.value_dim
        return {f"{blk}{name}.weight": shape for name, shape in matrices.items()}, self._index(dim, blk)

    def _index(self, dim: int, blk: str) -> dict[str, Shape]:
        """Returns the index's tensors, which some layers lack."""
        if self.index is None:
            return {}
        heads, length = self.index
        return {
            f"{blk}indexer.attn_q_b.weight": (heads * length, self.query_latent),
            f"{blk}indexer.attn_k.weight": (length, dim),
            f"{blk}indexer.k_norm.weight": (length,),
            f"{blk}indexer.k_norm.bias": (length,),
            f"{blk}indexer.proj.weight": (heads, dim),
        }

    def read(self, reader: TensorReader, blk: str) -> "LatentWeights":
        rows = np.arange(self.heads * (self.plain + self.rotated)).reshape(self.heads, -1)
        parts = [each.reshape(-1) for each in np.split(rows, [self.plain], axis=1)]
        has_query_latent = self.query_latent > 0
        plain, rotated = reader.cut(f"{blk}attn_q_b" if has_query_latent else f"{blk}attn_q", parts)
        cut = [slice(0, self.latent), slice(self.latent, None)]
        latent, key = reader.cut(f"{blk}attn_kv_a_mqa", cut)
        absorbed, values = _read_heads(reader, self, blk)
        return LatentWeights(
            shape=self,
            q_latent=reader.matrix(f"{blk}attn_q_a") if has_query_latent else None,
            q_norm=replace(reader.norm(f"{blk}attn_q_a_norm"), eps=_EPS) if has_query_latent else None,
            rotated=rotated,
            plain=plain,
            key=key,
            latent=latent,
            norm=replace(reader.norm(f"{blk}attn_kv_a_norm"), eps=_EPS),
            absorbed=absorbed,
            values=values,
            o=reader.matrix(f"{blk}attn_output"),
        )


@dataclass(frozen=True)
class LatentWeights:
    shape: LatentShape
    q_latent: Matrix | None  # (query_latent, D)
    q_norm: Norm | None
    rotated: Matrix  # (H * rotated, D or query_latent)
    plain: Matrix  # (H * plain, D or query_latent)
    key: Matrix  # (rotated, D)
    latent: Matrix  # (latent, D)
    norm: Norm  # over latent
    absorbed: Matrix  # (H * latent, plain)
    values: Matrix  # (H * value_dim, latent)
    o: Matrix  # (D, H * value_dim)

    @property
    def matrices(self) -> list[Matrix]:
        inputs = [] if self.q_latent is None else [self.q_latent]
        inputs += [self.rotated, self.plain, self.key, self.latent]
        return [*inputs, self.absorbed, self.values, self.o]

    def names(self, blk: str, present: Container[str]) -> list[str]:
        queries = ["q"] * 2 if self.q_latent is None else ["q_a", "q_b", "q_b"]
        heads = ["k_b", "v_b"] if f"{blk}attn_k_b.weight" in present else ["kv_b"] * 2
        parts = [*queries, "kv_a_mqa", "kv_a_mqa", *heads, "output"]
        return [f"{blk}attn_{part}.weight" for part in parts]

    def mixer(self, device: DeviceBuffers, state: Sequence[Buffer]) -> Mixer:
        ops, shape, (cache,) = device.ops, self.shape, state
        buffer = {name.removeprefix("mla "): device.buffer(name, *row) for name, row in shape.buffers.items()}
        table = None if shape.rope is None else device.ropes[shape.rope]

        def mix(read: Buffer, batch: Batch, out: Buffer, *, add: bool) -> None:
            keys, into = [self.key, self.latent], [buffer["key"], buffer["latent"]]
            queries, made = [self.rotated, self.plain], [buffer["rotated"], buffer["plain"]]
            if self.q_latent is None or self.q_norm is None:
                ops.linear(read, [*queries, *keys], batch, [*made, *into])
            else:
                ops.linear(read, [self.q_latent, *keys], batch, [buffer["q latent"], *into])
                ops.norm(buffer["q latent"], self.q_norm, batch, buffer["q latent"])
                ops.linear(buffer["q latent"], queries, batch, made)
            ops.linear_heads(buffer["plain"], self.absorbed, batch, buffer["absorbed"])
            ops.join_heads(buffer["rotated"], buffer["absorbed"], batch, buffer["q"])
            if table is not None:
                ops.rope(buffer["q"], table, batch)
            ops.norm(buffer["latent"], self.norm, batch, buffer["latent"])
            ops.join_heads(buffer["key"], buffer["latent"], batch, buffer["k"])
            if table is not None:
                ops.rope(buffer["k"], table, batch)
            ops.store_kv(buffer["k"], buffer["k"], batch, cache, cache)
            ops.attention(AttentionCall(buffer["q"], cache, cache, batch, buffer["mixed"], shape.scale))
            ops.linear_heads(buffer["mixed"], self.values, batch, buffer["values"])
            ops.linear(buffer["values"], [self.o], batch, [out], accumulate=add)

        return mix


def _read_heads(reader: TensorReader, shape: LatentShape, blk: str) -> list[Matrix]:
    """Reads each head's matrices for queries and for values. Old files have one matrix for keys and values:
    its transposed part becomes float32."""
    if f"{blk}attn_k_b.weight" in reader.file.tensors:
        matrices = []
        for part in ("k_b", "v_b"):
            tensor = reader.file.stored(f"{blk}attn_{part}.weight")
            matrices.append(reader.backend.matrix(tensor.flat()))
            reader.count(tensor)
        return matrices
    whole = reader.file.load(f"{blk}attn_kv_b.weight")
    rows = np.arange(whole.shape[0]).reshape(shape.heads, -1)
    keys, values = (each.reshape(-1) for each in np.split(rows, [shape.plain], axis=1))
    turned = whole.take_rows(keys).dequantise().reshape(shape.heads, shape.plain, -1).transpose(0, 2, 1)
    absorbed = np.ascontiguousarray(turned).reshape(-1, shape.plain)
    reader.count(whole)
    return [made_matrix(reader.backend, absorbed), reader.backend.matrix(whole.take_rows(values))]


def index_limit(keys: Keys) -> int | None:
    """Returns the positions beyond which an index selects positions; None without an index."""
    key = "attention.indexer.top_k"
    return keys.whole(key, 1, 1 << 24) if key in keys else None


def _read_index(keys: Keys) -> tuple[int, int]:
    heads = keys.whole("attention.indexer.head_count", 1, 4096)
    return heads, keys.whole("attention.indexer.key_length", 1, 1024)


def read_latent(keys: Keys, family: Family, layers: int, context: int, scale: float | None) -> LatentShape:
    """Reads the shape of all of a model's layers; ``scale`` is the file's factor of scores, if any.
    ModelError as in :class:`Keys`."""
    has_head_lengths = "attention.key_length_mla" in keys
    kind = "_mla" if has_head_lengths else ""  # old files use the plain keys for a head
    length = keys.whole(f"attention.key_length{kind}", 2, _MOST)
    rotated = keys.whole("rope.dimension_count", 2, 512)
    if rotated >= length:
        got = f"{keys.name('rope.dimension_count')} is {rotated}"
        raise ModelError(f"{got}: less than the keys' length {length} is needed")
    shape = LatentShape(
        heads=keys.alike("attention.head_count", 1, 4096, layers),
        latent=keys.whole("attention.kv_lora_rank", 1, 1024 - rotated),
        rotated=rotated,
        plain=length - rotated,
        value_dim=keys.whole(f"attention.value_length{kind}", 1, _MOST),
        query_latent=keys.whole("attention.q_lora_rank", 0, _MOST, default=0),
        scale=scale or 1 / math.sqrt(length),
        index=None if index_limit(keys) is None else _read_index(keys),
    )
    positions = read_positions(keys, family, layers, rotated, context)
    if any(each.window for each in positions):
        raise ModelError(
            f"{keys.name('attention.sliding_window')}: latent attention with a window is not supported"
        )
    if (rope := positions[0].rope) is None:
        return shape
    return replace(shape, rope=rope, scale=shape.scale * latent_growth(keys))
