"""FFNs that layers are given when a model is loaded."""

from typing import Protocol, runtime_checkable

from hotcold.kernels.backend import Batch, Buffer, Chosen, FFNStats


class AnyFFN(Protocol):
    """An FFN that a layer is given when the model is loaded."""

    def __call__(
        self,
        normed: Buffer,
        residual: Buffer,
        batch: Batch,
        out: Buffer,
        chosen: Chosen | None = None,
        gates: Buffer | None = None,
    ) -> None:
        """Adds ``ffn(normed)`` to ``out``; all ``[T, D]``. ``residual`` is what ``normed`` was made from, or
        the same buffer; ``out`` may be ``residual``: read it before writing. ``chosen``, of experts, is there
        where the layer has any, and ``gates`` where these are computed before."""


@runtime_checkable
class Skipping(Protocol):
    """Says, where a layer computes its neurons itself, whether it leaves out those whose gate does not fire,
    and where it counts the others."""

    @property
    def skips(self) -> bool: ...
    @property
    def stats(self) -> FFNStats | None: ...
