"""Experts on rows of fewer dimensions than the model (Nemotron 3)."""

from dataclasses import dataclass

from hotcold.kernels.backend import Batch, Buffer, Chosen, Matrix
from hotcold.model.ffn.feed_forward import Adder, LayerFFNs
from hotcold.model.ffn.routed import RoutedFFN
from hotcold.model.mixers.device_buffers import DeviceBuffers


@dataclass(frozen=True, kw_only=True)
class LatentFFN(RoutedFFN):
    down: Matrix  # (latent, D)
    up: Matrix  # (D, latent)

    def _tensors(self, blk: str) -> dict[str, Matrix]:
        latent_matrices = {f"{blk}ffn_latent_down.weight": self.down, f"{blk}ffn_latent_up.weight": self.up}
        return super()._tensors(blk) | latent_matrices

    def experts_adder(self, device: DeviceBuffers, ffns: LayerFFNs, chosen: Chosen) -> Adder:
        ops = device.ops
        small, result = (device.buffer(f"latent {part}", self.down.shape[0]) for part in ("x", "out"))

        def add(read: Buffer, batch: Batch, out: Buffer) -> None:
            ops.linear(read, [self.down], batch, [small])
            ops.add(result, small, batch, keep=0, scale=0)
            ffns.neurons(small, ffns.residual, batch, result, chosen)
            ops.linear(result, [self.up], batch, [out], accumulate=True)

        return add
