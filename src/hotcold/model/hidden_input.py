"""Makes the first row of the block that guesses tokens (:mod:`draft_block`) of a hidden row and a token."""

from dataclasses import dataclass

from hotcold.kernels.backend import Batch, Buffer, Matrix, Norm
from hotcold.model.mixers.device_buffers import DeviceBuffers
from hotcold.model.reading import Shape


@dataclass(frozen=True)
class HiddenInput:
    """Makes a block's first row of the embedding of a token and of a hidden row."""

    dim: int
    token_norm: Norm
    hidden_norm: Norm
    of_token: Matrix  # (D, D)
    of_hidden: Matrix  # (D, D)

    def buffer(self, device: DeviceBuffers) -> Buffer:
        """Where a step's hidden rows are."""
        return device.buffer("hidden", self.dim)

    def compute(self, device: DeviceBuffers, batch: Batch, x: Buffer) -> None:
        """Sets x, which has the embeddings of tokens, to the block's first rows."""
        ops = device.ops
        token, hidden = device.buffer("normed token", self.dim), device.buffer("normed hidden", self.dim)
        ops.norm(x, self.token_norm, batch, token)
        ops.norm(self.buffer(device), self.hidden_norm, batch, hidden)
        ops.linear(token, [self.of_token], batch, [x])
        ops.linear(hidden, [self.of_hidden], batch, [x], accumulate=True)


def hidden_buffer_shapes(dim: int) -> dict[str, Shape]:
    """Names and shapes of a row, in :meth:`DeviceBuffers.buffer`, that this takes."""
    return dict.fromkeys(("hidden", "normed token", "normed hidden"), (dim,))
