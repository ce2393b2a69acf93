"""Gated delta net (arXiv 2412.06464), linear attention with a state: its shape, tensors and ops."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np

from hotcold.kernels.backend import Batch, Buffer, DeltaCall, Matrix, Norm
from hotcold.model.keys import Keys, ModelError
from hotcold.model.mixers.device_buffers import DeviceBuffers, Mixer
from hotcold.model.mixers.mixer import Arrays, MixerShape, Tensors, state_array
from hotcold.model.mixers.short_conv import LEAST_TAPS, MOST_TAPS
from hotcold.model.reading import Shape, TensorReader

_EPS = 1e-6  # of the norms of q and k; other norms have the file's


@dataclass(frozen=True)
class GatedDeltaShape(MixerShape):
    """A gated delta net; q and k have Hk ``keys`` heads. Each v head has a state ``[key_dim, value_dim]``."""

    keys: int
    values: int  #: heads of v, Hv
    key_dim: int
    value_dim: int
    taps: int  #: of the convolution
    tiled: bool  #: v head h uses k head h % Hk, not h // (Hv / Hk)

    @property
    def channels(self) -> int:
        """Values of q, k and v, the input of the convolution."""
        return 2 * self.keys * self.key_dim + self.value_rows

    @property
    def value_rows(self) -> int:
        return self.values * self.value_dim

    @property
    def buffers(self) -> dict[str, Shape]:
        heads = self.values, self.value_dim
        return {
            "delta qkv": (self.channels,),
            "delta z": heads,
            "delta beta": (self.values,),
            "delta alpha": (self.values,),
            "delta mixed": (self.channels,),
            "delta decay": (self.values,),
            "delta out": heads,
        }

    def slot_arrays(self) -> Arrays:
        return [
            state_array(self.taps - 1, self.channels),
            state_array(self.values, self.key_dim, self.value_dim),
        ]

    def tensors(self, dim: int, blk: str, present: Container[str]) -> Tensors:
        heads, rows = self.values, self.value_rows
        matrices: dict[str, Shape]
        if f"{blk}ssm_in.weight" in present:  # the first files of Qwen3-Next
            matrices = {"ssm_in": (self.channels + rows, dim)}
        else:
            matrices = {"attn_qkv": (self.channels, dim), "attn_gate": (rows, dim)}
        if f"{blk}ssm_ba.weight" in present:
            matrices["ssm_ba"] = 2 * heads, dim
        else:
            matrices |= {"ssm_alpha": (heads, dim), "ssm_beta": (heads, dim)}
        matrices |= {"ssm_out": (dim, rows), "ssm_conv1d": (self.channels, self.taps)}
        matrices["ssm_norm"] = (self.value_dim,)
        required = {f"{blk}{name}.weight": shape for name, shape in matrices.items()}
        return required | {f"{blk}ssm_dt.bias": (heads,), f"{blk}ssm_a": (heads,)}, {}

    def read(self, reader: TensorReader, blk: str) -> "GatedDeltaWeights":
        qkv, z = self._read_inputs(reader, blk)
        beta, alpha = self._read_factors(reader, blk)
        return GatedDeltaWeights(
            shape=self,
            qkv=qkv,
            z=z,
            beta=beta,
            alpha=alpha,
            conv=reader.needed_buffer(f"{blk}ssm_conv1d.weight"),
            dt_bias=reader.needed_buffer(f"{blk}ssm_dt.bias"),
            a=reader.needed_buffer(f"{blk}ssm_a"),
            norm=reader.norm(f"{blk}ssm_norm"),
            out=reader.matrix(f"{blk}ssm_out"),
        )

    def _read_inputs(self, reader: TensorReader, blk: str) -> list[Matrix]:
        if f"{blk}ssm_in.weight" not in reader.file.tensors:
            return [reader.matrix(f"{blk}attn_qkv"), reader.matrix(f"{blk}attn_gate")]
        # By k head: q, k, then v and z of all its v heads.
        v = self.value_rows // self.keys
        rows = np.arange(self.channels + self.value_rows).reshape(self.keys, -1)
        parts = np.split(rows, np.cumsum([self.key_dim, self.key_dim, v]), axis=1)
        *qkv, z = (part.reshape(-1) for part in parts)
        # A file read cannot reorder rows.
        tensor = reader.stored(f"{blk}ssm_in").load()
        matrices = [reader.backend.matrix(tensor.take_rows(each)) for each in (np.concatenate(qkv), z)]
        reader.count(tensor)
        return matrices

    def _read_factors(self, reader: TensorReader, blk: str) -> list[Matrix]:
        if f"{blk}ssm_ba.weight" not in reader.file.tensors:
            return [reader.matrix(f"{blk}ssm_beta"), reader.matrix(f"{blk}ssm_alpha")]
        rows = np.arange(2 * self.values).reshape(self.keys, 2, -1)  # by k head: its beta, then its alpha
        return reader.cut(f"{blk}ssm_ba", [rows[:, part].reshape(-1) for part in (0, 1)])


@dataclass(frozen=True)
class GatedDeltaWeights:
    shape: GatedDeltaShape
    qkv: Matrix  # (channels, D)
    z: Matrix  # (Hv * value_dim, D): the gate of the output
    beta: Matrix  # (Hv, D), as is alpha
    alpha: Matrix
    conv: Buffer  # [channels, taps]
    dt_bias: Buffer  # [Hv], as is a
    a: Buffer
    norm: Norm  # over value_dim
    out: Matrix  # (D, Hv * value_dim)

    @property
    def matrices(self) -> list[Matrix]:
        return [self.qkv, self.z, self.beta, self.alpha, self.out]

    def names(self, blk: str, present: Container[str]) -> list[str]:
        inputs = ["ssm_in"] * 2 if f"{blk}ssm_in.weight" in present else ["attn_qkv", "attn_gate"]
        factors = ["ssm_ba"] * 2 if f"{blk}ssm_ba.weight" in present else ["ssm_beta", "ssm_alpha"]
        return [f"{blk}{name}.weight" for name in (*inputs, *factors, "ssm_out")]

    def mixer(self, device: DeviceBuffers, state: Sequence[Buffer]) -> Mixer:
        ops, shape, (columns, states) = device.ops, self.shape, state
        buffers = (device.buffer(name, *row) for name, row in shape.buffers.items())
        qkv, z, beta, alpha, mixed, decay, result = buffers

        def mix(read: Buffer, batch: Batch, out: Buffer, *, add: bool) -> None:
            ops.linear(read, [self.qkv, self.z, self.beta, self.alpha], batch, [qkv, z, beta, alpha])
            ops.short_conv(qkv, self.conv, None, batch, columns, mixed, activation="silu")
            ops.decay(alpha, self.dt_bias, self.a, batch, decay)
            arrays = mixed, decay, beta, batch, states, result
            keys, dim, tiled = shape.keys, shape.key_dim, shape.tiled
            ops.gated_delta(DeltaCall(*arrays, keys=keys, key_dim=dim, tiled=tiled, eps=_EPS))
            ops.norm(result, self.norm, batch, result)
            ops.multiply(result, z, batch, result, activation="silu")
            ops.linear(result, [self.out], batch, [out], accumulate=add)

        return mix


def read_gated_delta(keys: Keys, *, tiled: bool) -> GatedDeltaShape:
    """Reads the shape of a model's layers of this kind; ModelError as in :class:`Keys`."""
    values = keys.whole("ssm.time_step_rank", 1, 4096)
    heads = keys.whole("ssm.group_count", 1, values)
    inner = keys.whole("ssm.inner_size", 1, 1 << 20)
    if values % heads:
        raise ModelError(f"{keys.name('ssm.group_count')} is {heads}: it must divide {values} heads")
    if inner % values:
        raise ModelError(f"{keys.name('ssm.time_step_rank')} is {values}: it must divide {inner}")
    return GatedDeltaShape(
        keys=heads,
        values=values,
        key_dim=keys.whole("ssm.state_size", 1, 1024),
        value_dim=inner // values,
        taps=keys.whole("ssm.conv_kernel", LEAST_TAPS, MOST_TAPS),
        tiled=tiled,
    )
