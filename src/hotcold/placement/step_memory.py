"""What steps take of a backend's memory besides weights, keys and values, counted before anything is
allocated."""

import math
from dataclasses import dataclass

from hotcold.formats.blocks import BlockType
from hotcold.kernels import gpus
from hotcold.kernels.backend import (
    FFN_COUNTS,
    PAGE,
    SPARSE_ACTIVATIONS,
    BatchLimits,
    mask_words,
)
from hotcold.kernels.gpu import ALIGNMENT, StepShape
from hotcold.model.config import Config
from hotcold.model.experts import Experts

# Of the cpu backend's packed layouts (csrc/simd/kernels.h); others take no more.
_BLOCK = 32
_GROUP = 512
_SUMS = 528  # floats that sums of a group take
_LEAVES = 64  # the most that the neurons of a layer are cut into, 128 or more in each, with sums of its own


def buffer_bytes(config: Config, limits: BatchLimits, *, split: bool = False) -> int:
    """Of the batch, activations, logits, rope tables and masks of neurons, on one backend; ``split``: with
    the two mailboxes between the sides of a layer."""
    positions = limits.pages_per_sequence * PAGE
    row = ((7 if split else 3) + config.branches) * config.dim + sum(_room_floats(config))
    masks = (3 if split else 1) * _mask_words(config, split=split) * 8
    if config.experts:
        chosen = config.layers * config.experts.chosen + (1 if config.experts.shared else 0)
        masks += 8 * (chosen + (config.experts.chosen if split else 0))
    batch = 4 * (4 * limits.tokens + limits.sequences * (limits.pages_per_sequence + 1) + limits.logits + 4)
    floats = limits.tokens * row + limits.logits * (config.dim + config.vocab)
    floats += positions * sum(rope.dim for rope in config.ropes)
    return 4 * floats + limits.tokens * masks + batch


def _room_floats(config: Config) -> list[int]:
    """Of a row, in each buffer that mixers share."""
    return [math.prod(shape) for _, shape in config.rooms]


def _mask_words(config: Config, *, split: bool) -> int:
    """Of a row of masks, or of both halves of one."""
    if config.experts is None:
        return -(-max(config.neurons) // 64)
    count = config.experts.count
    return mask_words(config.experts.ends)[-1] + (count if split else 0)


def scratch_bytes(config: Config, limits: BatchLimits) -> int:
    """Of the largest op: all ops of a program share one buffer, which the first run allocates."""
    tokens = limits.tokens
    decode = min(tokens, limits.decode)
    positions = limits.pages_per_sequence * PAGE
    linear = max(tokens, limits.logits) * _quantised_bytes(max(config.dim, *_room_floats(config)))
    ops = [linear, *(4 * decode * mixer.scratch_floats(positions) for mixer in config.mixers)]
    if config.experts is None:
        ops.append(
            tokens * _quantised_bytes(config.dim) + _ffn_bytes(config, max(config.neurons), tokens, decode)
        )
    else:
        ops += _expert_bytes(config, config.experts, tokens, decode)
    return max(ops) + 9 * 64  # each part begins at a multiple of 64


def _ffn_bytes(
    config: Config, neurons: int, rows: int, decode: int, parts: int = 1, most: int = _LEAVES
) -> int:
    """Of so many rows, but for their quantised input; ``most`` leaves of each of so many experts."""
    values = 4 * rows * neurons
    if config.down_layout == "by_output" and config.activation not in SPARSE_ACTIVATIONS:
        return values + rows * _quantised_bytes(neurons)
    leaves = min(most, max(-(-neurons // 64) // 2, 1))
    return values + leaves * (decode * -(-config.dim // _GROUP) * _SUMS * 4 + parts * (5 * 8 + 4))


def _expert_bytes(config: Config, experts: Experts, tokens: int, decode: int) -> list[int]:
    """Of the router, of the experts' FFN (csrc/program/program_experts.cpp), and of a shared expert's."""
    k, count, dim = experts.chosen, experts.count, config.dim
    leaves = -(-_LEAVES // k)
    ffn = tokens * (1 + k) * _quantised_bytes(dim) + 8 * tokens * k * dim
    ffn += _ffn_bytes(config, experts.neurons, tokens * k, decode * k, min(decode * k, count), leaves)
    router = tokens * (_quantised_bytes(dim) + 4 * count)
    shared = tokens * _quantised_bytes(dim) + _ffn_bytes(config, experts.shared, tokens, decode)
    return [router, ffn, shared]


#: What a layer takes on a GPU beyond its weights, keys and values: every range of it begins at a multiple.
GPU_LAYER_BYTES = 20 * ALIGNMENT


@dataclass(frozen=True)
class GPUStep:
    """What steps take of a GPU's memory. What it exchanges with the CPU lies in host memory."""

    config: Config
    limits: BatchLimits
    types: tuple[BlockType, BlockType, BlockType]  #: of gate, up and down; without a gate up's twice
    rank: int = 0  #: of the largest predictor; 0 without any

    def nbytes(self, hot: int | None, head: bool) -> int:
        """Of all buffers and scratch, with at most so many hot neurons in a layer (None: with no layer)."""
        config, limits = self.config, self.limits
        rows, positions = limits.tokens, limits.pages_per_sequence * PAGE
        widths = [config.dim] * (2 + config.family.parallel + config.branches)
        widths += [] if hot is None else _room_floats(config)
        buffers = [4 * rows * width for width in widths]
        buffers += [2 * positions * rope.dim for rope in config.ropes for _ in range(2)]  # cosines and sines
        buffers += [4 * limits.logits * config.dim, gpus.batch_bytes(limits)]
        if head:
            buffers.append(4 * limits.logits * config.vocab)
        if hot is not None and config.experts:
            each = [4 * rows * config.experts.chosen] * 2  # ids and factors
            buffers += each * config.layers + [4 * rows] * (2 if config.experts.shared else 0)
        if hot is not None:
            buffers.append(8 * len(FFN_COUNTS) * config.layers)
        if hot is not None and self.rank:
            buffers += self._masks()
        shapes = {(each.heads, each.kv_heads, each.head_dim) for each in config.mixers}
        scratch = max(gpus.scratch_bytes(self._shape(hot, *each)) for each in shapes)
        return gpus.allocated_bytes(*buffers, scratch)

    def _masks(self) -> list[int]:
        """Each half of a layer begins with a whole word, so layers of one width may differ by a word; of
        experts each has a mask of its own, and each expert begins with a whole word."""
        if self.config.experts:
            count = self.config.experts.count
            return [8 * self.limits.tokens * (_mask_words(self.config, split=False) + count)] * 2
        words = {-(-n // 64) + more for n in set(self.config.neurons) for more in (0, 1)}
        return [8 * self.limits.tokens * n for n in words]

    def _shape(self, hot: int | None, heads: int, kv_heads: int, head_dim: int) -> StepShape:
        config = self.config
        return StepShape(
            limits=self.limits,
            dim=config.dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            neurons=max(config.neurons),
            hot=hot,
            types=self.types,
            gated=config.gated,
            down_layout=config.down_layout,
            activation=config.activation,
            rank=self.rank,
            experts=config.experts.count if config.experts else 1,
            chosen=config.experts.chosen if config.experts else 1,
            shared=config.experts.shared if config.experts else 0,
        )


def _quantised_bytes(columns: int) -> int:
    """One row as int8 codes, with a scale and two sums of each block."""
    padded = -(-columns // _GROUP) * _GROUP
    return padded + padded // _BLOCK * 12
