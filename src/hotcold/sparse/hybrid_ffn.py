"""An FFN that computes the neurons a token needs: all whose gate fires, or the predicted ones of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotcold.kernels.backend import (
    FFN_COUNTS,
    Backend,
    Batch,
    Buffer,
    FFNStats,
    FFNWeights,
    Mailbox,
    PredictorWeights,
    Program,
)
from hotcold.model.devices import Devices

PREDICTOR_INPUTS = ("residual", "normed")


@dataclass(frozen=True)
class Prediction:
    """Where a layer's candidates come from, for decode rows; prompt rows are always dense."""

    predictor: PredictorWeights
    #: ``[T, words]`` uint64: of split weights the hot neurons, then, from a whole word on, the cold ones.
    #: Layers may share it: it is written and read in one call
    mask: Buffer
    #: what is read: the ``residual`` stream before the FFN's norm (PowerInfer), or the ``normed`` input
    input: str = "residual"

    def __post_init__(self) -> None:
        if self.input not in PREDICTOR_INPUTS:
            raise ValueError(f"predictor input {self.input!r}: choose from {', '.join(PREDICTOR_INPUTS)}")


@dataclass(eq=False)
class HybridFFN:
    """One layer's FFN. Mode ``exact`` is ``skip`` alone, ``predicted`` is ``skip`` with a prediction.

    ``skip`` leaves out neurons whose gate does not fire: only for activations that then give exact zeros; the
    FFN op refuses the others."""

    backend: Backend
    weights: FFNWeights
    skip: bool
    prediction: Prediction | None = None  #: names the candidates; None means all
    stats: FFNStats | None = None  #: counts what decode rows read
    fired: Buffer | None = None  #: is set to the mask of what fired, for decode rows

    def counts(self) -> npt.NDArray[np.int64]:
        """What it has counted so far, in the order of :data:`FFN_COUNTS`; zeros where it does not count."""
        return _read_counts(self.backend, self.stats)

    def __call__(self, normed: Buffer, residual: Buffer, batch: Batch, out: Buffer) -> None:
        """Adds the FFN of ``normed`` to ``out``; all ``[T, D]``."""
        self._predict(normed, residual, batch)
        self._compute(normed, self.weights, batch, out, self.prediction and self.prediction.mask)

    def _predict(self, normed: Buffer, residual: Buffer, batch: Batch) -> None:
        if (p := self.prediction) is not None:
            self.backend.predict(residual if p.input == "residual" else normed, p.predictor, batch, p.mask)

    def _compute(self, x: Buffer, weights: FFNWeights, batch: Batch, out: Buffer, mask: Buffer) -> None:
        self.backend.ffn(
            x,
            weights,
            batch,
            out,
            skip=self.skip,
            mask=mask,
            fired=self.fired,
            stats=self.stats,
            accumulate=True,
        )


def _read_counts(ops: Backend, stats: FFNStats | None) -> npt.NDArray[np.int64]:
    if stats is None:
        return np.zeros(len(FFN_COUNTS), np.int64)
    counts: npt.NDArray[np.int64] = ops.read(stats.counts, stats.row, stats.row + 1)[0]
    return counts


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

    @property
    def neurons(self) -> int:
        return sum(half.neurons for half in self.halves)

    @property
    def words(self) -> int:
        return sum(half.words for half in self.halves)

    @property
    def nbytes(self) -> int:
        return sum(half.nbytes for half in self.halves)

    @property
    def runs(self) -> int:
        return sum(half.runs for half in self.halves)


class SplitFFN(HybridFFN):
    """Hot neurons on this backend and, at the same time, cold ones on another (arXiv 2312.12456, section 5).

    ``out`` gets the hot part, then the cold one, whichever is first. :meth:`connect` is called before."""

    weights: SplitWeights

    @property
    def cold_words(self) -> int:
        """Of the mask of cold neurons in the mailbox: the last of the prediction's; 0 without one."""
        return self.weights.cold.words if self.prediction else 0

    def connect(self, cold: Backend, box: Mailbox) -> Program:
        """The cold side's program, which is given the mailbox that this layer posts to."""
        self._cold, self._box = cold, box
        self._cold_stats = FFNStats(cold.zeros((1, len(FFN_COUNTS)), np.int64)) if self.stats else None
        return cold.record(self._compute_cold)

    def counts(self) -> npt.NDArray[np.int64]:
        """Of both sides together."""
        return super().counts() + _read_counts(self._cold, self._cold_stats)

    def __call__(self, normed: Buffer, residual: Buffer, batch: Batch, out: Buffer) -> None:
        """As in :class:`HybridFFN`; belongs to the hot side's program."""
        self._predict(normed, residual, batch)
        mask = self.prediction and self.prediction.mask
        self.backend.post(self._box, normed, mask, batch)
        if self.weights.hot is not None:
            self._compute(normed, self.weights.hot, batch, out, mask)
        self.backend.collect(self._box, batch, out)

    def _compute_cold(self) -> None:
        box = self._box
        self._cold.ffn(
            box.x,
            self.weights.cold,
            box.batch,
            box.y,
            skip=self.skip,
            mask=box.mask,
            stats=self._cold_stats,
        )


def hybrid_ffns(
    backend: Backend | Devices,
    weights: Sequence[FFNWeights],
    rows: int,
    *,
    skip: bool,
    count: bool = True,
    predictors: Sequence[PredictorWeights | None] = (),
    predictor_input: str = "residual",
) -> list[HybridFFN]:
    """One FFN per layer, each with counts of its own, if any; layers of the same width share one mask. Those
    with :class:`SplitWeights` still have to be connected.

    ``rows`` are the most of a step (``BatchLimits.tokens``). A layer without a predictor computes every gate.
    ValueError: there are predictors, but not one per layer; or the input has no such name."""
    masks: dict[tuple[Backend, int], Buffer] = {}

    def mask(ops: Backend, parts: Sequence[FFNWeights]) -> Buffer:
        """Each part begins with a whole word."""
        words = sum(part.words for part in parts)
        if (ops, words) not in masks:
            masks[ops, words] = ops.zeros((rows, words), np.uint64)
        return masks[ops, words]

    def prediction(ops: Backend, layer: FFNWeights, predictor: PredictorWeights | None) -> Prediction | None:
        if predictor is None:
            return None
        parts = layer.halves if isinstance(layer, SplitWeights) else [layer]
        return Prediction(predictor, mask(ops, parts), predictor_input)

    ffns: list[HybridFFN] = []
    backends = Devices.of(backend, len(weights)).layers
    shape = (len(weights), len(FFN_COUNTS))
    counts = {ops: ops.zeros(shape, np.int64) for ops in dict.fromkeys(backends)} if count else {}
    for ops, layer, predictor in zip(backends, weights, predictors or [None] * len(weights), strict=True):
        kind = SplitFFN if isinstance(layer, SplitWeights) else HybridFFN
        stats = FFNStats(counts[ops], len(ffns)) if count else None
        ffns.append(kind(ops, layer, skip, prediction(ops, layer, predictor), stats))
    return ffns
