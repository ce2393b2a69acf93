"""An FFN that computes only the neurons that a token needs: the active ones, or the predicted of these."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np
import numpy.typing as npt

from hotcold.kernels.backend import (
    FFN_COUNTS,
    Backend,
    Batch,
    Buffer,
    Chosen,
    FFNCall,
    FFNStats,
    FFNWeights,
    Mailbox,
    PredictorWeights,
)
from hotcold.model.devices import Devices

PREDICTOR_INPUTS = ("residual", "normed")


@dataclass(frozen=True)
class Prediction:
    """The source of a layer's candidates, for decode rows; prompt rows are always dense."""

    predictor: PredictorWeights
    #: ``[T, words]`` uint64. For split weights: the hot neurons, then, from the next word on, the cold ones.
    #: Layers may share it, since one call writes and reads it
    mask: Buffer
    #: its input: the ``residual`` stream before the FFN's norm (PowerInfer), or the ``normed`` input
    input: str = "residual"
    #: for split experts, the cold neurons' predictor and mask; ``predictor`` and ``mask`` are the hot ones'
    cold: tuple[PredictorWeights, Buffer] | None = None

    @property
    def cold_mask(self) -> Buffer:
        """The mask with the cold neurons in its last words."""
        return self.mask if self.cold is None else self.cold[1]

    def __post_init__(self) -> None:
        if self.input not in PREDICTOR_INPUTS:
            raise ValueError(f"predictor input {self.input!r}: choose from {', '.join(PREDICTOR_INPUTS)}")


@dataclass(eq=False)
class FFN:
    """One layer's FFN. ``off`` computes all neurons. ``exact`` and ``predicted`` leave out neurons with an
    inactive gate. This needs an activation with exact zeros; the FFN op refuses others."""

    backend: Backend
    weights: FFNWeights
    mode: str  #: ``off``, ``exact`` or ``predicted``
    prediction: Prediction | None = None  #: chooses the candidates in mode ``predicted``; None: all neurons
    stats: FFNStats | None = None  #: counts the reads of decode rows
    active: Buffer | None = None  #: gets the active neurons of decode rows
    strongest: Buffer | None = None  #: likewise, the neurons with the largest magnitudes, if all are active

    @property
    def skips(self) -> bool:
        """True if neurons with an inactive gate are left out."""
        return self.mode != "off"

    def counts(self) -> npt.NDArray[np.int64]:
        """Counts so far, in the order of :data:`FFN_COUNTS`; zeros without ``stats``."""
        return _read_counts(self.backend, self.stats)

    def cold_counts(self) -> npt.NDArray[np.int64]:
        """The part of :meth:`counts` that another backend computed."""
        return np.zeros(len(FFN_COUNTS), np.int64)

    def __call__(
        self,
        normed: Buffer,
        residual: Buffer,
        batch: Batch,
        out: Buffer,
        chosen: Chosen | None = None,
        gates: Buffer | None = None,
    ) -> None:
        """Adds the FFN of ``normed`` to ``out``; all ``[T, D]``. ``chosen``: the router's experts; ``gates``:
        gates that were computed before."""
        self._predict(normed, residual, batch, chosen)
        for weights in self._parts:
            call = self._call(normed, weights, batch, out, chosen)
            self.backend.ffn(replace(call, gates=gates, strongest=self.strongest))

    @property
    def _parts(self) -> Sequence[FFNWeights]:
        """The weights that this backend computes one after another."""
        return [self.weights]

    def _predict(self, normed: Buffer, residual: Buffer, batch: Batch, chosen: Chosen | None) -> None:
        if (p := self.prediction) is None:
            return
        x = residual if p.input == "residual" else normed
        for predictor, mask in [(p.predictor, p.mask), *([p.cold] if p.cold else [])]:
            self.backend.predict(x, predictor, batch, mask, chosen)

    def _call(
        self, x: Buffer, weights: FFNWeights, batch: Batch, out: Buffer, chosen: Chosen | None
    ) -> FFNCall:
        return FFNCall(
            x,
            weights,
            batch,
            out,
            skip=self.skips,
            mask=self.prediction and self.prediction.mask,
            active=self.active,
            stats=self.stats,
            accumulate=True,
            chosen=chosen,
        )


def _read_counts(ops: Backend, stats: FFNStats | None) -> npt.NDArray[np.int64]:
    if stats is None:
        return np.zeros(len(FFN_COUNTS), np.int64)
    counts: npt.NDArray[np.int64] = ops.read(stats.counts, stats.row, stats.row + 1)[0]
    return counts


@dataclass(frozen=True)
class SplitWeights:
    """One layer's FFN in two parts, each with ascending neurons; ``hot`` None: no hot neurons. ``streamed``
    has the cold neurons once more, for prompts on the hot side; None: the cold side computes them, too."""

    hot: FFNWeights | None
    cold: FFNWeights
    streamed: FFNWeights | None = None

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


@dataclass(frozen=True)
class SplitPredictor:
    """Two predictors for a split layer of experts. In masks, each part's experts begin at whole words, so
    each part needs its own predictor."""

    hot: PredictorWeights
    cold: PredictorWeights

    @property
    def nbytes(self) -> int:
        return self.hot.nbytes + self.cold.nbytes


@dataclass(eq=False)
class SplitFFN(FFN):
    """An FFN with hot neurons on this backend and, at the same time, cold ones on another (arXiv 2312.12456,
    section 5). ``out`` gets the hot part, then the cold part, in any order of completion."""

    weights: SplitWeights
    _: KW_ONLY
    cold: Backend
    box: Mailbox  #: holds the hot side's posts and the cold side's answers
    cold_active: Buffer | None = None  #: as ``active``, for the cold neurons; a buffer of the cold side

    def __post_init__(self) -> None:
        self._cold_stats = FFNStats(self.cold.zeros((1, len(FFN_COUNTS)), np.int64)) if self.stats else None

    def counts(self) -> npt.NDArray[np.int64]:
        """The sum of both sides' counts."""
        return super().counts() + self.cold_counts()

    def cold_counts(self) -> npt.NDArray[np.int64]:
        return _read_counts(self.cold, self._cold_stats)

    def __call__(
        self,
        normed: Buffer,
        residual: Buffer,
        batch: Batch,
        out: Buffer,
        chosen: Chosen | None = None,
        gates: Buffer | None = None,
    ) -> None:
        """Computes as :class:`FFN` does; belongs to the hot side's program."""
        if gates is not None:
            raise ValueError("gates are computed before the layer: it must not be split")
        self._predict(normed, residual, batch, chosen)
        cold_mask = self.prediction and self.prediction.cold_mask
        self.backend.post(self.box, normed, cold_mask, batch, chosen)
        if self.weights.hot is not None:
            self.backend.ffn(self._call(normed, self.weights.hot, batch, out, chosen))
        self.backend.collect(self.box, batch, out)

    def compute_cold(self) -> None:
        """Answers a post; belongs to the cold side's program."""
        box = self.box
        call = FFNCall(box.x, self.weights.cold, box.batch, box.y, skip=self.skips, mask=box.mask)
        stats, chosen = self._cold_stats, box.chosen
        self.cold.ffn(replace(call, active=self.cold_active, stats=stats, chosen=chosen))


@dataclass(eq=False)
class PromptFFN(FFN):
    """An FFN of steps with only prompt rows: this backend computes the hot neurons, then the cold ones."""

    weights: SplitWeights

    @property
    def _parts(self) -> Sequence[FFNWeights]:
        return [half for half in (self.weights.hot, self.weights.streamed) if half is not None]


def prompt_ffns(ffns: Sequence[FFN]) -> list[FFN]:
    """Returns the FFNs of steps with only prompt rows; none if no layer has streamed weights, so that
    ``ffns`` serve all steps."""

    def prompt_ffn(ffn: FFN) -> FFN:
        if isinstance(ffn, SplitFFN) and ffn.weights.streamed is not None:
            return PromptFFN(ffn.backend, ffn.weights, ffn.mode)
        return ffn

    made = [prompt_ffn(ffn) for ffn in ffns]
    return made if any(isinstance(ffn, PromptFFN) for ffn in made) else []


def make_ffns(
    backend: Backend | Devices,
    weights: Sequence[FFNWeights],
    rows: int,
    *,
    mode: str,
    count: bool = True,
    predictors: Sequence[PredictorWeights | None] = (),
    predictor_input: str = "residual",
    cold: tuple[Backend, Mapping[int, Mailbox]] | None = None,
    skips: Sequence[bool] = (),
) -> list[FFN]:
    """Makes one FFN per layer, each with its own counts, if any; layers of the same width share one mask.
    ``cold``: for layers with :class:`SplitWeights`, the other backend and the mailbox of each.

    ``rows`` are the most of a step (``BatchLimits.tokens``). ``skips`` is True for each layer whose
    activation gives zeros; without it, the mode decides for all layers. A layer without a predictor computes
    every gate. ValueError: there are predictors, but not one per layer; or the input's name is unknown."""
    masks: dict[tuple[Backend, int, bool], Buffer] = {}

    def mask(ops: Backend, words: int, *, cold: bool = False) -> Buffer:
        if (ops, words, cold) not in masks:
            masks[ops, words, cold] = ops.zeros((rows, words), np.uint64)
        return masks[ops, words, cold]

    def prediction(ops: Backend, layer: FFNWeights, predictor: PredictorWeights | None) -> Prediction | None:
        if predictor is None:
            return None
        if isinstance(predictor, SplitPredictor) and isinstance(layer, SplitWeights) and layer.hot:
            cold = predictor.cold, mask(ops, layer.cold.words, cold=True)
            return Prediction(predictor.hot, mask(ops, layer.hot.words), predictor_input, cold)
        return Prediction(predictor, mask(ops, layer.words), predictor_input)

    ffns: list[FFN] = []
    backends = Devices.from_backend(backend, len(weights)).layers
    shape = (len(weights), len(FFN_COUNTS))
    counts = {ops: ops.zeros(shape, np.int64) for ops in dict.fromkeys(backends)} if count else {}
    modes = [mode if skip else "off" for skip in skips] if skips else [mode] * len(weights)
    given = predictors or [None] * len(weights)
    for ops, layer, predictor, mode in zip(backends, weights, given, modes, strict=True):
        stats = FFNStats(counts[ops], len(ffns)) if count else None
        named = prediction(ops, layer, predictor)
        if isinstance(layer, SplitWeights):
            assert cold is not None
            other, boxes = cold
            ffns.append(SplitFFN(ops, layer, mode, named, stats, cold=other, box=boxes[len(ffns)]))
        else:
            ffns.append(FFN(ops, layer, mode, named, stats))
    return ffns


def make_shared_ffns(
    backends: Sequence[Backend], weights: Sequence[FFNWeights | None], mode: str
) -> list[FFN | None]:
    """Makes one FFN per layer for its shared expert, or None. Shared experts have no predictors, so
    ``predicted`` means ``exact`` for them. Each FFN counts its reads, unless it reads all (``off``)."""
    shape = (len(weights), len(FFN_COUNTS))
    used = dict.fromkeys(ops for ops, each in zip(backends, weights, strict=True) if each is not None)
    counts = {ops: ops.zeros(shape, np.int64) for ops in used} if mode != "off" else {}
    return [
        None if each is None else FFN(ops, each, mode, stats=FFNStats(counts[ops], layer) if counts else None)
        for layer, (ops, each) in enumerate(zip(backends, weights, strict=True))
    ]
