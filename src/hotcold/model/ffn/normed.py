"""An FFN whose neurons are normalised before down (BitNet b1.58, arXiv 2402.17764).

The norm's mean is over all neurons of a token, so ops of mixers compute the FFN. Zeros stay zeros and add
nothing to the mean, so no up row of a neuron with a zero gate is read."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hotcold.kernels.backend import Batch, Buffer, Matrix, Norm
from hotcold.model.ffn.feed_forward import NO_NEURONS, FeedForward, LayerFFNs
from hotcold.model.ffn.given_ffn import Skipping
from hotcold.model.keys import Keys, ModelError
from hotcold.model.mixers.device_buffers import DeviceBuffers, Mixer
from hotcold.model.reading import Shape, TensorReader

#: Supported activations: of published models, and of earlier models.
ACTIVATIONS = ("relu2", "silu")
#: The rotary base of models with the first activation, for files without an activation.
_BASE = 500000.0


def read_activation(keys: Keys) -> tuple[str, tuple[str, ...]]:
    """Reads the activation of a file without our own key for it, and notes on its source."""
    if "hidden_activation" in keys:
        return keys.choice("hidden_activation", ACTIVATIONS, ACTIVATIONS[0]), ()
    base = keys.number("rope.freq_base", 0, 1e12, default=10000.0)
    kind = ACTIVATIONS[base != _BASE]
    return kind, (f"the file does not say its activation: {kind} goes with a rotary base of {base:g}",)


@dataclass(frozen=True)
class NormedShape:
    """FFN of one layer: ``down(norm(act(gate(x)) * up(x)))``."""

    neurons: int
    activation: str  #: one of :data:`ACTIVATIONS`
    ops: ClassVar[tuple[str, ...]] = ()  #: ops that some backends lack

    @property
    def buffers(self) -> dict[str, Shape]:
        """Names and row shapes of buffers (:meth:`DeviceBuffers.buffer`)."""
        return dict.fromkeys(("gates", "neurons"), (self.neurons,))

    def tensors(self, dim: int, blk: str) -> dict[str, Shape]:
        """Returns shapes by name of a layer's required tensors."""
        n = self.neurons
        shapes: dict[str, Shape] = {"gate": (n, dim), "up": (n, dim), "down": (dim, n), "sub_norm": (n,)}
        return {f"{blk}ffn_{part}.weight": shape for part, shape in shapes.items()}

    def read(self, reader: TensorReader, blk: str) -> "NormedFFN":
        """Reads a layer's weights; errors as in :func:`load_weights`."""
        gate, up, down = (reader.matrix(f"{blk}ffn_{part}") for part in ("gate", "up", "down"))
        return NormedFFN(self, gate, up, down, reader.norm(f"{blk}ffn_sub_norm"))


def read_normed(neurons: Sequence[int], activation: str, down_layout: str) -> tuple[NormedShape, ...]:
    """Makes the shapes of all layers."""
    for key, value, allowed in (
        ("activation", activation, ACTIVATIONS),
        ("down_layout", down_layout, ("by_output",)),
    ):
        if value not in allowed:
            needed = f"with a norm before down {' or '.join(allowed)} is needed"
            raise ModelError(f"hotcold.ffn.{key} is {value}: {needed}")
    return tuple(NormedShape(n, activation) for n in neurons)


@dataclass(frozen=True)
class NormedFFN(FeedForward):
    neurons = NO_NEURONS
    shape: NormedShape
    gate: Matrix  # (N, D)
    up: Matrix  # (N, D)
    down: Matrix  # (D, N)
    norm: Norm  # over N

    @property
    def matrices(self) -> list[Matrix]:
        return [self.gate, self.up, self.down]

    @property
    def row_bytes(self) -> tuple[int, int, int, int]:
        """As in FFNWeights, for rows that are read for active neurons."""
        return 0, self.up.nbytes // self.shape.neurons, 0, 0

    def names(self, blk: str, present: Container[str]) -> list[str]:
        return [f"{blk}ffn_{part}.weight" for part in ("gate", "up", "down")]

    def mixer(self, device: DeviceBuffers, state: Sequence[Buffer], ffns: LayerFFNs) -> Mixer:
        """Makes the FFN on a backend. If the layer's FFN function skips neurons, only up rows of active ones
        are read, and counted: the bits are the same."""
        ops, shape = device.ops, self.shape
        gates, neurons = (device.buffer(name, *row) for name, row in shape.buffers.items())
        skip, stats = False, None
        if isinstance(ffns.neurons, Skipping):
            skip, stats = ffns.neurons.skips, ffns.neurons.stats

        def feed_forward(read: Buffer, batch: Batch, out: Buffer, *, add: bool) -> None:
            if skip:
                ops.linear(read, [self.gate], batch, [gates])
                ops.linear(read, [self.up], batch, [neurons], where=gates, stats=stats)
            else:
                ops.linear(read, [self.gate, self.up], batch, [gates, neurons])
            if shape.activation == "relu2":  # relu(g)^2 is relu(g) twice
                ops.multiply(neurons, gates, batch, neurons, activation="relu")
                ops.multiply(neurons, gates, batch, neurons, activation="relu")
            else:
                ops.multiply(neurons, gates, batch, neurons, activation=shape.activation)
            ops.norm(neurons, self.norm, batch, neurons)
            ops.linear(neurons, [self.down], batch, [out], accumulate=add)

        return feed_forward
