"""Weights as backends hold them, each in a layout of its own."""

from typing import Protocol


class Matrix(Protocol):
    """A weight matrix that a backend holds in its own layout."""

    @property
    def shape(self) -> tuple[int, int]: ...  # (rows, columns)
    @property
    def nbytes(self) -> int: ...


class FFNWeights(Protocol):
    """One layer's FFN in a backend's own layout."""

    @property
    def neurons(self) -> int: ...  # of all experts
    @property
    def words(self) -> int: ...  # 64-bit ones, of a row of its masks
    @property
    def nbytes(self) -> int: ...
    #: Bytes of one gate, up and down row, and of the scales that one run of down rows shares; 0 without.
    @property
    def row_bytes(self) -> tuple[int, int, int, int]: ...
    @property
    def runs(self) -> int: ...  # of down rows that share scales; 0 where each has its own


class PredictorWeights(Protocol):
    @property
    def nbytes(self) -> int: ...
