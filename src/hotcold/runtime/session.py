"""A loaded model, which its users share, and their sessions: sparsity mode, KV cache, and programs of a
step."""

import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.backend import (
    FFN_COUNTS,
    PAGE,
    Backend,
    BatchLimits,
    DiskCounts,
    FFNWeights,
    Matrix,
    PredictorWeights,
)
from hotcold.model.config import Config
from hotcold.model.devices import Devices
from hotcold.model.draft_block import DraftBlock
from hotcold.model.ffn.given_ffn import AnyFFN
from hotcold.model.kv_cache import SequenceState
from hotcold.model.transformer import Transformer
from hotcold.model.weights import Weights
from hotcold.placement.memory_plan import MemoryPlan
from hotcold.placement.split import ColdSide
from hotcold.runtime.counters import Counters, Footprint
from hotcold.runtime.memory import check_memory
from hotcold.runtime.mode import SparsityMode, choose_mode
from hotcold.runtime.placing import OnGPU
from hotcold.runtime.pooling import Pooling, pooling_of
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session_lock import SessionLock
from hotcold.sparse.ffn import FFN, SplitFFN, make_ffns, make_shared_ffns, prompt_ffns
from hotcold.sparse.predictor import load_predictors
from hotcold.sparse.timeline import Timeline
from hotcold.tokenizer.tokenizer import Tokenizer

#: Takes the layers' FFNs, and returns the FFNs to run.
Wrap = Callable[[list[AnyFFN]], list[AnyFFN]]


class User(Protocol):
    """A user of a session, who runs its steps: an engine, or a scoring."""

    @property
    def in_use(self) -> str: ...  # describes unfinished work; empty if another user may have the session


class Session:
    """A model in one sparsity mode, ready to run the steps that its batch describes, for one user at a time.

    The caller fills ``transformer.batch`` and reads ``transformer.logits``. ``sparsity`` is the mode in use.
    ``notes`` are the notes of loading, and the choice of ``auto`` with its reason. ``footprint`` is what a
    decode step reads; ``counters`` count the steps so far. Made by :meth:`LoadedModel.session`.

    Several threads may use a session: each holds ``lock`` while it claims the session or runs a step."""

    def __init__(self, model: "LoadedModel", mode: SparsityMode, wrap: Wrap = list) -> None:
        self.model, self._mode = model, mode
        self.sparsity, self.notes = mode.name, [*model.notes, *mode.notes, *mode.details]
        self.details = mode.details  #: the last ``notes``: commands print them only with --verbose
        config, limits, devices = model.config, model.limits, model.devices
        extra = mode.predictors.nbytes if mode.predictors else 0
        check_memory(model.plan, extra)
        predictors = self._load_predictors(mode)
        none = np.zeros((config.layers, len(FFN_COUNTS)), np.int64)
        shared = [layer.shared.ffn if layer.shared else None for layer in model.weights.layers]
        self._shared = make_shared_ffns(devices.layers, shared, mode.name)
        #: whether shared experts are sparse and count the rows that they read
        self.shared_counts = any(ffn is not None and ffn.stats is not None for ffn in self._shared)
        # Whether a layer reads only some rows of up: an FFN with a norm before down, on a CPU.
        self._chooses = tuple(
            mode.name != "off" and bool(config.normed) and skip and ops.chooses_rows
            for skip, ops in zip(config.skips, devices.layers, strict=True)
        )
        self._counters = Counters(none, shared=none[: config.layers * self.shared_counts].copy())
        self.predictors = predictors  #: of each layer; None if the mode uses none
        self.footprint = self._footprint(mode)
        plan, cache_type = model.plan, model.plan.request.cache_type
        self.state = SequenceState(devices, config, plan.pages, cache_type, plan.slots, plan.spare_slots)
        self.cache = self.state.pages  #: the owners of pages
        self.slots = self.state.slots  #: the owners of state slots; None if no layer keeps states
        self.lock = SessionLock()
        self.closed = False
        self._user: weakref.ref[User] | None = None
        # Only the FFNs know which experts a step reads, and so how many rows.
        self._ffns, self._cold_sides = self._make_ffns(count=mode.name != "off" or config.experts is not None)
        self._watched: Watched | None = None
        _serve(self, self._cold_sides, self._ffns)
        ffns = wrap([*self._ffns])
        of_model = config, model.weights, devices
        prompts = prompt_ffns(self._ffns) if wrap is list else []  # other FFNs see all steps
        self.transformer = Transformer(*of_model, ffns, limits, self.state, self._shared, prompts)
        self.draft_block = self._make_draft_block()  #: the block that drafts tokens, if any
        self.draft_session: Session | None = None  #: session of a draft model
        # Rows that a dense step of one token reads, [layers, 5]; other FFNs count rows themselves.
        self._dense_rows: npt.NDArray[np.int64] | None = None
        if mode.name == "off" and config.experts is None:
            runs = [layer.ffn.runs for layer in model.weights.layers]
            rows = np.outer(config.neurons, (1, config.gated, 1, 1))
            self._dense_rows = np.column_stack([rows, runs]).astype(np.int64)

    def claim(self, user: User) -> None:
        """Gives the batch and the KV cache to one user, with all pages and slots free; does nothing if the
        user has them. UserError: another user is not done with them."""
        owner = self._user() if self._user else None
        if owner is user:
            return
        if owner is not None and owner.in_use:
            fix = "finish or abort that request first, or use model.session(), which has its own KV cache"
            raise UserError(f"the session is in use by {owner.in_use}: {fix}")
        self.state.clear()
        self._user = weakref.ref(user)

    def watched(self, *, strongest: bool = False) -> "Watched":
        """Returns the same FFNs recorded again, to report active neurons, or the ``strongest`` ones of a
        model that is not split. Made at the first call. GPUMemoryError: a GPU's memory does not suffice."""
        if self._watched is None:
            ffns = self._make_ffns(count=True)
            self._watched = Watched(self.model, *ffns, self.transformer, strongest=strongest)
        return self._watched

    def closed_error(self) -> UserError:
        """Returns the error for uses after :meth:`close`."""
        return UserError(f"the model {self.model.name} is closed: load it again")

    def run(self, watched: "Watched | None" = None) -> None:
        """Runs the step that the batch describes, and counts what it read. With ``watched``, that object then
        has the active neurons of the decode rows."""
        if self.closed:
            raise self.closed_error()
        batch, counters = self.transformer.batch, self._counters
        programs = None if watched is None else watched.programs
        rows, decode_rows = int(batch.counts[0]), int(batch.counts[1])
        if rows > decode_rows:
            self.transformer.run(programs)
            counters.prompt_tokens += rows - decode_rows
            return
        start, before = time.perf_counter(), self.model.disk_counts()
        self.transformer.run(programs)
        counters.run_s += time.perf_counter() - start
        if before is not None and (after := self.model.disk_counts()) is not None:
            counters.disk += after - before
        counters.decode_steps += 1
        if watched is not None:
            watched.steps += 1
        counters.decode_tokens += rows
        last = batch.positions[0] if rows == 1 else batch.positions[:rows].sum()
        counters.kv_positions += rows + int(last)
        if self._dense_rows is not None:
            counters.rows += self._dense_rows if rows == 1 else self._dense_rows * (1, 1, 1, rows, 1)

    @property
    def identity(self) -> tuple[str, ...]:
        """The settings besides the tokens that decide the bits of keys and values."""
        model, mode = self.model, self._mode
        predictors = str(mode.predictors.path) if mode.predictors else ""
        how = mode.name, model.plan.request.cache_type, model.backend.prompt_math
        streamed = "streamed" * self.transformer.separates_prompts
        return model.fingerprint, *how, streamed, model.devices.identity, predictors

    @property
    def counters(self) -> Counters:
        """Counts of all steps so far; reads the FFNs' own counts from their backends."""
        return self._read_counters() if self.lock.held_here else self.lock.run(self._read_counters)

    def _read_counters(self) -> Counters:
        # Makes new arrays, since another thread may be copying the previous ones.
        if self._dense_rows is None:
            rows = np.array([ffn.counts() for ffn in self._ffns], np.int64)
            if self._watched is not None:
                rows += self._watched.counts().sum(0)
            self._counters.rows = rows
        if self.shared_counts:
            none = np.zeros(len(FFN_COUNTS), np.int64)
            counts = [none if shared is None else shared.counts() for shared in self._shared]
            self._counters.shared = np.array(counts, np.int64)
        if self.draft_block is not None:
            self._counters.draft_bytes = self.draft_block.nbytes_read
        elif self.draft_session is not None:
            drafts = self.draft_session
            self._counters.draft_bytes = drafts.counters.nbytes(drafts.footprint)
        return self._counters

    def add_seconds(self, seconds: float, *, prompt: bool) -> None:
        """Adds the time of a step, with or without prompt rows."""
        if prompt:
            self._counters.prompt_s += seconds
        else:
            self._counters.decode_s += seconds

    def count_drafting(self, seconds: float) -> None:
        """Adds the time in which a step without prompt rows waited for drafts."""
        self._counters.run_s += seconds

    def count_drafts(self, verified: int, rejected: int) -> None:
        """Counts the draft tokens of a step without prompt rows; each had its own row."""
        self._counters.decode_tokens -= rejected
        self._counters.drafts += verified
        self._counters.rejected_drafts += rejected

    def trace(self, timeline: Timeline | None) -> None:
        """Starts a record of when each side of a hybrid model computes and waits; None stops it. ValueError:
        the model is on one backend."""
        links = [side.link for side in self._cold_sides]
        if not links:
            raise ValueError("a timeline shows two backends: this model is on one")
        if timeline is not None:
            timeline.start(*links)
        else:
            for link in links:
                link.stop_marks()
        self.transformer.watch = timeline.stage if timeline else None

    def close(self) -> None:
        """Ends the cold sides' threads, after the current step. The session cannot run afterwards."""
        self.lock.run(self._close)

    def _close(self) -> None:
        self.closed = True
        for side in self._cold_sides:
            side.close()
        if self._watched is not None:
            self._watched.close()

    def _load_predictors(self, mode: SparsityMode) -> list[PredictorWeights | None]:
        """Loads one predictor for each layer with an FFN; returns None for all layers if the mode uses
        none."""
        model = self.model
        if mode.predictors is None:
            return [None] * model.config.layers
        with open_gguf(mode.predictors.path) as file:
            return load_predictors(file, model.config, model.devices, model.fingerprint)

    def _make_ffns(self, *, count: bool) -> tuple[list[FFN], list[ColdSide]]:
        """Makes the FFNs, and the cold side of each GPU, whose thread is not started yet."""
        model, mode = self.model, self._mode
        config, weights = model.config, [layer.ffn for layer in model.weights.layers]
        experts = [config.experts_of(i) for i in range(config.layers)]
        kinds = [(config.ffn_width(i), each.chosen if each else 0) for i, each in enumerate(experts)]
        sides = [
            ColdSide(model.devices, gpu, weights, self.predictors, model.limits, kinds) for gpu in model.gpus
        ]
        ffns = make_ffns(
            model.devices,
            weights,
            model.limits.tokens,
            mode=mode.name,
            count=count,
            predictors=self.predictors,
            predictor_input=mode.predictors.input if mode.predictors else "normed",
            cold=(model.backend, {i: box for side in sides for i, box in side.boxes.items()}),
            skips=self._chooses if config.normed else config.skips,
        )
        return ffns, sides

    def _make_draft_block(self) -> DraftBlock | None:
        model, config = self.model, self.model.config.draft
        weights = model.weights.draft
        if config is None or weights is None:
            return None
        mode = "exact" if all(config.skips) else "off"
        layers = [layer.ffn for layer in weights.layers]
        ffns = make_ffns(model.backend, layers, model.limits.tokens, mode=mode, count=False)
        of_model = self.transformer, model.config, model.weights
        return DraftBlock(*of_model, ffns, model.plan.pages, model.plan.request.cache_type, model.backend)

    @property
    def chosen_bytes(self) -> tuple[int, ...]:
        """Bytes of chosen up rows, by layer, for FFNs that the neuron counts exclude; 0 if all rows are
        read."""
        layers = zip(self.model.weights.layers, self._chooses, strict=True)
        return tuple(layer.normed.up.nbytes if chooses and layer.normed else 0 for layer, chooses in layers)

    def read_whole(self) -> Iterator[tuple[str, Backend, int]]:
        """Yields the weights that every step reads as a whole, without norms: kind, backend, and bytes. Each
        layer's come first, then the head, then tables that add values to each layer for each token."""
        weights, devices = self.model.weights, self.model.devices
        layers = zip(weights.layers, self.chosen_bytes, self.predictors, devices.layers, strict=True)
        for layer, chosen, predictor, backend in layers:
            whole = layer.dense_bytes - chosen + layer.shared_bytes * (not self.shared_counts)
            yield "attention", backend, whole
            yield "predictor", backend, predictor.nbytes if predictor else 0
        ends = [] if weights.streams is None else weights.streams.matrices(end=True)
        yield "head", devices.head, weights.head.nbytes + sum(each.nbytes for each in ends)
        if weights.inputs is not None:
            yield "embedding", devices.embedding, weights.inputs.read_bytes
        if weights.streams is not None:
            begins = weights.streams.matrices(end=False)
            yield "embedding", devices.embedding, sum(each.nbytes for each in begins)

    def _footprint(self, mode: SparsityMode) -> Footprint:
        weights, config = self.model.weights, self.model.config
        cache_type = self.model.plan.request.cache_type
        read: list[Matrix] = [weights.head]  # read as a whole by every step, like dense shared experts
        normed = [layer.normed if c else None for layer, c in zip(weights.layers, self._chooses, strict=True)]
        for layer, ffn in zip(weights.layers, normed, strict=True):
            read += [each for each in layer.matrices if ffn is None or each is not ffn.up]
        shared = [layer.shared.ffn for layer in weights.layers if layer.shared]
        whole = [] if self.shared_counts else shared
        norms = weights.norm_values
        tables = 0 if weights.inputs is None else weights.inputs.table_bytes
        read += [] if weights.inputs is None else weights.inputs.projections
        if weights.streams is not None:
            read += [*weights.streams.matrices(end=False), *weights.streams.matrices(end=True)]
        params = sum(mode.predictors.params) if mode.predictors else 0
        return Footprint(
            step_bytes=sum(nbytes for _, _, nbytes in self.read_whole()) + 4 * norms,
            step_params=sum(math.prod(each.shape) for each in read)
            + sum((2 + config.gated) * config.dim * each.neurons for each in whole)
            + norms
            + params,
            token_bytes=(weights.embedding.nbytes + tables) // config.vocab,
            neurons=tuple(
                ffn.shape.neurons if ffn else n for ffn, n in zip(normed, config.neurons, strict=True)
            ),
            dim=config.dim,
            row_bytes=tuple(
                ffn.row_bytes if ffn else _row_bytes(layer.ffn)
                for ffn, layer in zip(normed, weights.layers, strict=True)
            ),
            kv_bytes=sum(each.page_bytes(cache_type) for each in config.mixers) // PAGE,
            state_bytes=2 * config.slot_bytes,
            shared_row_bytes=tuple(
                _row_bytes(layer.shared.ffn) if layer.shared else (0, 0, 0, 0) for layer in weights.layers
            )
            if self.shared_counts
            else (),
        )


class Watched:
    """FFNs that report active neurons or the strongest ones, and a model's programs with them. They share the
    session's weights, buffers and cache, but not the masks of candidates, and give the same bits."""

    def __init__(
        self,
        model: "LoadedModel",
        ffns: list[FFN],
        sides: list[ColdSide],
        transformer: Transformer,
        *,
        strongest: bool = False,
    ) -> None:
        rows = model.limits.tokens
        self.steps = 0  #: steps without prompt rows that these programs ran
        self._ffns = ffns
        self._cold = model.backend
        for ffn in ffns:
            if isinstance(ffn, SplitFFN):
                ffn.cold_active = self._cold.zeros((rows, ffn.weights.cold.words), np.uint64)
                if ffn.weights.hot is not None:
                    ffn.active = ffn.backend.zeros((rows, ffn.weights.hot.words), np.uint64)
            elif strongest:
                ffn.strongest = ffn.backend.zeros((rows, ffn.weights.words), np.uint64)
            else:
                ffn.active = ffn.backend.zeros((rows, ffn.weights.words), np.uint64)
        self._cold_sides = sides
        _serve(self, sides, ffns)
        self.programs = transformer.record([*ffns])

    def active_masks(self, rows: int) -> list[npt.NDArray[np.uint64]]:
        """Returns each layer's masks of the last step's first rows, ``[rows, words]``. A split layer has its
        hot neurons first, then, from a whole word on, its cold ones, each in ascending order."""
        return [self._masks(ffn, rows) for ffn in self._ffns]

    def counts(self) -> npt.NDArray[np.int64]:
        """Returns ``[2, layers, 5]`` as in FFNStats, of steps without prompt rows: first by each layer's
        backend, then by the cold backend of split layers."""
        cold = np.array([ffn.cold_counts() for ffn in self._ffns])
        return np.array([np.array([ffn.counts() for ffn in self._ffns]) - cold, cold])

    def close(self) -> None:
        for side in self._cold_sides:
            side.close()

    def _masks(self, ffn: FFN, rows: int) -> npt.NDArray[np.uint64]:
        bits = ffn.active if ffn.strongest is None else ffn.strongest
        parts = [] if bits is None else [ffn.backend.read(bits, 0, rows)]
        if isinstance(ffn, SplitFFN):
            parts.append(self._cold.read(ffn.cold_active, 0, rows))
        return parts[0] if len(parts) == 1 else np.hstack(parts)


def _row_bytes(ffn: FFNWeights) -> tuple[int, ...]:
    """Returns the bytes of rows as FFNStats counts them: without a gate, up rows count as gate rows."""
    gate, up, *down = ffn.row_bytes
    return (gate, up, *down) if gate else (up, 0, *down)


def _serve(owner: object, sides: list[ColdSide], ffns: list[FFN]) -> None:
    """Starts cold sides and ends them with their owner."""
    for side in sides:
        side.serve(ffns)
        weakref.finalize(owner, side.close)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A loaded model, immutable and shared by all its users. A :meth:`session` runs steps."""

    path: Path
    fingerprint: str
    tokenizer: Tokenizer
    weights: Weights
    devices: Devices
    plan: MemoryPlan  #: of the weights, and of every session
    sparsity: str  #: the requested mode, perhaps ``auto``
    predictor: Path | None  #: the file with predictors, if there is one
    notes: tuple[str, ...]  #: notes of loading: assumptions, and slower ways than usual
    on_gpus: tuple[OnGPU, ...]  #: the part on each GPU
    #: metadata about the chat template, for :class:`~hotcold.chat.chat.Chat`
    chat_metadata: Mapping[str, Any] = field(default_factory=dict)
    chosen_pooling: Pooling | None = None  #: replaces the file's
    sampling: SamplingParams = field(default_factory=SamplingParams)  #: the file's recommendation
    draft_max: int = 0  #: limit for the draft tokens of a sequence in a step
    draft: "LoadedModel | None" = None  #: the draft model
    _sessions: weakref.WeakSet[Session] = field(default_factory=weakref.WeakSet, init=False, repr=False)

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def limits(self) -> BatchLimits:
        """The limits of the steps of every session."""
        return self.plan.request.limits

    @property
    def context(self) -> int:
        """The limit for positions of a sequence."""
        return self.plan.request.context

    @property
    def pooling(self) -> Pooling:
        """How the vectors of a text's tokens become one vector. UserError: the user chose no pooling, and the
        file names none that is supported."""
        return pooling_of(self.chat_metadata, self.chosen_pooling)

    @property
    def backend(self) -> Backend:
        """The backend of all parts that a placement does not put elsewhere."""
        return self.devices.embedding

    def disk_counts(self) -> DiskCounts | None:
        """Returns the expert reads of all sessions so far; None if all experts are in memory."""
        return self.backend.disk_counts()

    @property
    def gpus(self) -> tuple[Backend, ...]:
        """The backends of parts outside :attr:`backend`: GPUs, or their replacements in checks."""
        return self.devices.gpus

    @property
    def threads(self) -> int | None:
        """Threads of :attr:`backend`; None if it has no threads of its own."""
        return self.backend.threads

    def session(
        self, sparsity: str | None = None, predictor: Path | None = None, wrap: Wrap = list
    ) -> Session:
        """Makes a user's own state besides the shared weights. Any number of sessions may be open, each with
        a KV cache. Each thread may run steps of another session: the steps run one at a time.

        ``sparsity`` and ``predictor``: see :class:`LoadOptions`; None: as the model was loaded. ``wrap``
        takes the layers' FFNs and returns the FFNs to run. LoadError: the model cannot run in that mode, or
        memory does not suffice for another KV cache; PredictorError: an invalid sidecar."""
        session = Session(self, self.mode(sparsity, predictor), wrap)
        self._sessions.add(session)
        return session

    def mode(self, sparsity: str | None = None, predictor: Path | None = None) -> SparsityMode:
        """Returns the mode in which a :meth:`session` would run; errors as there."""
        source = predictor or self.predictor
        return choose_mode(sparsity or self.sparsity, self.config, self.path, source, self.fingerprint)

    def close(self) -> None:
        """Closes all sessions, including those of :attr:`draft`."""
        for session in list(self._sessions):
            session.close()
        if self.draft is not None:
            self.draft.close()
