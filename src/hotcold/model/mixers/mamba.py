"""Mamba-2 (arXiv 2405.21060), a state space layer: its shape, its tensors, and its ops in a step."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from hotcold.kernels.backend import Batch, Buffer, Matrix, Norm, ScanCall
from hotcold.model.keys import Keys, ModelError
from hotcold.model.mixers.device_buffers import DeviceBuffers, Mixer
from hotcold.model.mixers.mixer import Arrays, MixerShape, Tensors, state_array
from hotcold.model.mixers.short_conv import LEAST_TAPS, MOST_TAPS
from hotcold.model.reading import Shape, TensorReader


@dataclass(frozen=True)
class MambaShape(MixerShape):
    """A Mamba-2 layer; each of ``heads`` has a state ``[head_dim, state_dim]`` and its group's B and C."""

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    taps: int  #: of the convolution

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Values of x, B and C, the input of the convolution."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def buffers(self) -> dict[str, Shape]:
        heads = self.heads, self.head_dim
        return {
            "ssm z": heads,
            "ssm xbc": (self.channels,),
            "ssm dt": (self.heads,),
            "ssm mixed": (self.channels,),
            "ssm out": heads,
        }

    def slot_arrays(self) -> Arrays:
        return [
            state_array(self.taps - 1, self.channels),
            state_array(self.heads, self.head_dim, self.state_dim),
        ]

    def tensors(self, dim: int, blk: str, present: Container[str]) -> Tensors:
        rows = self.inner + self.channels + self.heads
        required: dict[str, Shape] = {
            f"{blk}ssm_in.weight": (rows, dim),
            f"{blk}ssm_conv1d.weight": (self.channels, self.taps),
            f"{blk}ssm_dt.bias": (self.heads,),
            f"{blk}ssm_a": (self.heads,),
            f"{blk}ssm_d": (self.heads,),
            f"{blk}ssm_out.weight": (dim, self.inner),
        }
        optional: dict[str, Shape] = {
            f"{blk}ssm_in.bias": (rows,),
            f"{blk}ssm_conv1d.bias": (self.channels,),
            f"{blk}ssm_norm.weight": (self.groups, self.inner // self.groups),
            f"{blk}ssm_out.bias": (dim,),
        }
        return required, optional

    def read(self, reader: TensorReader, blk: str) -> "MambaWeights":
        inner, end = self.inner, self.inner + self.channels
        parts = [slice(0, inner), slice(inner, end), slice(end, end + self.heads)]
        z, xbc, dt = reader.cut(f"{blk}ssm_in", parts)
        return MambaWeights(
            shape=self,
            z=z,
            xbc=xbc,
            dt=dt,
            conv=reader.needed_buffer(f"{blk}ssm_conv1d.weight"),
            conv_bias=reader.buffer(f"{blk}ssm_conv1d.bias"),
            dt_bias=reader.needed_buffer(f"{blk}ssm_dt.bias"),
            a=reader.needed_buffer(f"{blk}ssm_a"),
            d=reader.needed_buffer(f"{blk}ssm_d"),
            norm=reader.own_norm(f"{blk}ssm_norm"),
            out=reader.matrix(f"{blk}ssm_out"),
        )


@dataclass(frozen=True)
class MambaWeights:
    shape: MambaShape
    z: Matrix  # (inner, D): the gate of the output
    xbc: Matrix  # (channels, D)
    dt: Matrix  # (heads, D)
    conv: Buffer  # [channels, taps]
    conv_bias: Buffer | None  # [channels]
    dt_bias: Buffer  # [heads], as are a and d
    a: Buffer
    d: Buffer
    norm: Norm | None  # over each group's values
    out: Matrix  # (D, inner)

    @property
    def matrices(self) -> list[Matrix]:
        return [self.z, self.xbc, self.dt, self.out]

    def names(self, blk: str, present: Container[str]) -> list[str]:
        return [f"{blk}{name}.weight" for name in ("ssm_in",) * 3 + ("ssm_out",)]

    def mixer(self, device: DeviceBuffers, state: Sequence[Buffer]) -> Mixer:
        ops, shape, (columns, states) = device.ops, self.shape, state
        z, xbc, dt, mixed, result = (device.buffer(name, *row) for name, row in shape.buffers.items())

        def mix(read: Buffer, batch: Batch, out: Buffer, *, add: bool) -> None:
            ops.linear(read, [self.z, self.xbc, self.dt], batch, [z, xbc, dt])
            ops.short_conv(xbc, self.conv, self.conv_bias, batch, columns, mixed, activation="silu")
            vectors = self.dt_bias, self.a, self.d
            ops.ssm_scan(ScanCall(mixed, dt, *vectors, batch, states, result, groups=shape.groups))
            ops.multiply(result, z, batch, result, activation="silu")
            if self.norm is not None:
                ops.norm(result, self.norm, batch, result)
            ops.linear(result, [self.out], batch, [out], accumulate=add)

        return mix


def read_mamba(keys: Keys) -> MambaShape:
    """Reads the shape of a model's layers of this kind; ModelError as in :class:`Keys`."""
    heads = keys.whole("ssm.time_step_rank", 1, 4096)
    groups = keys.whole("ssm.group_count", 1, heads, default=1)
    inner = keys.whole("ssm.inner_size", 1, 1 << 20)
    if heads % groups:
        raise ModelError(f"{keys.name('ssm.group_count')} is {groups}: it must divide {heads} heads")
    if inner % heads:
        raise ModelError(f"{keys.name('ssm.time_step_rank')} is {heads}: it must divide {inner}")
    return MambaShape(
        heads=heads,
        head_dim=inner // heads,
        state_dim=keys.whole("ssm.state_size", 1, 1024),
        groups=groups,
        taps=keys.whole("ssm.conv_kernel", LEAST_TAPS, MOST_TAPS),
    )
