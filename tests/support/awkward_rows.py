"""Rows of floats that a rule which makes blocks of them may get wrong."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: The largest code of a block type's, or the number of its steps.
CODES = (4, 6, 7, 8, 15, 16, 31, 127)


def awkward_rows(count: int) -> npt.NDArray[np.float32]:
    """``[count, 32]``: ordinary values of one magnitude; halves of a step between codes; denormals and zeros
    of either sign; any bits, infinite and NaN among them; and in every other row some of each."""
    random, shape = np.random.default_rng(count), (count, 32)
    size, largest = 2.0 ** random.integers(-20, 12, (count, 1)), random.choice(CODES, (count, 1))
    ordinary = random.uniform(-16, 16, shape) * size
    halves = np.rint(random.uniform(-2, 2, shape) * largest) / 2 * size
    halves[:, :1] = largest * size * random.choice((-1, 1), (count, 1))
    tiny = random.integers(0, 3, shape, np.uint32) | random.integers(0, 2, shape, np.uint32) << 31
    bits = random.integers(0, 1 << 32, shape, np.uint32)
    kinds = np.stack(
        [ordinary.astype(np.float32), halves.astype(np.float32), tiny.view("f4"), bits.view("f4")]
    )
    mixed = np.where(random.random(shape) < 0.02, 3, random.integers(0, 3, shape))
    which = np.where(np.arange(count)[:, None] % 2, mixed, random.integers(0, 4, (count, 1)))
    rows: npt.NDArray[np.float32] = np.take_along_axis(kinds, which[None], axis=0)[0]
    return rows
