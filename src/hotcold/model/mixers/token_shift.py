"""Interpolation between an FFN's input row and the row before it (RWKV's channel mix, arXiv 2305.13048)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hotcold.kernels.backend import Batch, Buffer
from hotcold.model.mixers.device_buffers import DeviceBuffers


@dataclass(frozen=True)
class TokenShift:
    mix: Buffer  # [1, D]
    dim: int

    def mixer(self, device: DeviceBuffers, state: Sequence[Buffer]) -> Callable[[Buffer, Batch], Buffer]:
        """Makes the function that returns the shifted rows; the last array of ``state`` is its state."""
        buffer, last = device.buffer("shifted", self.dim), state[-1]

        def shift(read: Buffer, batch: Batch) -> Buffer:
            device.ops.token_shift(read, self.mix, batch, last, [buffer])
            return buffer

        return shift
