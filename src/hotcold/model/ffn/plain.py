"""An FFN whose neurons all rows have."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from hotcold.kernels.backend import Batch, Buffer, FFNWeights, Matrix
from hotcold.model.ffn.feed_forward import Adder, FeedForward, LayerFFNs
from hotcold.model.ffn.gate_cut import GateCut
from hotcold.model.mixers.device_buffers import DeviceBuffers
from hotcold.model.mixers.token_shift import TokenShift


@dataclass(frozen=True)
class PlainFFN(FeedForward):
    neurons: FFNWeights
    gates: GateCut | None = None  #: where gates depend on each other
    shift: TokenShift | None = None  #: where rows are moved towards the rows before them first

    @property
    def matrices(self) -> list[Matrix]:
        return [self.gates.matrix] if self.gates else []

    def names(self, blk: str, present: Container[str]) -> list[str]:
        return [f"{blk}ffn_gate.weight"] if self.gates else []

    def adder(self, device: DeviceBuffers, state: Sequence[Buffer], given: LayerFFNs) -> Adder:
        shift = self.shift.mixer(device, state) if self.shift else None

        def add(read: Buffer, batch: Batch, out: Buffer) -> None:
            read = shift(read, batch) if shift else read
            gates = self.gates.compute(device, read, batch) if self.gates else None
            given.neurons(read, given.residual, batch, out, None, gates)

        return add
