"""The part of ``Backend`` for heads of latent attention (MLA, arXiv 2405.04434)."""

from typing import Protocol

from hotcold.kernels.arrays import Buffer
from hotcold.kernels.batch import Batch
from hotcold.kernels.weights import Matrix


class HeadOps(Protocol):
    def linear_heads(self, x: Buffer, weights: Matrix, batch: Batch, out: Buffer) -> None:
        """Computes ``out[t, h] = w_h @ x[t, h, -I:]``, with rows ``h * O`` to ``(h + 1) * O`` of the weights
        ``(H * O, I)`` as ``w_h``. x ``[T, H, I or more]``, out ``[T, H, O]``. Inputs are quantised as in
        :meth:`Backend.linear`."""

    def join_heads(self, x: Buffer, y: Buffer, batch: Batch, out: Buffer) -> None:
        """Sets ``out[t, h]`` to ``x[t, h]``, then ``y[t, h]``; all are ``[T, H, values]``."""
