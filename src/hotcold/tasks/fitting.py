"""Fits the predictors of a model to a text, with training or without, and measures their quality."""

import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hotcold.api.llm import Model, source_of
from hotcold.engine.engine import Engine
from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.backend import PredictorTensors
from hotcold.kernels.gpus import OFF
from hotcold.model.config import Config
from hotcold.runtime.opening import file_of, opened
from hotcold.runtime.options import Progress
from hotcold.runtime.session import LoadedModel, Session
from hotcold.sparse.expert_fitting import fit_experts
from hotcold.sparse.fitting import INPUTS, Fit, FitOptions, Fitted, fit_layer
from hotcold.sparse.predictor import write_sidecar
from hotcold.tasks.bench import measure, prompt_of
from hotcold.tasks.ffn_inputs import ffn_inputs
from hotcold.tasks.profiling import LONGEST_WINDOW, window_length
from hotcold.tasks.reports import Setup
from hotcold.tasks.texts import new_file, text_of
from hotcold.tasks.windows import evenly, text_windows
from hotcold.training.options import TrainOptions
from hotcold.values import printable, whole
from hotcold.version import __version__

_ROUNDS = 5  # rounds of timing

_HEADING = "layer  rank     bytes  of FFN  candidates  active  recall  weighted   read  pays"
_ROW = (
    "{layer:5}{rank:6}{nbytes:10}{size_ratio:8.1%}{candidates:12.1%}{active:8.1%}{recall:8.4f}"
    "{weighted_recall:10.4f}{read_ratio:7.3f}  {pays!s:>5}"
)

#: Stands for the predictor of a layer that has no FFN.
_NO_FIT = Fit(0, 0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, pays=False)

Windows = list[list[int]]


@dataclass(frozen=True)
class Speed:
    """The speed of generation on this machine: medians of rounds in which both modes took turns."""

    exact_tok_s: float
    predicted_tok_s: float
    ratio: float  #: median over rounds of the second over the first
    least_ratio: float  #: of a round
    most_ratio: float

    @property
    def is_noise(self) -> bool:
        """Whether rounds do not agree on the faster one of the two."""
        return self.least_ratio <= 1 <= self.most_ratio


@dataclass(frozen=True)
class Comparison:
    """Predictors made from the same text by `svd`, for the same recall of what neurons add."""

    layers: list[Fit]
    speed: Speed
    tensors: Sequence[PredictorTensors] = field(repr=False)

    def report(self) -> dict[str, Any]:
        return {"layers": [asdict(fit) for fit in self.layers], **asdict(self.speed)}


@dataclass(frozen=True)
class FittedPredictor:
    """A model's predictors; ``str()`` gives the table that ``hotcold fit-predictor`` prints."""

    options: FitOptions
    layers: list[Fit]  #: by layer, the quality of its predictor on text that was not fitted to
    frontier: list[list[Fit]]  #: by layer, the predictors of all ranks, the best first
    pays: list[bool]  #: by layer, whether ``--sparsity auto`` should use it
    speed: Speed
    measured: Literal["auto", "predicted"]  #: the sparsity mode of ``speed.predicted_tok_s``
    fingerprint: str  #: the model's
    setup: Setup
    tensors: Sequence[PredictorTensors | None] = field(repr=False)  #: None: a layer without an FFN
    svd: Comparison | None = None  #: beside predictors that were trained

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file. As ``MODEL.predictor.gguf`` beside the model it is found when the model is
        loaded."""
        write_sidecar(Path(path), self.fingerprint, self.tensors, self.metadata)

    @property
    def metadata(self) -> dict[str, Any]:
        """The keys ``hotcold.predictor.*`` of the file, as docs/formats.md lists them."""
        return _metadata(self.options, self.layers, self.pays)

    def report(self) -> dict[str, Any]:
        """The report for ``--json``."""
        return {
            **self.metadata,
            **asdict(self.speed),
            "measured": self.measured,
            "layers": [asdict(fit) for fit in self.layers],
            "frontier": [[asdict(fit) for fit in ladder] for ladder in self.frontier],
            **({} if self.svd is None else {"svd": self.svd.report()}),
            **asdict(self.setup),
        }

    def __str__(self) -> str:
        lines = [_HEADING, *(_ROW.format(layer=i, **asdict(fit)) for i, fit in enumerate(self.layers))]
        fits = [fit for ladder in self.frontier for fit in ladder]
        for rank in sorted({fit.rank for fit in fits}):
            same = [fit for fit in fits if fit.rank == rank]
            share, candidates, read = (
                statistics.mean(getattr(fit, name) for fit in same)
                for name in ("size_ratio", "candidates", "read_ratio")
            )
            words = f"{share:.1%} of the FFN, {candidates:.1%} candidates, reads {read:.3f} of exact"
            lines.append(f"rank {rank}: {words}")
        lines.append(self._generation(self.speed))
        if self.svd is not None:
            lines += ["beside it, svd of the same text:", _HEADING]
            lines += [_ROW.format(layer=i, **asdict(fit)) for i, fit in enumerate(self.svd.layers)]
            lines.append(self._generation(self.svd.speed))
        return "\n".join(lines)

    def _generation(self, speed: Speed) -> str:
        rounds = f"rounds: {speed.least_ratio:.2f} to {speed.most_ratio:.2f} times"
        if speed.is_noise:
            return f"generation: {self.measured} and exact differ by the clock's noise ({rounds})"
        both = f"exact {speed.exact_tok_s:.1f}, {self.measured} {speed.predicted_tok_s:.1f} tok/s"
        return f"generation: {both}, {speed.ratio:.2f} times ({rounds})"


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
    context: int | None = None,
    special: bool = False,
    threads: int | None = None,
    cache_type: str | None = None,
    backend: str | None = None,
    output: str | os.PathLike[str] | None = None,
    work: str | os.PathLike[str] | None = None,
    training: TrainOptions | None = None,
    progress: Progress | None = None,
) -> FittedPredictor:
    """Makes the predictors of ``sparsity="predicted"`` from a text, and measures their quality.

    >>> fitted = hotcold.fit_predictor("model.gguf", Path("text.txt"), output="model.predictor.gguf")

    Args:
        model: a GGUF file, or what was loaded from one; None is the built-in model.
        text: a text, or the ``Path`` of a file in UTF-8, cut into windows of ``context`` positions (at most
            512 by default).
        held_out: another text to judge by; None takes the last fifth of ``text``, which is not fitted to.
        method: ``svd``, a truncated SVD of the gate; ``train``, the same factors trained with torch (the
            extra ``[train]``); or ``trained``, the predictors in a PowerInfer file.
        recall: share of the active neurons to find; None: 0.99, or as trained thresholds give.
        weighted: whether ``recall`` weighs each neuron by how much it adds, as it always does with ``train``.
        type: block type of the predictors; None: Q4_0, or that of the trained ones.
        max_share: limit of a predictor's bytes, as a part of its layer's FFN.
        tokens: how many tokens to use, spread over the text: four fifths to fit, one to judge.
        special: whether names of control tokens in the texts become these tokens.
        threads, cache_type, backend: as in :class:`LLM`, for a model that is not loaded yet.
        output: file to write; None writes nothing.
        work: with ``train``, a folder for what the run has so far: the same call goes on from it. None is
            ``output`` with ``.work`` after it.
        training: how ``train`` trains.
        progress: is told of the phases ``loading`` and ``layers``.

    UserError: a value is not allowed, the text has less than two windows, or no predictor fits
    ``max_share``."""
    if method not in INPUTS:
        raise UserError(f"method {method!r}: choose from {', '.join(INPUTS)}")
    tokens = whole("tokens", tokens, 2)
    settings = FitOptions(method, recall, weighted or method == "train", type and type.upper(), max_share)
    to_write = None if output is None else new_file(output)
    folder = _work_folder(method, work, training, to_write)
    texts = [text_of(each) for each in (text, held_out) if each is not None]
    load_options: dict[str, Any] = {"threads": threads, "cache_type": cache_type, "backend": backend}
    source = source_of(model)
    if not isinstance(source, LoadedModel):
        load_options["context"] = context
    if method == "trained":
        _check_experts(file_of(source))
    # Loading as predicted checks a PowerInfer file's own predictors before anything else is done.
    mode, own = "predicted" if method == "trained" else "exact", file_of(source)
    more = {"sparsity": mode, "predictor": own, "default_context": LONGEST_WINDOW, "gpu": OFF}
    base = opened(source, load_options, progress, **more, state_copies=0, draft_max=0)
    base.mode(mode, own)
    _check_layers(base, method)
    fit_to, seen = _windows(base, texts, tokens, window_length(base.context, context), special=special)
    if folder is None:
        ladders = _fit(base, settings, fit_to, seen, progress)
        best = [each[0] if each else None for each in ladders]
        frontier = [[each.fit for each in ladder] for ladder in ladders]
        return _measured(base, settings, best, frontier, to_write)
    from hotcold.tasks.predictor_training import trained

    layers = trained(base, settings, training or TrainOptions(), fit_to, seen, folder, threads, progress)
    best, beside = [each.best for each in layers], [each.svd for each in layers]
    return _measured(base, settings, best, [each.tried for each in layers], to_write, beside)


def _work_folder(
    method: str, work: str | os.PathLike[str] | None, training: TrainOptions | None, output: Path | None
) -> Path | None:
    """The folder of a training, or None for other methods. Without torch nothing else is begun."""
    if method != "train":
        if work is not None or training is not None:
            raise UserError(f"`work` is for method=train, and the method is {method}")
        return None
    import hotcold.training.libraries  # noqa: F401

    if work is None and output is None:
        raise UserError("`work` is None: name a folder for what the training has so far, or an `output`")
    return Path(work or f"{output}.work")


def _check_experts(path: Path) -> None:
    with open_gguf(path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
    if config.experts is not None:
        seen = f"{printable(path.name)} has {config.experts.count} experts in a layer"
        raise UserError(f"{seen}: trained predictors are taken of layers without experts; use `method=svd`")


def _check_layers(model: LoadedModel, method: str) -> None:
    config = model.config
    if config.whole:  # only some zeros, which depend on more than a neuron's own rows
        raise UserError(f"{config.whole}: no neuron can be predicted by itself")
    if method != "svd" and not all(config.neurons):
        seen = f"{config.neurons.count(0)} layers of {printable(model.name)} have no FFN"
        raise UserError(f"{seen}: predictors of the others can be made by `method=svd` alone")


def _windows(
    model: LoadedModel, texts: Sequence[str], tokens: int, length: int, *, special: bool = False
) -> tuple[Windows, Windows]:
    """Windows to fit to and, without overlap, windows to judge by: four fifths and one fifth of ``tokens``.

    They are spread over the two texts, or over the first four fifths and the last fifth of one."""
    fit_to, *more = (text_windows(model.tokenizer, text, length, special=special) for text in texts)
    if more:
        held_out = more[0]
    else:
        end = len(fit_to) * 4 // 5
        fit_to, held_out = fit_to[:end], fit_to[end:]
    if not fit_to:
        raise UserError("the text is less than two windows: give more, or make them smaller (`context`)")
    wanted = max(1, tokens * 4 // (5 * length)), max(1, tokens // (5 * length))
    return evenly(fit_to, wanted[0]), evenly(held_out, wanted[1])


def _fit(
    model: LoadedModel,
    settings: FitOptions,
    fit_to: Windows,
    held_out: Windows,
    progress: Progress | None,
) -> list[list[Fitted]]:
    """Fits predictors of several ranks for each layer, the best first; none for layers without an FFN."""
    names = {"normed", INPUTS[settings.method]}
    inputs = ffn_inputs(model, fit_to, names), ffn_inputs(model, held_out, names)
    ladders: list[list[Fitted]] = []
    with open_gguf(model.path) as file:
        for layer, (seen, unseen) in enumerate(zip(*inputs, strict=True)):
            fit = fit_experts if model.config.experts_of(layer) else fit_layer
            some = model.config.neurons[layer] > 0
            ladders.append(
                fit(file, model.config, layer, settings, fit_to=seen, held_out=unseen) if some else []
            )
            if progress:
                progress("layers", layer + 1, model.config.layers)
    return ladders


def _measured(
    model: LoadedModel,
    settings: FitOptions,
    best: Sequence[Fitted | None],
    frontier: list[list[Fit]],
    output: Path | None,
    svd: Sequence[Fitted] | None = None,
) -> FittedPredictor:
    """The best predictor of each layer. Bytes decide in which layers prediction pays, timing whether it pays
    at all. ``svd`` is timed, too, in the same mode."""
    tensors = [each and each.tensors for each in best]
    fits = [each.fit if each else _NO_FIT for each in best]
    pays = [fit.pays for fit in fits]
    measured: Literal["auto", "predicted"] = "auto" if any(pays) else "predicted"
    beside = None
    with tempfile.TemporaryDirectory(prefix="hotcold-") as folder, closing(model.session("exact")) as exact:
        path = Path(folder, "predictor.gguf")  # the output appears at the end, so that a killed run can go on
        write_sidecar(path, model.fingerprint, tensors, _metadata(settings, fits, pays))
        with closing(model.session(measured, path)) as predicted:
            speed = _speed(exact, predicted)
        if svd is not None:
            beside = _compared(model, settings, svd, exact, measured, Path(folder, "svd.gguf"))
        setup = Setup.of(exact)
    found = FittedPredictor(
        options=settings,
        layers=fits,
        frontier=frontier,
        pays=pays if speed.least_ratio > 1 else [False] * len(pays),
        speed=speed,
        measured=measured,
        fingerprint=model.fingerprint,
        setup=setup,
        tensors=tensors,
        svd=beside,
    )
    if output is not None:
        found.write(output)
    return found


def _compared(
    model: LoadedModel,
    settings: FitOptions,
    svd: Sequence[Fitted],
    exact: Session,
    mode: Literal["auto", "predicted"],
    path: Path,
) -> Comparison:
    fits = [each.fit for each in svd]
    facts = _metadata(replace(settings, method="svd"), fits, [fit.pays for fit in fits])
    write_sidecar(path, model.fingerprint, [each.tensors for each in svd], facts)
    with closing(model.session(mode, path)) as predicted:
        return Comparison(fits, _speed(exact, predicted), [each.tensors for each in svd])


def _metadata(settings: FitOptions, fits: Sequence[Fit], pays: Sequence[bool]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "version": __version__,
        "method": settings.method,
        "weighted": settings.weighted,
        "input": INPUTS[settings.method],
    }
    if settings.target is not None:
        found["target"] = settings.target
    found["pays"] = [*pays]
    for name in ("candidates", "recall", "weighted_recall", "read_ratio"):
        found[name] = [getattr(fit, name) for fit in fits]
    return found


def _speed(exact: Session, predicted: Session) -> Speed:
    model = exact.model
    prompt = prompt_of(model, min(32, model.context // 4))
    length = min(64, model.context // 2)
    engines = Engine(exact), Engine(predicted)

    def round(seed: int) -> list[float]:
        return [measure(engine, prompt, [length], None, seed=seed).tok_s or 1 for engine in engines]

    round(0)  # warms memory and threads
    rounds = [round(seed) for seed in range(1, _ROUNDS + 1)]
    ratios = [after / before for before, after in rounds]
    return Speed(
        exact_tok_s=statistics.median(before for before, _ in rounds),
        predicted_tok_s=statistics.median(after for _, after in rounds),
        ratio=statistics.median(ratios),
        least_ratio=min(ratios),
        most_ratio=max(ratios),
    )
