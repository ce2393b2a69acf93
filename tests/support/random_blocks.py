"""Random tensors of every block type: quantised values, or random blocks where a type is only read."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import Tensor, block_type, quantise

#: Where the float16 scales of a block lie, and their size relative to the first: minima are subtracted, so
#: that these give values around zero.
HALVES: dict[str, dict[int, float]] = {
    "Q4_K": {0: 1.0, 2: 7.5},
    "Q5_K": {0: 1.0, 2: 15.5},
    "Q6_K": {208: 1.0},
    "IQ4_NL": {0: 1.0},
    "Q2_K": {80: 1.0, 82: 1.5},
    "Q3_K": {108: 1.0},
    "TQ1_0": {52: 1.0},
    "TQ2_0": {64: 1.0},
    **{
        name: {0: 1.0}
        for name in ("IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "Q1_0", "Q2_0")
    },
}


def random_blocks(random: np.random.Generator, type: str, *shape: int, scale: float = 1.0) -> Tensor:
    """Values whose root mean square is about ``scale``."""
    kind = block_type(type)
    if kind.encode:
        return quantise((random.standard_normal(shape) * scale).astype(np.float32), kind)
    data = random.integers(0, 256, (math.prod(shape[:-1]), kind.row_bytes(shape[-1])), np.uint8)
    blocks, tensor = data.reshape(-1, kind.nbytes), Tensor(kind, shape, data)
    if type == "MXFP4":  # a power of two, divided by 4, since codes are multiples of 4
        blocks[:, 0] = round(math.log2(scale)) + 125 + random.integers(0, 2, len(blocks))
        return tensor
    if type in ("TQ2_0", "Q2_0"):  # no encoder gives code 3; of Q2_0 some stay, as it has a value
        codes = blocks[:, :64] if type == "TQ2_0" else blocks[:, 2:16]
        codes ^= (codes & codes >> 1 & 0x55) * 2
    if type == "NVFP4":
        blocks[:, :4] = _small_floats(random.uniform(0.7, 1.3, (len(blocks), 4)) * scale / 2.9)
        return tensor
    sizes = random.uniform(0.7, 1.3, (len(blocks), 1))
    for unit in (2.0**-6, None):  # a first time to learn how large the values are
        if unit is None:
            unit = 2.0**-6 * scale / math.sqrt(np.square(tensor.dequantise(), dtype=np.float64).mean())
        if type == "IQ1_M":
            _put_half_of_iq1_m(blocks, unit * sizes)
        for at, share in HALVES.get(type, {}).items():
            blocks[:, at : at + 2] = (unit * share * sizes).astype("<f2").view(np.uint8)
    return tensor


def _small_floats(values: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """The nearest floats of 8 bits without sign (E4M3), none of them 0."""
    codes = np.arange(1, 0x7F)
    floats = np.where(codes < 8, codes / 512, (8 + codes % 8) * 2.0 ** (codes // 8 - 10))
    return codes[np.abs(values[..., None] - floats).argmin(axis=-1)].astype(np.uint8)


def _put_half_of_iq1_m(blocks: npt.NDArray[np.uint8], halves: npt.NDArray[np.float64]) -> None:
    """Four bits at a time, in the highest of each of the last four words."""
    words = blocks[:, 48:56].copy().view("<u2")
    bits = halves.astype("<f2").view("<u2") >> np.arange(0, 16, 4, dtype="<u2") & 15
    blocks[:, 48:56] = (words & 0x0FFF | bits << 12).astype("<u2").view(np.uint8)
