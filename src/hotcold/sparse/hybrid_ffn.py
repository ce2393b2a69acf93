"""An FFN that computes the neurons a token needs: all whose gate fires, or the predicted ones of them."""

from __future__ import annotations

from collections.abc import Sequence

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


class HybridFFN:
    """One layer's FFN. Mode ``exact`` is ``skip`` alone, ``predicted`` is ``skip`` with a predictor.

    Args:
        backend: runs the ops.
        weights: the layer's.
        skip: leave out neurons whose gate does not fire. Only for activations that then give exact zeros;
            the FFN op refuses the others.
        predictor: names the candidates for decode rows; prompt rows are always dense.
        predictor_input: what the predictor reads: the ``residual`` stream before the FFN's norm
            (PowerInfer's) or the ``normed`` input of the FFN.
        mask: candidates, ``[T, ceil(N / 64)]`` uint64 for the rows of the batch; needed with a predictor.
            Layers may share it: it is written and read within one call.
        stats: counts what decode rows read; None counts nothing.
    """

    def __init__(
        self,
        backend: Backend,
        weights: FFNWeights,
        *,
        skip: bool,
        predictor: PredictorWeights | None = None,
        predictor_input: str = "residual",
        mask: Buffer | None = None,
        stats: FFNStats | None = None,
    ) -> None:
        if predictor_input not in PREDICTOR_INPUTS:
            raise ValueError(
                f"predictor input {predictor_input!r}: choose from {', '.join(PREDICTOR_INPUTS)}"
            )
        if (predictor is None) != (mask is None):
            raise ValueError("a predictor and the mask that it writes: give both or neither")
        self.stats = stats
        self._backend = backend
        self._weights = weights
        self._skip = skip
        self._predictor = predictor
        self._reads_residual = predictor_input == "residual"
        self._mask = mask

    def __call__(self, normed: Buffer, residual: Buffer, batch: Batch, out: Buffer) -> None:
        """Adds the FFN of ``normed`` to ``out``; all ``[T, D]``."""
        if self._predictor is not None:
            self._backend.predict(
                residual if self._reads_residual else normed, self._predictor, batch, self._mask
            )
        self._backend.ffn(
            normed,
            self._weights,
            batch,
            out,
            skip=self._skip,
            mask=self._mask,
            stats=self.stats,
            accumulate=True,
        )


def hybrid_ffns(
    backend: Backend,
    weights: Sequence[FFNWeights],
    rows: int,
    *,
    skip: bool,
    predictors: Sequence[PredictorWeights] | None = None,
    predictor_input: str = "residual",
) -> list[HybridFFN]:
    """One FFN per layer, each with its own stats; layers of the same width share one mask.

    Args:
        rows: the most rows of a step (``BatchLimits.tokens``).
    """
    masks: dict[int, Buffer] = {}
    ffns = []
    for i, layer in enumerate(weights):
        words = -(-layer.neurons // 64)
        if predictors is not None and words not in masks:
            masks[words] = backend.zeros((rows, words), np.uint64)
        ffns.append(
            HybridFFN(
                backend,
                layer,
                skip=skip,
                predictor=None if predictors is None else predictors[i],
                predictor_input=predictor_input,
                mask=masks.get(words),
                stats=FFNStats(),
            )
        )
    return ffns
