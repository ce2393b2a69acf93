"""Maps a model's neurons to cells: each layer is a column of cells, from hot to cold.

If the activation gives zeros, active neurons are counted; otherwise the neurons with the largest coefficients
of down. A cell is one neuron. In a model with too many neurons it is several of one kind that are active
about equally often."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.backend import mask_bits
from hotcold.placement.profiles import read_profile
from hotcold.placement.sizes import sizes_of_file
from hotcold.placement.split import SplitDevices
from hotcold.runtime.session import LoadedModel
from hotcold.sparse.ffn import SplitWeights

MOST_CELLS = 8192  #: limit of a whole model
HOT_PART = 0.2  #: hot share of a layer's neurons without a GPU: the neurons that are active most often

_LEVELS = 15  # levels of a cell with several neurons, in 4 bits

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Masks = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class MapLayout:
    """The neurons that the cells represent. Cells are in the order of the layers."""

    neurons: tuple[int, ...]  #: number in each layer
    hot: tuple[int, ...]  #: number of hot neurons in each layer
    cells: tuple[int, ...]  #: number in each layer
    hot_cells: tuple[int, ...]  #: number of hot cells in each layer, which come first
    bits: int  #: bits of a cell in a frame: 1 if a cell is one neuron, otherwise 4
    #: what determines hot neurons: a ``placement`` on the GPU, or a ``profile``; empty without either
    hot_by: str
    zeros: bool  #: whether the activation gives zeros; otherwise every neuron is active for every token
    #: for each cell, how often its neurons are active in the profile, 0 to 255, base64; or empty
    firing: str
    #: unit of the cells: each active ``neuron``, or, if the activation gives no zeros, each chosen ``expert``
    #: or each layer's ``strongest`` neurons, the tenth with the largest coefficients. There are no cells if
    #: this is ``neuron`` and ``zeros`` is false.
    unit: str = "neuron"


class NeuronMap:
    """Reduces masks of active neurons to cells, for a model as it is placed."""

    def __init__(self, model: LoadedModel) -> None:
        neurons = model.config.neurons
        firing = _firing(model)
        hot, hot_by = _hot(model, firing)
        sizes, bits = cell_sizes([(int(mask.sum()), int((~mask).sum())) for mask in hot])
        orders, begins, words = [], [], 0
        for i, mask in enumerate(hot):
            by_firing = np.arange(len(mask)) if firing is None else np.argsort(-firing[i], kind="stable")
            order = np.concatenate([by_firing[mask[by_firing]], by_firing[~mask[by_firing]]])
            places, mask_words = _places(model, i, mask)
            orders.append(64 * words + places[order])
            words += mask_words
            begins.append(order)
        cells = np.concatenate([each for both in sizes for each in both])
        self._bits = np.concatenate(orders)  # position of each neuron in the bits of all masks
        self._sizes, self._starts = cells, np.cumsum(cells) - cells
        self._hot = np.concatenate([np.arange(len(mask)) < mask.sum() for mask in hot])
        self._layers = np.cumsum([0, *map(len, hot[:-1])])
        shares = None
        if firing is not None:
            shares = np.concatenate([f[order] for f, order in zip(firing, begins, strict=True)])
        self.layout = MapLayout(
            neurons=tuple(neurons),
            hot=tuple(int(mask.sum()) for mask in hot),
            cells=tuple(len(h) + len(c) for h, c in sizes),
            hot_cells=tuple(len(h) for h, _ in sizes),
            bits=bits,
            hot_by=hot_by,
            zeros=gives_zeros(model),
            unit="strongest" if tells_strongest(model) else "neuron",
            firing="" if shares is None else _text(_levels(shares, self._sizes, self._starts)),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of one token's cells."""
        return -(-len(self._sizes) * self.layout.bits // 8)

    def token_masks(self, masks: Sequence[Masks], row: int) -> Masks:
        """Returns one row of the layers' masks ``[rows, words]``, concatenated."""
        return np.concatenate([mask[row] for mask in masks])

    def cells(self, token_masks: Masks) -> tuple[str, list[tuple[int, int]]]:
        """Returns cells in base64, and the numbers of active hot and cold neurons of each token.
        ``token_masks`` has a result of :meth:`token_masks` for each token, ``[tokens, words]``; cells are in
        the order of tokens.

        The lower bits of a byte have the lower cell. Four bits state the active share ``p`` of a cell's
        neurons: ``15 sqrt(p)``, rounded up."""
        bits = np.unpackbits(np.ascontiguousarray(token_masks).view(np.uint8), axis=1, bitorder="little")
        active = bits[:, self._bits]
        hot = active[:, self._hot].sum(1, np.int64)
        counts = list(zip(hot.tolist(), (active.sum(1, np.int64) - hot).tolist(), strict=True))
        return packed_cells(active, self._sizes, self._starts, self.layout.bits), counts


def gives_zeros(model: LoadedModel) -> bool:
    """Returns whether the activation leaves some neurons inactive."""
    return model.config.whole is None


def tells_strongest(model: LoadedModel) -> bool:
    """Returns whether the FFN op can report the neurons with the largest coefficients. It can if down is a
    dot product over a whole layer that the CPU computes."""
    config = model.config
    dot_over_layer = config.down_layout == "by_output" and not config.normed and not any(config.skips)
    has_neurons = any(config.neurons) and config.experts is None
    return dot_over_layer and has_neurons and not model.gpus and not gives_zeros(model)


def cell_sizes(kinds: Sequence[Sequence[int]]) -> tuple[list[list[Ints]], int]:
    """Divides each layer's neurons, of one or two kinds, into cells. Returns the number of neurons in each
    cell, by layer and kind, and the bits of a cell."""
    layers = [sum(each) for each in kinds]
    fitting = (s for s in range(1, sum(layers)) if sum(_count(n, s) for n in layers) <= MOST_CELLS)
    size = next(fitting, 1)
    return [[_sizes(n, size) for n in each] for each in kinds], 1 if size == 1 else 4


def packed_cells(active: npt.NDArray[np.uint8], sizes: Ints, starts: Ints, bits: int) -> str:
    """Returns cells in base64; ``active``, ``[tokens, neurons]`` in the order of cells, has 1 if active."""
    if bits == 1:
        return _text(np.packbits(active, axis=1, bitorder="little"))
    levels = np.ceil(_LEVELS * np.sqrt(_means(active, sizes, starts))).astype(np.uint8)
    if levels.shape[1] % 2:
        levels = np.pad(levels, ((0, 0), (0, 1)))
    return _text(levels[:, ::2] | levels[:, 1::2] << 4)


def _means(values: npt.NDArray[Any], sizes: Ints, starts: Ints) -> npt.NDArray[np.float64]:
    """Returns the mean over each cell's neurons, along the last axis."""
    return np.asarray(np.add.reduceat(values, starts, axis=-1, dtype=np.float64) / sizes)


def _levels(shares: npt.NDArray[Any], sizes: Ints, starts: Ints) -> npt.NDArray[np.uint8]:
    return np.rint(255 * _means(shares, sizes, starts)).astype(np.uint8)


def _text(values: npt.NDArray[np.uint8]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _count(neurons: int, size: int) -> int:
    """Returns the maximum number of a layer's cells: one hot and one cold cell may be partly filled."""
    return -(-neurons // size) + (size > 1)


def _sizes(neurons: int, size: int) -> Ints:
    """Returns the sizes of the cells of ``neurons`` neurons."""
    ends = np.append(np.arange(size, neurons, size), neurons) if neurons else np.zeros(0, np.int64)
    return np.diff(ends, prepend=0)


def _firing(model: LoadedModel) -> list[npt.NDArray[Any]] | None:
    """Returns how often neurons are active, from the profile next to the model; None without a valid one."""
    path = model.path.with_suffix(".profile.gguf")
    if not path.exists():
        return None
    with open_gguf(model.path) as file:
        sizes = sizes_of_file(file, model.config, model.limits, model.plan.request.cache_type)
    try:
        return list(read_profile(path, sizes).firing)
    except UserError:
        return None  # damaged, or another model's: placement, which needs it, reports the error


def _hot(model: LoadedModel, firing: list[npt.NDArray[Any]] | None) -> tuple[list[Bools], str]:
    """Returns masks of the hot neurons of each layer, and what determines them."""
    devices, neurons = model.devices, model.config.neurons
    if isinstance(devices, SplitDevices):
        placed = zip(devices.masks, devices.layers, strict=True)
        return [mask & (layer is not model.backend) for mask, layer in placed], "placement"
    if firing is None:
        return [np.zeros(n, np.bool_) for n in neurons], ""
    return [_hottest(each) for each in firing], "profile"


def _hottest(firing: npt.NDArray[Any]) -> Bools:
    hottest = np.zeros(len(firing), np.bool_)
    hottest[np.argsort(-firing, kind="stable")[: int(HOT_PART * len(firing))]] = True
    return hottest


def _places(model: LoadedModel, layer: int, hot: Bools) -> tuple[Ints, int]:
    """Returns the bit of each neuron in its layer's mask, and the number of words of this mask."""
    weights, experts = model.weights.layers[layer].ffn, model.config.experts_of(layer)
    ends = experts.ends if experts else (len(hot),)
    if not isinstance(weights, SplitWeights):
        return mask_bits(ends), weights.words
    places = np.empty(len(hot), np.int64)
    for part, first in ((hot, 0), (~hot, 64 * weights.hot.words if weights.hot else 0)):
        places[part] = first + mask_bits([int(part[:end].sum()) for end in ends])
    return places, weights.words
