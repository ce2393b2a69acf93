"""Ops on weight matrices: linear, embed, predict."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotcold.kernels import checks
from hotcold.kernels.backend import Buffer, Chosen, IndexedBy, Matrix, PredictorWeights, Rows
from hotcold.kernels.vulkan.matrix import DeviceMatrix, DevicePredictor
from hotcold.kernels.vulkan.memory import Range, aligned
from hotcold.kernels.vulkan.packing import BLOCK, RowLayout, shader_type
from hotcold.kernels.vulkan.recording import Cut, Dispatch, Recording, Written

FEW_ROWS = 16  #: of input, in one pass of gemv.comp
#: Rows of input of a tile of gemm.glsl, which has twice as many outputs.
SMALL_TILE, LARGE_TILE = 32, 64
_BIAS, _ACCUMULATE, _RELU = 1, 2, 4  # flags of gemv.comp
_MOST_GROUPS = 65535  # in each dimension of a dispatch
_TOKENS, _POSITIONS = 5, 6  # arrays of batch.glsl


class Count(enum.IntEnum):
    """Number of the batch that is the row count (csrc/shaders/counts.glsl)."""

    TOKENS = 0
    LOGITS = 1
    DECODE = 2
    ALL = 3  #: none: the buffer's row count


@dataclass(frozen=True)
class Input:
    """Input rows of a product with matrices."""

    values: Range  #: [rows, columns] float32
    codes: Range | None  #: from quantise.comp, for quantised types
    columns: int
    rows: int  #: the most rows
    count: Count


def dot_input(
    recording: Recording,
    values: Range,
    columns: int,
    rows: int,
    count: Count,
    matrices: Sequence[DeviceMatrix],
) -> Input:
    """Makes the input of rows ``[rows, columns]`` float32, quantised if one of the matrices needs that."""
    codes = None
    if any(matrix.quantised for matrix in matrices) and rows:
        if rows <= FEW_ROWS and _maker(recording, values, rows, count) == len(recording.steps) - 1:
            recording.keep_scratch()
        codes = recording.scratch(linear_scratch_bytes(rows, columns))
        quantise(recording, values, codes, columns, rows, count)
    return Input(values, codes, columns, rows, count)


def quantise(
    recording: Recording, values: Range, codes: Range, columns: int, rows: int, count: Count
) -> None:
    """Quantises rows. If the dispatch that makes these rows can quantise them, it does."""
    at = _maker(recording, values, rows, count)
    if at is not None and not any(map(codes.overlaps, _ranges(recording.steps[at:]))):
        maker = recording.steps[at]
        assert isinstance(maker, Dispatch)
        ranges, constants = (*maker.ranges[:-1], Written(codes)), (*maker.constants[:-1], 1)
        recording.steps[at] = replace(maker, ranges=ranges, constants=constants)
        return
    blocks, times = columns // BLOCK, -(-rows // _MOST_GROUPS)
    groups = -(-blocks // 32), -(-rows // times), times
    recording.run("quantise", [values, Written(codes)], [blocks, rows, count], groups)


def _maker(recording: Recording, values: Range, rows: int, count: Count) -> int | None:
    """Returns the number of the step that makes these rows if it can quantise them, and if at most a post
    follows it."""
    for at in range(len(recording.steps) - 1, max(-1, len(recording.steps) - 4), -1):
        step = recording.steps[at]
        if isinstance(step, Dispatch) and step.shader != "post":
            return at if _can_quantise(step, values, rows, count) else None
    return None


def _can_quantise(step: Dispatch, values: Range, rows: int, count: Count) -> bool:
    """Returns whether a dispatch makes these rows and can quantise them: a norm of whole rows with its values
    in registers, or attention to whole blocks of a head."""
    if step.shader == "norm":
        of, *_, held, quantised = step.constants
        fits = step.groups == (1, rows, 1) and of == count and held > 0
    elif step.shader == "attention_merge":
        _, quantised = step.constants
        first_row, _, head_dim, *_ = struct.unpack(f"<{len(step.push) // 4}I", step.push)
        fits = first_row == 0 and step.groups[2] == rows and head_dim % BLOCK == 0 and count == Count.TOKENS
    else:
        return False
    *_, target, _ = step.ranges
    assert isinstance(target, Written)
    return target.range.is_same(values) and fits and not quantised


def _ranges(steps: Sequence[object]) -> Iterator[Range]:
    """Returns the ranges of all dispatches among these steps."""
    for step in steps:
        for each in step.ranges if isinstance(step, Dispatch) else ():
            yield each.range if isinstance(each, Written) else each


def product(
    recording: Recording,
    matrix: DeviceMatrix,
    x: Input,
    out: Range,
    *,
    accumulate: bool = False,
    relu: bool = False,
    heads: int = 1,
) -> None:
    """Computes ``out[t] (+)= matrix @ x[t] + bias``; out ``[rows, O]`` float32.

    With ``heads`` x has that many rows for each of x.rows tokens, and each head has its part of the matrix's
    rows."""
    if not x.rows:
        return
    rows, columns = matrix.shape
    source = x.codes if matrix.quantised else x.values
    assert source is not None
    lanes = gemv_lanes(columns)
    flags = _BIAS * (matrix.bias is not None) | _ACCUMULATE * accumulate | _RELU * relu
    for part in matrix.parts:
        ranges: list[Range | Written] = [part.range, source, matrix.bias or part.range, Written(out)]
        push = part.rows, columns, x.rows, x.count, rows, part.first, flags
        if x.rows > FEW_ROWS and x.count != Count.LOGITS:
            _many_rows(recording, matrix, ranges, push, heads)
            continue
        # A step rarely needs more logits than it has rows: the shader computes more in several passes.
        tokens = min(power_of_two(min(x.rows, recording.rows)), FEW_ROWS)
        groups = -(-part.rows * lanes // 256), 1, 1
        recording.work(part.rows * columns * x.rows)
        of_heads = [heads] if heads > 1 else []
        constants = [shader_type(matrix.type), tokens, lanes, *of_heads]
        recording.run("gemv", ranges, (*push, 0.0), groups, constants)


def cap_logits(recording: Recording, logits: Range, width: int, cap: float) -> bool:
    """Lets the product that makes these logits cap them. They can be in host memory, which a dispatch should
    not read. Returns False if the last dispatches are not that product."""
    parts: dict[int, Dispatch] = {}
    rows = 0
    for at in reversed(range(len(recording.steps))):
        step = recording.steps[at]
        if isinstance(step, Cut):
            continue
        if rows == width or not isinstance(step, Dispatch) or not _makes_logits(step, logits):
            break
        parts[at] = step
        rows += struct.unpack_from("<I", step.push)[0]
    if rows != width:
        return False
    for at, step in parts.items():
        push, constants = step.push[:-4] + struct.pack("<f", cap), (*step.constants, 1, 1)
        recording.steps[at] = replace(step, push=push, constants=constants)
    return True


def _makes_logits(step: Dispatch, logits: Range) -> bool:
    """Returns whether a dispatch is a product that makes these logits, without heads and not capped."""
    if step.shader != "gemv" or len(step.constants) != 3:
        return False
    target = step.ranges[-1]
    count = struct.unpack_from("<4I", step.push)[3]
    return count == Count.LOGITS and isinstance(target, Written) and target.range.is_same(logits)


def gemv_lanes(columns: int) -> int:
    """Returns invocations of a row in gemv.comp and ffn_rows.comp: two sizes, since each costs pipelines."""
    return 8 if RowLayout.from_columns(columns).chunks <= 8 else 32


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


def tile_inputs(rows: int, matrices: int = 1) -> int:
    """Returns the rows of input of a tile, if one of ``matrices`` multiplies each of ``rows`` rows. A large
    tile loads and unpacks weights less often, but few rows would leave it unfilled and the device idle."""
    return LARGE_TILE if rows > LARGE_TILE * matrices else SMALL_TILE


def _many_rows(
    recording: Recording,
    matrix: DeviceMatrix,
    ranges: list[Range | Written],
    push: tuple[int, ...],
    heads: int,
) -> None:
    """Multiplies many rows, in dispatches that each fit a submit."""
    rows, columns, inputs = push[:3]
    tile = tile_inputs(inputs)
    tiles, outputs, constants = -(-inputs // tile), 2 * tile, [shader_type(matrix.type), tile]
    if heads > 1:
        recording.work(rows * columns * inputs)
        groups = tiles, -(-matrix.shape[0] // heads // outputs), heads
        recording.run("gemm", ranges, (*push, 0), groups, [*constants, heads])
        return
    step = max(1, Recording.MOST_WORK // (columns * inputs * outputs)) * outputs
    for start in range(0, rows, step):
        part_rows = min(step, rows - start)
        recording.work(part_rows * columns * inputs)
        groups = tiles, -(-part_rows // outputs), 1
        recording.run("gemm", ranges, (*push, start), groups, constants)


def linear(
    recording: Recording,
    x: Buffer,
    weights: Sequence[Matrix],
    outs: Sequence[Buffer],
    accumulate: bool,
    rows: Rows,
) -> None:
    matrices = [checks.own_weights(each, DeviceMatrix) for each in weights]
    inputs = [recording.range_of("x", x, w.shape[1], rows=rows) for w in matrices]
    ranges = [
        recording.range_of("out", out, w.shape[0], rows=rows) for w, out in zip(matrices, outs, strict=True)
    ]
    if not matrices:
        return
    most = recording.rows_of(rows)
    shared_input = dot_input(recording, inputs[0], matrices[0].shape[1], most, Count(rows), matrices)
    for w, out in zip(matrices, ranges, strict=True):
        product(recording, w, shared_input, out, accumulate=accumulate)


def linear_heads(recording: Recording, x: Buffer, weights: Matrix, out: Buffer) -> None:
    w = checks.own_weights(weights, DeviceMatrix)
    checks.check_no_bias("linear_heads", w.bias)
    x_dims, y_dims, columns = (*(recording.memory.own(each).shape for each in (x, out)), w.shape[1])
    if len(x_dims) != 3 or len(y_dims) != 3 or x_dims[1] != y_dims[1] or y_dims[1] * y_dims[2] != w.shape[0]:
        raise ValueError(f"linear_heads of {w.shape} from {x_dims} to {y_dims}")
    heads, width, rows = x_dims[1], x_dims[2], recording.rows
    if width < columns:
        raise ValueError(f"linear_heads of {w.shape} from {x_dims} to {y_dims}")
    values = recording.range_of("x", x, heads * width)
    target = recording.range_of("out", out, w.shape[0])
    if width != columns:
        values = _last_values(recording, values, heads, width, columns)
    codes = dot_input(recording, values, columns, rows * heads, Count.ALL, [w]).codes
    product(recording, w, Input(values, codes, columns, rows, Count.TOKENS), target, heads=heads)


def _last_values(recording: Recording, values: Range, heads: int, width: int, columns: int) -> Range:
    """Copies the last values of each head."""
    cut = recording.scratch(4 * recording.rows * heads * columns)
    groups = -(-heads * columns // 256), recording.rows, 1
    push = heads, width, width - columns, 0
    recording.run("join_heads", [values, values, Written(cut)], push, groups)
    return cut


def heads_scratch_bytes(rows: int, heads: int, columns: int) -> int:
    """Returns the most bytes of scratch of op linear_heads."""
    return aligned(4 * rows * heads * columns) + aligned(linear_scratch_bytes(rows * heads, columns))


def join_heads(recording: Recording, x: Buffer, y: Buffer, out: Buffer) -> None:
    shapes = [recording.memory.own(each).shape for each in (x, y, out)]
    if any(len(each) != 3 for each in shapes) or len({each[1] for each in shapes}) > 1:
        raise ValueError(f"join_heads of {shapes[0]} and {shapes[1]} to {shapes[2]}")
    heads, first, second = shapes[0][1], shapes[0][2], shapes[1][2]
    ranges = [
        recording.range_of(what, each, heads * width)
        for what, each, width in (("x", x, first), ("y", y, second), ("out", out, first + second))
    ]
    groups = -(-heads * (first + second) // 256), recording.rows, 1
    recording.run("join_heads", [*ranges[:2], Written(ranges[2])], (heads, first, 0, second), groups)


def embed(
    recording: Recording,
    table: Matrix,
    out: Buffer,
    by: IndexedBy,
    accumulate: bool,
) -> None:
    w = checks.own_weights(table, DeviceMatrix)
    rows, columns = w.shape
    target = recording.range_of("out", out, columns)
    recording.bound("tokens" if by == IndexedBy.TOKENS else "positions", rows)
    numbers = _TOKENS if by == IndexedBy.TOKENS else _POSITIONS
    groups = -(-columns // 256), recording.rows, 1
    for part in w.parts:
        push = part.rows, columns, part.first, numbers, accumulate
        recording.run("embed", [part.range, Written(target)], push, groups, [shader_type(w.type)])


def linear_scratch_bytes(rows: int, columns: int) -> int:
    """Returns bytes of scratch for ``rows`` rows of quantised input."""
    return rows * (columns // BLOCK) * (BLOCK + 8)


def predict_scratch_bytes(rows: int, dim: int, rank: int, neurons: int) -> int:
    """Returns bytes of scratch of op predict for ``rows`` decode rows."""
    inputs = linear_scratch_bytes(rows, dim), linear_scratch_bytes(rows, rank)
    return sum(map(aligned, (4 * rows * rank, 4 * rows * neurons, *inputs)))


def predict(
    recording: Recording,
    x: Buffer,
    weights: PredictorWeights,
    mask: Buffer,
    chosen: Chosen | None,
) -> None:
    w = checks.own_weights(weights, DevicePredictor)
    checks.check_chosen(chosen, w.experts)
    (rank, dim), (neurons, _) = w.first.shape, w.second.shape
    values = recording.range_of("x", x, dim)
    target = recording.range_of("mask", mask, w.words, np.uint64)
    ids = recording.range_of("ids", chosen.ids, w.chosen, np.int32) if chosen else None
    rows = recording.decode
    hidden, scores = recording.scratch(4 * rows * rank), recording.scratch(4 * rows * neurons)
    x_rows = dot_input(recording, values, dim, rows, Count.DECODE, [w.first])
    product(recording, w.first, x_rows, hidden, relu=w.relu)
    h_rows = dot_input(recording, hidden, rank, rows, Count.DECODE, [w.second])
    product(recording, w.second, h_rows, scores)
    ranges: list[Range | Written] = [scores, w.threshold, w.neurons, ids or w.neurons, Written(target)]
    push = neurons, 2 * w.words, w.chosen if ids else 0
    recording.run("mask", ranges, push, (-(-2 * w.words // 8), rows, 1))
