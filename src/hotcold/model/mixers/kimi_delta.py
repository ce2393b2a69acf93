"""Kimi delta attention (arXiv 2510.26692), a gated delta net with a decay for each key channel: its shape,
its tensors, and its ops in a step."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np

from hotcold.kernels.backend import Batch, Buffer, DeltaCall, Matrix, Norm
from hotcold.model.keys import Keys
from hotcold.model.mixers.device_buffers import DeviceBuffers, Mixer
from hotcold.model.mixers.mixer import Arrays, MixerShape, Tensors, state_array
from hotcold.model.mixers.short_conv import LEAST_TAPS, MOST_TAPS
from hotcold.model.reading import Shape, TensorReader, upload

_EPS = 1e-6  # of the norms of q and k; other norms have the file's
_QKV = ("q", "k", "v")


@dataclass(frozen=True)
class KimiDeltaShape(MixerShape):
    """Kimi delta attention of one layer; each of ``heads`` has a state ``[head_dim, head_dim]``."""

    heads: int
    head_dim: int
    taps: int  #: of the convolutions

    @property
    def rows(self) -> int:
        """Values of q, as of k, of v and of the output."""
        return self.heads * self.head_dim

    @property
    def buffers(self) -> dict[str, Shape]:
        heads, rows = (self.heads, self.head_dim), self.rows
        return {
            "kda q": (1, rows),
            "kda k": (1, rows),
            "kda v": (1, rows),
            "kda qk": (1, 2 * rows),
            "kda qkv": (1, 3 * rows),
            "kda mixed": (3 * rows,),
            "kda decay latent": (self.head_dim,),
            "kda gate latent": (self.head_dim,),
            "kda beta": (self.heads,),
            "kda decay": heads,
            "kda gate": heads,
            "kda out": heads,
        }

    def slot_arrays(self) -> Arrays:
        return [
            state_array(self.taps - 1, 3 * self.rows),
            state_array(self.heads, self.head_dim, self.head_dim),
        ]

    def tensors(self, dim: int, blk: str, present: Container[str]) -> Tensors:
        heads, length, rows = self.heads, self.head_dim, self.rows
        shapes: dict[str, Shape] = {
            f"{blk}{name}.weight": (3 * rows if name == "attn_qkv" else rows, dim)
            for name in _inputs(blk, present)
        }
        # Convolutions have four dimensions in llama.cpp's files.
        shapes |= {f"{blk}ssm_conv1d_{part}.weight": (1, rows, 1, self.taps) for part in _QKV}
        matrices: dict[str, Shape] = {
            "ssm_f_a": (length, dim),
            "ssm_f_b": (rows, length),
            "ssm_g_a": (length, dim),
            "ssm_g_b": (rows, length),
            "ssm_beta": (heads, dim),
            "ssm_norm": (length,),
            "attn_output": (dim, rows),
        }
        shapes |= {f"{blk}{name}.weight": shape for name, shape in matrices.items()}
        return shapes | {f"{blk}ssm_dt.bias": (rows,), f"{blk}ssm_a": (heads,)}, {}

    def read(self, reader: TensorReader, blk: str) -> "KimiDeltaWeights":
        return KimiDeltaWeights(
            shape=self,
            qkv=tuple(reader.matrix(f"{blk}{name}") for name in _inputs(blk, reader.file.tensors)),
            conv=upload(reader.backend, np.concatenate([self._conv(reader, blk, part) for part in _QKV])),
            decay_in=reader.matrix(f"{blk}ssm_f_a"),
            decay_out=reader.matrix(f"{blk}ssm_f_b"),
            gate_in=reader.matrix(f"{blk}ssm_g_a"),
            gate_out=reader.matrix(f"{blk}ssm_g_b"),
            beta=reader.matrix(f"{blk}ssm_beta"),
            dt_bias=reader.needed_buffer(f"{blk}ssm_dt.bias"),
            a=reader.needed_buffer(f"{blk}ssm_a"),
            norm=reader.norm(f"{blk}ssm_norm"),
            out=reader.matrix(f"{blk}attn_output"),
        )

    def _conv(self, reader: TensorReader, blk: str, part: str) -> np.ndarray:
        values = reader.vector(f"{blk}ssm_conv1d_{part}.weight")
        assert values is not None
        return values.reshape(self.rows, self.taps)


@dataclass(frozen=True)
class KimiDeltaWeights:
    shape: KimiDeltaShape
    qkv: tuple[Matrix, ...]  # (H * head_dim, D) of q, of k, of v; or one for all
    conv: Buffer  # [3 * H * head_dim, taps]
    decay_in: Matrix  # (head_dim, D), as is gate_in
    decay_out: Matrix  # (H * head_dim, head_dim), as is gate_out
    gate_in: Matrix
    gate_out: Matrix
    beta: Matrix  # (H, D)
    dt_bias: Buffer  # [H * head_dim]
    a: Buffer  # [H]
    norm: Norm  # over head_dim
    out: Matrix  # (D, H * head_dim)

    @property
    def matrices(self) -> list[Matrix]:
        return [
            *self.qkv,
            self.decay_in,
            self.gate_in,
            self.beta,
            self.decay_out,
            self.gate_out,
            self.out,
        ]

    def names(self, blk: str, present: Container[str]) -> list[str]:
        others = "ssm_f_a", "ssm_g_a", "ssm_beta", "ssm_f_b", "ssm_g_b", "attn_output"
        return [f"{blk}{name}.weight" for name in (*_inputs(blk, present), *others)]

    def mixer(self, device: DeviceBuffers, state: Sequence[Buffer]) -> Mixer:
        ops, shape, (columns, states) = device.ops, self.shape, state
        buffers = (device.buffer(name, *row) for name, row in shape.buffers.items())
        q, k, v, qk, qkv, mixed, decay_latent, gate_latent, beta, decay, gate, result = buffers
        joined = len(self.qkv) == 1

        def mix(read: Buffer, batch: Batch, out: Buffer, *, add: bool) -> None:
            matrices = [*self.qkv, self.decay_in, self.gate_in, self.beta]
            into = [*([qkv] if joined else [q, k, v]), decay_latent, gate_latent, beta]
            ops.linear(read, matrices, batch, into)
            if not joined:
                ops.join_heads(q, k, batch, qk)
                ops.join_heads(qk, v, batch, qkv)
            ops.short_conv(qkv, self.conv, None, batch, columns, mixed, activation="silu")
            ops.linear(decay_latent, [self.decay_out], batch, [decay])
            ops.linear(gate_latent, [self.gate_out], batch, [gate])
            ops.decay(decay, self.dt_bias, self.a, batch, decay)
            arrays = mixed, decay, beta, batch, states, result
            call = DeltaCall(*arrays, keys=shape.heads, key_dim=shape.head_dim, tiled=False, eps=_EPS)
            ops.gated_delta(call)
            ops.norm(result, self.norm, batch, result)
            ops.multiply(result, gate, batch, result, activation="sigmoid")
            ops.linear(result, [self.out], batch, [out], accumulate=add)

        return mix


def _inputs(blk: str, present: Container[str]) -> list[str]:
    """Returns names of the matrices for q, k and v."""
    fused = f"{blk}attn_qkv.weight" in present
    return ["attn_qkv"] if fused else [f"attn_{part}" for part in _QKV]


def read_kimi_delta(keys: Keys, layers: int) -> KimiDeltaShape:
    """Reads the shape of a model's layers of this kind; ModelError as in :class:`Keys`."""
    return KimiDeltaShape(
        heads=keys.alike("attention.head_count", 1, 4096, layers),
        head_dim=keys.whole("kda.head_dim", 1, 1024),
        taps=keys.whole("ssm.conv_kernel", LEAST_TAPS, MOST_TAPS),
    )
