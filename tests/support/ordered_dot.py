"""Dots in the order of the ``vulkan`` backend: chunks of blocks, each summed in turn, then the chunks.

Every operation is float32, rounded on its own: NumPy neither fuses a multiply with an add nor reorders
element-wise operations. See :class:`support.vulkan.model.OrderedReference`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import Tensor
from hotcold.kernels.backend import Floats
from hotcold.kernels.numpy_matrix import SMALLEST_AMAX, ReferenceMatrix

Doubles = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]

BLOCK = 32
LANES = 32  #: chunks of a dot, at most
ONE = np.float32(1)

HALF_ONE = np.array([1], "<f2").view(np.uint8)
#: Types of 32 weights: where the float16 scale lies, and the minimum.
HALVES = {
    "Q8_0": (0, None), "Q4_0": (0, None), "Q5_0": (0, None), "IQ4_NL": (0, None),
    "Q4_1": (0, 2), "Q5_1": (0, 2),
}  # fmt: skip


def quantise(x: Floats) -> tuple[Floats, Floats]:
    """Codes ``[..., B, 32]`` and scales ``[..., B]`` of rows of whole blocks."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    amax = np.abs(blocks).max(axis=-1)
    amax = np.where(amax < SMALLEST_AMAX, np.float32(0), amax)
    finite = np.isfinite(amax)
    with np.errstate(all="ignore"):
        inverse = np.where(amax > 0, np.float32(127) / amax, np.float32(0)).astype(np.float32)
        codes = np.rint(blocks * inverse[..., None])
        scales = np.where(finite, amax / np.float32(127), np.float32(np.nan)).astype(np.float32)
    return np.where(finite[..., None], codes, np.float32(0)).astype(np.float32), scales


@dataclass(frozen=True)
class Blocks:
    """Quantised weights per 32 columns: a dot's part is ``(scale * codes.x + minimum * sum(x)) scale_x``."""

    codes: Doubles  # [O, B, 32]; integers, of Q6_K and Q2_K times the small scale, so that all is exact
    scale: Floats  # [O, B], of types that are opened [O, B, 2]: of the first 16 codes, and the others
    minimum: Floats | None  # [O, B]
    small_minima: Doubles | None = None  # [O, B, 2] integers: of Q2_K, times the sum of 16 values of x each


def decoded(tensor: Tensor, headers: dict[int, Bytes]) -> Floats:
    """The values that the blocks would have with other bytes at some places: ``[rows, blocks, weights]``."""
    blocks = tensor.data.reshape(-1, tensor.type.nbytes).copy()
    for at, new in headers.items():
        blocks[:, at : at + len(new)] = new
    values = Tensor(tensor.type, tensor.shape, blocks.reshape(tensor.data.shape)).dequantise()
    return values.reshape(len(tensor.data), -1, tensor.type.weights)


def half_at(tensor: Tensor, at: int) -> Floats:
    """The float16 at this byte of each block, ``[rows, blocks]``."""
    blocks = tensor.data.reshape(len(tensor.data), -1, tensor.type.nbytes)
    halves: Floats = blocks[:, :, at : at + 2].copy().view("<f2")[..., 0].astype(np.float32)
    return halves


def blocks_of(tensor: Tensor) -> Blocks:
    """A block's codes are its values where its scales are 1 and its minima 0."""
    name, rows = tensor.type.name, len(tensor.data)
    if name in HALVES:
        d, m = HALVES[name]
        headers = {d: HALF_ONE} if m is None else {d: HALF_ONE, m: np.zeros(2, np.uint8)}
        codes = decoded(tensor, headers).astype(np.float64)
        return Blocks(codes, half_at(tensor, d), None if m is None else half_at(tensor, m))
    if name == "MXFP4":
        codes = decoded(tensor, {0: np.array([128], np.uint8)}).astype(np.float64)
        exponents = tensor.data.reshape(rows, -1, 17)[:, :, 0].astype(np.int64)
        return Blocks(codes, np.ldexp(1.0, exponents - 128).astype(np.float32), None)
    if name == "Q6_K":
        codes = decoded(tensor, {192: np.ones(16, np.uint8), 208: HALF_ONE}).astype(np.float64)
        small = tensor.data.reshape(rows, -1, 210)[:, :, 192:208].view(np.int8).astype(np.float64)
        codes = codes.reshape(rows, -1, 16) * small.reshape(rows, -1, 1)
        return Blocks(codes.reshape(rows, -1, 32), half_at(tensor, 208).repeat(8, axis=1), None)
    if name == "Q2_K":
        blocks = tensor.data.reshape(rows, -1, 84)
        codes = decoded(tensor, {0: np.ones(16, np.uint8), 80: HALF_ONE, 82: np.zeros(2, np.uint8)})
        small = blocks[:, :, :16].astype(np.int64)
        codes = codes.astype(np.float64).reshape(rows, -1, 16) * (small & 15).reshape(rows, -1, 1)
        scale, minimum = (half_at(tensor, at).repeat(8, axis=1) for at in (80, 82))
        minima = (small >> 4).reshape(rows, -1, 2).astype(np.float64)
        return Blocks(codes.reshape(rows, -1, 32), scale, -minimum, minima)
    if tensor.type.open is not None:
        with np.errstate(all="ignore"):
            scales, opened = tensor.type.open(tensor.data.reshape(-1, tensor.type.nbytes))
        each = scales.repeat(opened.shape[1] // scales.shape[1] // 16, axis=1).reshape(rows, -1, 2)
        if tensor.factors is not None:
            each = each * tensor.factors[:, None, None]
        return Blocks(opened.reshape(rows, -1, 32).astype(np.float64), each, None)
    # Q4_K and Q5_K: 8 scales and minima of 6 bits, as in llama.cpp's get_scale_min_k4
    packed = tensor.data.reshape(rows, -1, tensor.type.nbytes)[:, :, 4:16]
    low, high, mixed = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    sc = np.concatenate([low & 63, (mixed & 15) | (low >> 6 << 4)], axis=-1).astype(np.float32)
    mn = np.concatenate([high & 63, (mixed >> 4) | (high >> 6 << 4)], axis=-1).astype(np.float32)
    ones = np.array([1] * 4 + [0] * 4 + [1] * 4, np.uint8)  # scales 1, minima 0
    codes = decoded(tensor, {0: HALF_ONE, 2: np.zeros(2, np.uint8), 4: ones})
    scale = half_at(tensor, 0)[..., None] * sc
    minimum = -(half_at(tensor, 2)[..., None] * mn)
    return Blocks(
        codes.reshape(rows, -1, 32).astype(np.float64), scale.reshape(rows, -1), minimum.reshape(rows, -1)
    )


def in_turn(parts: Floats, chunk: int) -> Floats:
    """``[..., P]`` summed over P: chunks of this length, each from +0 on, and then their sums."""
    count = -(-parts.shape[-1] // chunk)
    sums = np.zeros((*parts.shape[:-1], count), np.float32)
    for i in range(chunk):
        step = parts[..., i::chunk]
        sums[..., : step.shape[-1]] = sums[..., : step.shape[-1]] + step
    total = sums[..., 0]
    for each in range(1, count):
        total = total + sums[..., each]
    return total


@dataclass(frozen=True)
class OrderedMatrix(ReferenceMatrix):
    @cached_property
    def blocks(self) -> Blocks:
        return blocks_of(self.tensor)

    def dot(self, x: Floats, math: str = "same", decode: int = 0) -> Floats:
        """``[T, columns]`` -> ``[T, rows]``, with the bias."""
        out = np.empty((len(x), self.shape[0]), np.float32)
        count = -(-self.shape[1] // BLOCK)
        chunk = -(-count // LANES)
        with np.errstate(over="ignore", invalid="ignore"):
            for t, row in enumerate(x):
                out[t] = self._quantised(row, chunk) if self.quantised else self._floats(row, chunk)
            return out if self.bias is None else out + self.bias

    def _floats(self, x: Floats, chunk: int) -> Floats:
        return in_turn(self.values * x, BLOCK * chunk)

    def _quantised(self, x: Floats, chunk: int) -> Floats:
        codes, scales = quantise(x)
        b = self.blocks
        x = codes.astype(np.float64)
        if b.scale.ndim == 3:
            halves = np.einsum("obhi,bhi->obh", b.codes.reshape(*b.scale.shape, 16), x.reshape(-1, 2, 16))
            both = b.scale * halves.astype(np.float32)
            return in_turn((both[..., 0] + both[..., 1]) * scales, chunk)
        dots = np.einsum("obi,bi->ob", b.codes, x).astype(np.float32)
        parts = b.scale * dots
        if b.small_minima is not None:
            sums = np.einsum("obh,bh->ob", b.small_minima, x.reshape(-1, 2, 16).sum(axis=-1))
            parts = parts + b.minimum * sums.astype(np.float32)
        elif b.minimum is not None:
            parts = parts + b.minimum * codes.sum(axis=-1)
        return in_turn(parts * scales, chunk)
