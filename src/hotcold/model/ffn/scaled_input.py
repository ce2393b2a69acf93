"""Experts whose factor multiplies their input instead of their output (Llama 4)."""

from dataclasses import dataclass

from hotcold.kernels.backend import Batch, Buffer, Chosen, Matrix
from hotcold.model.ffn.feed_forward import Adder, LayerFFNs
from hotcold.model.ffn.routed import RoutedFFN
from hotcold.model.mixers.device_buffers import DeviceBuffers


@dataclass(frozen=True, kw_only=True)
class ScaledInputFFN(RoutedFFN):
    scale_input: Matrix  # (D, 1), all 1

    def experts_adder(self, device: DeviceBuffers, ffns: LayerFFNs, chosen: Chosen) -> Adder:
        ops, ones = device.ops, Chosen(chosen.ids, device.ones())
        scaled = device.buffer("experts in", self.scale_input.shape[0])

        def add(read: Buffer, batch: Batch, out: Buffer) -> None:
            ops.linear(chosen.factors, [self.scale_input], batch, [scaled])
            ops.multiply(scaled, read, batch, scaled, activation="none")
            ffns.neurons(scaled, ffns.residual, batch, out, ones)

        return add
