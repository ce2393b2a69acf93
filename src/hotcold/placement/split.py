"""Execution of a placement: divides weights into a hot and a cold half, and runs the cold half's program
concurrently with the hot one's."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Self

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.formats.stored import AnyTensor
from hotcold.kernels.backend import (
    SPARSE_ACTIVATIONS,
    Backend,
    BatchLimits,
    FFNTensors,
    FFNWeights,
    Floats,
    Mailbox,
    PredictorTensors,
    PredictorWeights,
)
from hotcold.model.devices import Devices
from hotcold.placement.placement import Placement
from hotcold.placement.sizes import CHUNK
from hotcold.sparse.ffn import FFN, SplitFFN, SplitPredictor, SplitWeights

Bools = npt.NDArray[np.bool_]

#: Seconds after which the hot side gives up on a layer without an answer, for each ``CHUNK`` rows of a step.
ANSWER_TIMEOUT_S = 30.0


def take_neurons(tensors: FFNTensors, chosen: Bools) -> FFNTensors:
    """Returns the neurons of a mask ``[N]``, in ascending order, in the file's own blocks, without the bias
    of down. UserError: the mask divides neurons with shared blocks of down, or a non-sparse expert with down
    by output."""
    index = np.flatnonzero(chosen)

    def vector(values: Floats | None) -> Floats | None:
        return None if values is None else values[index]

    down, blocks = _down(tensors, chosen)
    return replace(
        tensors,
        gate=None if tensors.gate is None else tensors.gate.take_rows(index),
        up=tensors.up.take_rows(index),
        down=down,
        down_blocks=blocks,
        gate_bias=vector(tensors.gate_bias),
        up_bias=vector(tensors.up_bias),
        down_bias=None,
        expert_ends=_ends(tensors, chosen) if tensors.experts > 1 else None,
    )


def _ends(tensors: FFNTensors | PredictorTensors, chosen: Bools) -> tuple[int, ...]:
    """Returns, for each expert, the end of its neurons among the selected ones."""
    return tuple(int(n) for n in np.append(0, np.cumsum(chosen))[list(tensors.ends)])


def take_scores(tensors: PredictorTensors, chosen: Bools) -> PredictorTensors:
    """Returns the predictor of some neurons of experts."""
    index = np.flatnonzero(chosen)
    second, ends = tensors.second.take_rows(index), _ends(tensors, chosen)
    return replace(tensors, second=second, threshold=tensors.threshold[index], expert_ends=ends)


def split_predictor(tensors: PredictorTensors, hot: Bools) -> PredictorTensors:
    """Returns the predictor with scores of hot neurons first, then the cold ones from the next whole word of
    the mask. Filler scores in between have an unreachable threshold. Not for experts."""
    filler = np.full(-int(hot.sum()) % 64, -1)
    order = np.concatenate([np.flatnonzero(hot), filler, np.flatnonzero(~hot)])
    second = tensors.second.take_rows(order)
    second.data[order < 0] = 0
    threshold = np.where(order < 0, np.float32(np.inf), tensors.threshold[order])
    return PredictorTensors(tensors.first, second, threshold, tensors.relu)


def _down(tensors: FFNTensors, chosen: Bools) -> tuple[AnyTensor, Bools | None]:
    """Returns the selected part of down; or all of it, and which blocks of each expert are selected."""
    if tensors.down_layout == "by_neuron":
        return tensors.down.take_rows(np.flatnonzero(chosen)), None
    if tensors.experts == 1:
        return tensors.down.take_columns(np.flatnonzero(_blocks(tensors.down, chosen))), None
    if tensors.activation in SPARSE_ACTIVATIONS:
        return tensors.down, _blocks(tensors.down, chosen).reshape(tensors.experts, -1)
    of_experts = chosen.reshape(tensors.experts, -1)
    if (of_experts != of_experts[:, :1]).any():
        got = "the placement divides an expert whose down weights are stored by output"
        raise UserError(f"{got}: make it with this version's hotcold plan")
    rows = np.flatnonzero(np.repeat(of_experts[:, 0], tensors.up.shape[1]))
    return tensors.down.take_rows(rows), None


def _blocks(tensor: AnyTensor, chosen: Bools) -> Bools:
    """Returns which blocks of neurons are selected. UserError: the mask divides a block."""
    shared = tensor.type.weights
    blocks = chosen.reshape(-1, shared)
    if (blocks != blocks[:, :1]).any():
        got = f"neurons whose down weights are in one block, {shared} of type {tensor.type.name}"
        raise UserError(f"the placement divides {got}: make it with this version's hotcold plan")
    return blocks[:, 0]


@dataclass(frozen=True)
class SplitDevices(Devices):
    masks: Sequence[Bools]
    streams: bool = False  #: whether GPUs compute the cold neurons of prompts, from streamed weights

    @classmethod
    def place(
        cls, placement: Placement, cold: Backend, gpus: Mapping[int, Backend], *, streams: bool = False
    ) -> Self:
        *layers, head = (cold if gpu is None else gpus[gpu] for gpu in (*placement.where, placement.head))
        return cls(cold, tuple(layers), head, placement.hot, streams, gpus=tuple(gpus.values()))

    @property
    def identity(self) -> str:
        masks = sha256(b"".join(np.packbits(mask).tobytes() for mask in self.masks)).hexdigest()
        return f"{super().identity},{masks}"

    def ffn_weights(self, layer: int, tensors: FFNTensors) -> FFNWeights:
        if not self._is_split(layer):
            return super().ffn_weights(layer, tensors)
        mask = self.masks[layer]
        bias = tensors.down_bias
        hot = None
        if mask.any():
            hot = self.layers[layer].ffn_weights(replace(take_neurons(tensors, mask), down_bias=bias))
            bias = None  # only one half adds the bias
        cold = replace(take_neurons(tensors, ~mask), down_bias=bias)
        streamed = self.layers[layer].streamed_weights(cold) if self.streams else None
        return SplitWeights(hot, self.embedding.ffn_weights(cold), streamed)

    def predictor_weights(self, layer: int, tensors: PredictorTensors) -> PredictorWeights:
        mask = self.masks[layer]
        if not self._is_split(layer):
            return super().predictor_weights(layer, tensors)
        if tensors.experts == 1:
            return super().predictor_weights(layer, split_predictor(tensors, mask))
        if not mask.any():
            return super().predictor_weights(layer, tensors)
        hot, cold = (
            super(SplitDevices, self).predictor_weights(layer, take_scores(tensors, each))
            for each in (mask, ~mask)
        )
        return SplitPredictor(hot, cold)

    def _is_split(self, layer: int) -> bool:
        return self.layers[layer] is not self.embedding and not self.masks[layer].all()


class ColdSide:
    """The cold halves of one GPU's split layers. A separate thread computes each when the GPU posts its
    input."""

    def __init__(
        self,
        devices: Devices,
        gpu: Backend,
        weights: Sequence[FFNWeights],
        predictors: Sequence[object | None],
        limits: BatchLimits,
        kinds: Sequence[tuple[int, int]],
    ) -> None:
        """``weights`` and ``predictors``: of all layers. ``kinds``: for each layer, the dimension of its FFN,
        and the experts per row, 0 without experts."""
        self.backend = devices.embedding
        self.link = gpu.link(ANSWER_TIMEOUT_S * max(1, limits.tokens // CHUNK))
        #: A mailbox has a mask of cold neurons if the layer has a predictor.
        words = {
            i: layer.cold.words if predictors[i] else 0
            for i, layer in enumerate(weights)
            if isinstance(layer, SplitWeights) and devices.layers[i] is gpu
        }
        self.boxes: dict[int, Mailbox] = {}
        for dim, chosen in dict.fromkeys(kinds):
            alike = {i: width for i, width in words.items() if kinds[i] == (dim, chosen)}
            if alike:
                self.boxes |= gpu.mailboxes(self.link, limits, dim, alike, chosen)
        self._thread: threading.Thread | None = None

    def serve(self, ffns: Sequence[FFN]) -> None:
        """Starts the thread that computes the cold halves."""
        programs = [
            (i, self.backend.record(ffn.compute_cold))
            for i, ffn in enumerate(ffns)
            if isinstance(ffn, SplitFFN) and i in self.boxes
        ]
        if programs:
            # A daemon thread does not keep alive a process that forgot to call close().
            serving = (self.link, programs)
            self._thread = threading.Thread(
                target=self.backend.serve, args=serving, name="cold side", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Stops the thread; does nothing if it has stopped."""
        self.link.stop()
        # The garbage collector may call this on any thread.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
