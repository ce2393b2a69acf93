"""From a model file to a model in memory: what fits, where each part lies, and then the weights."""

import weakref
from dataclasses import dataclass, field
from pathlib import Path

from hotcold.demo import model_path
from hotcold.engine.load_options import LoadError, LoadOptions
from hotcold.engine.memory import check_memory
from hotcold.engine.placing import open_devices
from hotcold.engine.session import Session, Wrap
from hotcold.engine.sparsity_mode import SparsityMode, choose_mode
from hotcold.errors import UserError
from hotcold.formats.gguf import GGUFFile, open_gguf, printable
from hotcold.kernels.backend import DECODE_ROWS, PAGE, Backend, BatchLimits
from hotcold.model.config import Config
from hotcold.model.devices import Devices
from hotcold.model.tokenizer import Tokenizer
from hotcold.model.weights import Progress, Weights, check_tensors, load_weights
from hotcold.sparse.predictor import find_predictors, predictor_names


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """What all users of a model share; nothing in it changes. Steps are run by a :meth:`session`."""

    path: Path
    fingerprint: str
    config: Config
    tokenizer: Tokenizer
    weights: Weights
    devices: Devices
    limits: BatchLimits  #: of the steps of every session
    context: int  #: the most positions of a sequence
    chunk: int  #: the most prompt rows of a step
    cache_type: str
    sparsity: str  #: the mode that was asked for, ``auto`` perhaps
    predictor: Path | None  #: the file with predictors, where there is one
    notes: tuple[str, ...]  #: of loading: what was assumed, and what runs a slower way
    _sessions: weakref.WeakSet[Session] = field(default_factory=weakref.WeakSet, init=False, repr=False)

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def backend(self) -> Backend:
        """Of whatever a placement does not put elsewhere."""
        return self.devices.embedding

    @property
    def hot(self) -> Backend | None:
        """The backend of what is hot, if not all lies on :attr:`backend`."""
        return self.devices.hot

    @property
    def threads(self) -> int | None:
        """Of :attr:`backend`; None where it has none of its own."""
        return self.backend.threads

    def session(
        self, sparsity: str | None = None, predictor: Path | None = None, wrap: Wrap = list
    ) -> Session:
        """A user's own state beside the shared weights; any number may be open, each with a KV cache. Threads
        may run steps of one each: the steps take turns.

        ``sparsity`` and ``predictor`` are those of :class:`LoadOptions`, None what the model was loaded with;
        ``wrap`` is given the layers' FFNs and gives those to run. LoadError: the model cannot run in that
        mode, or there is no memory for another KV cache; PredictorError: the sidecar is not right."""
        session = Session(self, self.mode(sparsity, predictor), wrap)
        self._sessions.add(session)
        return session

    def mode(self, sparsity: str | None = None, predictor: Path | None = None) -> SparsityMode:
        """The mode that a :meth:`session` would run in; errors as there."""
        source = predictor or self.predictor
        return choose_mode(sparsity or self.sparsity, self.config, self.path, source, self.fingerprint)

    def close(self) -> None:
        """Closes all sessions."""
        for session in list(self._sessions):
            session.close()


def load(path: Path | None, options: LoadOptions, progress: Progress | None = None) -> LoadedModel:
    """Loads a GGUF file, or the built-in model; ``progress`` is called with bytes read so far and in all.

    ValueError: not a model file (GGUFError), a model that is not supported (ModelError), or options that do
    not fit it or the machine (LoadError). Weights are read last, when a session has been found to fit."""
    with open_gguf(path or model_path()) as file:
        try:
            return _load(file, options, progress)
        except UserError:
            raise
        except ValueError as error:  # a shape that is right and that a kernel has no room for, say
            raise LoadError(f"{printable(file.path.name)} cannot run here: {error}") from error


def _load(file: GGUFFile, options: LoadOptions, progress: Progress | None) -> LoadedModel:
    factors, predictor = predictor_names(file), find_predictors(file, options.predictor)
    config = Config.from_metadata(file.metadata, file.magic, file.tensors)
    fingerprint = file.fingerprint()
    weight_bytes = check_tensors(file, config, factors)
    mode = choose_mode(options.sparsity, config, file.path, predictor, fingerprint)
    limits, context, chunk = _limits(config, options)
    tokenizer = Tokenizer.from_metadata(file.metadata)
    used = mode.predictors.path if mode.predictors else None
    devices, notes = open_devices(file, config, options, limits, used)
    if "output.weight" not in file.tensors and devices.head is not devices.embedding:
        weight_bytes += file.tensors["token_embd.weight"].nbytes  # each of the two has the table
    if mode.predictors:
        weight_bytes += mode.predictors.nbytes
    check_memory(weight_bytes, options.cache_type, config, limits, devices)
    return LoadedModel(
        path=file.path,
        fingerprint=fingerprint,
        config=config,
        tokenizer=tokenizer,
        weights=load_weights(file, config, devices, progress, factors),
        devices=devices,
        limits=limits,
        context=context,
        chunk=chunk,
        cache_type=options.cache_type,
        sparsity=options.sparsity,
        predictor=predictor,
        notes=(*config.notes, *notes),
    )


def _limits(config: Config, options: LoadOptions) -> tuple[BatchLimits, int, int]:
    """Of a step, and the most positions of a sequence and prompt rows of a step."""
    asked, most = options.context, config.context
    if asked is not None and not 2 <= asked <= most:
        raise LoadError(f"context of {asked} positions (-c): this model allows 2 to {most}")
    context = asked or min(most, options.default_context)
    chunk = min(options.chunk, context)
    pages, logits = -(-context // PAGE), max(DECODE_ROWS, options.sequences)
    return BatchLimits(DECODE_ROWS + chunk, options.sequences, pages, logits), context, chunk
