"""Random blocks of types whose scales one searches for: valid bytes, with one scale for all blocks."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import BlockType, Tensor

Bytes = npt.NDArray[np.uint8]

#: Where a block's float16 numbers lie, and their sizes relative to the first: minima are subtracted, so that
#: these give values around zero.
HALVES: dict[str, dict[int, float]] = {
    "Q4_K": {0: 1.0, 2: 7.5},
    "Q5_K": {0: 1.0, 2: 15.5},
    "Q2_K": {80: 1.0, 82: 1.5},
    "Q6_K": {208: 1.0},
    "Q3_K": {108: 1.0},
    "TQ2_0": {64: 1.0},
    **{name: {0: 1.0} for name in ("Q5_0", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS")},
}


def random_block_rows(
    rng: np.random.Generator, type: BlockType, rows: int, columns: int, std: float
) -> Bytes:
    """``(rows, row_bytes)`` of this standard deviation; SystemExit: the type is none of :data:`HALVES`."""
    if type.name not in HALVES:
        raise SystemExit(f"no random blocks of {type.name}: choose from {', '.join(HALVES)}")
    count = rows * type.row_bytes(columns)
    data = rng.integers(0, 1 << 64, -(-count // 8), np.uint64).view(np.uint8)[:count]
    _set_halves(data.reshape(-1, type.nbytes), type, std / _unit(type))
    return data.reshape(rows, -1)


def _set_halves(blocks: Bytes, type: BlockType, scale: float) -> None:
    if type.name == "TQ2_0":  # no encoder gives code 3
        codes = blocks[:, :64]
        codes ^= (codes & codes >> 1 & 0x55) * np.uint8(2)
    for at, share in HALVES[type.name].items():
        blocks[:, at : at + 2] = np.array([scale * share], "<f2").view(np.uint8)


@cache
def _unit(type: BlockType) -> float:
    """The standard deviation of random blocks whose scale is 1; that of 1/1024, which no type's codes
    overflow, tells it."""
    blocks = np.random.default_rng(0).integers(0, 256, (4096, type.nbytes), np.uint8)
    _set_halves(blocks, type, 2.0**-10)
    values = Tensor(type, (len(blocks), type.weights), blocks).dequantise()
    return float(values.std()) * 2**10
