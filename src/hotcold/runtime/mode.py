"""The sparsity mode of a session, and its predictors."""

from dataclasses import dataclass
from pathlib import Path

from hotcold.formats.gguf import open_gguf
from hotcold.model.config import Config
from hotcold.runtime.options import SPARSITY_MODES, LoadError
from hotcold.sparse.predictor import PredictorFacts, check_predictors
from hotcold.values import printable


@dataclass(frozen=True)
class SparsityMode:
    name: str  #: ``exact``, ``predicted`` or ``off``
    notes: tuple[str, ...] = ()  #: unavailable requests, and what ``auto`` does with predictors
    predictors: PredictorFacts | None = None  #: None if the mode uses none
    details: tuple[str, ...] = ()  #: how ``auto`` computes a model without predictors, and why


def choose_mode(
    requested: str, config: Config, model: Path, predictor: Path | None, fingerprint: str
) -> SparsityMode:
    """Returns the mode for one of :data:`SPARSITY_MODES`. ``predictor``: the file with predictors, which may
    be the ``model``'s own. UserError: the model cannot run in that mode, or the predictors are invalid."""
    if requested not in SPARSITY_MODES:
        raise LoadError(f"sparsity {requested!r}: choose from {', '.join(SPARSITY_MODES)}")
    if requested == "off":
        return SparsityMode("off")
    auto = requested == "auto"
    if config.whole and any(config.skips):
        if requested == "predicted":
            cut = "in this model all gates of a token together decide which neurons are active"
            why = config.whole if config.normed else cut
            raise LoadError(f"`sparsity=predicted`: {why}: use exact, off or auto")
        layers = f"{sum(config.skips)} of {config.layers} layers"
        note = (
            f"rows of up are skipped, only on CPUs: {config.whole}"
            if config.normed
            else f"zeros are skipped in {layers}, whose gates are cut"
        )
        return SparsityMode("exact", details=(note,)) if auto else SparsityMode("exact", (note,))
    if config.whole:
        if auto:
            whole = ", so chosen experts are computed whole" if config.experts else ""
            return SparsityMode("off", details=(f"sparsity auto chooses off: {config.whole}{whole}",))
        got = f"`sparsity={requested}`: {config.whole}"
        raise LoadError(f"{got}, so no neuron can be skipped: use off or auto")
    whole_downs = _whole_downs(config)
    if requested == "exact":
        return SparsityMode("exact", whole_downs)
    if requested == "predicted":
        if predictor is None:
            got = "`sparsity=predicted`: the file has no predictor (blk.N.fc1, blk.N.fc2) and no sidecar"
            needed = "use exact, which is lossless and needs none, or make one with hotcold fit-predictor"
            raise LoadError(f"{got}: {needed}")
        facts = _facts(predictor, config, fingerprint)
        return SparsityMode("predicted", whole_downs, facts)
    return _automatic(config, model, predictor, fingerprint)


def _automatic(config: Config, model: Path, predictor: Path | None, fingerprint: str) -> SparsityMode:
    """Returns ``predicted`` if a sidecar stores a measurement in its favour, else ``exact``: it gives the
    same bits as ``off`` and is never slower."""
    reasons = _whole_downs(config)
    notes: tuple[str, ...] = ()
    if predictor is not None:
        name = printable(predictor.name)
        if predictor == model:
            notes = (_not_measured(model, name, "`method=trained`"),)
        else:
            facts = _facts(predictor, config, fingerprint)
            measured = facts.measured
            if measured and not measured.objection:
                note = f"sparsity auto chooses predicted, by {name}: {measured.cost}, {measured.gain}"
                return SparsityMode("predicted", (note,), facts, reasons)
            if measured:
                figures = f"{measured.cost}, {measured.gain}"
                notes = (f"sparsity auto does not use {name}: {measured.objection} ({figures})",)
            else:
                notes = (_not_measured(model, name, f"`measure={name}`"),)
    if reasons and all(down for down, n in zip(config.whole_downs, config.neurons, strict=True) if n):
        details = tuple(f"sparsity auto chooses off: {each}" for each in reasons)
        return SparsityMode("off", notes, details=details)
    return SparsityMode("exact", notes, details=reasons)


def _not_measured(model: Path, name: str, option: str) -> str:
    command = f"hotcold fit-predictor -m {printable(model.name)} {option} -f TEXT -o NEW.predictor.gguf"
    return (
        f"sparsity auto chooses exact: {name} has no measurement of its predictors; "
        f"this measures them: {command}"
    )


def _whole_downs(config: Config) -> tuple[str, ...]:
    """Names the number of layers that add all neurons, and the reason; empty if there are none."""
    types = sorted({type for type in config.whole_downs if type})
    if not types:
        return ()
    layers = f"{sum(map(bool, config.whole_downs))} of {sum(map(bool, config.neurons))} layers"
    return (f"in {layers} down is {' and '.join(types)} by_output, so its zeros are not skipped",)


def _facts(path: Path, config: Config, fingerprint: str) -> PredictorFacts:
    with open_gguf(path) as file:
        return check_predictors(file, config, fingerprint)
