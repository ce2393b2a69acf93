"""A layer is a tuple of blocks, each of which adds to the residual stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from hotcold.kernels.backend import FFNWeights, Matrix, Norm
from hotcold.model.experts import Apart, Latent, Router, SharedExpert
from hotcold.model.gate_cut import GateCut
from hotcold.model.mixers.mixer import MixerWeights
from hotcold.model.mixers.token_shift import TokenShift
from hotcold.model.normed_ffn import NormedWeights


@dataclass(frozen=True)
class FeedForward:
    """The weights of an FFN. Where its neurons are experts', it has a router, and perhaps a shared expert."""

    neurons: FFNWeights
    router: Router | None = None
    shared: SharedExpert | None = None
    latent: Latent | None = None
    apart: Apart | None = None  #: where the shared expert is an ordinary FFN beside the others
    gates: GateCut | None = None  #: where these depend on each other
    shift: TokenShift | None = None  #: where rows are moved towards those before them first

    @property
    def matrices(self) -> list[Matrix]:
        """The matrices that a step reads whole."""
        router = self.router.weights if self.router else None
        gate = self.shared.gate if self.shared else None
        latent = [self.latent.down, self.latent.up] if self.latent else []
        cut = self.gates.matrix if self.gates else None
        return [*(each for each in (router, gate, cut) if each is not None), *latent]


@dataclass(frozen=True)
class NoNeurons:
    """The FFN of a layer that has none."""

    neurons: int = 0
    words: int = 0
    nbytes: int = 0
    row_bytes: tuple[int, int, int, int] = (0, 0, 0, 0)
    runs: int = 0


NO_NEURONS = NoNeurons()


P = TypeVar("P", covariant=True)


@dataclass(frozen=True)
class Block(Generic[P]):
    """``x += post_norm(part(norm(x)))``, where either norm may be missing; x is the residual stream. The part
    is the weights of a mixer or of an FFN, or what computes with them."""

    norm: Norm | None
    part: P
    post_norm: Norm | None = None
    #: reads x as the block before it did, not what that made of it: attention and FFN side by side
    beside: bool = False


def side_by_side(blocks: Sequence[Block[P]]) -> list[list[Block[P]]]:
    """The blocks in order; those that read the same x are together."""
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
    scale: float = 1.0  #: the residual stream is multiplied by it after the blocks

    @cached_property
    def feed_forward(self) -> FeedForward | None:
        """None where the layer is a mixer alone."""
        parts = (block.part for block in self.blocks)
        return next((part for part in parts if isinstance(part, FeedForward)), None)

    @property
    def normed(self) -> NormedWeights | None:
        """The FFN where its neurons are normalised before down."""
        parts = (block.part for block in self.blocks)
        return next((part for part in parts if isinstance(part, NormedWeights)), None)

    @property
    def ffn(self) -> FFNWeights:
        return self.feed_forward.neurons if self.feed_forward else NO_NEURONS

    @property
    def shared(self) -> SharedExpert | None:
        return self.feed_forward.shared if self.feed_forward else None

    @property
    def matrices(self) -> list[Matrix]:
        """The matrices that a step reads whole."""
        early = [self.early_router.weights] if self.early_router else []
        return [*early, *(matrix for block in self.blocks for matrix in block.part.matrices)]

    @property
    def dense_bytes(self) -> int:
        """Bytes of these."""
        return sum(each.nbytes for each in self.matrices)

    @property
    def shared_bytes(self) -> int:
        """Bytes of a shared expert's FFN."""
        return self.shared.ffn.nbytes if self.shared else 0
