"""How this processor prefetches weights, and the scratch memory of a step on it."""

from hotcold.kernels import _native
from hotcold.kernels.backend import SPARSE_ACTIVATIONS
from hotcold.kernels.gpu import StepShape
from hotcold.kernels.instruction_sets import default_isa
from hotcold.kernels.numpy_tiles import PROMPT_MATHS

STREAMS = range(1, 9)  #: numbers of streams per thread that the read probe tries
FETCHING = ("3K:1", "1K:1", "8K:1", "8K:2", "16K:2")  #: prefetch settings that doctor tries
_BLOCK, _GROUP = 32, 512  # input values that share a scale; inputs are padded to whole groups


def fetching() -> str:
    """Returns how far ahead weights are prefetched, and into which cache: ``3K:1`` is 3 KiB into L1."""
    ahead, level = _native.fetching()
    return f"{ahead / 1024:g}K:{level}"


def fetching_is_measured() -> bool:
    """Returns True if the default setting was measured on such a processor (csrc/simd/fetching.cpp)."""
    return _native.fetching_is_measured()


def set_fetching(setting: str) -> None:
    """Sets how far ahead weights are prefetched, for all models of this process. No result depends on it."""
    kilobytes, level = setting.split("K:")
    _native.set_fetching(int(float(kilobytes) * 1024), int(level))


def scratch_bytes(shape: StepShape, prompt_math: str = "same") -> int:
    """Returns bytes of scratch that all ops of a step share on a CPU: the largest op's need."""
    rows = shape.limits.tokens * shape.heads
    of_heads = [rows * _heads_input_bytes(columns) for columns in shape.head_columns]
    most = _native.step_scratch_bytes(
        isa=default_isa(),
        tokens=shape.limits.tokens,
        logits=shape.limits.logits,
        pages_per_sequence=shape.limits.pages_per_sequence,
        dim=shape.dim,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        neurons=shape.neurons // shape.experts,
        experts=shape.experts,
        chosen=shape.chosen,
        shared=shape.shared,
        by_output=shape.down_layout == "by_output" and shape.activation not in SPARSE_ACTIVATIONS,
        math=PROMPT_MATHS.index(prompt_math),
    )
    return max(most, *of_heads) if of_heads else most


def _heads_input_bytes(columns: int) -> int:
    """Returns bytes of op linear_heads for one head's input of one row: quantised, or float32 where blocks do
    not fit (``Input`` in csrc/simd/types.h)."""
    if columns % _BLOCK:
        return 4 * (columns + 16)
    return -(-columns // _GROUP) * (_GROUP + _GROUP // _BLOCK * 12)
