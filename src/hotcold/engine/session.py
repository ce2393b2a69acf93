"""One user's state beside a loaded model: a sparsity mode, a KV cache, and the program that runs steps."""

import math
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from hotcold.engine.memory import check_memory
from hotcold.engine.sparsity_mode import SparsityMode
from hotcold.engine.statistics import Counters, Footprint
from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.backend import PAGE, Buffer, FFNStats, PredictorWeights
from hotcold.model.kv_cache import KVCache
from hotcold.model.transformer import FFN, Transformer
from hotcold.sparse.handshake import Handshake
from hotcold.sparse.hybrid_ffn import hybrid_ffns
from hotcold.sparse.predictor import load_predictors
from hotcold.sparse.split import serve_cold
from hotcold.sparse.timeline import Timeline

if TYPE_CHECKING:
    from hotcold.engine.loading import LoadedModel

#: Is given the layers' FFNs, and gives those to run.
Wrap = Callable[[list[FFN]], list[FFN]]


class User(Protocol):
    """What runs steps of a session: an engine, or a scoring."""

    @property
    def in_use(self) -> str: ...  # says what is not done yet; empty where another may have the session


class Session:
    """A model in one sparsity mode, ready to run the steps that its batch describes, for one user at a time.

    The caller fills ``transformer.batch`` and reads ``transformer.logits``. ``sparsity`` is the mode in
    force; ``notes`` are those of loading, and what ``auto`` chose and why. ``footprint`` is what a decode
    step reads, and ``counters`` what the steps so far did. Made by :meth:`LoadedModel.session`."""

    def __init__(self, model: "LoadedModel", mode: SparsityMode, wrap: Wrap = list) -> None:
        self.model = model
        self.sparsity, self.notes = mode.name, [*model.notes, *mode.notes]
        config, limits, devices = model.config, model.limits, model.devices
        extra = mode.predictors.nbytes if mode.predictors else 0
        check_memory(extra, model.cache_type, config, limits, devices, "the predictors of a session need")
        predictors = self._load_predictors(mode)
        self.counters = Counters(np.zeros((config.layers, 5), np.int64))
        self.footprint = self._footprint(mode, predictors)
        self.cache = KVCache(devices, config, limits.sequences * limits.pages_per_sequence, model.cache_type)
        self._user: weakref.ref[User] | None = None
        self._handshake = Handshake()
        weakref.finalize(self, self._handshake.close)
        ffns = wrap(self._ffns(mode, predictors))
        self.transformer = Transformer(config, model.weights, devices, ffns, limits, self.cache)
        # What a dense step of one token reads, [layers, 5]; the other modes' FFNs count for themselves.
        self._dense_rows: npt.NDArray[np.int64] | None = None
        if mode.name == "off":
            runs = [layer.ffn.runs for layer in model.weights.layers]
            rows = np.outer(config.neurons, (1, config.gated, 1, 1))
            self._dense_rows = np.column_stack([rows, runs]).astype(np.int64)

    def claim(self, user: User) -> None:
        """Gives the batch and the KV cache to one user, with all pages free; again by the same one, this does
        nothing. UserError: another one is not done with them."""
        owner = self._user() if self._user else None
        if owner is user:
            return
        if owner is not None and owner.in_use:
            fix = "finish or abort that first, or take model.session(), which has a KV cache of its own"
            raise UserError(f"the session is in use by {owner.in_use}: {fix}")
        self.cache.clear()
        self._user = weakref.ref(user)

    def run(self) -> None:
        """Runs the step that the batch describes, and counts what it read."""
        batch, counters = self.transformer.batch, self.counters
        rows, decode_rows = int(batch.counts[0]), int(batch.counts[1])
        if rows > decode_rows:
            # A mixed step's decode rows are left out, so that counts and time belong to the same steps.
            kept = counters.rows.copy()
            self.transformer.run()
            counters.rows[:] = kept
            counters.prompt_tokens += rows - decode_rows
            return
        start = time.perf_counter()
        self.transformer.run()
        counters.run_s += time.perf_counter() - start
        counters.decode_steps += 1
        counters.decode_tokens += rows
        last = batch.positions[0] if rows == 1 else batch.positions[:rows].sum()
        counters.kv_positions += rows + int(last)
        if self._dense_rows is not None:
            counters.rows += self._dense_rows if rows == 1 else self._dense_rows * (1, 1, 1, rows, 1)

    def trace(self, timeline: Timeline | None) -> None:
        """From now on records when each side of a hybrid model computes and waits; None stops it."""
        self._handshake.mark = timeline.mark if timeline else None
        self.transformer.watch = timeline.stage if timeline else None

    def close(self) -> None:
        """Ends the cold side's thread, where there is one. Nothing can be run any more."""
        self._handshake.close()

    def _load_predictors(self, mode: SparsityMode) -> list[PredictorWeights | None]:
        """One of each layer; None where the mode uses none."""
        model = self.model
        if mode.predictors is None:
            return [None] * model.config.layers
        with open_gguf(mode.predictors.path) as file:
            loaded = load_predictors(file, model.config, model.devices, model.fingerprint)
        return [each if use else None for each, use in zip(loaded, mode.used, strict=True)]

    def _ffns(self, mode: SparsityMode, predictors: list[PredictorWeights | None]) -> list[FFN]:
        model, off = self.model, mode.name == "off"
        ffns = hybrid_ffns(
            model.devices,
            [layer.ffn for layer in model.weights.layers],
            model.limits.tokens,
            skip=not off,
            predictors=predictors,
            predictor_input=mode.predictors.input if mode.predictors else "normed",
        )
        for ffn, counts in zip(ffns, self.counters.rows, strict=True):
            ffn.stats = None if off else FFNStats(counts)  # a view: one array counts for all layers
        serve_cold(model.backend, ffns, model.limits, model.config.dim, self._handshake)
        return [*ffns]

    def _footprint(self, mode: SparsityMode, predictors: list[PredictorWeights | None]) -> Footprint:
        weights, config = self.model.weights, self.model.config
        read: list[Buffer] = [weights.head]  # matrices and vectors, each read whole by every step
        norms = [weights.norm]
        for layer in weights.layers:
            read += (layer.q, layer.k, layer.v, layer.o)
            norms += filter(None, (layer.attn_norm, layer.ffn_norm, layer.q_norm, layer.k_norm))
        read += (vector for norm in norms for vector in (norm.weight, norm.bias) if vector is not None)
        read_predictors = [each for each in predictors if each is not None]
        params = int(np.dot(mode.predictors.params, mode.used)) if mode.predictors else 0
        row_bytes = (layer.ffn.row_bytes for layer in weights.layers)
        return Footprint(
            step_bytes=sum(each.nbytes for each in (*read, *read_predictors)),
            step_params=sum(math.prod(each.shape) for each in read) + params,
            token_bytes=weights.embedding.nbytes // config.vocab,
            neurons=config.neurons,
            dim=config.dim,
            # As in FFNStats: without a gate the up rows count as gate rows.
            row_bytes=tuple((gate, up, *down) if gate else (up, 0, *down) for gate, up, *down in row_bytes),
            kv_bytes=KVCache.page_bytes(config, self.model.cache_type) // PAGE,
        )
