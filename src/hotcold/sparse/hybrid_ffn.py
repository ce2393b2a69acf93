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
        hot_mask: for split weights, the first words of ``mask``, which name the hot neurons; cold ones begin
            with a whole word.
    """

    predictor: PredictorWeights
    mask: Buffer
    input: str = "residual"
    hot_mask: Buffer | None = None

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
        self.fired: Buffer | None = None  #: is set to the mask of what fired, for decode rows
        self.weights = weights
        self.prediction = prediction
        self._backend = backend
        self._skip = skip

    def __call__(self, normed: Buffer, residual: Buffer, batch: Batch, out: Buffer) -> None:
        """Adds the FFN of ``normed`` to ``out``; all ``[T, D]``."""
        self._predict(normed, residual, batch)
        mask = self.prediction and self.prediction.mask
        self._compute(normed, self.weights, batch, out, mask)

    def _predict(self, normed: Buffer, residual: Buffer, batch: Batch) -> None:
        if (p := self.prediction) is not None:
            self._backend.predict(residual if p.input == "residual" else normed, p.predictor, batch, p.mask)

    def _compute(self, x: Buffer, weights: FFNWeights, batch: Batch, out: Buffer, mask: Buffer) -> None:
        self._backend.ffn(
            x, weights, batch, out,
            skip=self._skip, mask=mask, fired=self.fired, stats=self.stats, accumulate=True,
        )  # fmt: skip


@dataclass(frozen=True)
class SplitWeights:
    """One layer's FFN in two halves, each in ascending order of its neurons; ``hot`` None means none."""

    hot: FFNWeights | None
    cold: FFNWeights

    @property
    def halves(self) -> list[FFNWeights]:
        return [half for half in (self.hot, self.cold) if half is not None]

    @property
    def row_bytes(self) -> tuple[int, int, int, int]:
        return self.cold.row_bytes

    neurons = property(lambda self: sum(half.neurons for half in self.halves))
    nbytes = property(lambda self: sum(half.nbytes for half in self.halves))
    runs = property(lambda self: sum(half.runs for half in self.halves))


@dataclass(frozen=True)
class Mailbox:
    """What the two sides of a layer exchange; the cold side's buffers."""

    batch: Batch  #: of which only the counts are filled
    x: Buffer  #: ``[T, D]``: the FFN's input
    mask: Buffer | None  #: ``[T, words]`` uint64: candidates among the cold neurons
    y: Buffer  #: ``[T, D]``: the cold neurons' part of the output


class SplitFFN(HybridFFN):
    """Hot neurons on this backend and, at the same time, cold ones on another (arXiv 2312.12456, section 5).

    ``out`` gets the hot part, then the cold one, whichever is first. :meth:`connect` comes before all else.
    """

    weights: SplitWeights

    def connect(self, layer: int, mailbox: Mailbox, handshake: Handshake) -> None:
        self._layer, self._mailbox, self._handshake = layer, mailbox, handshake
        self._cold_stats = FFNStats() if self.stats else None

    def __call__(self, normed: Buffer, residual: Buffer, batch: Batch, out: Buffer) -> None:
        """As in :class:`HybridFFN`; belongs to the hot side's program."""
        self._predict(normed, residual, batch)
        fill = partial(self._fill, normed, batch)
        self._backend.host(lambda: self._handshake.post(self._layer, fill), batch)
        if self.weights.hot is not None:
            mask = self.prediction and self.prediction.hot_mask
            self._compute(normed, self.weights.hot, batch, out, mask)
        self._backend.host(self._wait, batch)
        self._backend.add(out, self._mailbox.y, batch)

    def record_cold(self, cold: Backend) -> None:
        """The cold side's part, in its own program."""
        box, weights, stats = self._mailbox, self.weights.cold, self._cold_stats
        cold.host(lambda: self._handshake.take(self._layer), box.batch)
        cold.ffn(box.x, weights, box.batch, box.y, skip=self._skip, mask=box.mask, stats=stats)
        cold.host(lambda: self._handshake.give(self._layer), box.batch)

    def _fill(self, normed: Buffer, batch: Batch) -> None:
        """Fills the mailbox, and the mask of the hot neurons."""
        box, p, rows, decode = self._mailbox, self.prediction, batch.n_tokens, batch.n_decode
        box.batch.counts[:] = batch.counts
        box.x[:rows] = normed[:rows]
        if p is not None and box.mask is not None:
            words = p.mask.shape[1] - box.mask.shape[1]
            box.mask[:decode] = p.mask[:decode, words:]
            if p.hot_mask is not None:
                p.hot_mask[:decode] = p.mask[:decode, :words]

    def _wait(self) -> None:
        self._handshake.wait(self._layer)
        if self.stats and self._cold_stats:
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

    def mask(ops: Backend, parts: Sequence[FFNWeights]) -> Buffer:
        """Each part begins with a whole word."""
        words = sum(-(-part.neurons // 64) for part in parts)
        if (ops, words) not in masks:
            masks[ops, words] = ops.zeros((rows, words), np.uint64)
        return masks[ops, words]

    ffns: list[HybridFFN] = []
    backends = Devices.of(backend, len(weights)).layers
    for ops, layer, predictor in zip(backends, weights, predictors, strict=True):
        kind, prediction, parts = HybridFFN, None, [layer]
        if isinstance(layer, SplitWeights):
            kind, parts = SplitFFN, layer.halves
        if predictor is not None:
            hot_mask = mask(ops, parts[:1]) if len(parts) > 1 else None
            prediction = Prediction(predictor, mask(ops, parts), predictor_input, hot_mask)
        ffns.append(kind(ops, layer, skip=skip, prediction=prediction, stats=FFNStats()))
    return ffns
