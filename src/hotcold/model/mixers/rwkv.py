"""The time mix of RWKV-7 (arXiv 2503.14456), which keeps a state: shape, tensors, and ops in a step."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from hotcold.kernels.backend import Batch, Buffer, Floats, Matrix, Wkv7Call
from hotcold.model.keys import Keys, ModelError
from hotcold.model.mixers.device_buffers import DeviceBuffers, Mixer
from hotcold.model.mixers.mixer import Arrays, MixerShape, Tensors, state_array
from hotcold.model.mixers.token_shift import TokenShift
from hotcold.model.reading import Shape, TensorReader, upload

_EPS = 64e-5  # of the norm over a head; other norms have the file's
_PARTS = "rwkvag"  # targets of the token shift, in the order of the file's lerps
_MATRICES = ("receptance", "key", "value", "output")
_VECTORS = ("k_k", "k_a", "r_k")


@dataclass(frozen=True)
class RWKVShape(MixerShape):
    """A time mix; each of ``heads`` has a state ``[head_dim, head_dim]``. The last four numbers are ranks."""

    heads: int
    head_dim: int
    decay: int
    rate: int
    share: int
    gate: int
    first: bool = True  #: the first layer, whose v is mixed into the v of later layers
    ops: ClassVar[tuple[str, ...]] = ("token_shift", "activate", "wkv7")  # type: ignore[misc]

    def of_layers(self, layers: int) -> tuple["RWKVShape", ...]:
        """Returns the shapes of ``layers`` layers; the first one differs."""
        return (self, *[replace(self, first=False)] * (layers - 1))

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def ranks(self) -> dict[str, int]:
        """Ranks by the letters of their matrices."""
        shares = {} if self.first else {"v": self.share}
        return {"w": self.decay, "a": self.rate, **shares, "g": self.gate}

    @property
    def buffers(self) -> dict[str, Shape]:
        heads = self.heads, self.head_dim
        mixed: dict[str, Shape] = {f"rwkv x {part}": (self.dim,) for part in _PARTS}
        small: dict[str, Shape] = {f"rwkv {part} latent": (rank,) for part, rank in self.ranks.items()}
        names = ("r", "k", "v", "decay", "rate", "share", "first", "out")
        return mixed | small | {f"rwkv {name}": heads for name in names} | {"rwkv gate": (self.dim,)}

    def slot_arrays(self) -> Arrays:
        """Returns shape and type of a slot's arrays; the last is the FFN's."""
        rows = state_array(self.dim)
        return [rows, state_array(self.heads, self.head_dim, self.head_dim), rows]

    def tensors(self, dim: int, blk: str, present: Container[str]) -> Tensors:
        shapes: dict[str, Shape] = dict.fromkeys(_MATRICES, (dim, dim)) | dict.fromkeys(_VECTORS, (dim,))
        shapes |= {"lerp_fused": (len(_PARTS), 1, 1, dim), "ln": (dim,)}
        for part, rank in self.ranks.items():
            shapes |= {f"{part}1": (rank, dim), f"{part}2": (dim, rank)}
            shapes |= {} if part == "g" else {f"{part}0": (dim,)}
        required = {f"{blk}time_mix_{name}.weight": shape for name, shape in shapes.items()}
        required |= {f"{blk}time_mix_ln.bias": (dim,), f"{blk}channel_mix_lerp_k.weight": (dim,)}
        unread: dict[str, Shape] = {}
        if self.first:  # llama.cpp's files have unused copies of a's here
            unread = {"v0": (dim,), "v1": (self.rate, dim), "v2": (dim, self.rate)}
        return required, {f"{blk}time_mix_{name}.weight": shape for name, shape in unread.items()}

    def read(self, reader: TensorReader, blk: str) -> "RWKVWeights":
        vectors = [_required_vector(reader, f"{blk}time_mix_{name}.weight") for name in (*_VECTORS, "ln")]
        vectors.append(_required_vector(reader, f"{blk}time_mix_ln.bias"))
        mixes = _required_vector(reader, f"{blk}time_mix_lerp_fused.weight").reshape(len(_PARTS), -1)
        pairs = {part: _pair(reader, f"{blk}time_mix_{part}") for part in self.ranks}
        receptance, key, value, out = (reader.matrix(f"{blk}time_mix_{name}") for name in _MATRICES)
        return RWKVWeights(
            shape=self,
            mixes=upload(reader.backend, mixes),
            vectors=upload(reader.backend, np.stack(vectors)),
            receptance=receptance,
            key=key,
            value=value,
            out=out,
            pairs=pairs,
        )

    def read_shift(self, reader: TensorReader, blk: str) -> TokenShift:
        """Reads the token shift of the layer's FFN."""
        mix = _required_vector(reader, f"{blk}channel_mix_lerp_k.weight").reshape(1, -1)
        return TokenShift(upload(reader.backend, mix), self.dim)


def _required_vector(reader: TensorReader, name: str) -> Floats:
    values = reader.vector(name)
    assert values is not None
    return values


def _pair(reader: TensorReader, name: str) -> tuple[Matrix, Matrix]:
    """Reads the two matrices of a low rank, the second with its bias."""
    stored = reader.stored(f"{name}2")
    second = reader.backend.matrix(stored, reader.vector(f"{name}0.weight"))
    reader.count(stored)
    return reader.matrix(f"{name}1"), second


@dataclass(frozen=True)
class RWKVWeights:
    shape: RWKVShape
    mixes: Buffer  # [6, D]
    vectors: Buffer  # [5, D]: k_k, k_a, r_k, weight and bias of the norm
    receptance: Matrix  # (D, D), as are key, value and out
    key: Matrix
    value: Matrix
    out: Matrix
    pairs: dict[str, tuple[Matrix, Matrix]]  # (rank, D) and (D, rank), by their letters

    @property
    def matrices(self) -> list[Matrix]:
        pairs = [matrix for pair in self.pairs.values() for matrix in pair]
        return [self.receptance, self.key, self.value, self.out, *pairs]

    def names(self, blk: str, present: Container[str]) -> list[str]:
        pairs = [f"{part}{i}" for part in self.pairs for i in (1, 2)]
        return [f"{blk}time_mix_{name}.weight" for name in (*_MATRICES, *pairs)]

    def mixer(self, device: DeviceBuffers, state: Sequence[Buffer]) -> Mixer:
        ops, last, states = device.ops, state[0], state[1]
        buffer = {
            name.removeprefix("rwkv "): device.buffer(name, *row) for name, row in self.shape.buffers.items()
        }
        mixed = {part: buffer[f"x {part}"] for part in _PARTS}
        v, result, gate = buffer["first" if self.shape.first else "v"], buffer["out"], buffer["gate"]
        results = {"w": buffer["decay"], "a": buffer["rate"], "v": buffer["share"], "g": gate}
        between = {"w": "tanh", "g": "sigmoid"}
        blend = (None, None) if self.shape.first else (buffer["first"], buffer["share"])

        def mix(read: Buffer, batch: Batch, out: Buffer, *, add: bool) -> None:
            ops.token_shift(read, self.mixes, batch, last, [*mixed.values()])
            for part, matrix, target in (
                ("r", self.receptance, buffer["r"]),
                ("k", self.key, buffer["k"]),
                ("v", self.value, v),
            ):
                ops.linear(mixed[part], [matrix], batch, [target])
            for part, (down, up) in self.pairs.items():
                small = buffer[f"{part} latent"]
                ops.linear(mixed[part], [down], batch, [small])
                if part in between:
                    ops.activate(small, batch, small, activation=between[part])
                ops.linear(small, [up], batch, [results[part]])
            rows = buffer["r"], buffer["k"], v, buffer["decay"], buffer["rate"]
            first, share = blend
            call = Wkv7Call(*rows, self.vectors, batch, states, result, first=first, share=share, eps=_EPS)
            ops.wkv7(call)
            ops.multiply(result, gate, batch, result, activation="none")
            ops.linear(result, [self.out], batch, [out], accumulate=add)

        return mix


def read_rwkv(keys: Keys, dim: int) -> RWKVShape:
    """Reads the shape of a model's first layer; ModelError as in :class:`Keys`."""
    head_dim = keys.whole("wkv.head_size", 1, 1024)
    if dim % head_dim:
        raise ModelError(f"{keys.name('wkv.head_size')} is {head_dim}: it must divide {dim} dimensions")
    if keys.whole("token_shift_count", 1, 2, default=2) != 2:
        raise ModelError(f"{keys.name('token_shift_count')} is 1: this is not supported yet")

    def rank(name: str) -> int:
        return keys.whole(f"attention.{name}_lora_rank", 1, 1 << 16)

    return RWKVShape(
        heads=dim // head_dim,
        head_dim=head_dim,
        decay=rank("decay"),
        rate=rank("iclr"),
        share=rank("value_residual_mix"),
        gate=rank("gate"),
    )
