"""Gated short convolution (LFM2, arXiv 2511.23404): its shape, its tensors, and its ops in a step."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from hotcold.kernels.backend import Batch, Buffer, Matrix
from hotcold.model.keys import Keys
from hotcold.model.mixers.device_buffers import DeviceBuffers, Mixer
from hotcold.model.mixers.mixer import Arrays, MixerShape, Tensors, state_array
from hotcold.model.reading import Shape, TensorReader

#: Taps that op ``short_conv`` supports.
LEAST_TAPS, MOST_TAPS = 2, 8


@dataclass(frozen=True)
class ShortConvShape(MixerShape):
    """A gated convolution ``out(c * conv(b * x))``; b, c and x are products of the input and a matrix."""

    dim: int
    taps: int  #: positions that a row reads, its own included

    @property
    def buffers(self) -> dict[str, Shape]:
        return {f"conv {part}": (self.dim,) for part in ("b", "c", "x", "out")}

    def slot_arrays(self) -> Arrays:
        return [state_array(self.taps - 1, self.dim)]

    def tensors(self, dim: int, blk: str, present: Container[str]) -> Tensors:
        required: dict[str, Shape] = {
            f"{blk}shortconv.in_proj.weight": (3 * dim, dim),
            f"{blk}shortconv.conv.weight": (dim, self.taps),
            f"{blk}shortconv.out_proj.weight": (dim, dim),
        }
        optional: dict[str, Shape] = {
            f"{blk}shortconv.in_proj.bias": (3 * dim,),
            f"{blk}shortconv.conv.bias": (dim,),
            f"{blk}shortconv.out_proj.bias": (dim,),
        }
        return required, optional

    def read(self, reader: TensorReader, blk: str) -> "ShortConvWeights":
        name = f"{blk}shortconv"
        parts = [slice(i * self.dim, (i + 1) * self.dim) for i in range(3)]
        b, c, x = reader.cut(f"{name}.in_proj", parts)
        return ShortConvWeights(
            shape=self,
            b=b,
            c=c,
            x=x,
            conv=reader.needed_buffer(f"{name}.conv.weight"),
            conv_bias=reader.buffer(f"{name}.conv.bias"),
            out=reader.matrix(f"{name}.out_proj"),
        )


@dataclass(frozen=True)
class ShortConvWeights:
    shape: ShortConvShape
    b: Matrix  # (D, D), as are c, x and out
    c: Matrix
    x: Matrix
    conv: Buffer  # [D, taps]
    conv_bias: Buffer | None  # [D]
    out: Matrix

    @property
    def matrices(self) -> list[Matrix]:
        return [self.b, self.c, self.x, self.out]

    def names(self, blk: str, present: Container[str]) -> list[str]:
        return [f"{blk}shortconv.{part}.weight" for part in ("in_proj",) * 3 + ("out_proj",)]

    def mixer(self, device: DeviceBuffers, state: Sequence[Buffer]) -> Mixer:
        ops, (columns,) = device.ops, state
        b, c, x, mixed = (device.buffer(name, *row) for name, row in self.shape.buffers.items())

        def mix(read: Buffer, batch: Batch, out: Buffer, *, add: bool) -> None:
            ops.linear(read, [self.b, self.c, self.x], batch, [b, c, x])
            ops.multiply(x, b, batch, x, activation="none")
            ops.short_conv(x, self.conv, self.conv_bias, batch, columns, mixed, activation="none")
            ops.multiply(mixed, c, batch, mixed, activation="none")
            ops.linear(mixed, [self.out], batch, [out], accumulate=add)

        return mix


def read_short_conv(keys: Keys, dim: int) -> ShortConvShape:
    """Reads the shape of a model's layers of this kind; ModelError as in :class:`Keys`."""
    return ShortConvShape(dim, keys.whole("shortconv.l_cache", LEAST_TAPS, MOST_TAPS))
