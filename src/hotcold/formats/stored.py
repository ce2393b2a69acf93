"""Tensors that are not read yet: a backend reads them from the file piece by piece into its own layout."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from hotcold.formats.blocks import BlockType, Floats, Index, Tensor
from hotcold.formats.files import FileError, RegularFile


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a file, or a part of it: ``rows`` rows of ``row_bytes`` bytes, from byte ``offset`` on.

    ``shape`` is the shape of the chosen part. ``chosen`` has ascending indices of rows or, with
    ``by_column``, of columns, counted in blocks of a row; None means all. Reading raises ``error``, with the
    path, if the file cannot be read or has changed. ``factors`` are as in :class:`Tensor`, ``[rows]``."""

    type: BlockType
    shape: tuple[int, ...]
    file: RegularFile
    offset: int
    rows: int
    row_bytes: int
    error: Callable[[FileError], ValueError]
    chosen: Index | None = None
    by_column: bool = False
    factors: Floats | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.type.data_shape(self.shape))

    def load(self) -> Tensor:
        """Reads the tensor into new memory at each call."""
        data = np.empty((self.rows, self.row_bytes), np.uint8)
        with self._errors():
            self.file.read_into(data.data.cast("B"), self.offset)
        if self.chosen is None:
            return Tensor(self.type, self.shape, data, self.factors)
        columns = self.row_bytes // self.type.nbytes * self.type.weights
        whole = Tensor(self.type, (self.rows, columns), data, self.factors)
        return whole.take_columns(self.chosen) if self.by_column else whole.take_rows(self.chosen)

    def flat(self) -> "StoredTensor":
        """The chosen rows as a matrix."""
        rows = self.rows if self.chosen is None or self.by_column else len(self.chosen)
        return replace(self, shape=(rows, self.shape[-1]))

    @property
    def row_factors(self) -> Floats | None:
        """Returns the factors of the chosen part's rows."""
        if self.factors is None or self.chosen is None or self.by_column:
            return self.factors
        chosen: Floats = self.factors[self.chosen]
        return chosen

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """Yields the file's descriptor: see :meth:`RegularFile.descriptor`."""
        with self._errors(), self.file.descriptor() as number:
            yield number

    def take_rows(self, chosen: Index | slice) -> "StoredTensor":
        """The tensor of these rows, not yet read. ``chosen`` has their ascending indices among the rows that
        this tensor has."""
        shape = self.shape[1:]
        if self.chosen is not None and not self.by_column:
            rows = self.chosen[chosen]
            return replace(self, shape=(len(rows), *shape), chosen=rows)
        if self.chosen is not None:
            raise ValueError("rows or columns of this tensor were chosen already: choose once")
        if isinstance(chosen, slice):
            start, stop, _ = chosen.indices(self.rows)
            offset = self.offset + start * self.row_bytes
            factors = None if self.factors is None else self.factors[start:stop]
            return replace(
                self, shape=(stop - start, *shape), offset=offset, rows=stop - start, factors=factors
            )
        return replace(self, shape=(len(chosen), *shape), chosen=chosen)

    def take_columns(self, chosen: Index) -> "StoredTensor":
        """The tensor of these columns, not yet read; their ascending indices count blocks of a row."""
        if self.chosen is not None:
            raise ValueError("rows or columns of this tensor were chosen already: choose once")
        shape = (*self.shape[:-1], len(chosen) * self.type.weights)
        return replace(self, shape=shape, chosen=chosen, by_column=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except FileError as error:
            raise self.error(error) from None


#: The tensors that a backend makes weights from.
AnyTensor: TypeAlias = Tensor | StoredTensor
