"""An FFN that computes the neurons a token needs: all whose gate fires, or the predicted ones of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotcold.kernels.backend import (
    Backend,
    Batch,
    Buffer,
    FFNStats,
    FFNWeights,
    PredictorWeights,
)

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
        self.fired: Buffer | None = None  #: is set to the mask of what fired, for decode rows
        self._backend = backend
        self._weights = weights
        self._skip = skip
        self._prediction = prediction

    def __call__(self, normed: Buffer, residual: Buffer, batch: Batch, out: Buffer) -> None:
        """Adds the FFN of ``normed`` to ``out``; all ``[T, D]``."""
        mask = None
        if self._prediction is not None:
            mask = self._prediction.mask
            source = residual if self._prediction.input == "residual" else normed
            self._backend.predict(source, self._prediction.predictor, batch, mask)
        self._backend.ffn(
            normed,
            self._weights,
            batch,
            out,
            skip=self._skip,
            mask=mask,
            fired=self.fired,
            stats=self.stats,
            accumulate=True,
        )


def hybrid_ffns(
    backend: Backend,
    weights: Sequence[FFNWeights],
    rows: int,
    *,
    skip: bool,
    predictors: Sequence[PredictorWeights | None] | None = None,
    predictor_input: str = "residual",
) -> list[HybridFFN]:
    """One FFN per layer, each with stats of its own; layers of the same width share one mask.

    Args:
        rows: the most rows of a step (``BatchLimits.tokens``).
        predictors: one per layer; a layer without one, or all, compute every gate.

    Raises:
        ValueError: a predictor is missing, or the input has no such name.
    """
    if predictors is None:
        predictors = [None] * len(weights)
    masks: dict[int, Buffer] = {}
    ffns = []
    for layer, predictor in zip(weights, predictors, strict=True):
        words, prediction = -(-layer.neurons // 64), None
        if predictor is not None:
            if words not in masks:
                masks[words] = backend.zeros((rows, words), np.uint64)
            prediction = Prediction(predictor, masks[words], predictor_input)
        ffns.append(HybridFFN(backend, layer, skip=skip, prediction=prediction, stats=FFNStats()))
    return ffns
