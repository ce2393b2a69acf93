"""Transposes down matrices: rows by neuron become rows by output, or the reverse."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from hotcold.formats.blocks import BlockType, BlockTypeError, Bytes, Tensor
from hotcold.formats.gguf import GGUFFile
from hotcold.kernels.quantising import quantise_rows
from hotcold.quantize.rewriting import Job, PlannedTensor, QuantizeError

#: Weights that a job holds in float32, unless one block of columns has more.
_PANEL_WEIGHTS = 1 << 22
_READ_BYTES = 1 << 20


def transposed(source: GGUFFile, name: str, type: BlockType) -> PlannedTensor:
    """A tensor ``(..., R, C)`` as ``(..., C, R)``, in blocks of ``type`` along R. It is lossless if both
    types are float types and ``type`` holds the values; otherwise the blocks are quantised again.

    ``QuantizeError``: the tensor has no such rows, or R is no multiple of a block; while writing: it holds
    NaN or infinity, or values that the type cannot hold."""
    info = source.tensors[name]
    if info.type.decode is None or len(info.shape) < 2:
        raise QuantizeError(f"tensor {name} is {info.type.name} {info.shape}: it cannot be transposed")
    *outer, rows, columns = info.shape
    if rows % type.weights:
        fix = "choose another `type`, such as Q8_0 or F16"
        raise QuantizeError(
            f"tensor {name} would have rows of {rows} weights, and {type.name} needs {type.weights}: {fix}"
        )
    job = partial(_panel, source, name, type)
    return PlannedTensor(type, (*outer, columns, rows), partial(_cut, info.type, info.shape, job))


def _cut(type: BlockType, shape: tuple[int, ...], job: partial[Bytes]) -> Iterator[Job]:
    """Jobs for runs of columns of each matrix, in whole blocks."""
    *outer, rows, columns = shape
    step = max(1, _PANEL_WEIGHTS // (rows * type.weights)) * type.weights
    for matrix in range(int(np.prod(outer, dtype=np.int64))):
        for start in range(0, columns, step):
            yield partial(job, matrix, start, min(columns, start + step))


def _panel(source: GGUFFile, name: str, type: BlockType, matrix: int, start: int, stop: int) -> Bytes:
    """Columns ``start`` to ``stop`` of one matrix, as rows."""
    info = source.tensors[name]
    rows, old = info.shape[-2], info.type
    panel = np.empty((stop - start, rows), np.float32)
    blocks = slice(start // old.weights * old.nbytes, -(-stop // old.weights) * old.nbytes)
    step = max(1, _READ_BYTES // old.row_bytes(info.shape[-1]))
    for first in range(0, rows, step):
        last = min(rows, first + step)
        data = source.read_rows(name, matrix * rows + first, matrix * rows + last)
        part = Tensor(old, (last - first, stop - start), np.ascontiguousarray(data[:, blocks]))
        panel[:, first:last] = part.dequantise().T
    if not np.isfinite(panel).all():
        raise QuantizeError(f"tensor {name} holds NaN or infinity: the file is damaged; make it again")
    try:
        return quantise_rows(panel, type, threads=1)
    except BlockTypeError as error:
        raise QuantizeError(f"tensor {name} as {type.name}: {error}") from None
