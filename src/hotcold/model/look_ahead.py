"""Tries the router of the next layer of experts on the residual stream of the one before (Eliseev and Mazur,
arXiv 2312.17238), so that what is not in memory can be read meanwhile."""

from collections.abc import Sequence
from itertools import pairwise

from hotcold.kernels.backend import LookAhead, Norm
from hotcold.model.ffn.routed import RoutedFFN, Router
from hotcold.model.layer import LayerWeights


def look_aheads(layers: Sequence[LayerWeights]) -> list[LookAhead | None]:
    """Returns what each layer tries, without its ``x``: the residual stream before its FFN. None where no
    layer of experts follows, or where that one's router reads rows that were moved."""
    found: list[LookAhead | None] = [None] * len(layers)
    with_experts = [i for i, layer in enumerate(layers) if _router(layer) is not None]
    for before, after in pairwise(with_experts):
        own = _router(layers[after])
        feed_forward = layers[after].feed_forward
        assert own is not None and feed_forward is not None
        router, norm = own
        found[before] = LookAhead(
            norm=norm,
            weights=router.weights,
            k=router.experts.chosen,
            score=router.experts.score,
            selection_bias=router.selection_bias,
            groups=router.experts.groups,
            ffn=feed_forward.neurons,
        )
    return found


def _router(layer: LayerWeights) -> tuple[Router, Norm | None] | None:
    """A layer's router, and the norm between the residual stream and that."""
    if layer.early_router is not None:
        return layer.early_router, None
    for block in layer.blocks:
        part = block.part
        if isinstance(part, RoutedFFN) and part.router is not None:
            return part.router, part.router_norm(block.norm)
    return None
