"""From a model file to a model that can run: what fits, how sparsity is used, and what a step will read."""

import copy
import math
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hotcold.demo import model_path
from hotcold.engine.load_options import LoadError, LoadOptions
from hotcold.engine.memory import available_memory
from hotcold.engine.placing import open_devices
from hotcold.engine.statistics import Counters, Footprint
from hotcold.errors import UserError
from hotcold.formats.gguf import GGUFFile, open_gguf, printable
from hotcold.kernels.backend import (
    MAX_DECODE_ROWS,
    PAGE,
    SPARSE_ACTIVATIONS,
    BatchLimits,
    Buffer,
    FFNStats,
    PredictorWeights,
)
from hotcold.model.config import Config
from hotcold.model.devices import Devices
from hotcold.model.kv_cache import KVCache
from hotcold.model.step_memory import buffer_bytes, scratch_bytes
from hotcold.model.tokenizer import Tokenizer
from hotcold.model.transformer import FFN, Transformer
from hotcold.model.weights import Progress, check_tensors, load_weights
from hotcold.sparse.handshake import Handshake
from hotcold.sparse.hybrid_ffn import hybrid_ffns
from hotcold.sparse.predictor import (
    PredictorFacts,
    check_predictors,
    find_predictors,
    load_predictors,
    predictor_names,
)
from hotcold.sparse.split import serve_cold
from hotcold.sparse.timeline import Timeline

#: Is given the layers' FFNs, and gives those to run.
Wrap = Callable[[list[FFN]], list[FFN]]


class User(Protocol):
    """What runs steps of a model: an engine, or a scoring."""

    @property
    def in_use(self) -> str: ...  # says what is not done yet; empty where another may have the model


class LoadedModel:
    """A model in one sparsity mode, ready to run the steps that its batch describes, for one user at a time.

    The caller fills ``transformer.batch`` and reads ``transformer.logits``. ``sparsity`` is the mode in
    force; ``notes`` say what ``auto`` chose and why, and whatever runs a slower way. ``context`` and
    ``chunk`` are the most positions of a sequence and prompt rows of a step, ``hot`` the backend of what is
    hot, if not all lies on ``backend``, ``footprint`` what a decode step reads, and ``counters`` what the
    steps so far did."""

    cache: KVCache
    _user: weakref.ref[User] | None

    def __init__(self, file: GGUFFile, options: LoadOptions, progress: Progress | None = None) -> None:
        factors = predictor_names(file)
        self._path = file.path
        self._predictor_path = find_predictors(file, options.predictor)
        self.fingerprint = file.fingerprint()
        self.name = file.path.stem
        self.config = config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        weight_bytes = check_tensors(file, config, factors)
        self._check_mode(options.sparsity)
        facts = self._predictor_facts(options.sparsity)
        predicted = self._mode(options.sparsity, facts)[0] == "predicted"
        if facts and predicted:
            weight_bytes += facts.nbytes
        asked, most = options.context, config.context
        if asked is not None and not 2 <= asked <= most:
            raise LoadError(f"context of {asked} positions (-c): this model allows 2 to {most}")
        self.context = asked or min(most, options.default_context)
        self.chunk = min(options.chunk, self.context)
        pages, logits = -(-self.context // PAGE), max(MAX_DECODE_ROWS, options.sequences)
        self._limits = BatchLimits(MAX_DECODE_ROWS + self.chunk, options.sequences, pages, logits)
        self.tokenizer = Tokenizer.from_metadata(file.metadata)
        self.cache_type = options.cache_type
        self._devices, self._placing_notes = open_devices(
            file, config, options, self._limits, facts.path if facts and predicted else None
        )
        if "output.weight" not in file.tensors and self._devices.head is not self._devices.embedding:
            weight_bytes += file.tensors["token_embd.weight"].nbytes  # each of the two has the table
        check_memory(weight_bytes, self.cache_type, config, self._limits, self._devices)
        self.backend = self._devices.embedding
        self.hot = getattr(self._devices, "hot", None)
        self.threads: int | None = getattr(self.backend, "threads", None)
        self._weights = load_weights(file, config, self._devices, progress, factors)
        self._enter(options.sparsity)

    def claim(self, user: User) -> None:
        """Gives the batch and the KV cache to one user, with all pages free; again by the same one, this does
        nothing. ValueError: another one is not done with them."""
        owner = self._user() if self._user else None
        if owner is user:
            return
        if owner is not None and owner.in_use:
            fix = "finish or abort that first, or take model.with_sparsity(), which has a KV cache of its own"
            raise UserError(f"the model is in use by {owner.in_use}: {fix}")
        self.cache.clear()
        self._user = weakref.ref(user)

    def run(self) -> None:
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
        self.handshake.mark = timeline.mark if timeline else None
        self.transformer.watch = timeline.stage if timeline else None

    def close(self) -> None:
        """Ends the cold side's thread, where there is one. Nothing can be run any more."""
        self.handshake.close()

    def with_sparsity(self, sparsity: str, predictor: Path | None = None, wrap: Wrap = list) -> "LoadedModel":
        """The same weights in another mode, with a KV cache of its own, and perhaps with another sidecar.
        ValueError: the model cannot run in that mode, or the sidecar is not right."""
        other = copy.copy(self)
        other._predictor_path = predictor or self._predictor_path
        other._check_mode(sparsity)
        other._enter(sparsity, wrap)
        return other

    def _check_mode(self, requested: str) -> None:
        if requested not in ("exact", "predicted"):
            return
        if (activation := self.config.activation) not in SPARSE_ACTIVATIONS:
            seen = f"--sparsity {requested}: activation {activation} gives no zeros"
            raise LoadError(f"{seen}, so no neuron can be left out: use off or auto")
        if requested == "predicted" and not self._predictor_path:
            seen = "--sparsity predicted: the file has no predictor (blk.N.fc1, blk.N.fc2) and no sidecar"
            needed = "use exact, which is lossless and needs none, or make one with hotcold fit-predictor"
            raise LoadError(f"{seen}: {needed}")

    def _predictor_facts(self, requested: str) -> PredictorFacts | None:
        """Those that the mode may use, checked; ``auto`` asks a sidecar, as PowerInfer's files don't say."""
        path, activation = self._predictor_path, self.config.activation
        asked = requested == "predicted" or (requested == "auto" and path != self._path)
        if path is None or not asked or activation not in SPARSE_ACTIVATIONS:
            return None
        with open_gguf(path) as file:
            return check_predictors(file, self.config, self.fingerprint)

    def _enter(self, requested: str, wrap: Wrap = list) -> None:
        facts = self._predictor_facts(requested)
        self.sparsity, notes = self._mode(requested, facts)
        self.notes = [*self.config.notes, *self._placing_notes, *notes]
        self._predictors: list[PredictorWeights | None] = [None] * self.config.layers
        self._predictor_params, self._predictor_input = 0, "normed"
        if facts and self.sparsity == "predicted":
            used = [requested == "predicted" or pays for pays in facts.pays]
            with open_gguf(facts.path) as file:
                loaded = load_predictors(file, self.config, self._devices, self.fingerprint)
            self._predictors = [each if use else None for each, use in zip(loaded, used, strict=True)]
            self._predictor_params, self._predictor_input = int(np.dot(facts.params, used)), facts.input
        self.counters = Counters(np.zeros((self.config.layers, 5), np.int64))
        self.footprint = self._footprint()
        pages = self._limits.sequences * self._limits.pages_per_sequence
        self._user = None
        self.cache = KVCache(self._devices, self.config, pages, self.cache_type)
        self.transformer = Transformer(
            self.config, self._weights, self._devices, wrap(self._ffns()), self._limits, self.cache
        )
        # What a dense step of one token reads, [layers, 5]; the other modes' FFNs count for themselves.
        self._dense_rows: npt.NDArray[np.int64] | None = None
        if self.sparsity == "off":
            runs = [layer.ffn.runs for layer in self._weights.layers]
            rows = np.outer(self.config.neurons, (1, self.config.gated, 1, 1))
            self._dense_rows = np.column_stack([rows, runs]).astype(np.int64)

    def _mode(self, requested: str, facts: PredictorFacts | None) -> tuple[str, list[str]]:
        """The mode in force, and notes that say what was chosen and what runs a slower way."""
        activation = self.config.activation
        if requested != "auto":
            return requested, []
        if activation not in SPARSE_ACTIVATIONS:
            return "off", [f"sparsity auto is off: activation {activation} gives no zeros"]
        if facts and (paying := sum(facts.pays)):
            where = f"{paying} of {self.config.layers} layers, by {printable(facts.path.name)}"
            return "predicted", [f"sparsity auto is predicted: this pays in {where}"]
        note = "sparsity auto is exact: nothing says that the predictor pays; --sparsity predicted uses it"
        return "exact", [note] if self._predictor_path else []

    def _ffns(self) -> list[FFN]:
        weights = [layer.ffn for layer in self._weights.layers]
        rows, inputs, off = self._limits.tokens, self._predictor_input, self.sparsity == "off"
        ffns = hybrid_ffns(
            self._devices, weights, rows, skip=not off, predictors=self._predictors, predictor_input=inputs
        )
        for ffn, counts in zip(ffns, self.counters.rows, strict=True):
            ffn.stats = None if off else FFNStats(counts)  # a view: one array counts for all layers
        self.handshake = Handshake()
        weakref.finalize(self, self.handshake.close)
        serve_cold(self.backend, ffns, self._limits, self.config.dim, self.handshake)
        return [*ffns]

    def _footprint(self) -> Footprint:
        weights, config = self._weights, self.config
        read: list[Buffer] = [weights.head]  # matrices and vectors, each read whole by every step
        norms = [weights.norm]
        for layer in weights.layers:
            read += (layer.q, layer.k, layer.v, layer.o)
            norms += filter(None, (layer.attn_norm, layer.ffn_norm, layer.q_norm, layer.k_norm))
        read += (vector for norm in norms for vector in (norm.weight, norm.bias) if vector is not None)
        predictors = [each for each in self._predictors if each is not None]
        row_bytes = (layer.ffn.row_bytes for layer in weights.layers)
        return Footprint(
            step_bytes=sum(each.nbytes for each in (*read, *predictors)),
            step_params=sum(math.prod(each.shape) for each in read) + self._predictor_params,
            token_bytes=weights.embedding.nbytes // config.vocab,
            neurons=config.neurons,
            dim=config.dim,
            # As in FFNStats: without a gate the up rows count as gate rows.
            row_bytes=tuple((gate, up, *down) if gate else (up, 0, *down) for gate, up, *down in row_bytes),
            kv_bytes=KVCache.page_bytes(config, self.cache_type) // PAGE,
        )


def load(path: Path | None, options: LoadOptions, progress: Progress | None = None) -> LoadedModel:
    """Loads a GGUF file, or the built-in model; ``progress`` is called with bytes read so far and in all.

    ValueError: not a model file (GGUFError), a model that is not supported (ModelError), or options that do
    not fit it or the machine (LoadError). Weights are read last."""
    with open_gguf(path or model_path()) as file:
        try:
            return LoadedModel(file, options, progress)
        except UserError:
            raise
        except ValueError as error:  # a shape that is right and that a kernel has no room for, say
            raise LoadError(f"{printable(file.path.name)} cannot run here: {error}") from error


def check_memory(
    weight_bytes: int, cache_type: str, config: Config, limits: BatchLimits, devices: Devices
) -> None:
    """Raises LoadError when weights, KV cache, buffers and scratch are more than this process may still
    take."""
    pages = limits.sequences * limits.pages_per_sequence
    cache_bytes = pages * KVCache.page_bytes(config, cache_type)
    backends = len(set(devices.parts))
    step_bytes = buffer_bytes(config, limits, split=backends > 1) + scratch_bytes(config, limits)
    step_bytes *= backends
    free = available_memory()
    if free is not None and weight_bytes + cache_bytes + step_bytes > free:
        smaller = "context (-c)" if weight_bytes < free else "or more quantised model"
        sizes = (weight_bytes, cache_bytes, step_bytes, free)
        weights, cache, steps, left = (f"{n / 2**30:.2f} GiB" for n in sizes)
        needs = f"the model needs {weights}, its KV cache of {pages * PAGE} positions {cache}, steps {steps}"
        raise LoadError(f"not enough memory: {needs}, but {left} are available: use a smaller {smaller}")
