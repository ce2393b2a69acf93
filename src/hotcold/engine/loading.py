"""From a model file to a model that can run: what fits, how sparsity is used, and what a step will read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotcold.engine.memory import available_memory
from hotcold.engine.statistics import Counters, Footprint
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend
from hotcold.kernels.backend import (
    MAX_DECODE_ROWS,
    PAGE,
    SPARSE_ACTIVATIONS,
    Backend,
    BatchLimits,
    FFNStats,
    Matrix,
    Norm,
    PredictorWeights,
)
from hotcold.model.config import Config
from hotcold.model.kv_cache import KVCache
from hotcold.model.tokenizer import Tokenizer
from hotcold.model.transformer import FFN, DenseFFN, Transformer
from hotcold.model.weights import LayerWeights, Weights, check_tensors, load_weights
from hotcold.sparse.hybrid_ffn import hybrid_ffns
from hotcold.sparse.predictor import check_predictors, load_predictors, predictor_names

SPARSITY_MODES = ("auto", "exact", "predicted", "off")

#: Called with the bytes read so far and in all.
Progress = Callable[[int, int], None]


class LoadError(ValueError):
    """A model that cannot run as asked; the message says what would work."""


@dataclass
class LoadOptions:
    """How to load a model.

    Attributes:
        sparsity: ``auto``, ``exact``, ``predicted`` or ``off``.
        threads: None takes what affinity and cgroup quota allow.
        context: positions of each sequence; None is the model's own, ``default_context`` at most.
        default_context: see ``context``.
        backend: ``cpu`` or ``reference``.
        sequences: how many can run at the same time; each has ``context`` positions of KV cache.
        chunk: the most prompt rows of one step.
    """

    sparsity: str = "auto"
    threads: int | None = None
    context: int | None = None
    default_context: int = 4096
    backend: str = "cpu"
    sequences: int = 1
    chunk: int = 128

    def __post_init__(self) -> None:
        if self.sparsity not in SPARSITY_MODES:
            raise LoadError(f"sparsity {self.sparsity!r}: choose from {', '.join(SPARSITY_MODES)}")
        for name in ("sequences", "chunk", "default_context"):
            if getattr(self, name) < 1:
                raise LoadError(f"{name} is {getattr(self, name)}: at least 1 is needed")


@dataclass(frozen=True)
class ModelParts:
    """What was read from a file; models that differ only in sparsity share it."""

    name: str
    config: Config
    tokenizer: Tokenizer
    backend: Backend
    weights: Weights
    predictor_params: int  #: weights of the file's predictors; 0 where it has none
    predictors: Sequence[PredictorWeights] | None  #: loaded in mode ``predicted`` only
    context: int
    sequences: int
    chunk: int

    @property
    def down_by_neuron(self) -> bool:
        return all(layer.down_layout == "by_neuron" for layer in self.weights.layers)


class LoadedModel:
    """A model in one sparsity mode, ready to run the steps that its batch describes.

    Attributes:
        name: the file's, without its suffix.
        config, tokenizer, backend: of the model.
        transformer: its ``batch`` is filled by the caller, its ``logits`` read.
        cache: pages of K and V for ``sequences`` sequences of ``context`` positions.
        sparsity: the mode in force: ``exact``, ``predicted`` or ``off``.
        notes: what ``auto`` chose and why, and whatever runs a slower way; a line each.
        context: positions of one sequence.
        chunk: the most prompt rows of one step.
        threads: of the backend; None where it has no pool.
        footprint: what a decode step reads.
        counters: what the steps so far did.
    """

    def __init__(self, parts: ModelParts, sparsity: str, notes: list[str]) -> None:
        self._parts = parts
        self.name = parts.name
        self.config = parts.config
        self.tokenizer = parts.tokenizer
        self.backend = parts.backend
        self.context = parts.context
        self.chunk = parts.chunk
        self.threads: int | None = getattr(parts.backend, "threads", None)
        self.sparsity = sparsity
        self.notes = notes
        self.counters = Counters(np.zeros((parts.config.layers, 4), np.int64))
        self.footprint = footprint(parts, sparsity)
        self.cache = KVCache(parts.backend, parts.config, parts.sequences * -(-parts.context // PAGE))
        self.transformer = Transformer(
            parts.config, parts.weights, parts.backend, self._ffns(), batch_limits(parts), self.cache
        )
        # What a dense step of one token reads, [layers, 4]; the other modes' FFNs count for themselves.
        columns = (1, int(parts.config.gated), 1, 1)
        self._dense_rows = np.outer(parts.config.neurons, columns) if sparsity == "off" else None

    def run(self) -> None:
        """Runs the step that the batch describes, and counts it."""
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
            counters.rows += self._dense_rows if rows == 1 else self._dense_rows * (1, 1, 1, rows)

    def with_sparsity(self, sparsity: str) -> LoadedModel:
        """The same weights in another mode, with a KV cache of its own.

        Raises:
            LoadError: the model cannot run in that mode.
        """
        check_sparsity(sparsity, self.config, self._parts.predictors is not None)
        mode, notes = choose_sparsity(sparsity, self._parts)
        return LoadedModel(self._parts, mode, notes)

    def _ffns(self) -> list[FFN]:
        parts, backend = self._parts, self._parts.backend
        if self.sparsity == "off":
            return [DenseFFN(backend, layer.ffn) for layer in parts.weights.layers]
        ffns = hybrid_ffns(
            backend,
            [layer.ffn for layer in parts.weights.layers],
            rows=batch_limits(parts).tokens,
            skip=True,
            predictors=parts.predictors if self.sparsity == "predicted" else None,
        )
        for ffn, counts in zip(ffns, self.counters.rows, strict=True):
            ffn.stats = FFNStats(counts)  # a view: one array counts for all layers
        return [*ffns]


def load(path: Path | None, options: LoadOptions, progress: Progress | None = None) -> LoadedModel:
    """Loads a model.

    Args:
        path: a GGUF file; None is the built-in model.
        options: see :class:`LoadOptions`.
        progress: called with bytes read so far and in all.

    Raises:
        ValueError: not a model file (GGUFError), a model that is not supported (ModelError), or options
            that do not fit it or the machine (LoadError). Weights are read last.
    """
    if path is None:
        from hotcold.demo import model_path

        path = model_path()
    with open_gguf(path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        others = predictor_names(file)
        weight_bytes = check_tensors(file, config, others)
        check_sparsity(options.sparsity, config, bool(others))
        predicted = bool(others) and options.sparsity == "predicted"
        context = resolve_context(options, config)
        tokenizer = Tokenizer.from_metadata(file.metadata)
        weight_bytes += check_predictors(file, config) if predicted else 0
        check_memory(weight_bytes, config, context, options)
        backend = open_backend(options.backend, options.threads)
        weights = load_weights(file, config, backend, progress, others)
        predictors = load_predictors(file, config, backend) if predicted else None
    parts = ModelParts(
        name=path.stem,
        config=config,
        tokenizer=tokenizer,
        backend=backend,
        weights=weights,
        predictor_params=sum(math.prod(file.tensors[name].shape) for name in others),
        predictors=predictors,
        context=context,
        sequences=options.sequences,
        chunk=min(options.chunk, context),
    )
    return LoadedModel(parts, *choose_sparsity(options.sparsity, parts))


def resolve_context(options: LoadOptions, config: Config) -> int:
    """Positions of a sequence. Raises LoadError when more are asked for than the model was trained for."""
    if options.context is None:
        return min(config.context, options.default_context)
    if not 2 <= options.context <= config.context:
        raise LoadError(
            f"context of {options.context} positions (-c): this model allows 2 to {config.context}"
        )
    return options.context


def check_memory(weight_bytes: int, config: Config, context: int, options: LoadOptions) -> None:
    """Raises LoadError when weights, KV cache and buffers are more than this process may still take."""
    cache_bytes = options.sequences * -(-context // PAGE) * KVCache.page_bytes(config)
    row_bytes = 4 * (4 * config.dim + 2 * (config.heads + config.kv_heads) * config.head_dim)
    buffers = (options.chunk + MAX_DECODE_ROWS) * row_bytes + MAX_DECODE_ROWS * 4 * config.vocab
    need = weight_bytes + cache_bytes + buffers
    free = available_memory()
    if free is not None and need > free:
        hint = "use a smaller or more quantised model"
        if weight_bytes + buffers < free:
            hint = "use a smaller context (-c)"
        raise LoadError(
            f"not enough memory: the model needs {weight_bytes / 2**30:.2f} GiB, its KV cache of {context} "
            f"positions {cache_bytes / 2**30:.2f} GiB, but {free / 2**30:.2f} GiB are available: {hint}"
        )


def check_sparsity(requested: str, config: Config, predictor: bool) -> None:
    """Raises LoadError when a model cannot run in the mode asked for."""
    if requested in ("exact", "predicted") and config.activation not in SPARSE_ACTIVATIONS:
        raise LoadError(
            f"--sparsity {requested}: activation {config.activation} gives no zeros, so no neuron can be "
            "left out: use off or auto"
        )
    if requested == "predicted" and not predictor:
        raise LoadError(
            "--sparsity predicted: the file has no predictor (blk.N.fc1, blk.N.fc2): use exact, which is "
            "lossless and needs none, or a PowerInfer file with predictors"
        )


def choose_sparsity(requested: str, parts: ModelParts) -> tuple[str, list[str]]:
    """The mode in force, and notes that say what was chosen and what runs a slower way."""
    activation = parts.config.activation
    notes = []
    mode = requested
    if requested == "auto":
        if activation not in SPARSE_ACTIVATIONS:
            mode = "off"
            notes.append(f"sparsity auto is off: activation {activation} gives no zeros")
        elif not parts.down_by_neuron:
            mode = "off"
            notes.append("sparsity auto is off: " + _dense_down(parts))
        else:
            mode = "exact"
            if parts.predictor_params:
                notes.append("sparsity auto is exact: --sparsity predicted uses the predictor")
    elif requested != "off" and not parts.down_by_neuron:
        notes.append(_dense_down(parts))
    return mode, notes


def _dense_down(parts: ModelParts) -> str:
    return "ffn_down lies by output in blocks along the neurons, and runs dense until panels are built"


def batch_limits(parts: ModelParts) -> BatchLimits:
    """Room for every decode row and one prompt chunk; logits for 16 rows, or one of each sequence."""
    return BatchLimits(
        tokens=MAX_DECODE_ROWS + parts.chunk,
        sequences=parts.sequences,
        pages_per_sequence=-(-parts.context // PAGE),
        logits=max(MAX_DECODE_ROWS, parts.sequences),
    )


def footprint(parts: ModelParts, sparsity: str) -> Footprint:
    """What a decode step reads besides the neurons' rows."""
    config, weights = parts.config, parts.weights
    matrices: list[Matrix] = [weights.head]
    norms: list[Norm | None] = [weights.norm]
    for layer in weights.layers:
        matrices += (layer.q, layer.k, layer.v, layer.o)
        norms += (layer.attn_norm, layer.ffn_norm, layer.q_norm, layer.k_norm)
    params = sum(m.shape[0] * m.shape[1] for m in matrices)
    nbytes = sum(m.nbytes for m in matrices)
    for norm in norms:
        for vector in (norm.weight, norm.bias) if norm else ():
            if vector is not None:
                params += vector.size
                nbytes += vector.nbytes
    if sparsity == "predicted":
        nbytes += sum(predictor.nbytes for predictor in parts.predictors or ())
        params += parts.predictor_params
    return Footprint(
        step_bytes=nbytes,
        step_params=params,
        token_bytes=weights.embedding.nbytes // config.vocab,
        token_params=config.dim,
        neurons=config.neurons,
        dim=config.dim,
        row_bytes=tuple(_row_bytes(layer) for layer in weights.layers),
        kv_bytes=KVCache.page_bytes(config) // PAGE,
    )


def _row_bytes(layer: LayerWeights) -> tuple[int, int, int]:
    """As in :class:`~hotcold.kernels.backend.FFNStats`: without a gate the up rows count as gate rows."""
    gate, up, down = layer.ffn.row_bytes
    return (gate, up, down) if gate else (up, 0, down)
