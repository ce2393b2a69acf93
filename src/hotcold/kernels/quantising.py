"""Packing of float32 rows into any block type of ggml's quantiser, with importance per column.

Where a rule alone determines a type's bytes, they equal the ``gguf`` package's. For other types a search
finds the scales with the least squared error, in which large weights count more."""

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.formats.blocks import GGML_TYPES, BlockType, BlockTypeError, Bytes, Floats, ggml_type
from hotcold.kernels import _native
from hotcold.kernels.cores import find_cores
from hotcold.kernels.instruction_sets import default_isa


def written_types() -> tuple[BlockType, ...]:
    """Returns the types that :func:`quantise_rows` can write."""
    return tuple(type for type in GGML_TYPES.values() if _native.can_quantise(type.id))


def quantise_rows(
    values: npt.ArrayLike,
    type: BlockType | str,
    importance: npt.ArrayLike | None = None,
    threads: int | None = None,
) -> Bytes:
    """Packs float32 ``values`` ``[rows, n]`` into blocks, as bytes ``[rows, row_bytes]``.

    ``importance`` ``[n]`` multiplies the squared error of each column (llama.cpp's ``quant_weights``). The
    bytes depend neither on ``threads`` (None: as affinity and cgroup quota allow) nor on the processor.
    ``BlockTypeError``: the type cannot be written, a row is not a multiple of its block, or a value does not
    fit, as in :func:`hotcold.formats.blocks.quantise`. ``UserError``: the importance is not ``n`` finite
    numbers of 0 and more, or the threads cannot be started."""
    kind = ggml_type(type)
    if not _native.can_quantise(kind.id):
        choices = ", ".join(each.name for each in written_types())
        raise BlockTypeError(f"cannot write {kind.name}: choose from {choices}")
    array = np.ascontiguousarray(values, np.float32)
    if array.ndim != 2 or array.size == 0:
        raise BlockTypeError(f"cannot quantise an array of shape {array.shape}: rows [rows, n] are needed")
    packed = np.empty(kind.data_shape(array.shape), np.uint8)
    weights = None if importance is None else _checked(importance, array.shape[1])
    try:
        pool = _native.Pool(find_cores().wanted if threads is None else threads)
    except ValueError as error:
        raise UserError(str(error)) from None
    try:
        _native.quantise_rows(default_isa(), kind.id, array, weights, packed, pool)
    except ValueError as error:
        raise BlockTypeError(str(error)) from None
    return packed


def _checked(importance: npt.ArrayLike, n: int) -> Floats:
    weights = np.ascontiguousarray(importance, np.float32)
    if weights.shape != (n,):
        raise UserError(f"importance of shape {weights.shape}: one number for each of {n} columns is needed")
    wrong = weights[~((weights >= 0) & np.isfinite(weights))]
    if len(wrong):
        raise UserError(f"importance {wrong[0]:g}: finite numbers of 0 and more are needed")
    return weights
