"""Size of the scratch memory that the ops of a step share: the largest op's request."""

from hotcold.kernels.backend import BatchLimits, equal_ends
from hotcold.kernels.gpu import StepShape
from hotcold.kernels.vulkan.attention import attention_scratch_bytes
from hotcold.kernels.vulkan.ffn import ffn_scratch_bytes
from hotcold.kernels.vulkan.ffn_weights import LEAVES, FFNShape, leaves_together
from hotcold.kernels.vulkan.linear import (
    FEW_ROWS,
    heads_scratch_bytes,
    linear_scratch_bytes,
    predict_scratch_bytes,
)
from hotcold.kernels.vulkan.memory import aligned
from hotcold.kernels.vulkan.recording import PROGRAM_ROWS

#: Largest range that every Vulkan device accepts in a shader.
LEAST_RANGE = 128 << 20


def step_scratch_bytes(shape: StepShape) -> int:
    """Returns bytes of scratch for programs of all sizes; see :func:`hotcold.kernels.gpus.scratch_bytes`."""
    limits = shape.limits
    sizes = {min(rows, limits.tokens) for rows in (*PROGRAM_ROWS, limits.tokens)}
    return aligned(max(_program_bytes(shape, limits, rows) for rows in sizes))


def _ffn_bytes(shape: StepShape, neurons: int, experts: int, rows: int, decode: int) -> list[int]:
    """Returns bytes of scratch of an FFN with ``neurons``, for experts of unequal sizes too."""
    most = min(neurons, -(-shape.neurons // experts)) if experts > 1 else neurons
    kind = shape.down_layout, shape.activation, shape.gated, *shape.types
    ffn = FFNShape(shape.dim, equal_ends(most * experts, experts), shape.chosen if experts > 1 else 1, *kind)
    together, sizes = leaves_together(ffn, LEAST_RANGE), []  # the device's own is this, or more
    while together <= LEAVES:
        sizes.append(ffn_scratch_bytes(ffn, rows, decode, together))
        together *= 2
    return sizes


def _program_bytes(shape: StepShape, limits: BatchLimits, rows: int) -> int:
    """Returns the largest op's scratch in a program for ``rows`` rows."""
    ops = [linear_scratch_bytes(limits.logits, shape.dim)]
    if shape.hot is not None:
        decode, inner = min(rows, limits.decode), shape.heads * shape.head_dim
        ops.append(linear_scratch_bytes(rows, max(shape.dim, inner, shape.inner)))
        ops += [heads_scratch_bytes(rows, shape.heads, columns) for columns in shape.head_columns]
        attention = attention_scratch_bytes(limits, rows, shape.heads, shape.kv_heads, shape.head_dim)
        if rows <= FEW_ROWS:  # attention quantises its rows for the next product
            attention += aligned(linear_scratch_bytes(rows, inner))
        ops.append(attention)
        if shape.experts > 1:
            ops.append(aligned(4 * rows * shape.experts) + aligned(linear_scratch_bytes(rows, shape.dim)))
        for neurons, experts in ((shape.hot, shape.experts), (shape.shared, 1)):
            if neurons:
                ops += _ffn_bytes(shape, neurons, experts, rows, decode)
        if shape.rank:
            ops.append(predict_scratch_bytes(decode, shape.dim, shape.rank, shape.neurons + 63))
    return max(ops)
