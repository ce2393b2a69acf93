"""Tensors to be written to a file: the writer's interface, and tensors that are made while writing."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from hotcold.formats.blocks import BlockType, Bytes

#: Bytes of a piece of a tensor that is read or written piece by piece.
PIECE_BYTES = 4 << 20


class Writable(Protocol):
    """A tensor that can be written: one in memory, or a :class:`NewTensor`."""

    @property
    def type(self) -> BlockType: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def pieces(self) -> Iterable[Bytes]:
        """Its bytes in order, in C-contiguous pieces that are taken one at a time."""
        ...


@dataclass(frozen=True)
class NewTensor:
    """A tensor whose bytes are made while it is written: ``make`` yields its :meth:`~Writable.pieces`."""

    type: BlockType
    shape: tuple[int, ...]  #: in NumPy order, outermost dimension first
    make: Callable[[], Iterable[Bytes]]

    @property
    def nbytes(self) -> int:
        empty = 0 in self.shape  # PowerInfer's list for a layer without hot neurons
        return 0 if empty else math.prod(self.type.data_shape(self.shape))

    def pieces(self) -> Iterable[Bytes]:
        return self.make()
