"""What steps take of a backend's memory besides weights, keys and values, counted before anything is
allocated."""

from hotcold.kernels.backend import PAGE, SPARSE_ACTIVATIONS, SPLIT, BatchLimits
from hotcold.model.config import Config

# Of the cpu backend's packed layouts (csrc/kernels.h); others take no more.
_BLOCK = 32
_GROUP = 512
_SUMS = 528  # floats that sums of a group take
_LEAVES = 64  # the most that the neurons of a layer are cut into, 128 or more in each, with sums of its own


def buffer_bytes(config: Config, limits: BatchLimits, *, split: bool = False) -> int:
    """Of the batch, activations, logits, rope tables and masks of neurons, on one backend; ``split``: with
    the two mailboxes between the sides of a layer."""
    positions = limits.pages_per_sequence * PAGE
    row = (7 if split else 3) * config.dim + 2 * (config.heads + config.kv_heads) * config.head_dim
    masks = (3 if split else 1) * -(-max(config.neurons) // 64) * 8
    batch = 4 * (4 * limits.tokens + limits.sequences * (limits.pages_per_sequence + 4) + limits.logits + 4)
    floats = limits.tokens * row + limits.logits * (config.dim + config.vocab) + positions * config.head_dim
    return 4 * floats + limits.tokens * masks + batch


def scratch_bytes(config: Config, limits: BatchLimits) -> int:
    """Of the largest op: all ops of a program share one buffer, which the first run allocates."""
    tokens = limits.tokens
    decode = min(tokens, limits.decode)
    inner = config.heads * config.head_dim
    splits = -(-limits.pages_per_sequence * PAGE // SPLIT)
    attention = decode * config.heads * splits * (config.head_dim + 2) * 4
    linear = max(tokens, limits.logits) * _quantised_bytes(max(config.dim, inner))
    neurons = max(config.neurons)
    ffn = tokens * (_quantised_bytes(config.dim) + 4 * neurons)
    if config.down_layout == "by_output" and config.activation not in SPARSE_ACTIVATIONS:
        ffn += tokens * _quantised_bytes(neurons)
    else:
        leaves = min(_LEAVES, max(-(-neurons // 64) // 2, 1))
        ffn += leaves * (decode * -(-config.dim // _GROUP) * _SUMS * 4 + 5 * 8 + 4)
    return max(attention, linear, ffn) + 5 * 64  # each part begins at a multiple of 64


def _quantised_bytes(columns: int) -> int:
    """One row as int8 codes, with a scale and two sums of each block."""
    padded = -(-columns // _GROUP) * _GROUP
    return padded + padded // _BLOCK * 12
