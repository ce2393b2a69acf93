"""Holds what users of a model share, and each one's own state: a sparsity mode, a KV cache, a step's
programs."""

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
from hotcold.sparse.ffn import FFN, SplitFFN, make_ffns, make_shared_ffns
from hotcold.sparse.predictor import load_predictors
from hotcold.sparse.timeline import Timeline
from hotcold.tokenizer.tokenizer import Tokenizer

#: Is given the layers' FFNs, and gives those to run.
Wrap = Callable[[list[AnyFFN]], list[AnyFFN]]


class User(Protocol):
    """Runs the steps of a session: an engine, or a scoring."""

    @property
    def in_use(self) -> str: ...  # says what is not done yet; empty where another may have the session


class Session:
    """A model in one sparsity mode, ready to run the steps that its batch describes, for one user at a time.

    The caller fills ``transformer.batch`` and reads ``transformer.logits``. ``sparsity`` is the mode in
    force; ``notes`` are those of loading, and what ``auto`` chose and why. ``footprint`` is what a decode
    step reads, and ``counters`` what the steps so far did. Made by :meth:`LoadedModel.session`.

    Several threads may use it: each of them holds ``lock`` while it claims the session or runs a step."""

    def __init__(self, model: "LoadedModel", mode: SparsityMode, wrap: Wrap = list) -> None:
        self.model, self._mode = model, mode
        self.sparsity, self.notes = mode.name, [*model.notes, *mode.notes, *mode.details]
        self.details = mode.details  #: the last ``notes``: commands print them with --verbose alone
        config, limits, devices = model.config, model.limits, model.devices
        extra = mode.predictors.nbytes if mode.predictors else 0
        check_memory(model.plan, extra)
        predictors = self._load_predictors(mode)
        none = np.zeros((config.layers, len(FFN_COUNTS)), np.int64)
        shared = [layer.shared.ffn if layer.shared else None for layer in model.weights.layers]
        self._shared = make_shared_ffns(devices.layers, shared, mode.name)
        #: whether shared experts read only a part of their rows, which they count
        self.shared_counts = any(ffn is not None and ffn.stats is not None for ffn in self._shared)
        #: whether a layer reads only rows of up that it chooses: an FFN with a norm before down, on a CPU
        self._chooses = tuple(
            mode.name != "off" and bool(config.normed) and skip and ops.chooses_rows
            for skip, ops in zip(config.skips, devices.layers, strict=True)
        )
        self._counters = Counters(none, shared=none[: config.layers * self.shared_counts].copy())
        self.predictors = predictors  #: of each layer; None where none is used
        self.footprint = self._footprint(mode)
        plan, cache_type = model.plan, model.plan.request.cache_type
        self.state = SequenceState(devices, config, plan.pages, cache_type, plan.slots, plan.spare_slots)
        self.cache = self.state.pages  #: whose pages lie where
        self.slots = self.state.slots  #: whose states lie where; None where no layer keeps one
        self.lock = SessionLock()
        self.closed = False
        self._user: weakref.ref[User] | None = None
        # Which experts a step reads, and so how many rows, is known to the FFNs alone.
        self._ffns, self._cold_sides = self._make_ffns(count=mode.name != "off" or config.experts is not None)
        self._watched: Watched | None = None
        _serve(self, self._cold_sides, self._ffns)
        ffns = wrap([*self._ffns])
        of_model = config, model.weights, devices
        self.transformer = Transformer(*of_model, ffns, limits, self.state, self._shared)
        self.draft_block = self._make_draft_block()  #: that guesses tokens; None where there is none
        self.draft_session: Session | None = None  #: of a smaller model that drafts tokens for this one
        # Rows that a dense step of one token reads, [layers, 5]; other FFNs count for themselves.
        self._dense_rows: npt.NDArray[np.int64] | None = None
        if mode.name == "off" and config.experts is None:
            runs = [layer.ffn.runs for layer in model.weights.layers]
            rows = np.outer(config.neurons, (1, config.gated, 1, 1))
            self._dense_rows = np.column_stack([rows, runs]).astype(np.int64)

    def claim(self, user: User) -> None:
        """Gives the batch and the KV cache to one user, with all pages and slots free; again by the same one,
        this does nothing. UserError: another one is not done with them."""
        owner = self._user() if self._user else None
        if owner is user:
            return
        if owner is not None and owner.in_use:
            fix = "finish or abort that first, or take model.session(), which has a KV cache of its own"
            raise UserError(f"the session is in use by {owner.in_use}: {fix}")
        self.state.clear()
        self._user = weakref.ref(user)

    def watched(self, *, strongest: bool = False) -> "Watched":
        """The same FFNs once more, which also report what fired; or the ``strongest`` neurons, of a model
        that is not split. Made when first asked for. GPUMemoryError: a GPU has no room for them."""
        if self._watched is None:
            ffns = self._make_ffns(count=True)
            self._watched = Watched(self.model, *ffns, self.transformer, strongest=strongest)
        return self._watched

    def closed_error(self) -> UserError:
        """Makes the error of those that use it after :meth:`close`."""
        return UserError(f"the model {self.model.name} is closed: load it again")

    def run(self, watched: "Watched | None" = None) -> None:
        """Runs the step that the batch describes, and counts what it read; with what :meth:`watched` gave,
        that then has what fired for the decode rows."""
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
        return model.fingerprint, *how, model.devices.identity, predictors

    @property
    def counters(self) -> Counters:
        """Counts of all steps so far; the FFNs' own counts are read from their backends now."""
        return self._read_counters() if self.lock.held_here else self.lock.run(self._read_counters)

    def _read_counters(self) -> Counters:
        # Makes new arrays, since another thread may copy the ones before.
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
        """Counts the time of a step, which had prompt rows or not."""
        if prompt:
            self._counters.prompt_s += seconds
        else:
            self._counters.decode_s += seconds

    def count_drafting(self, seconds: float) -> None:
        """Counts the time in which a step without a prompt row waited for drafts."""
        self._counters.run_s += seconds

    def count_drafts(self, verified: int, wrong: int) -> None:
        """Counts the guesses of a step without a prompt row, each of which had a row of its own."""
        self._counters.decode_tokens -= wrong
        self._counters.drafts += verified
        self._counters.rejected_drafts += wrong

    def trace(self, timeline: Timeline | None) -> None:
        """Records from now on when each side of a hybrid model computes and waits; None stops it.
        ValueError: the model is on one backend."""
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
        """Ends the cold sides' threads, after the step that runs now. Nothing can be run any more."""
        self.lock.run(self._close)

    def _close(self) -> None:
        self.closed = True
        for side in self._cold_sides:
            side.close()
        if self._watched is not None:
            self._watched.close()

    def _load_predictors(self, mode: SparsityMode) -> list[PredictorWeights | None]:
        """Loads one predictor for each layer with an FFN; None for all layers if the mode uses none."""
        model = self.model
        if mode.predictors is None:
            return [None] * model.config.layers
        with open_gguf(mode.predictors.path) as file:
            return load_predictors(file, model.config, model.devices, model.fingerprint)

    def _make_ffns(self, *, count: bool) -> tuple[list[FFN], list[ColdSide]]:
        """Makes the FFNs, and the cold side of each GPU, which does not serve yet."""
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
        """Bytes by layer of rows that are read where a neuron fires, of an FFN that is not in the counts of
        the layer's neurons; 0 where all are read."""
        layers = zip(self.model.weights.layers, self._chooses, strict=True)
        return tuple(layer.normed.up.nbytes if chooses and layer.normed else 0 for layer, chooses in layers)

    def read_whole(self) -> Iterator[tuple[str, Backend, int]]:
        """The weights that every step reads whole, norms excepted: kind, the backend that reads them, and
        bytes, for each layer, then the head, and what gives layers values of each token."""
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
        read: list[Matrix] = [weights.head]  # each whole, by every step, as shared experts are
        normed = [layer.normed if c else None for layer, c in zip(weights.layers, self._chooses, strict=True)]
        for layer, some in zip(weights.layers, normed, strict=True):
            read += [each for each in layer.matrices if some is None or each is not some.up]
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
                own.shape.neurons if own else n for own, n in zip(normed, config.neurons, strict=True)
            ),
            dim=config.dim,
            row_bytes=tuple(
                own.row_bytes if own else _row_bytes(layer.ffn)
                for own, layer in zip(normed, weights.layers, strict=True)
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
    """FFNs that report what fired, or which neurons work hardest, and a model's programs with them. They
    share the session's weights, masks of candidates excepted, its buffers and its cache, and give the same
    bits."""

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
        self.steps = 0  #: without prompt rows, that these ran
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

    def fired(self, rows: int) -> list[npt.NDArray[np.uint64]]:
        """Returns each layer's masks of the last step's first rows, ``[rows, words]``: in a split layer those
        of its hot neurons, then, from a whole word on, of its cold ones, each in ascending order."""
        return [self._masks(ffn, rows) for ffn in self._ffns]

    def counts(self) -> npt.NDArray[np.int64]:
        """``[2, layers, 5]`` as in FFNStats, of steps without prompt rows: by the backend of each layer, and
        of split layers by the cold one."""
        cold = np.array([ffn.cold_counts() for ffn in self._ffns])
        return np.array([np.array([ffn.counts() for ffn in self._ffns]) - cold, cold])

    def close(self) -> None:
        for side in self._cold_sides:
            side.close()

    def _masks(self, ffn: FFN, rows: int) -> npt.NDArray[np.uint64]:
        told = ffn.active if ffn.strongest is None else ffn.strongest
        parts = [] if told is None else [ffn.backend.read(told, 0, rows)]
        if isinstance(ffn, SplitFFN):
            parts.append(self._cold.read(ffn.cold_active, 0, rows))
        return parts[0] if len(parts) == 1 else np.hstack(parts)


def _row_bytes(ffn: FFNWeights) -> tuple[int, ...]:
    """As FFNStats counts rows: without a gate those of up are the gate's."""
    gate, up, *down = ffn.row_bytes
    return (gate, up, *down) if gate else (up, 0, *down)


def _serve(owner: object, sides: list[ColdSide], ffns: list[FFN]) -> None:
    """Starts cold sides, which end with their owner."""
    for side in sides:
        side.serve(ffns)
        weakref.finalize(owner, side.close)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A loaded model, which all its users share; nothing in it changes. A :meth:`session` runs steps."""

    path: Path
    fingerprint: str
    tokenizer: Tokenizer
    weights: Weights
    devices: Devices
    plan: MemoryPlan  #: of the weights, and of every session
    sparsity: str  #: the mode that was asked for, ``auto`` perhaps
    predictor: Path | None  #: the file with predictors, where there is one
    notes: tuple[str, ...]  #: of loading: what was assumed, and what runs a slower way
    on_gpus: tuple[OnGPU, ...]  #: what each GPU has, where there are any
    #: what the file says of its chat template, for :class:`~hotcold.chat.chat.Chat`
    chat_metadata: Mapping[str, Any] = field(default_factory=dict)
    chosen_pooling: Pooling | None = None  #: instead of the file's
    sampling: SamplingParams = field(default_factory=SamplingParams)  #: as the file recommends
    draft_max: int = 0  #: the most tokens of a sequence that are guessed in a step
    draft: "LoadedModel | None" = None  #: a smaller one that guesses them
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
        """The most positions of a sequence."""
        return self.plan.request.context

    @property
    def pooling(self) -> Pooling:
        """How the vectors of a text's tokens become one. UserError: the user chose none, and the file names
        nothing that is supported."""
        return pooling_of(self.chat_metadata, self.chosen_pooling)

    @property
    def backend(self) -> Backend:
        """The backend of whatever a placement does not put elsewhere."""
        return self.devices.embedding

    def disk_counts(self) -> DiskCounts | None:
        """Counts what was read of experts so far, by all sessions together; None: all lie in memory."""
        return self.backend.disk_counts()

    @property
    def gpus(self) -> tuple[Backend, ...]:
        """The backends of what does not lie on :attr:`backend`: GPUs, or what plays their part."""
        return self.devices.gpus

    @property
    def threads(self) -> int | None:
        """Threads of :attr:`backend`; None where it has none of its own."""
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
        """Closes all sessions, those of :attr:`draft`, too."""
        for session in list(self._sessions):
            session.close()
        if self.draft is not None:
            self.draft.close()
