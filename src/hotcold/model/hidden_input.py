"""Input of a draft block (:mod:`draft_block`), made of a hidden row and a token."""

from dataclasses import dataclass

from hotcold.kernels.backend import Batch, Buffer, Matrix, Norm
from hotcold.model.mixers.device_buffers import DeviceBuffers
from hotcold.model.reading import Shape


@dataclass(frozen=True)
class HiddenInput:
    """Makes a draft block's first row of a token's embedding and a hidden row."""

    dim: int
    token_norm: Norm
    hidden_norm: Norm
    of_token: Matrix  # (D, D)
    of_hidden: Matrix  # (D, D)

    def buffer(self, device: DeviceBuffers) -> Buffer:
        """Returns the buffer of a step's hidden rows."""
        return device.buffer("hidden", self.dim)

    def compute(self, device: DeviceBuffers, batch: Batch, x: Buffer) -> None:
        """Replaces x, the embeddings of tokens, by the block's first rows."""
        ops = device.ops
        token, hidden = device.buffer("normed token", self.dim), device.buffer("normed hidden", self.dim)
        ops.norm(x, self.token_norm, batch, token)
        ops.norm(self.buffer(device), self.hidden_norm, batch, hidden)
        ops.linear(token, [self.of_token], batch, [x])
        ops.linear(hidden, [self.of_hidden], batch, [x], accumulate=True)


def hidden_buffer_shapes(dim: int) -> dict[str, Shape]:
    """Returns names and row shapes of the buffers that this needs (:meth:`DeviceBuffers.buffer`)."""
    return dict.fromkeys(("hidden", "normed token", "normed hidden"), (dim,))
