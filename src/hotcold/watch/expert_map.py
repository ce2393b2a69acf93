"""Maps the experts of a model to cells, if its activation gives no zeros. Each layer is a column of cells.

Every neuron of a chosen expert is active, so the chosen experts are the only difference between tokens."""

from collections.abc import Sequence

import numpy as np

from hotcold.kernels.backend import mask_words
from hotcold.placement.split import SplitDevices
from hotcold.runtime.session import LoadedModel
from hotcold.sparse.ffn import SplitWeights
from hotcold.watch.neuron_map import (
    Bools,
    Ints,
    MapLayout,
    Masks,
    NeuronMap,
    cell_sizes,
    gives_zeros,
    packed_cells,
)


class ExpertMap:
    """Reduces masks of active neurons to the chosen experts."""

    def __init__(self, model: LoadedModel) -> None:
        layers = range(model.config.layers)
        experts = [model.config.experts_of(i) for i in layers]
        counts = [each.count if each else 0 for each in experts]
        self._words = [_words(model, i) for i in layers]
        sizes, bits = cell_sizes([(n,) for n in counts])
        self._sizes = np.concatenate([each for (each,) in sizes])
        self._starts = np.cumsum(self._sizes) - self._sizes
        none = (0,) * len(counts)
        self.layout = MapLayout(
            neurons=tuple(counts),
            hot=none,
            cells=tuple(len(each) for (each,) in sizes),
            hot_cells=none,
            bits=bits,
            hot_by="",
            zeros=False,
            firing="",
            unit="expert",
        )

    @property
    def nbytes(self) -> int:
        """Bytes of one token's cells."""
        return -(-len(self._sizes) * self.layout.bits // 8)

    def token_masks(self, masks: Sequence[Masks], row: int) -> Bools:
        """Returns the experts of all layers that one row chose, from the layers' masks ``[rows, words]``."""
        chosen = []
        for mask, parts in zip(masks, self._words, strict=True):
            active_before = np.cumsum(np.append(0, mask[row] != 0))
            counts = sum(active_before[ends] - active_before[begins] for begins, ends in parts)
            chosen.append(np.asarray(counts) > 0 if parts else np.zeros(0, np.bool_))
        return np.concatenate(chosen)

    def cells(self, token_masks: Bools) -> tuple[str, list[tuple[int, int]]]:
        """Returns the cells of the tokens' :meth:`token_masks`, like :meth:`NeuronMap.cells`; no expert is
        hot."""
        text = packed_cells(token_masks.astype(np.uint8), self._sizes, self._starts, self.layout.bits)
        return text, [(0, int(n)) for n in token_masks.sum(1)]


def shown_map(model: LoadedModel) -> NeuronMap | ExpertMap:
    """Returns a map of the neurons, or of the experts if all neurons of a chosen expert are active."""
    layers = range(model.config.layers)
    chooses_experts = any(
        (experts := model.config.experts_of(i)) and experts.count > experts.chosen for i in layers
    )
    return ExpertMap(model) if chooses_experts and not gives_zeros(model) else NeuronMap(model)


def _words(model: LoadedModel, layer: int) -> list[tuple[Ints, Ints]]:
    """Returns the ranges of each expert's words in its layer's mask; two in a split layer."""
    experts = model.config.experts_of(layer)
    if experts is None:
        return []
    weights, ends = model.weights.layers[layer].ffn, experts.ends
    if not isinstance(weights, SplitWeights):
        return [_bounds(ends, 0)]
    assert isinstance(model.devices, SplitDevices)
    hot, parts, first = model.devices.masks[layer], [], 0
    if weights.hot is not None:
        parts, first = [(hot, 0)], weights.hot.words
    parts.append((~hot, first))
    return [_bounds([int(part[:end].sum()) for end in ends], begin) for part, begin in parts]


def _bounds(ends: Sequence[int], first: int) -> tuple[Ints, Ints]:
    words = first + np.array(mask_words(ends))
    return words[:-1], words[1:]
