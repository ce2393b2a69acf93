"""A placement carried out: weights in two halves, and the cold half's program beside the hot one's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from hotcold.kernels.backend import (
    Backend,
    BatchLimits,
    FFNTensors,
    FFNWeights,
    Floats,
    PredictorTensors,
    PredictorWeights,
)
from hotcold.model.devices import Devices
from hotcold.sparse.handshake import Handshake
from hotcold.sparse.hybrid_ffn import HybridFFN, Mailbox, SplitFFN, SplitWeights
from hotcold.sparse.placement import Placement

Bools = npt.NDArray[np.bool_]


def take_neurons(tensors: FFNTensors, chosen: Bools) -> FFNTensors:
    """The neurons of a mask ``[N]``, in ascending order, in the file's own blocks; without the bias of down.
    ``ValueError``: neurons whose down weights share blocks are not all on one side."""
    index, down = np.flatnonzero(chosen), tensors.down

    def vector(values: Floats | None) -> Floats | None:
        return None if values is None else values[index]

    if tensors.down_layout == "by_neuron":
        taken = down.take_rows(index)
    else:
        shared = down.type.weights
        blocks = chosen.reshape(-1, shared)
        if (blocks != blocks[:, :1]).any():
            seen = f"neurons whose down weights lie in one block, {shared} of type {down.type.name}"
            raise ValueError(f"the placement divides {seen}: make it with this version's hotcold plan")
        taken = down.take_columns(np.flatnonzero(blocks[:, 0]))
    return FFNTensors(
        None if tensors.gate is None else tensors.gate.take_rows(index),
        tensors.up.take_rows(index), taken, tensors.down_layout, tensors.activation, tensors.threshold,
        vector(tensors.gate_bias), vector(tensors.up_bias),
    )  # fmt: skip


def split_predictor(tensors: PredictorTensors, hot: Bools) -> PredictorTensors:
    """The same scores, those of hot neurons first, then, from a whole word of the mask on, the cold ones'.
    What fills up the word has a threshold that no score reaches."""
    filler = np.full(-int(hot.sum()) % 64, -1)
    order = np.concatenate([np.flatnonzero(hot), filler, np.flatnonzero(~hot)])
    second = tensors.second.take_rows(order)
    second.data[order < 0] = 0
    threshold = np.where(order < 0, np.float32(np.inf), tensors.threshold[order])
    return PredictorTensors(tensors.first, second, threshold, tensors.relu)


@dataclass(frozen=True)
class SplitDevices(Devices):
    hot: Backend
    masks: Sequence[Bools]

    @classmethod
    def place(cls, placement: Placement, cold: Backend, hot: Backend) -> Self:
        layers = tuple(hot if i in placement.layers else cold for i in range(len(placement.hot)))
        return cls(cold, layers, hot if placement.head else cold, hot, placement.hot)

    def ffn_weights(self, layer: int, tensors: FFNTensors) -> FFNWeights:
        if not self._is_split(layer):
            return super().ffn_weights(layer, tensors)
        hot, bias, mask = None, tensors.down_bias, self.masks[layer]
        if mask.any():  # then the bias, which is added once, is theirs
            hot = self.hot.ffn_weights(replace(take_neurons(tensors, mask), down_bias=bias))
            bias = None
        cold = self.embedding.ffn_weights(replace(take_neurons(tensors, ~mask), down_bias=bias))
        return SplitWeights(hot, cold)

    def predictor_weights(self, layer: int, tensors: PredictorTensors) -> PredictorWeights:
        if self._is_split(layer):
            tensors = split_predictor(tensors, self.masks[layer])
        return super().predictor_weights(layer, tensors)

    def _is_split(self, layer: int) -> bool:
        return self.layers[layer] is self.hot and not self.masks[layer].all()


def serve_cold(
    cold: Backend, ffns: Sequence[HybridFFN], limits: BatchLimits, dim: int, handshake: Handshake
) -> None:
    """Connects the split layers of ``ffns`` to one program on ``cold``, which the handshake then serves.
    Layers alternate between two mailboxes."""
    split = [(i, ffn) for i, ffn in enumerate(ffns) if isinstance(ffn, SplitFFN)]
    if not split:
        return
    batch, rows = cold.batch(limits), limits.tokens
    x, y = ([cold.zeros((rows, dim)) for _ in range(2)] for _ in range(2))
    for at, (layer, ffn) in enumerate(split):
        words = -(-ffn.weights.cold.neurons // 64)
        mask = cold.zeros((rows, words), np.uint64) if ffn.prediction else None
        ffn.connect(layer, Mailbox(batch, x[at % 2], mask, y[at % 2]), handshake)

    def program() -> None:
        for _, ffn in split:
            ffn.record_cold(cold)

    handshake.serve(cold.record(program))
