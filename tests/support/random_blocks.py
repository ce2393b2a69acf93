"""Random tensors of every block type: quantised values, or random blocks where a type is only read."""

from __future__ import annotations

import math

import numpy as np

from hotcold.formats.blocks import Tensor, block_type, quantise

#: Where the float16 scales of a block lie, and their size relative to the first: minima are subtracted, so
#: that these give values around zero.
HALVES: dict[str, dict[int, float]] = {
    "Q4_K": {0: 1.0, 2: 7.5},
    "Q5_K": {0: 1.0, 2: 15.5},
    "Q6_K": {208: 1.0},
    "IQ4_NL": {0: 1.0},
}


def random_blocks(random: np.random.Generator, type: str, *shape: int, scale: float = 1.0) -> Tensor:
    """Values whose root mean square is about ``scale``."""
    kind = block_type(type)
    if kind.encode:
        return quantise((random.standard_normal(shape) * scale).astype(np.float32), kind)
    data = random.integers(0, 256, (math.prod(shape[:-1]), kind.row_bytes(shape[-1])), np.uint8)
    blocks, tensor = data.reshape(-1, kind.nbytes), Tensor(kind, shape, data)
    if type == "MXFP4":  # a power of two, less the 4 of which its codes are multiples
        blocks[:, 0] = round(math.log2(scale)) + 125 + random.integers(0, 2, len(blocks))
        return tensor
    sizes = random.uniform(0.7, 1.3, (len(blocks), 1))
    for unit in (2.0**-6, None):  # a first time to learn how large the values are
        if unit is None:
            unit = 2.0**-6 * scale / math.sqrt(np.square(tensor.dequantise(), dtype=np.float64).mean())
        for at, share in HALVES[type].items():
            blocks[:, at : at + 2] = (unit * share * sizes).astype("<f2").view(np.uint8)
    return tensor
