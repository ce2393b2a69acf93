"""Interface of all FFNs of a layer: weights, and ops in a step."""

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
    """FFN functions made at loading for a layer, and buffers shared with its other blocks."""

    neurons: AnyFFN
    residual: Buffer  #: the residual stream
    shared: AnyFFN | None = None  #: of the shared expert; None computes all of its neurons
    chosen: Chosen | None = None  #: the experts of each row; None in a layer without experts


@dataclass(frozen=True)
class NoNeurons:
    """Weights of an FFN that does not use the FFN op."""

    neurons: int = 0
    words: int = 0
    nbytes: int = 0
    row_bytes: tuple[int, int, int, int] = (0, 0, 0, 0)
    runs: int = 0


NO_NEURONS = NoNeurons()


class FeedForward(ABC):
    """The weights of a layer's FFN."""

    neurons: FFNWeights  #: for the FFN op; :data:`NO_NEURONS` without it

    @property
    @abstractmethod
    def matrices(self) -> list[Matrix]:
        """The matrices that a step reads whole."""

    @abstractmethod
    def names(self, blk: str, present: Container[str]) -> Sequence[str]:
        """Returns the file's tensor of each of :attr:`matrices`, in the same order."""

    def router_norm(self, norm: Norm | None) -> Norm | None:
        """Returns the norm between the residual stream and a router; ``norm`` is the block's."""
        return norm

    def mixer(self, device: DeviceBuffers, state: Sequence[Buffer], ffns: LayerFFNs) -> Mixer:
        """Makes the FFN on a backend, with the layer's part of :class:`SequenceState`."""
        ops, add_to = device.ops, self.adder(device, state, ffns)

        def feed_forward(read: Buffer, batch: Batch, out: Buffer, *, add: bool) -> None:
            if not add:
                ops.add(out, ffns.residual, batch, keep=0, scale=0)
            add_to(read, batch, out)

        return feed_forward

    def adder(self, device: DeviceBuffers, state: Sequence[Buffer], ffns: LayerFFNs) -> Adder:
        """Makes the function that adds the FFN's output."""
        raise NotImplementedError
