"""Interfaces of a backend's weights; each backend has its own layout."""

from typing import Protocol


class Matrix(Protocol):
    """A weight matrix in a backend's own layout."""

    @property
    def shape(self) -> tuple[int, int]: ...  # (rows, columns)
    @property
    def nbytes(self) -> int: ...


class FFNWeights(Protocol):
    """An FFN of one layer in a backend's own layout."""

    @property
    def neurons(self) -> int: ...  # of all experts together
    @property
    def words(self) -> int: ...  # 64-bit words in a row of its masks
    @property
    def nbytes(self) -> int: ...
    #: Bytes of one gate, up and down row, and of the scales that one run of down rows shares; 0 without.
    @property
    def row_bytes(self) -> tuple[int, int, int, int]: ...
    @property
    def runs(self) -> int: ...  # runs of down rows that share scales; 0 where each row has its own


class PredictorWeights(Protocol):
    @property
    def nbytes(self) -> int: ...
