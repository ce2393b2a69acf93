"""A placement carried out: weights in two halves, and the cold half's program beside the hot one's."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.formats.stored import AnyTensor
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
from hotcold.sparse.hybrid_ffn import HybridFFN, SplitFFN, SplitWeights
from hotcold.sparse.placement import Placement

Bools = npt.NDArray[np.bool_]

#: The hot side gives up where a layer is not answered for so long.
ANSWER_TIMEOUT_S = 30.0


def take_neurons(tensors: FFNTensors, chosen: Bools) -> FFNTensors:
    """The neurons of a mask ``[N]``, in ascending order, in the file's own blocks; without the bias of down.
    ``ValueError``: neurons whose down weights share blocks are not all on one side."""
    index = np.flatnonzero(chosen)

    def vector(values: Floats | None) -> Floats | None:
        return None if values is None else values[index]

    by_neuron = tensors.down_layout == "by_neuron"
    return replace(
        tensors,
        gate=None if tensors.gate is None else tensors.gate.take_rows(index),
        up=tensors.up.take_rows(index),
        down=tensors.down.take_rows(index) if by_neuron else _columns(tensors.down, chosen),
        gate_bias=vector(tensors.gate_bias),
        up_bias=vector(tensors.up_bias),
        down_bias=None,
    )


def split_predictor(tensors: PredictorTensors, hot: Bools) -> PredictorTensors:
    """The same scores, those of hot neurons first, then, from a whole word of the mask on, the cold ones'.
    What fills up the word has a threshold that no score reaches."""
    filler = np.full(-int(hot.sum()) % 64, -1)
    order = np.concatenate([np.flatnonzero(hot), filler, np.flatnonzero(~hot)])
    second = tensors.second.take_rows(order)
    second.data[order < 0] = 0
    threshold = np.where(order < 0, np.float32(np.inf), tensors.threshold[order])
    return PredictorTensors(tensors.first, second, threshold, tensors.relu)


def _columns(tensor: AnyTensor, chosen: Bools) -> AnyTensor:
    """Whole blocks of each row; ``UserError`` where the mask divides one."""
    shared = tensor.type.weights
    blocks = chosen.reshape(-1, shared)
    if (blocks != blocks[:, :1]).any():
        seen = f"neurons whose down weights lie in one block, {shared} of type {tensor.type.name}"
        raise UserError(f"the placement divides {seen}: make it with this version's hotcold plan")
    return tensor.take_columns(np.flatnonzero(blocks[:, 0]))


@dataclass(frozen=True)
class SplitDevices(Devices):
    masks: Sequence[Bools]
    hot: Backend = field(kw_only=True)

    @classmethod
    def place(cls, placement: Placement, cold: Backend, hot: Backend) -> Self:
        layers = tuple(hot if i in placement.layers else cold for i in range(len(placement.hot)))
        return cls(cold, layers, hot if placement.head else cold, placement.hot, hot=hot)

    def ffn_weights(self, layer: int, tensors: FFNTensors) -> FFNWeights:
        if not self._is_split(layer):
            return super().ffn_weights(layer, tensors)
        mask = self.masks[layer]
        bias = tensors.down_bias
        hot = None
        if mask.any():
            hot = self.hot.ffn_weights(replace(take_neurons(tensors, mask), down_bias=bias))
            bias = None  # it is added once
        cold = self.embedding.ffn_weights(replace(take_neurons(tensors, ~mask), down_bias=bias))
        return SplitWeights(hot, cold)

    def predictor_weights(self, layer: int, tensors: PredictorTensors) -> PredictorWeights:
        if self._is_split(layer):
            tensors = split_predictor(tensors, self.masks[layer])
        return super().predictor_weights(layer, tensors)

    def _is_split(self, layer: int) -> bool:
        return self.layers[layer] is self.hot and not self.masks[layer].all()


class ColdSide:
    """The cold halves of split layers, which a thread of its own computes when they are posted."""

    def __init__(
        self, cold: Backend, hot: Backend, ffns: Sequence[HybridFFN], limits: BatchLimits, dim: int
    ) -> None:
        split = {i: ffn for i, ffn in enumerate(ffns) if isinstance(ffn, SplitFFN)}
        self.link = hot.link(ANSWER_TIMEOUT_S)
        words = {layer: ffn.cold_words for layer, ffn in split.items()}
        boxes = hot.mailboxes(self.link, limits, dim, words)
        programs = [(layer, ffn.connect(cold, boxes[layer])) for layer, ffn in split.items()]
        # As a daemon, it does not keep a process that forgot to close from ending.
        serving = (self.link, programs)
        self._thread = threading.Thread(target=cold.serve, args=serving, name="cold side", daemon=True)
        if programs:
            self._thread.start()

    def close(self) -> None:
        """Ends the cold side; harmless when it has ended."""
        self.link.stop()
        # The garbage collector may call this on any thread.
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
