"""A layer as a tuple of blocks, each adding to the residual stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from hotcold.kernels.backend import FFNWeights, Matrix, Norm
from hotcold.model.ffn.feed_forward import NO_NEURONS, FeedForward
from hotcold.model.ffn.normed import NormedFFN
from hotcold.model.ffn.routed import RoutedFFN, Router, SharedExpert
from hotcold.model.mixers.mixer import MixerWeights

P = TypeVar("P", covariant=True)


@dataclass(frozen=True)
class Block(Generic[P]):
    """A block ``x += post_norm(part(norm(x)))`` on the residual stream x; either norm may be missing. The
    part is the weights of a mixer or FFN, or the function that computes with them."""

    norm: Norm | None
    part: P
    post_norm: Norm | None = None
    #: reads the same x as the previous block, not its output: attention and FFN in parallel
    beside: bool = False


def parallel_groups(blocks: Sequence[Block[P]]) -> list[list[Block[P]]]:
    """Groups the blocks, in order, by the x that they read."""
    groups: list[list[Block[P]]] = []
    for block in blocks:
        if block.beside:
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


@dataclass(frozen=True)
class LayerWeights:
    blocks: tuple[Block[MixerWeights | FeedForward], ...]
    early_router: Router | None = None  #: reads the layer's input, before its blocks
    scale: float = 1.0  #: multiplies the residual stream after the blocks

    @cached_property
    def feed_forward(self) -> FeedForward | None:
        """The FFN; None in a layer with only a mixer."""
        parts = (block.part for block in self.blocks)
        return next((part for part in parts if isinstance(part, FeedForward)), None)

    @property
    def normed(self) -> NormedFFN | None:
        """The FFN if its neurons are normalised before down."""
        return self.feed_forward if isinstance(self.feed_forward, NormedFFN) else None

    @property
    def ffn(self) -> FFNWeights:
        return self.feed_forward.neurons if self.feed_forward else NO_NEURONS

    @property
    def shared(self) -> SharedExpert | None:
        return self.feed_forward.shared if isinstance(self.feed_forward, RoutedFFN) else None

    @property
    def matrices(self) -> list[Matrix]:
        """The matrices that a step reads whole."""
        early = [self.early_router.weights] if self.early_router else []
        return [*early, *(matrix for block in self.blocks for matrix in block.part.matrices)]

    @property
    def dense_bytes(self) -> int:
        """Bytes of the matrices that a step reads whole."""
        return sum(each.nbytes for each in self.matrices)

    @property
    def shared_bytes(self) -> int:
        """Bytes of a shared expert's FFN."""
        return self.shared.ffn.nbytes if self.shared else 0
