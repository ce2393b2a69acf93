"""Interface of the FFN functions that a model gets for its layers at loading."""

from typing import Protocol, runtime_checkable

from hotcold.kernels.backend import Batch, Buffer, Chosen, FFNStats


class AnyFFN(Protocol):
    """FFN function of a layer, made when the model is loaded."""

    def __call__(
        self,
        normed: Buffer,
        residual: Buffer,
        batch: Batch,
        out: Buffer,
        chosen: Chosen | None = None,
        gates: Buffer | None = None,
    ) -> None:
        """Adds ``ffn(normed)`` to ``out``; all ``[T, D]``. ``normed`` was computed from ``residual``, or is
        the same buffer. ``out`` may be ``residual``, so implementations read it before writing. ``chosen``:
        in layers with experts. ``gates``: if they are already computed."""


@runtime_checkable
class Skipping(Protocol):
    """True if a layer with its own computation skips inactive neurons, and where it counts the others."""

    @property
    def skips(self) -> bool: ...
    @property
    def stats(self) -> FFNStats | None: ...
