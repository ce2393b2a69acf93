"""Describes a tensor to write to a GGUF file, and its source."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hotcold.convert.checkpoint import Checkpoint, Rearrange
from hotcold.convert.quantised import Dequantised
from hotcold.convert.settings import ConvertError
from hotcold.convert.tensor_files import Array
from hotcold.formats.blocks import Tensor, block_type
from hotcold.model.reading import takes_factors


def unchanged(values: Array) -> Array:
    return values


@dataclass(frozen=True)
class Source:
    """A GGUF tensor, its shape in NumPy order, and the checkpoint's names for it."""

    name: str
    shape: tuple[int, ...]
    origins: tuple[str, ...]
    #: reads like :meth:`Checkpoint.load`, in GGUF's order; or returns finished blocks, or parts of a stack
    load: Callable[[], Array | Tensor | Iterator[Array | Tensor]] = field(compare=False)
    packed: str | None = None  #: the block type, if ``load`` gives finished blocks
    #: reads the factor of each matrix of finished blocks
    factors: Callable[[], Array] | None = field(default=None, compare=False)

    @property
    def origin(self) -> str:
        return self.origins[0]


def loaded(
    checkpoint: Checkpoint,
    target: str,
    origins: Sequence[str],
    shape: tuple[int, ...],
    rearrange: Rearrange = unchanged,
    result: tuple[int, ...] | None = None,
    *,
    moves_rows: bool = False,
) -> Source:
    """A source of one tensor of this shape, or of several tensors, stacked. ``result`` is the shape in GGUF's
    order. Blocks of NVFP4 stay blocks if ``rearrange`` only moves rows and readers support their factor."""
    for name in origins:
        check_shape(checkpoint, name, shape)
    result = result or shape
    files = [checkpoint.files[name].file for name in origins]
    whole = (len(origins), *result) if len(origins) > 1 else result
    if (
        (moves_rows or rearrange is unchanged)
        and len(shape) == 2
        and takes_factors(target)
        and shape[1] % 64 == 0
    ):
        matrices = [file for file in files if isinstance(file, Dequantised) and file.is_nvfp4]
        if len(matrices) == len(files):
            return _blocks(target, whole, origins, matrices, rearrange)
    if len(origins) == 1:
        return Source(target, result, tuple(origins), partial(checkpoint.load, origins[0], rearrange))

    def load() -> Iterator[Array]:
        for name in origins:
            yield checkpoint.load(name, rearrange)

    return Source(target, whole, tuple(origins), load)


def _blocks(
    target: str,
    shape: tuple[int, ...],
    origins: Sequence[str],
    matrices: Sequence[Dequantised],
    rearrange: Rearrange,
) -> Source:
    type = block_type("NVFP4")

    def load() -> Iterator[Tensor]:
        for matrix in matrices:
            yield Tensor(type, shape[-2:], np.ascontiguousarray(rearrange(matrix.blocks())))

    def factors() -> Array:
        return np.concatenate([matrix.factors() for matrix in matrices])

    return Source(target, shape, tuple(origins), load, type.name, factors)


def check_shape(checkpoint: Checkpoint, name: str, expected: tuple[int, ...]) -> None:
    if name not in checkpoint.files:
        raise ConvertError(f"{checkpoint.folder} has no tensor {name!r}: the checkpoint is not complete")
    if (shape := checkpoint.shape(name)) != expected:
        got = f"tensor {name!r} has shape {list(shape)}: config.json implies {list(expected)}"
        raise ConvertError(f"{checkpoint.folder}: {got}")
