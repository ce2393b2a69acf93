"""Describes the ops for heads of latent attention (MLA, arXiv 2405.04434), beside those of
:class:`~hotcold.kernels.backend.Backend`."""

from typing import Protocol

from hotcold.kernels.arrays import Buffer
from hotcold.kernels.batch import Batch
from hotcold.kernels.weights import Matrix


class HeadOps(Protocol):
    def linear_heads(self, x: Buffer, weights: Matrix, batch: Batch, out: Buffer) -> None:
        """``out[t, h] = w_h @ x[t, h, -I:]``, where ``w_h`` are rows ``h * O`` and on of the weights
        ``(H * O, I)``. x ``[T, H, I or more]``, out ``[T, H, O]``. Inputs are quantised as in
        :meth:`Backend.linear`."""

    def join_heads(self, x: Buffer, y: Buffer, batch: Batch, out: Buffer) -> None:
        """``out[t, h]`` is ``x[t, h]``, then ``y[t, h]``; all are ``[T, H, values]``."""
