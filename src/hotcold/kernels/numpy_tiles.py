"""Products of BF16 numbers with the bits of Intel's AMX. Products of bytes need no specification: sums of
integers are exact."""

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.kernels.backend import Floats

#: How a processor with AMX computes the products of prompt rows. ``same``: with the bits of decode rows.
#: ``split``: float weights and their input are two BF16 numbers each, with 16 of the 24 bits of a float32.
#: ``fast``: all weights and their input are rounded to BF16. In each of them, linear layers and dense FFNs
#: compute decode rows by BF16 weights as ``split`` does.
PROMPT_MATHS = ("same", "split", "fast")
CHUNK = 32  #: columns that one instruction multiplies
_LEAST_NORMAL = np.float32(2.0**-126)

BF16 = npt.NDArray[np.uint16]  # bits


def check_prompt_math(math: str) -> str:
    if math not in PROMPT_MATHS:
        raise UserError(f"`prompt_math={math}`: choose from {', '.join(PROMPT_MATHS)}")
    return math


def to_bf16(x: Floats) -> BF16:
    """Rounds float32 to BF16, ties to even; a NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    result: BF16 = np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype(np.uint16)
    return result


def from_bf16(bits: BF16) -> Floats:
    values: Floats = (bits.astype(np.uint32) << 16).view(np.float32)
    return values


def split_bf16(x: Floats) -> tuple[BF16, BF16]:
    """Splits a float32 into two BF16 numbers; the second is 0 where the first is not finite."""
    high = to_bf16(x)
    with np.errstate(invalid="ignore"):
        rest = x - from_bf16(high)
    return high, to_bf16(np.where(np.isfinite(from_bf16(high)), rest, np.float32(0)))


def _flushed(x: npt.NDArray[np.float64] | Floats) -> Floats:
    """Rounds to float32; a denormal becomes a zero of its sign."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        y = x.astype(np.float32)
    return np.where(np.abs(y) < _LEAST_NORMAL, np.copysign(np.float32(0), y), y)


def add_tile(x: BF16, w: BF16, sums: Floats) -> Floats:
    """Adds the products of ``[T, 32]`` and ``[N, 32]`` to sums ``[T, N]``, as TDPBF16PS does.

    Even and odd columns have separate sums, which start at 0 and add products in ascending order by fused
    multiply-adds. Then the odd sum is added to the even one, and the result to ``sums``. Every step rounds to
    nearest even and reads and writes denormals as zeros. A product of two BF16 numbers is exact in float64,
    and rounding its sum twice changes no bit: the factors have few digits."""
    left, right = (_flushed(from_bf16(each)).astype(np.float64) for each in (x, w))
    halves = np.zeros((2, *sums.shape), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for column in range(CHUNK):
            half = column % 2
            product = left[:, None, column] * right[None, :, column]
            halves[half] = _flushed(halves[half].astype(np.float64) + product)
        return _flushed(_flushed(sums) + _flushed(halves[0] + halves[1]))


def tile_dot(x: Floats, w: Floats, type: str, math: str) -> Floats:
    """Multiplies ``[T, I]`` by weights ``[N, I]`` of a block type; returns ``[T, N]``.

    Chunks of 32 columns are added in ascending order. With ``split`` a chunk adds three products: both high
    halves, then low input and high weights, then high input and low weights. BF16 weights have no low
    halves."""
    pad = [(0, 0), (0, -x.shape[1] % CHUNK)]
    high_x, low_x = (np.pad(each, pad) for each in split_bf16(x))
    high_w, low_w = (np.pad(each, pad) for each in split_bf16(w))
    pairs = [(high_x, high_w)]
    if math == "split":
        pairs += [(low_x, high_w)] if type == "BF16" else [(low_x, high_w), (high_x, low_w)]
    sums = np.zeros((len(x), len(w)), np.float32)
    for first in range(0, high_x.shape[1], CHUNK):
        for left, right in pairs:
            columns = slice(first, first + CHUNK)
            sums = add_tile(left[:, columns], right[:, columns], sums)
    return sums
