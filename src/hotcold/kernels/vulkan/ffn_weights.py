"""FFN weights in device memory, in the layout of csrc/shaders/ffn*.glsl.

Gate, up and down by neuron are rows of blocks; a float type's down by output is transposed. If blocks of a
quantised type run along the neurons, down is stored in panels of one block's number of neurons. A panel has
the scales of all outputs, then each neuron's codes. Where the activation gives no zeros, down by output stays
rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import BlockType, Bytes, Floats
from hotcold.formats.stored import AnyTensor
from hotcold.kernels import checks
from hotcold.kernels.backend import (
    FFNTensors,
    is_dense,
    mask_words,
    panel_bytes,
    scale_run,
)
from hotcold.kernels.vulkan import packing
from hotcold.kernels.vulkan.buffers import DeviceMemory
from hotcold.kernels.vulkan.matrix import Part
from hotcold.kernels.vulkan.memory import Range, aligned

LEAVES = 64  #: most leaves in the sums of one row, over all its experts


@dataclass(frozen=True)
class FFNShape:
    """Facts that determine an FFN's programs; the weights' values do not."""

    dim: int
    ends: tuple[int, ...]  #: end of each expert's neurons
    chosen: int  #: k
    down_layout: str
    activation: str
    gated: bool
    gate: BlockType  #: without a gate, up's
    up: BlockType
    down: BlockType

    @staticmethod
    def from_tensors(tensors: FFNTensors) -> FFNShape:
        gate = tensors.up if tensors.gate is None else tensors.gate
        return FFNShape(
            dim=tensors.up.shape[1],
            ends=tensors.ends,
            chosen=tensors.chosen,
            down_layout=tensors.down_layout,
            activation=tensors.activation,
            gated=tensors.gate is not None,
            gate=gate.type,
            up=tensors.up.type,
            down=tensors.down.type,
        )

    @property
    def experts(self) -> int:
        return len(self.ends)

    @property
    def neurons(self) -> int:
        return self.ends[-1]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and end neuron of each expert."""
        return list(pairwise((0, *self.ends)))

    @property
    def most(self) -> int:
        """Neurons of the largest expert."""
        return max(end - first for first, end in self.spans)

    @property
    def dense(self) -> bool:
        """True if down is a dot over all neurons."""
        return is_dense(self.down_layout, self.down, self.activation)

    @property
    def panels(self) -> bool:
        return self.down_layout == "by_output" and not self.dense and self.down.weights > 1

    @property
    def leaves(self) -> int:
        """The most leaves of one expert's sum."""
        return -(-LEAVES // self.chosen)

    def leaves_of(self, neurons: int) -> int:
        return min(max(-(-neurons // 64) // 2, 1), self.leaves)

    def leaf_edges(self, neurons: int, together: int) -> list[int]:
        """Returns the first neurons of groups of ``together`` leaves, and the end of the last group."""
        words, leaves = -(-neurons // 64), self.leaves_of(neurons)
        return [min(words * leaf // leaves * 64, neurons) for leaf in range(0, leaves, together)] + [neurons]


@dataclass(frozen=True, eq=False)
class DeviceFFN:
    """An FFN of one layer; ``table`` has four words for each expert, then biases."""

    shape: FFNShape
    table: Range
    gate: tuple[Part, ...]
    up: tuple[Part, ...]
    down: tuple[Part, ...]
    together: int  #: leaves whose neurons are all in one part; not used if down is a dot
    biases: tuple[int, int, int]  #: offsets of gate, up and down biases in the table; 0 without
    numbers: tuple[float, float, float]  #: threshold, limit, alpha
    nbytes: int
    row_bytes: tuple[int, int, int, int]

    @property
    def neurons(self) -> int:
        return self.shape.neurons

    @property
    def words(self) -> int:
        return mask_words(self.shape.ends)[-1]

    @property
    def runs(self) -> int:
        return self.neurons // scale_run(self.shape.down) if self.shape.panels else 0


def ffn_weights(memory: DeviceMemory, tensors: FFNTensors) -> DeviceFFN:
    checks.check_ffn(tensors)
    checks.check_resident(tensors)
    shape = FFNShape.from_tensors(tensors)
    dim, down = shape.dim, tensors.down
    largest = memory.info.max_range
    together, cuts = _cuts(shape, largest)
    gate = () if tensors.gate is None else _rows(memory, tensors.gate, cuts)
    up = _rows(memory, tensors.up, cuts)
    if shape.dense:
        per_range = max(1, largest // _row_bytes(shape.down, down.shape[1]))
        edges = [*range(0, down.shape[0], per_range), down.shape[0]]
        held = _rows(memory, down, list(pairwise(edges)))
    elif shape.panels:
        held = tuple(_panels(memory, shape, tensors, *cut) for cut in cuts)
    elif shape.down_layout == "by_output":
        held = tuple(_transposed(memory, shape, tensors, *cut) for cut in cuts)
    else:
        held = _rows(memory, down, cuts)
    biases = tensors.gate_bias, tensors.up_bias, tensors.down_bias
    table, places = _table(shape, biases)
    gate_bytes = 0 if tensors.gate is None else tensors.gate.nbytes
    whole = gate_bytes, tensors.up.nbytes, tensors.down_nbytes
    sizes = [n // shape.neurons for n in whole]
    last = panel_bytes(down.type, dim) if shape.panels else (sizes[2], 0)
    return DeviceFFN(
        shape=shape,
        table=memory.upload(table),
        gate=gate,
        up=up,
        down=held,
        together=together,
        biases=places,
        numbers=(tensors.threshold, tensors.limit, tensors.alpha),
        nbytes=sum(whole) + sum(each.nbytes for each in biases if each is not None),
        row_bytes=(sizes[0], sizes[1], *last),
    )


def _row_bytes(type: BlockType, columns: int) -> int:
    return sum(packing.section_bytes(type, columns))


def _table(
    shape: FFNShape, biases: Sequence[npt.NDArray[np.float32] | None]
) -> tuple[npt.NDArray[np.uint32], tuple[int, int, int]]:
    words, outputs, experts = mask_words(shape.ends), 0, []
    for (first, end), word in zip(shape.spans, words, strict=False):
        experts.append((first, end, 2 * word, outputs))
        outputs += shape.dim if end > first else 0
    table = [np.array(experts, np.uint32).reshape(-1)]
    places = []
    for bias in biases:
        places.append(sum(map(len, table)) if bias is not None else 0)
        if bias is not None:
            table.append(bias.reshape(-1).view(np.uint32))
    return np.concatenate(table), (places[0], places[1], places[2])


def _neuron_bytes(shape: FFNShape) -> int:
    """Returns bytes of one neuron in the largest of the matrices that are cut between neurons."""
    widths = [_row_bytes(shape.gate, shape.dim), _row_bytes(shape.up, shape.dim)]
    if shape.panels:
        widths.append(-(-4 * panel_words(shape.down, shape.dim) // shape.down.weights))
    elif not shape.dense:
        widths.append(_row_bytes(shape.down, shape.dim))
    return max(widths)


def leaves_together(shape: FFNShape, most_bytes: int) -> int:
    """Returns ``DeviceFFN.together`` for ranges of ``most_bytes``."""
    return _cuts(shape, most_bytes)[0]


def _cuts(shape: FFNShape, most_bytes: int) -> tuple[int, list[tuple[int, int]]]:
    """Cuts the neurons into parts that each fit a range. Also returns how many leaves each part keeps
    together at least: as many as fit, all if one part suffices."""
    row_bytes = _neuron_bytes(shape)
    slack = 2 * shape.down.weights if shape.panels else 0  # panels shared by two parts
    most = most_bytes // row_bytes - slack
    together = LEAVES
    while True:
        edges = {0}
        for first, end in shape.spans:
            if end > first:
                edges.update(first + edge for edge in shape.leaf_edges(end - first, together))
        ordered = sorted(edges)
        if together == 1 or max(b - a for a, b in pairwise(ordered)) <= most:
            break
        together //= 2
    if max(b - a for a, b in pairwise(ordered)) > most:
        got = f"FFN weights of {row_bytes} bytes a neuron, {shape.neurons} of them"
        raise ValueError(f"{got}: this device reads {most_bytes} at a time; use another device, or the CPU")
    cuts, first = [], 0
    for edge, after in pairwise([*ordered, shape.neurons + most + 1]):
        if after - first > most:
            cuts.append((first, edge))
            first = edge
    return LEAVES if shape.dense else together, cuts


# --- rows ---


def _rows(memory: DeviceMemory, tensor: AnyTensor, cuts: Sequence[tuple[int, int]]) -> tuple[Part, ...]:
    return tuple(_part(memory, tensor, first, end) for first, end in cuts)


def _part(memory: DeviceMemory, tensor: AnyTensor, first: int, end: int) -> Part:
    chunks = packing.row_chunks(tensor, first, end)
    return _store(memory, tensor.type, tensor.shape[1], first, end, chunks, tensor.row_factors)


def _store(
    memory: DeviceMemory,
    type: BlockType,
    columns: int,
    first: int,
    end: int,
    chunks: Iterator[tuple[int, Bytes]],
    factors: Floats | None = None,
) -> Part:
    """Stores rows of a file as sections, a chunk at a time; ``factors`` are those of all rows."""
    sizes = packing.section_bytes(type, columns)
    begins = np.cumsum([0, *(size * (end - first) for size in sizes)])
    held = memory.allocate(aligned(int(begins[-1]), 16))
    for start, data in chunks:
        chunk_factors = None if factors is None else factors[start : start + len(data)]
        sections = packing.pack(type, data, columns, chunk_factors)
        for section, size, begin in zip(sections, sizes, begins, strict=False):
            to = held.offset + int(begin) + (start - first) * size
            memory.device.write(held.held, to, np.ascontiguousarray(section).reshape(-1))
    return Part(first, end - first, held)


def _transposed(memory: DeviceMemory, shape: FFNShape, tensors: FFNTensors, first: int, end: int) -> Part:
    """Transposes a by-output matrix of a float type without changing a value."""
    size, dim = shape.down.nbytes, shape.dim

    def chunks() -> Iterator[tuple[int, Bytes]]:
        for begin, expert_end, outputs in _outputs(shape, tensors, first, end):
            values = outputs.view(f"V{size}")[:, max(first - begin, 0) : expert_end - begin]
            step = max(1, packing.CHUNK_BYTES // (dim * size))
            for start in range(0, values.shape[1], step):
                rows = np.ascontiguousarray(values[:, start : start + step].T)
                yield max(first, begin) + start, rows.view(np.uint8).reshape(len(rows), -1)

    return _store(memory, shape.down, dim, first, end, chunks())


def _outputs(shape: FFNShape, tensors: FFNTensors, first: int, end: int) -> Iterator[tuple[int, int, Bytes]]:
    """Yields, for each expert with neurons from ``first`` to ``end``: its first neuron, the end of its
    neurons before ``end``, and its rows of down by output."""
    ends = {begin: expert_end for begin, expert_end in shape.spans if expert_end > begin}
    for begin, down in tensors.expert_downs():
        if begin < end and ends[begin] > first:
            chunks = [data for _, data in packing.row_chunks(down, 0, shape.dim)]
            yield begin, min(ends[begin], end), np.concatenate(chunks)


# --- panels ---


def _panels(memory: DeviceMemory, shape: FFNShape, tensors: FFNTensors, first: int, end: int) -> Part:
    """Stores whole panels, which may have neurons before ``first`` and after ``end``."""
    type, size = shape.down, shape.down.weights
    begin, last = first // size * size, -(-end // size) * size
    nbytes = 4 * panel_words(type, shape.dim)
    held = memory.allocate((last - begin) // size * nbytes)
    for expert, expert_end, outputs in _outputs(shape, tensors, begin, last):
        blocks = outputs.reshape(shape.dim, -1, type.nbytes)
        start = max(expert, begin)
        step = max(1, packing.CHUNK_BYTES // nbytes) * size
        for at in range(start, expert_end, step):
            stop = min(at + step, expert_end)
            packed = pack_panels(type, blocks[:, (at - expert) // size : (stop - expert) // size])
            memory.device.write(held.held, held.offset + (at - begin) // size * nbytes, packed.reshape(-1))
    return Part(first, end - first, held)


def panel_words(type: BlockType, dim: int) -> int:
    """Returns 32-bit words of a panel; its outputs are padded to a multiple of 32."""
    return -(-dim // 32) * 8 * type.nbytes


def pack_panels(type: BlockType, blocks: Bytes) -> Bytes:
    """Maps ``[outputs, panels, bytes of a block]`` to ``[panels, bytes]``."""
    dim, panels = blocks.shape[:2]
    padded = np.zeros((panels, -(-dim // 32) * 32, type.nbytes), np.uint8)
    padded[:, :dim] = blocks.swapaxes(0, 1)
    planes, low, high = _SPLITTERS[type.name](padded)
    codes = [_nibbles(low) if type.name != "Q8_0" else low]
    if high is not None:
        codes.append(_bits(high, 1) if type.name != "Q6_K" else _bits(high, 2))
    rows = np.concatenate(codes, axis=2)
    return np.concatenate(
        [*(plane.reshape(panels, -1) for plane in planes), rows.reshape(panels, -1)], axis=1
    )


def _nibbles(codes: Bytes) -> Bytes:
    """Packs codes of 4 bits, ``[panels, neurons, outputs]``: of each 8 outputs, 4 in the lower halves of 4
    bytes and 4 in the upper halves."""
    quads = codes.reshape(*codes.shape[:2], -1, 2, 4)
    packed = (quads[..., 0, :] | quads[..., 1, :] << np.uint8(4)).reshape(*codes.shape[:2], -1)
    return packed


def _bits(high: Bytes, bits: int) -> Bytes:
    """Packs high bits. One bit per code: bits of 32 outputs fill a word, in order. Two bits: 16 outputs fill
    a word; the i-th four outputs have bits 2 i and 2 i + 1 of its four bytes."""
    if bits == 1:
        return np.packbits(high, axis=2, bitorder="little")
    quads = high.reshape(*high.shape[:2], -1, 4, 4)
    packed: Bytes = np.bitwise_or.reduce(quads << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=3)
    return packed.reshape(*high.shape[:2], -1)


#: Planes of scales, ``[panels, bytes of all outputs]``; codes without their high bits ``[panels, neurons,
#: outputs]``; high bits of the same shape, or None.
Panel = tuple[list[Bytes], Bytes, Bytes | None]


def _by_neuron(codes: Bytes) -> Bytes:
    """Swaps the last two axes of ``[panels, outputs, neurons]``."""
    return np.ascontiguousarray(codes.swapaxes(1, 2))


def _fields(packed: Bytes, bits: int, width: int) -> Bytes:
    """Unpacks codes of ``bits`` to ``[panels, outputs, neurons]``. Each run of ``width`` bytes has its first
    ``width`` codes in its lowest bits."""
    runs = packed.reshape(*packed.shape[:2], -1, 1, width)
    fields = runs >> np.arange(0, 8, bits, dtype=np.uint8)[:, None] & np.uint8((1 << bits) - 1)
    return fields.reshape(*packed.shape[:2], -1)


def _of_32(halves: int, bits: int) -> Callable[[Bytes], Panel]:
    """Makes a splitter for 32 weights: ``halves`` float16 (0: a byte), perhaps fifth bits, then codes."""

    def split_blocks(blocks: Bytes) -> Panel:
        width = 2 * halves or 1
        planes = [blocks[:, :, at : at + 2] for at in range(0, width, 2)] if halves else [blocks[:, :, :1]]
        if bits == 8:
            return planes, _by_neuron(blocks[:, :, width:]), None
        codes = _by_neuron(_fields(blocks[:, :, -16:], 4, 16))
        if bits == 4:
            return planes, codes, None
        return planes, codes, _by_neuron(np.unpackbits(blocks[:, :, -20:-16], axis=2, bitorder="little"))

    return split_blocks


def _byte_planes(scales: Bytes) -> list[Bytes]:
    return [scales[:, :, i] for i in range(scales.shape[2])]


def _of_k(blocks: Bytes) -> Panel:
    planes = [blocks[:, :, :2], blocks[:, :, 2:4], *_byte_planes(blocks[:, :, 4:16])]
    codes = _by_neuron(_fields(blocks[:, :, -128:], 4, 32))
    high = _by_neuron(_fields(blocks[:, :, 16:48], 1, 32)) if blocks.shape[2] > 144 else None
    return planes, codes, high


def _of_q6_k(blocks: Bytes) -> Panel:
    planes = [blocks[:, :, 208:], *_byte_planes(blocks[:, :, 192:208])]
    low, high = _fields(blocks[:, :, :128], 4, 64), _fields(blocks[:, :, 128:192], 2, 32)
    return planes, _by_neuron(low), _by_neuron(high)


_SPLITTERS: dict[str, Callable[[Bytes], Panel]] = {
    "Q8_0": _of_32(1, 8),
    "Q4_0": _of_32(1, 4),
    "IQ4_NL": _of_32(1, 4),
    "Q4_1": _of_32(2, 4),
    "Q5_0": _of_32(1, 5),
    "Q5_1": _of_32(2, 5),
    "MXFP4": _of_32(0, 4),
    "Q4_K": _of_k,
    "Q5_K": _of_k,
    "Q6_K": _of_q6_k,
}
