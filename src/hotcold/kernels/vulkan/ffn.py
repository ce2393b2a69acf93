"""The FFN op as dispatches of csrc/shaders/ffn_*.comp.

Decode rows: candidates are listed; then their gates; then, for active gates, ups and coefficients; then
down's rows with non-zero coefficients, a group of leaves at a time; then the tree. Where no gate decides what
is read, gates and ups are one dispatch. Prompt rows compute all neurons. A program of few rows treats all of
them as decode rows: the bits are the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import BlockType
from hotcold.formats.words import ACTIVATIONS
from hotcold.kernels import checks
from hotcold.kernels.backend import DECODE_ROWS, Buffer, FFNCall, FFNStats, scale_run
from hotcold.kernels.vulkan.buffers import DeviceMemory
from hotcold.kernels.vulkan.ffn_weights import DeviceFFN, FFNShape
from hotcold.kernels.vulkan.linear import LARGE_TILE, SMALL_TILE, Count, gemv_lanes, quantise, tile_inputs
from hotcold.kernels.vulkan.matrix import Part
from hotcold.kernels.vulkan.memory import Range, aligned
from hotcold.kernels.vulkan.packing import UNIT, shader_type
from hotcold.kernels.vulkan.recording import Recording, Written
from hotcold.kernels.vulkan.streamed import StreamedFFN

#: Scratch for neuron and output values of prompt rows; more rows take more passes.
PASS_BYTES = 16 << 20
_DOWN_TILE = 32  # choices of a group of ffn_prompt_down.glsl
_ALL, _DECODE, _PROMPT = range(3)  # ROWS of ffn.glsl
_GATE, _UP, _ONLY_UP, _OUTPUT = range(4)  # STAGE of ffn_rows.glsl
_SUMS, _OUT, _ADDED = range(3)  # RESULT of ffn_rows.glsl
_MOST_AT_ONCE = 4  # choices whose down sums one invocation of ffn_down.comp computes


@dataclass(frozen=True)
class Pass:
    """Rows of a step that one series of dispatches covers."""

    shape: FFNShape
    kind: int
    first: int  #: first row, counted among the rows of this kind
    rows: int  #: the most rows
    together: int  #: leaves that are summed before their sum is stored

    @property
    def prompt(self) -> bool:
        return self.kind == _PROMPT

    @property
    def tile(self) -> int:
        """Choices of one expert that share weight reads."""
        return tile_inputs(self.choices, self.shape.experts) if self.prompt else _power_of_two(self.rows)

    @property
    def choices(self) -> int:
        return self.rows * self.shape.chosen

    @property
    def tiles(self) -> int:
        """The most tiles."""
        if self.shape.experts == 1:
            return -(-self.rows // self.tile)
        full_tiles = self.choices // self.tile if self.rows > self.tile else 0
        return full_tiles + min(self.shape.experts, self.choices)

    @property
    def sums(self) -> int:
        """Sums of one choice: one per group of leaves, or the dot."""
        return _sums(self.shape, self.together)

    @property
    def bit_words(self) -> int:
        return -(-self.shape.most // 64) * 2

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each of its scratch arrays."""
        shape, choices = self.shape, self.choices
        words = {
            "tiles": 4 + 4 * self.tiles + choices if shape.experts > 1 else 0,
            "lists": 0 if self.prompt else 2 * self.tiles * (1 + shape.most),
            "bits": 0 if self.prompt else choices * self.bit_words,
            "values": choices * shape.most,
            "sums": choices * self.sums * shape.dim,
            "codes": _code_words(choices, shape.most) if shape.dense and shape.down.weights > 1 else 0,
        }
        return {name: 4 * count for name, count in words.items()}


def _sums(shape: FFNShape, together: int) -> int:
    return 1 if shape.dense else -(-shape.leaves_of(shape.most) // together)


def _power_of_two(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


def _quads(shape: FFNShape, choices: int) -> int:
    """Returns how often an invocation of ffn_down.comp takes four outputs. Registers hold 16 sums, and a load
    has at most 16 bytes. In panels, registers also hold the scales of each output."""
    most = UNIT // (4 * shape.down.nbytes) if shape.down.weights == 1 else 2 if shape.panels else 4
    return min(most, _MOST_AT_ONCE // choices)


def _code_words(rows: int, columns: int) -> int:
    """Returns words of quantised input of this size."""
    return rows * -(-columns // 32) * 10


def _passes(shape: FFNShape, rows: int, decode: int, together: int) -> Iterator[Pass]:
    if rows <= DECODE_ROWS:
        yield Pass(shape, _ALL, 0, rows, _decode_together(shape, rows, together))
        return
    if decode:
        yield Pass(shape, _DECODE, 0, decode, _decode_together(shape, decode, together))
    row_bytes = 4 * shape.chosen * (shape.most + _sums(shape, together) * shape.dim)
    row_work = shape.chosen * shape.most * shape.dim
    most = min(PASS_BYTES // row_bytes, Recording.MOST_WORK // row_work)
    most = max(SMALL_TILE, most // LARGE_TILE * LARGE_TILE)
    for first in range(0, rows, most):
        yield Pass(shape, _PROMPT, first, min(most, rows - first), together)


def _decode_together(shape: FFNShape, rows: int, together: int) -> int:
    """Returns the leaves to sum together. Few rows have few sums, so every leaf can have its own workgroup
    (ffn_down.glsl relies on that for 1 and 2 rows); the sums of more rows would fill memory."""
    return together if shape.dense else min(together, 1 if rows <= 4 else 2 if rows <= 8 else 4)


def ffn_scratch_bytes(shape: FFNShape, rows: int, decode: int, together: int = 64) -> int:
    """Returns scratch bytes of a layer's FFN in a program for ``rows`` rows, with at most ``decode`` decode
    rows. ``together`` is that of its weights: 64 unless a range is too small."""
    passes = [
        sum(map(aligned, each.sizes.values())) for each in _passes(shape, rows, min(rows, decode), together)
    ]
    quantised = any(type.weights > 1 for type in (shape.gate, shape.up))
    return max(passes) + (aligned(4 * _code_words(rows, shape.dim)) if quantised else 0)


def ffn(recording: Recording, call: FFNCall) -> None:
    w = checks.own_weights(call.weights, DeviceFFN)
    if isinstance(w, StreamedFFN):
        w = w.copy(recording)
    shape, mask, stats, chosen = w.shape, call.mask, call.stats, call.chosen
    if call.strongest is not None:
        raise ValueError("the strongest neurons: GPUs do not report them; use `gpu=off`")
    checks.check_ffn_call(call, shape)
    _Op(
        recording=recording,
        w=w,
        x=recording.range_of("x", call.x, shape.dim),
        out=recording.range_of("out", call.out, shape.dim),
        skip=call.skip,
        mask=None if mask is None else _mask(recording, mask, w.words),
        mask_words=0 if mask is None else 2 * recording.memory.own(mask).width,
        active=None if call.active is None else recording.range_of("active", call.active, w.words, np.uint64),
        counts=None if stats is None else _counts(recording.memory, stats),
        counts_row=0 if stats is None else stats.row,
        accumulate=call.accumulate,
        ids=None if chosen is None else recording.range_of("ids", chosen.ids, shape.chosen, np.int32),
        factors=None if chosen is None else recording.range_of("factors", chosen.factors, shape.chosen),
        gates=None if call.gates is None else recording.range_of("gates", call.gates, shape.most),
    ).record()


def _mask(recording: Recording, mask: Buffer, words: int) -> Range:
    buffer = recording.memory.own(mask)
    if buffer.dtype != np.uint64:
        raise TypeError(f"mask is {buffer.dtype}: uint64 is needed")
    if buffer.shape[0] < recording.rows or buffer.width < words:
        got = f"{buffer.shape[0]} rows of {buffer.width}"
        raise ValueError(f"mask: expected at least {recording.rows} rows of {words} or more, got {got}")
    return buffer.range


def _check_ids(status: npt.NDArray[np.int32], experts: int) -> None:
    """Raises the error that ffn_tiles.comp found: its kind (0: none), the row, the id and the previous id."""
    kind, row, expert, before = map(int, status)
    if kind == 1:
        error = f"expert {expert} of row {row} is out of range"
        raise ValueError(f"{error}; allowed: 0 to {experts - 1}")
    if kind == 2:
        error = f"expert {expert} of row {row} follows {before}"
        raise ValueError(f"{error}: a row's experts must ascend")


def _counts(memory: DeviceMemory, stats: FFNStats) -> Range:
    array = memory.own(stats.counts)
    if array.dtype != np.int64:
        raise TypeError(f"counts are {array.dtype}: int64 is needed")
    if array.width != 5 or not 0 <= stats.row < array.shape[0]:
        raise ValueError(f"row {stats.row} of counts of shape {array.shape}: [L, 5] with that row are needed")
    return array.range


@dataclass(frozen=True)
class _Op:
    """One recorded call of the op."""

    recording: Recording
    w: DeviceFFN
    x: Range
    out: Range
    skip: bool
    mask: Range | None
    mask_words: int
    active: Range | None
    counts: Range | None
    counts_row: int
    accumulate: bool
    ids: Range | None
    factors: Range | None
    gates: Range | None

    @property
    def skips(self) -> bool:
        """True if neurons are left out: a dot over all neurons would read uncomputed values."""
        return self.skip and not self.w.shape.dense

    @property
    def reports(self) -> bool:
        return self.active is not None or self.counts is not None

    def record(self) -> None:
        recording, shape = self.recording, self.w.shape
        nbytes = ffn_scratch_bytes(shape, recording.rows, recording.decode, self.w.together)
        scratch = recording.scratch(nbytes)
        codes, used = None, 0
        if any(type.weights > 1 for type in (shape.gate, shape.up)):
            used = aligned(4 * _code_words(recording.rows, shape.dim))
            codes = scratch.part(0, used)
            quantise(recording, self.x, codes, shape.dim, recording.rows, Count.TOKENS)
        rest = scratch.part(used, nbytes - used)
        for pass_rows in _passes(shape, recording.rows, recording.decode, self.w.together):
            places, at = {}, 0
            for name, size in pass_rows.sizes.items():
                places[name] = rest.part(at, size)
                at += aligned(size)
            _Series(self, pass_rows, codes, places).record()


@dataclass(frozen=True)
class _Series:
    """Dispatches of one pass."""

    op: _Op
    rows: Pass
    codes: Range | None  #: of x
    scratch: dict[str, Range]

    def record(self) -> None:
        op, shape = self.op, self.op.w.shape
        if op.ids is not None:
            status = op.recording.status(lambda words: _check_ids(words, shape.experts))
            tiles = Written(self.scratch["tiles"] if shape.experts > 1 else self.scratch["values"])
            self.run("ffn_tiles", (1, 1, 1), [], [op.ids, Written(status)], tiles=tiles)
        if self.rows.prompt:
            self._prompt()
        else:
            self._decode()
        if self._writes_out:
            return
        constants = [op.factors is not None, op.accumulate]
        ids, factors = op.ids or op.w.table, op.factors or op.w.table
        self.run(
            "ffn_sum",
            (-(-shape.dim // 32), self.rows.rows, 1),
            constants,
            [ids, factors, self.scratch["sums"], Written(op.out)],
        )

    @property
    def _keeps_bits(self) -> bool:
        """True if down or the report reads the bits of active neurons."""
        return not self.rows.prompt and (not self.op.w.shape.dense or self.op.reports)

    @property
    def _writes_out(self) -> bool:
        """True if the last product writes the op's output: one expert without a factor, and no tree."""
        op, shape = self.op, self.op.w.shape
        only = shape.experts == 1 and op.factors is None and shape.most > 0
        return shape.dense and not self.rows.prompt and only

    @property
    def _gates_with_ups(self) -> bool:
        """True if gates and ups are one dispatch: equal matrices, and all ups are read."""
        op, shape = self.op, self.op.w.shape
        gate, up = ([(part.first, part.rows) for part in parts] for parts in (op.w.gate, op.w.up))
        return shape.gated and op.gates is None and not op.skips and (shape.gate, gate) == (shape.up, up)

    def _decode(self) -> None:
        op, shape = self.op, self.op.w.shape
        masked = op.mask is not None
        if self._keeps_bits:
            groups = max(self.rows.tiles, 4)  # at least 4, since they also clear the bits
            lists, bits = Written(self.scratch["lists"]), Written(self.scratch["bits"])
            self.run("ffn_candidates", (groups, 1, 1), [masked], [op.mask or op.w.table, lists, bits])
        listed = int(masked and not shape.dense)  # list to read: none, or the first
        if op.gates is not None:
            self._take_gates(op.gates, listed=op.skips)
        elif shape.gated and not self._gates_with_ups:
            self._few_rows(_GATE, op.w.gate, listed)
        if self._gates_with_ups:
            self._few_rows(_UP, op.w.up, listed, op.w.gate)
        elif shape.gated or op.gates is not None:
            self._few_rows(_UP, op.w.up, 2 if op.skips else listed)
        else:
            self._few_rows(_ONLY_UP, op.w.up, listed)
        self._report()  # now, so that the next dispatches, which do not wait for it, run concurrently
        if shape.dense:
            self._quantise_values()
            return self._few_rows(_OUTPUT, op.w.down, 0)
        at_once = min(self.rows.tile, _MOST_AT_ONCE)
        groups = self.rows.tiles * (self.rows.tile // at_once)
        quads = _quads(shape, at_once)
        for part in op.w.down:
            self.run(
                "ffn_down_panels" if shape.panels else "ffn_down",
                (-(-shape.dim // (256 * quads)), self.rows.sums, groups),
                [shader_type(shape.down), at_once, quads],
                [part.range, self.scratch["values"], self.scratch["bits"], Written(self.scratch["sums"])],
                part=part,
            )

    def _prompt(self) -> None:
        op, shape = self.op, self.op.w.shape
        if op.gates is not None:
            self._take_gates(op.gates, listed=False)
        elif shape.gated:
            self._many_rows(_GATE, op.w.gate)
        gated = shape.gated or op.gates is not None
        self._many_rows(_UP if gated else _ONLY_UP, op.w.up)
        if shape.dense:
            self._quantise_values()
            return self._many_rows(_OUTPUT, op.w.down)
        for part in op.w.down:
            op.recording.work(self.rows.choices * part.rows * shape.dim)
            self.run(
                "ffn_prompt_down_panels" if shape.panels else "ffn_prompt_down",
                (-(-shape.dim // 64), self.rows.sums, self.rows.tiles * (self.rows.tile // _DOWN_TILE)),
                [shader_type(shape.down)],
                [part.range, self.scratch["values"], Written(self.scratch["sums"])],
                part=part,
            )

    def _take_gates(self, gates: Range, *, listed: bool) -> None:
        values = self.scratch["values"]
        lists, bits = (values, values) if self.rows.prompt else (self.scratch["lists"], self.scratch["bits"])
        mask = self.op.mask if listed else None
        ranges = mask or self.op.w.table, Written(lists) if listed else lists, bits, gates
        constants = [listed, mask is not None]
        self.run("ffn_gates", (self.rows.tiles, 1, 1), constants, [*ranges, Written(values)])

    def _quantise_values(self) -> None:
        rows, shape = self.rows, self.op.w.shape
        if shape.down.weights > 1:
            values, codes = self.scratch["values"], self.scratch["codes"]
            quantise(self.op.recording, values, codes, shape.most, rows.choices, Count.ALL)

    def _operands(self, stage: int) -> tuple[BlockType, Range, int, Range, int]:
        """Returns a stage's operands: its weights' type, the input and the number of its rows, the output
        range, and outputs per row."""
        op, shape, scratch = self.op, self.op.w.shape, self.scratch
        if stage == _OUTPUT:
            source = scratch["codes" if shape.down.weights > 1 else "values"]
            return shape.down, source, self.rows.choices, scratch["sums"], shape.dim
        type = shape.gate if stage == _GATE else shape.up
        operand = self.codes if type.weights > 1 else op.x
        assert operand is not None
        return type, operand, op.recording.rows, scratch["values"], shape.most

    def _few_rows(self, stage: int, parts: Sequence[Part], listed: int, gates: Sequence[Part] = ()) -> None:
        """Computes a stage; with ``gates``, the parts of gate's matrix, gates and coefficients together."""
        op, shape = self.op, self.op.w.shape
        type, source, x_rows, values, outputs = self._operands(stage)
        kind = ACTIVATIONS.index(shape.activation)
        lanes = gemv_lanes(shape.most if stage == _OUTPUT else shape.dim)
        result = _SUMS
        if stage == _OUTPUT and self._writes_out:
            values, result = op.out, _ADDED if op.accumulate else _OUT
        constants = [shader_type(type), stage, listed, op.mask is not None, op.skips, kind, lanes]
        constants += [self._keeps_bits, result]
        lists, bits = self.scratch["lists"], self.scratch["bits"]
        both: list[Range | Written] = [Written(lists), bits]
        if stage in (_UP, _ONLY_UP):
            both = [lists, Written(bits)]
        for i, part in enumerate(parts):
            gate_range = [gates[i].range] if gates else []
            self.run(
                "ffn_gate_up" if gates else "ffn_rows",
                (-(-outputs * lanes // 256), self.rows.tiles, 1),
                constants,
                [op.mask or op.w.table, *both, part.range, source, Written(values), *gate_range],
                part=part,
                x_rows=x_rows,
            )

    def _many_rows(self, stage: int, parts: Sequence[Part]) -> None:
        op, shape = self.op, self.op.w.shape
        type, source, x_rows, values, outputs = self._operands(stage)
        columns = shape.most if stage == _OUTPUT else shape.dim
        for part in parts:
            op.recording.work(self.rows.choices * min(part.rows, outputs) * columns)
            self.run(
                "ffn_gemm",
                (self.rows.tiles, -(-outputs // (2 * self.rows.tile)), 1),
                [shader_type(type), stage, ACTIVATIONS.index(shape.activation)],
                [part.range, source, Written(values)],
                part=part,
                x_rows=x_rows,
            )

    def _report(self) -> None:
        op, shape, scratch = self.op, self.op.w.shape, self.scratch
        active, counts = op.active or op.counts, op.counts or op.active
        if active is None or counts is None:  # op.reports is false
            return
        run = scale_run(shape.down) if shape.panels else 0
        outputs = [op.active is not None, op.counts is not None]
        words = self.rows.rows * 2 * op.w.words if op.active else 1
        self.run(
            "ffn_report",
            (-(-words // 1024), 1, 1),
            [op.mask is not None, op.skip, shape.gated, shape.dense, run, *outputs, op.gates is not None],
            [
                op.mask or op.w.table,
                scratch["lists"],
                scratch["bits"],
                op.ids or op.w.table,
                Written(active),
                Written(counts),
            ],
        )

    def run(
        self,
        shader: str,
        groups: tuple[int, int, int],
        constants: Sequence[int],
        ranges: Sequence[Range | Written],
        *,
        part: Part | None = None,
        x_rows: int = 0,
        tiles: Range | Written | None = None,
    ) -> None:
        """Dispatches a shader with the arguments of every shader of the op: ffn.glsl."""
        op, shape, rows = self.op, self.op.w.shape, self.rows
        several = shape.experts > 1
        threshold, limit, alpha = map(float, op.w.numbers)
        push: list[int | float] = [
            shape.dim,
            shape.most,
            rows.bit_words,
            op.mask_words,
            shape.chosen,
            shape.experts,
            rows.kind,
            rows.first,
            rows.rows,
            rows.tiles,
            shape.leaves,
            rows.together,
            rows.sums,
            *op.w.biases,
            threshold,
            limit,
            alpha,
            part.rows if part else 0,
            part.first if part else 0,
            x_rows,
            2 * op.w.words,
            op.counts_row,
        ]
        tile_list = tiles or (self.scratch["tiles"] if several else op.w.table)
        shared = [int(several), 1 if shader == "ffn_sum" else rows.tile, *map(int, constants)]
        op.recording.run(shader, [op.w.table, tile_list, *ranges], push, groups, shared)
