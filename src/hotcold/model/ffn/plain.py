"""An FFN with the same neurons for all rows."""

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
    gates: GateCut | None = None  #: where a gate depends on the other gates
    shift: TokenShift | None = None  #: where rows are first mixed with the previous row

    @property
    def matrices(self) -> list[Matrix]:
        return [self.gates.matrix] if self.gates else []

    def names(self, blk: str, present: Container[str]) -> list[str]:
        return [f"{blk}ffn_gate.weight"] if self.gates else []

    def adder(self, device: DeviceBuffers, state: Sequence[Buffer], ffns: LayerFFNs) -> Adder:
        shift = self.shift.mixer(device, state) if self.shift else None

        def add(read: Buffer, batch: Batch, out: Buffer) -> None:
            read = shift(read, batch) if shift else read
            gates = self.gates.compute(device, read, batch) if self.gates else None
            ffns.neurons(read, ffns.residual, batch, out, None, gates)

        return add
