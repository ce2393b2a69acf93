"""An FFN that computes the neurons a token needs: all whose gate fires, or the predicted ones of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hotcold.kernels.backend import (
    Backend,
    Batch,
    Buffer,
    FFNStats,
    FFNWeights,
    PredictorWeights,
)
from hotcold.model.devices import Devices
from hotcold.sparse.handshake import Handshake

PREDICTOR_INPUTS = ("residual", "normed")


@dataclass(frozen=True)
class Prediction:
    """Where a layer's candidates come from, for decode rows; prompt rows are always dense.

    Attributes:
        predictor: the layer's.
        mask: the candidates, ``[T, ceil(N / 64)]`` uint64 for the rows of the batch. Layers may share it: it
            is written and read within one call.
        input: what the predictor reads: the ``residual`` stream before the FFN's norm (PowerInfer's), or the
            ``normed`` input of the FFN.
    """

    predictor: PredictorWeights
    mask: Buffer
    input: str = "residual"

    def __post_init__(self) -> None:
        if self.input not in PREDICTOR_INPUTS:
            raise ValueError(f"predictor input {self.input!r}: choose from {', '.join(PREDICTOR_INPUTS)}")


class HybridFFN:
    """One layer's FFN. Mode ``exact`` is ``skip`` alone, ``predicted`` is ``skip`` with a prediction.

    Args:
        backend: runs the ops.
        weights: the layer's.
        skip: leave out neurons whose gate does not fire. Only for activations that then give exact zeros; the
            FFN op refuses the others.
        prediction: names the candidates; None means all.
        stats: counts what decode rows read; None counts nothing.
    """

    def __init__(
        self,
        backend: Backend,
        weights: FFNWeights,
        *,
        skip: bool,
        prediction: Prediction | None = None,
        stats: FFNStats | None = None,
    ) -> None:
        self.stats = stats
        self._backend = backend
        self._weights = weights
        self._skip = skip
        self._prediction = prediction

    def __call__(self, normed: Buffer, residual: Buffer, batch: Batch, out: Buffer) -> None:
        """Adds the FFN of ``normed`` to ``out``; all ``[T, D]``."""
        self._ffn(normed, self._weights, batch, out, self._candidates(normed, residual, batch))

    def _candidates(self, normed: Buffer, residual: Buffer, batch: Batch) -> Buffer | None:
        if self._prediction is None:
            return None
        source = residual if self._prediction.input == "residual" else normed
        self._backend.predict(source, self._prediction.predictor, batch, self._prediction.mask)
        return self._prediction.mask

    def _ffn(
        self, normed: Buffer, weights: FFNWeights, batch: Batch, out: Buffer, mask: Buffer | None
    ) -> None:
        self._backend.ffn(
            normed, weights, batch, out, skip=self._skip, mask=mask, stats=self.stats, accumulate=True
        )


@dataclass(frozen=True)
class SplitWeights:
    """One layer's FFN in two halves, each in ascending order of its neurons; ``hot`` None means none."""

    hot: FFNWeights | None
    cold: FFNWeights
    row_bytes: tuple[int, int, int, int]
    neurons: int  #: of both, as all that follows
    nbytes: int
    runs: int


@dataclass(frozen=True)
class Mailbox:
    """What the two sides of a layer exchange; the cold side's buffers."""

    batch: Batch  #: of which only the counts are filled
    x: Buffer  #: ``[T, D]``: the FFN's input
    mask: Buffer | None  #: ``[T, words]`` uint64: candidates among the cold neurons
    y: Buffer  #: ``[T, D]``: the cold neurons' part of the output


class SplitFFN(HybridFFN):
    """Hot neurons on this backend and, at the same time, cold ones on another (arXiv 2312.12456, section 5).

    ``out`` gets the hot part, then the cold one, whichever is first. A predictor's mask names hot neurons in
    its first words and cold ones from a whole word on. Until :meth:`connect` there is no cold side.
    """

    def __init__(
        self, backend: Backend, weights: SplitWeights, hot_mask: Buffer | None, *,
        skip: bool, prediction: Prediction | None = None,
    ) -> None:  # fmt: skip
        super().__init__(backend, weights, skip=skip, prediction=prediction)
        self.split, self._hot_mask = weights, hot_mask
        self._cold_stats = FFNStats()

    @property
    def predicts(self) -> bool:
        return self._prediction is not None

    def connect(self, layer: int, mailbox: Mailbox, handshake: Handshake) -> None:
        self._layer, self._mailbox, self._handshake = layer, mailbox, handshake

    def __call__(self, normed: Buffer, residual: Buffer, batch: Batch, out: Buffer) -> None:
        """As in :class:`HybridFFN`; belongs to the hot side's program."""
        mask = self._candidates(normed, residual, batch)
        fill = partial(self._fill, normed, mask, batch)
        self._backend.host(lambda: self._handshake.post(self._layer, fill), batch)
        if self.split.hot is not None:
            self._ffn(normed, self.split.hot, batch, out, self._hot_mask)
        self._backend.host(self._wait, batch)
        self._backend.add(out, self._mailbox.y, batch)

    def record_cold(self, cold: Backend) -> None:
        """The cold side's part, in its own program."""
        box = self._mailbox
        cold.host(lambda: self._handshake.take(self._layer), box.batch)
        stats = self._cold_stats if self.stats else None
        cold.ffn(box.x, self.split.cold, box.batch, box.y, skip=self._skip, mask=box.mask, stats=stats)
        cold.host(lambda: self._handshake.give(self._layer), box.batch)

    def _fill(self, normed: Buffer, mask: Buffer | None, batch: Batch) -> None:
        """Fills the mailbox, and this side's mask."""
        box, rows, decode = self._mailbox, batch.n_tokens, batch.n_decode
        box.batch.counts[:] = batch.counts
        box.x[:rows] = normed[:rows]
        if mask is not None and box.mask is not None:
            words = mask.shape[1] - box.mask.shape[1]
            box.mask[:decode] = mask[:decode, words:]
            if self._hot_mask is not None:
                self._hot_mask[:decode] = mask[:decode, :words]

    def _wait(self) -> None:
        self._handshake.wait(self._layer)
        if self.stats is not None:
            self.stats.counts += self._cold_stats.counts
            self._cold_stats.counts[:] = 0


def hybrid_ffns(
    backend: Backend | Devices,
    weights: Sequence[FFNWeights],
    rows: int,
    *,
    skip: bool,
    predictors: Sequence[PredictorWeights | None] | None = None,
    predictor_input: str = "residual",
) -> list[HybridFFN]:
    """One FFN per layer, each with stats of its own; layers of the same width share one mask.

    Args:
        backend: of all layers, or of each. Those with :class:`SplitWeights` still have to be connected.
        rows: the most rows of a step (``BatchLimits.tokens``).
        predictors: one per layer; a layer without one, or all, compute every gate.

    Raises:
        ValueError: a predictor is missing, or the input has no such name.
    """
    if predictors is None:
        predictors = [None] * len(weights)
    masks: dict[tuple[Backend, int], Buffer] = {}

    def mask(ops: Backend, neurons: Sequence[int]) -> Buffer:
        """Of whole words for each of these numbers of neurons."""
        words = sum(-(-n // 64) for n in neurons)
        if (ops, words) not in masks:
            masks[ops, words] = ops.zeros((rows, words), np.uint64)
        return masks[ops, words]

    ffns: list[HybridFFN] = []
    backends = Devices.of(backend, len(weights)).layers
    for ops, layer, predictor in zip(backends, weights, predictors, strict=True):
        prediction = hot_mask = None
        hot, cold = (layer.hot, layer.cold) if isinstance(layer, SplitWeights) else (None, layer)
        if predictor is not None:
            parts = [part.neurons for part in (hot, cold) if part is not None]
            prediction = Prediction(predictor, mask(ops, parts), predictor_input)
            hot_mask = mask(ops, parts[:1]) if hot is not None else None
        if isinstance(layer, SplitWeights):
            ffns.append(SplitFFN(ops, layer, hot_mask, skip=skip, prediction=prediction))
        else:
            ffns.append(HybridFFN(ops, layer, skip=skip, prediction=prediction))
        ffns[-1].stats = FFNStats()
    return ffns
