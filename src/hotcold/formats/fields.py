"""Parts of quantised blocks: float16 scales, and codes of a few bits."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]
#: Blocks of a type whose weights are scales times codes: a scale for each of some equal runs, ``[blocks,
#: runs]``, and codes ``[blocks, weights]``.
Opened: TypeAlias = tuple[Floats, npt.NDArray[np.int8]]


def half_at(blocks: Bytes, at: int) -> Floats:
    """The float16 at this byte of every block, as a column."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def fields(packed: Bytes, bits: int, width: int) -> Bytes:
    """Codes of ``bits``; each run of ``width`` bytes holds its first ``width`` codes in its lowest bits."""
    runs = packed.reshape(len(packed), -1, 1, width)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (runs >> shifts & np.uint8((1 << bits) - 1)).reshape(len(packed), -1)
