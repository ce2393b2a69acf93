"""Fitting of a model's predictors to a text, with or without training, and measurement of their quality."""

import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hotcold.api.llm import Model, source_of
from hotcold.engine.engine import Engine
from hotcold.errors import UserError
from hotcold.formats.files import output_file
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.backend import PredictorTensors
from hotcold.kernels.gpus import OFF
from hotcold.model.config import Config
from hotcold.runtime.opening import file_of, opened
from hotcold.runtime.options import Progress
from hotcold.runtime.session import LoadedModel, Session
from hotcold.sparse.expert_fitting import fit_experts
from hotcold.sparse.fitting import INPUTS, Fit, FitOptions, Fitted, fit_layer
from hotcold.sparse.measurement import MOST_RATIO, Measurement
from hotcold.sparse.predictor import is_sidecar, write_measured, write_sidecar
from hotcold.tasks.bench import measure, prompt_of
from hotcold.tasks.ffn_inputs import ffn_inputs
from hotcold.tasks.profiling import LONGEST_WINDOW, window_length
from hotcold.tasks.reports import Setup
from hotcold.tasks.scoring import Divergence, Scorer, compare, join
from hotcold.tasks.texts import text_of
from hotcold.tasks.windows import evenly, text_windows
from hotcold.training.options import TrainOptions
from hotcold.values import printable, whole

_ROUNDS = 6  # rounds of timing; the median is between the slowest and the fastest in 97 of 100 cases
_FIRST_LOOK = 2048  # tokens after which the cost may be decided; checked again whenever they have doubled
_EARLY_LEVEL = 0.99  # level of an interval that decides early: repeated checks err more often than one

_HEADING = "layer  rank     bytes  of FFN  candidates  active  recall  weighted   read"
_ROW = (
    "{layer:5}{rank:6}{nbytes:10}{size_ratio:8.1%}{candidates:12.1%}{active:8.1%}{recall:8.4f}"
    "{weighted_recall:10.4f}{read_ratio:7.3f}"
)

#: Placeholder for a layer without an FFN.
_NO_FIT = Fit(0, 0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0)

Windows = list[list[int]]


@dataclass(frozen=True)
class Speed:
    """The speed of generation on this machine, from rounds that ran both modes one after the other."""

    exact_tok_s: float  #: median of the rounds
    predicted_tok_s: float
    ratio_low: float  #: ratio to ``exact`` in the slowest round
    ratio_high: float  #: ratio in the fastest round

    @property
    def ratio(self) -> float:
        return self.predicted_tok_s / self.exact_tok_s

    def __str__(self) -> str:
        return f"exact {self.exact_tok_s:.1f}, predicted {self.predicted_tok_s:.1f} tok/s"


@dataclass(frozen=True)
class Cost:
    """The cost and the gain of predictors on held-out text."""

    speed: Speed
    measured: Measurement

    def report(self) -> dict[str, Any]:
        return {**asdict(self.speed), "ratio": self.speed.ratio, "measured": self.measured.report()}

    @property
    def verdict(self) -> list[str]:
        """Lines about all layers together."""
        objection = self.measured.objection
        return [
            f"held-out text: {self.measured.cost}",
            f"KL divergence mean {self.measured.kl_mean:.3g} nats",
            f"generation: {self.speed}, {self.measured.gain}",
            *(
                ("`sparsity=auto` does not use these predictors:", objection)
                if objection
                else ("`sparsity=auto` uses these predictors",)
            ),
        ]


@dataclass(frozen=True)
class Comparison(Cost):
    """Predictors made from the same text by `svd`, for the same weighted recall."""

    layers: list[Fit]
    tensors: Sequence[PredictorTensors | None] = field(repr=False)

    def report(self) -> dict[str, Any]:
        return super().report() | {"layers": [asdict(fit) for fit in self.layers]}

    @property
    def table(self) -> list[str]:
        return [_HEADING, *(_ROW.format(layer=i, **asdict(fit)) for i, fit in enumerate(self.layers))]


@dataclass(frozen=True)
class FittedPredictor(Comparison):
    """A model's predictors; ``str()`` gives the table that ``hotcold fit-predictor`` prints."""

    options: FitOptions
    frontier: list[list[Fit]]  #: by layer, the predictors of all ranks, the best first
    fingerprint: str  #: the model's fingerprint
    setup: Setup
    svd: Comparison | None = None  #: for comparison with trained predictors

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file. Loading finds it as ``MODEL.predictor.gguf`` in the model's folder."""
        write_sidecar(Path(path), self.fingerprint, self.tensors, self.metadata)

    @property
    def metadata(self) -> dict[str, Any]:
        """The keys ``hotcold.predictor.*`` of the file (docs/formats.md)."""
        return self.options.facts(self.layers) | self.measured.metadata()

    def report(self) -> dict[str, Any]:
        """Returns the report for ``--json``."""
        return {
            **self.options.facts(self.layers),
            **super().report(),
            "frontier": [[asdict(fit) for fit in ladder] for ladder in self.frontier],
            **({} if self.svd is None else {"svd": self.svd.report()}),
            **asdict(self.setup),
        }

    def __str__(self) -> str:
        lines = self.table
        fits = [fit for ladder in self.frontier for fit in ladder]
        for rank in sorted({fit.rank for fit in fits}):
            same = [fit for fit in fits if fit.rank == rank]
            share, candidates, read = (
                statistics.mean(getattr(fit, name) for fit in same)
                for name in ("size_ratio", "candidates", "read_ratio")
            )
            words = f"{share:.1%} of the FFN, {candidates:.1%} candidates, reads {read:.3f} of exact"
            lines.append(f"rank {rank}: {words}")
        lines += self.verdict
        if self.svd is not None:
            lines += ["for comparison, svd of the same text:", *self.svd.table, *self.svd.verdict]
        return "\n".join(lines)


def fit_predictor(
    model: Model,
    text: str | Path,
    *,
    held_out: str | Path | None = None,
    method: Literal["svd", "train", "trained"] = "svd",
    recall: float | None = None,
    weighted: bool = False,
    type: str | None = None,
    max_share: float = 0.15,
    tokens: int = 8192,
    eval_tokens: int = 16384,
    context: int | None = None,
    special: bool = False,
    threads: int | None = None,
    cache_type: str | None = None,
    backend: str | None = None,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    work: str | os.PathLike[str] | None = None,
    training: TrainOptions | None = None,
    progress: Progress | None = None,
) -> FittedPredictor:
    """Makes the predictors of ``sparsity="predicted"`` from a text, and measures their quality.

    >>> fitted = hotcold.fit_predictor("model.gguf", Path("text.txt"), output="model.predictor.gguf")

    Args:
        model: a GGUF file, or a loaded model; None is the built-in model.
        text: a text, or the ``Path`` of a file in UTF-8, cut into windows of ``context`` positions (at most
            512 by default).
        held_out: another text for the measurement; None: the last fifth of ``text``, not used to fit.
        method: ``svd``, a truncated SVD of the gate; ``train``, the same factors trained with torch (the
            extra ``[train]``); or ``trained``, the predictors in a PowerInfer file.
        recall: share of the active neurons to find; None: 0.99, or as trained thresholds give.
        weighted: whether ``recall`` weighs each neuron by its contribution, as it always does with ``train``.
        type: block type of the predictors; None: Q4_0, or the type of trained ones.
        max_share: limit of a predictor's bytes, as a part of its layer's FFN.
        tokens: number of tokens to use, spread over the text: four fifths to fit, one to judge.
        eval_tokens: limit for held-out tokens to compare with ``exact``, until ``auto`` can decide.
        special: whether names of control tokens in the texts become these tokens.
        threads, cache_type, backend: as in :class:`LLM`, for a model that is not loaded yet.
        output, force: file to write (None writes nothing), and whether to replace an existing one.
        work: with ``train``, a folder from which the same call continues (None: ``output`` and ``.work``).
        training: settings of ``train``.
        progress: called with the phases ``loading``, ``layers`` and ``measuring``.

    UserError: a value is not allowed, the text has less than two windows, or no predictor fits
    ``max_share``."""
    if method not in INPUTS:
        raise UserError(f"method {method!r}: choose from {', '.join(INPUTS)}")
    tokens, eval_tokens = whole("tokens", tokens, 2), whole("eval_tokens", eval_tokens, 1)
    settings = FitOptions(method, recall, weighted or method == "train", type and type.upper(), max_share)
    to_write = output_file(output, force=force, inputs=[model, text, held_out])
    folder = _work_folder(method, work, training, to_write)
    texts = [text_of(each) for each in (text, held_out) if each is not None]
    load_options: dict[str, Any] = {"threads": threads, "cache_type": cache_type, "backend": backend}
    source = source_of(model)
    if not isinstance(source, LoadedModel):
        load_options["context"] = context
    _check_file(file_of(source), method)
    # Loading as predicted checks a PowerInfer file's own predictors before anything else.
    mode, predictors = "predicted" if method == "trained" else "exact", file_of(source)
    fixed = {"sparsity": mode, "predictor": predictors, "default_context": LONGEST_WINDOW, "gpu": OFF}
    base = opened(source, load_options, progress, **fixed, state_copies=0, draft_max=0)
    base.mode(mode, predictors)
    _check_layers(base, method)
    length = window_length(base.context, context)
    fit_to, held_out_windows = _windows(base, texts, tokens, length, special=special)
    checks = evenly(held_out_windows, max(1, tokens // (5 * length)))
    judges = _judges(held_out_windows, eval_tokens, length)
    if folder is None:
        best, frontier = _fit(base, settings, fit_to, checks, progress)
        return _measured(base, settings, best, frontier, judges, to_write, progress)
    from hotcold.tasks.predictor_training import trained

    layers = trained(base, settings, training or TrainOptions(), fit_to, checks, folder, threads, progress)
    best, svd = [each.best for each in layers], [each.svd for each in layers]
    return _measured(base, settings, best, [each.tried for each in layers], judges, to_write, progress, svd)


def measure_predictor(
    model: Model,
    predictor: str | os.PathLike[str],
    text: str | Path,
    *,
    eval_tokens: int = 16384,
    context: int | None = None,
    special: bool = False,
    threads: int | None = None,
    cache_type: str | None = None,
    backend: str | None = None,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Cost:
    """Measures the predictors of a file on a text to which they were not fitted. ``output`` gets the same
    predictors with the measurement, by which ``sparsity="auto"`` decides. Other arguments and errors are
    those of :func:`fit_predictor`."""
    eval_tokens, path = whole("eval_tokens", eval_tokens, 1), Path(predictor)
    to_write = output_file(output, force=force, inputs=[model, predictor, text])
    read = text_of(text)
    with open_gguf(path) as file:
        if not is_sidecar(file):
            fix = "the predictors in a PowerInfer file are measured by fit_predictor with `method=trained`"
            raise UserError(f"{printable(path.name)} is not a predictor file: {fix}")
    load_options: dict[str, Any] = {"threads": threads, "cache_type": cache_type, "backend": backend}
    source = source_of(model)
    if not isinstance(source, LoadedModel):
        load_options["context"] = context
    fixed: dict[str, Any] = {"sparsity": "predicted", "predictor": path, "gpu": OFF}
    fixed |= {"default_context": LONGEST_WINDOW, "state_copies": 0, "draft_max": 0}
    base = opened(source, load_options, progress, **fixed)
    base.mode("predicted", path)
    length = window_length(base.context, context)
    windows = text_windows(base.tokenizer, read, length, special=special)
    with closing(base.session("exact")) as exact:
        cost = _cost(exact, path, _judges(windows, eval_tokens, length), progress)
    if to_write is not None:
        write_measured(path, to_write, cost.measured)
    return cost


def _work_folder(
    method: str, work: str | os.PathLike[str] | None, training: TrainOptions | None, output: Path | None
) -> Path | None:
    """Returns the folder of a training, or None for other methods. Fails at once if torch is missing."""
    if method != "train":
        if work is not None or training is not None:
            raise UserError(f"`work` is for method=train, and the method is {method}")
        return None
    import hotcold.training.libraries  # noqa: F401

    if work is None and output is None:
        raise UserError("`work` is None: give a folder for the state of the training, or an `output`")
    return Path(work or f"{output}.work")


def _check_file(path: Path, method: str) -> None:
    """UserError: the model in a file cannot have predictors. The check comes before loading, whose message
    would name a sparsity mode that the user did not choose."""
    with open_gguf(path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
    if config.whole:  # the model may have zeros, but they depend on more than a neuron's own rows
        raise UserError(f"{config.whole}: no neuron can be predicted")
    if method == "trained" and config.experts is not None:
        got = f"{printable(path.name)} has {config.experts.count} experts in a layer"
        raise UserError(f"{got}: training needs layers without experts; use `method=svd`")


def _check_layers(model: LoadedModel, method: str) -> None:
    config = model.config
    if method != "svd" and not all(config.neurons):
        got = f"{config.neurons.count(0)} layers of {printable(model.name)} have no FFN"
        raise UserError(f"{got}: only `method=svd` can make predictors for the others")


def _windows(
    model: LoadedModel, texts: Sequence[str], tokens: int, length: int, *, special: bool = False
) -> tuple[Windows, Windows]:
    """Returns windows to fit to, four fifths of ``tokens`` spread over the text, and all held-out windows:
    the second text, or the last fifth of one text."""
    fit_to, *others = (text_windows(model.tokenizer, text, length, special=special) for text in texts)
    if others:
        held_out = others[0]
    else:
        end = len(fit_to) * 4 // 5
        fit_to, held_out = fit_to[:end], fit_to[end:]
    if not fit_to:
        raise UserError("the text is less than two windows: give more, or make them smaller (`context`)")
    return evenly(fit_to, max(1, tokens * 4 // (5 * length))), held_out


def _judges(windows: Windows, tokens: int, length: int) -> Windows:
    """Returns windows with this many tokens, shuffled so that the first ones already represent the text."""
    order = np.random.default_rng(0).permutation(len(windows))
    return [windows[at] for at in order[: max(1, tokens // (length - 1))]]


def _fit(
    model: LoadedModel,
    settings: FitOptions,
    fit_to: Windows,
    held_out: Windows,
    progress: Progress | None,
) -> tuple[list[Fitted | None], list[list[Fit]]]:
    """Fits predictors of several ranks. Returns the best of each layer (None without an FFN), and the quality
    of all, the best first."""
    names = {"normed", INPUTS[settings.method]}
    inputs = ffn_inputs(model, fit_to, names), ffn_inputs(model, held_out, names)
    best: list[Fitted | None] = []
    frontier: list[list[Fit]] = []
    with open_gguf(model.path) as file:
        for layer, (fit_inputs, held_out_inputs) in enumerate(zip(*inputs, strict=True)):
            fit = fit_experts if model.config.experts_of(layer) else fit_layer
            ladder: list[Fitted] = []
            if model.config.neurons[layer]:
                ladder = fit(file, model.config, layer, settings, fit_to=fit_inputs, held_out=held_out_inputs)
            best.append(ladder[0] if ladder else None)
            frontier.append([each.fit for each in ladder])
            if progress:
                progress("layers", layer + 1, model.config.layers)
    return best, frontier


def _measured(
    model: LoadedModel,
    settings: FitOptions,
    best: Sequence[Fitted | None],
    frontier: list[list[Fit]],
    judges: Windows,
    output: Path | None,
    progress: Progress | None,
    svd: Sequence[Fitted] | None = None,
) -> FittedPredictor:
    """Measures the cost and gain of each layer's best predictors together, and of ``svd``, if given."""
    with closing(model.session("exact")) as exact:
        compared = None
        if svd is not None:
            compared = _compared(exact, replace(settings, method="svd"), svd, judges, progress)
        comparison = _compared(exact, settings, best, judges, progress)
        fitted = FittedPredictor(
            layers=comparison.layers,
            speed=comparison.speed,
            measured=comparison.measured,
            tensors=comparison.tensors,
            options=settings,
            frontier=frontier,
            fingerprint=model.fingerprint,
            setup=Setup.from_session(exact),
            svd=compared,
        )
    if output is not None:
        fitted.write(output)
    return fitted


def _compared(
    exact: Session,
    settings: FitOptions,
    fitted: Sequence[Fitted | None],
    judges: Windows,
    progress: Progress | None,
) -> Comparison:
    """Measures predictors through a temporary file: the output appears only at the end, so that a killed run
    can continue."""
    model = exact.model
    fits = [each.fit if each else _NO_FIT for each in fitted]
    tensors = [each and each.tensors for each in fitted]
    with tempfile.TemporaryDirectory(prefix="hotcold-") as folder:
        path = Path(folder, "predictor.gguf")
        write_sidecar(path, model.fingerprint, tensors, settings.facts(fits))
        cost = _cost(exact, path, judges, progress)
    return Comparison(cost.speed, cost.measured, fits, tensors)


def _cost(exact: Session, sidecar: Path, judges: Windows, progress: Progress | None) -> Cost:
    with closing(exact.model.session("predicted", sidecar)) as predicted:
        divergence = _until_decided(Scorer(predicted), Scorer(exact), judges, progress)
        speed = _speed(exact, predicted)
    low, high = divergence.ratio_interval() or (0.0, math.inf)
    measured = Measurement(
        tokens=len(divergence.kl),
        kl_mean=max(0.0, float(divergence.kl.mean())),
        ppl_ratio=divergence.perplexity_ratio,
        ppl_ratio_low=low,
        ppl_ratio_high=high,
        speed_ratio=speed.ratio,
        speed_low=speed.ratio_low,
        speed_high=speed.ratio_high,
    )
    return Cost(speed, measured)


def _until_decided(
    predicted: Scorer, exact: Scorer, windows: Windows, progress: Progress | None
) -> Divergence:
    """Compares both modes window by window, until the confidence interval of the perplexity ratio is on one
    side of MOST_RATIO, or no window is left."""
    parts: list[Divergence] = []
    tokens, look = 0, _FIRST_LOOK
    for done, window in enumerate(windows, 1):
        parts.append(compare(predicted, exact, window))
        tokens += len(window) - 1
        if progress:
            progress("measuring", done, len(windows))
        if tokens >= look:
            look = 2 * tokens
            low, high = join(parts).ratio_interval(level=_EARLY_LEVEL) or (0.0, math.inf)
            if low > MOST_RATIO or high <= MOST_RATIO:
                break
    return join(parts)


def _speed(exact: Session, predicted: Session) -> Speed:
    model = exact.model
    prompt = prompt_of(model, min(32, model.context // 4))
    length = min(64, model.context // 2)
    engines = Engine(exact), Engine(predicted)

    def round(seed: int) -> list[float]:
        return [measure(engine, prompt, [length], None, seed=seed).tok_s or 1 for engine in engines]

    round(0)  # warms up memory and threads
    rounds = [round(seed) for seed in range(1, _ROUNDS + 1)]
    ratios = [after / before for before, after in rounds]
    return Speed(
        exact_tok_s=statistics.median(before for before, _ in rounds),
        predicted_tok_s=statistics.median(after for _, after in rounds),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
    )
