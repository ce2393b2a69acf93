"""Memory of a step on a backend, besides weights, keys and values, counted before anything is allocated."""

import math
from dataclasses import dataclass

from hotcold.formats.blocks import BLOCK_TYPES, BlockType
from hotcold.kernels import gpus, processor
from hotcold.kernels.backend import FFN_COUNTS, PAGE, SPARSE_ACTIVATIONS, BatchLimits, mask_words
from hotcold.kernels.gpu import ALIGNMENT, StepShape
from hotcold.model.config import Config


def buffer_bytes(config: Config, limits: BatchLimits, *, split: bool = False) -> int:
    """Returns the bytes of the batch, activations, logits, rope tables and neuron masks on one backend, and
    of the draft block. ``split``: includes the two mailboxes between the sides of a layer."""
    positions = limits.pages_per_sequence * PAGE
    row = ((7 if split else 3) + config.branches) * config.dim + sum(_buffer_floats(config))
    masks = (3 if split else 1) * _mask_words(config, split=split) * 8
    if config.experts:
        chosen = config.layers * config.experts.chosen + (1 if config.experts.shared else 0)
        masks += 8 * (chosen + (config.experts.chosen if split else 0))
    batch = 4 * (5 * limits.tokens + limits.sequences * (limits.pages_per_sequence + 4) + limits.logits + 4)
    floats = limits.tokens * row + limits.logits * (config.dim + config.vocab)
    floats += positions * sum(rope.dim for rope in config.ropes)
    draft = buffer_bytes(config.draft, limits) if config.draft else 0
    return 4 * floats + limits.tokens * masks + batch + draft


def _buffer_floats(config: Config) -> list[int]:
    """Returns the floats of a row in each buffer that mixers share."""
    return [math.prod(shape) for _, shape in config.buffers]


def _mask_words(config: Config, *, split: bool) -> int:
    """Returns the words of a row of masks, or of both halves of it."""
    dense = [n for i, n in enumerate(config.neurons) if config.experts_of(i) is None]
    words = -(-max(dense, default=0) // 64)
    if config.experts is None:
        return words
    count = config.experts.count
    return max(words, mask_words(config.experts.ends)[-1] + (count if split else 0))


def scratch_bytes(config: Config, limits: BatchLimits, prompt_math: str = "same") -> int:
    """Returns the bytes of scratch memory that all ops of a step share on a CPU; the first run allocates
    them. Weights count as quantised, except with `prompt_math` split, which concerns float weights."""
    types = (BLOCK_TYPES["Q8_0"],) * 3
    return max(processor.scratch_bytes(shape, prompt_math) for shape in _shapes(config, limits, types))


#: Bytes of a layer on a GPU besides weights, keys and values: each of its ranges is aligned.
GPU_LAYER_BYTES = 20 * ALIGNMENT


@dataclass(frozen=True)
class GPUStep:
    """The memory of a step on a GPU. Data exchanged with the CPU are in host memory."""

    config: Config
    limits: BatchLimits
    types: tuple[BlockType, BlockType, BlockType]  #: of gate, up and down; gate is up's type without a gate
    rank: int = 0  #: rank of the largest predictor; 0 without predictors

    def nbytes(self, hot: int | None) -> int:
        """Returns the bytes of all buffers and scratch memory. ``hot``: limit for the hot neurons of a layer;
        None: no layers. The logits are in host memory."""
        config, limits = self.config, self.limits
        rows, positions = limits.tokens, limits.pages_per_sequence * PAGE
        widths = [config.dim] * (2 + config.family.parallel + config.branches)
        widths += [] if hot is None else _buffer_floats(config)
        buffers = [4 * rows * width for width in widths]
        buffers += [2 * positions * rope.dim for rope in config.ropes for _ in range(2)]  # cosines and sines
        buffers += [4 * limits.logits * config.dim, gpus.batch_bytes(limits)]
        if hot is not None and config.experts:
            ids_and_factors = [4 * rows * config.experts.chosen] * 2
            buffers += ids_and_factors * config.layers + [4 * rows] * (2 if config.experts.shared else 0)
        if hot is not None:
            shared = config.experts is not None and config.experts.shared > 0
            counted = 1 + (shared and config.activation in SPARSE_ACTIVATIONS)
            buffers += [8 * len(FFN_COUNTS) * config.layers] * counted
        if hot is not None and self.rank:
            buffers += self._masks()
        shapes = _shapes(config, limits, self.types, hot, self.rank)
        return gpus.allocated_bytes(*buffers, max(gpus.scratch_bytes(shape) for shape in shapes))

    def _masks(self) -> list[int]:
        """Returns the bytes of masks. Each half of a layer begins with a whole word, so layers of one width
        may differ by a word. With experts, each layer has its own mask, and each expert begins with a whole
        word."""
        if self.config.experts:
            count = self.config.experts.count
            return [8 * self.limits.tokens * (_mask_words(self.config, split=False) + count)] * 2
        words = {-(-n // 64) + extra for n in set(self.config.neurons) for extra in (0, 1)}
        return [8 * self.limits.tokens * n for n in words]


def _shapes(
    config: Config,
    limits: BatchLimits,
    types: tuple[BlockType, BlockType, BlockType],
    hot: int | None = None,
    rank: int = 0,
) -> list[StepShape]:
    """Returns the shapes of steps, one for each kind of mixer."""
    widths = {each.attention for each in config.mixers if each.attention} or {(1, 1, 1)}
    inner = max((each.neurons for each in config.normed), default=0)
    return [
        StepShape(
            limits=limits,
            dim=config.dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            neurons=max(1, inner, *config.neurons),
            hot=hot,
            types=types,
            gated=config.gated,
            down_layout=config.down_layout,
            activation="none" if config.normed else config.activation,
            rank=rank,
            experts=config.experts.count if config.experts else 1,
            chosen=config.experts.chosen if config.experts else 1,
            shared=config.experts.shared if config.experts else 0,
            head_columns=tuple({n for mixer in config.mixers for n in mixer.head_columns}),
            inner=inner,
        )
        for heads, kv_heads, head_dim in widths
    ]
