"""Says what all FFNs of a layer have: weights, and ops in a step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hotcold.kernels.backend import Batch, Buffer, Chosen, FFNWeights, Matrix, Norm
from hotcold.model.ffn.given_ffn import AnyFFN
from hotcold.model.mixers.device_buffers import DeviceBuffers, Mixer

#: Adds the FFN of ``read`` ``[T, D]`` to ``out`` ``[T, D]``.
Adder: TypeAlias = Callable[[Buffer, Batch, Buffer], None]


@dataclass(frozen=True)
class LayerFFNs:
    """The FFNs that a layer was given at loading, and the buffers they share with its other blocks."""

    neurons: AnyFFN
    residual: Buffer  #: the residual stream
    shared: AnyFFN | None = None  #: the shared expert's; None computes all of its neurons
    chosen: Chosen | None = None  #: the experts of each row; None in a layer without experts


@dataclass(frozen=True)
class NoNeurons:
    """The weights of an FFN whose neurons the FFN op does not compute."""

    neurons: int = 0
    words: int = 0
    nbytes: int = 0
    row_bytes: tuple[int, int, int, int] = (0, 0, 0, 0)
    runs: int = 0


NO_NEURONS = NoNeurons()


class FeedForward(ABC):
    """The weights of a layer's FFN."""

    neurons: FFNWeights  #: of the FFN op; :data:`NO_NEURONS` where it computes none

    @property
    @abstractmethod
    def matrices(self) -> list[Matrix]:
        """The matrices that a step reads whole."""

    @abstractmethod
    def names(self, blk: str, present: Container[str]) -> Sequence[str]:
        """The tensor that each of :attr:`matrices` was read from, in the same order."""

    def router_norm(self, norm: Norm | None) -> Norm | None:
        """The norm between the residual stream and a router; ``norm`` is the block's."""
        return norm

    def mixer(self, device: DeviceBuffers, state: Sequence[Buffer], given: LayerFFNs) -> Mixer:
        """Makes the FFN on a backend, with the layer's part of :class:`SequenceState`."""
        ops, add_to = device.ops, self.adder(device, state, given)

        def feed_forward(read: Buffer, batch: Batch, out: Buffer, *, add: bool) -> None:
            if not add:
                ops.add(out, given.residual, batch, keep=0, scale=0)
            add_to(read, batch, out)

        return feed_forward

    def adder(self, device: DeviceBuffers, state: Sequence[Buffer], given: LayerFFNs) -> Adder:
        """Makes the function that adds the FFN's output."""
        raise NotImplementedError
