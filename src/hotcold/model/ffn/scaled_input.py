"""Experts whose factor multiplies their input, not their output (Llama 4)."""

from dataclasses import dataclass

from hotcold.kernels.backend import Batch, Buffer, Chosen, Matrix
from hotcold.model.ffn.feed_forward import Adder, LayerFFNs
from hotcold.model.ffn.routed import RoutedFFN
from hotcold.model.mixers.side import Side


@dataclass(frozen=True, kw_only=True)
class ScaledInputFFN(RoutedFFN):
    scale_input: Matrix  # (D, 1), all 1

    def experts_adder(self, side: Side, given: LayerFFNs, chosen: Chosen) -> Adder:
        ops, ones = side.ops, Chosen(chosen.ids, side.ones())
        scaled = side.room("experts in", self.scale_input.shape[0])

        def add(read: Buffer, batch: Batch, out: Buffer) -> None:
            ops.linear(chosen.factors, [self.scale_input], batch, [scaled])
            ops.multiply(scaled, read, batch, scaled, activation="none")
            given.neurons(scaled, given.residual, batch, out, ones)

        return add
