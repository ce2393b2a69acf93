"""Weight matrices in device memory: packing.py's sections, in as many ranges as the device needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotcold.errors import UserError
from hotcold.formats.blocks import BlockType
from hotcold.formats.stored import AnyTensor
from hotcold.kernels import checks
from hotcold.kernels.backend import Floats, PredictorTensors, mask_words
from hotcold.kernels.vulkan import packing
from hotcold.kernels.vulkan.buffers import DeviceMemory
from hotcold.kernels.vulkan.memory import Range, aligned

#: Most rows of a part: a dispatch has at most 65535 groups in a dimension, and gemv.comp gives each 8 rows.
MOST_ROWS = 8 * 65535


@dataclass(frozen=True)
class Part:
    """Rows ``first`` to ``first + rows`` of a matrix, as one range for a shader."""

    first: int
    rows: int
    range: Range


@dataclass(frozen=True, eq=False)
class DeviceMatrix:
    """A matrix on a device, made by :meth:`VulkanBackend.matrix`."""

    type: BlockType
    shape: tuple[int, int]
    parts: tuple[Part, ...]
    bias: Range | None
    nbytes: int

    @property
    def quantised(self) -> bool:
        return self.type.weights > 1  # float types are blocks of one value


@dataclass(frozen=True, eq=False)
class DevicePredictor:
    """A predictor on a device, made by :meth:`VulkanBackend.predictor_weights`."""

    first: DeviceMatrix
    second: DeviceMatrix
    threshold: Range  #: [N] float32
    relu: bool
    experts: int
    chosen: int
    words: int  #: 64-bit words in a row of its masks
    neurons: Range  #: for each half of these words: its first neuron, its expert's end, its expert
    nbytes: int


def device_matrix(memory: DeviceMemory, tensor: AnyTensor, bias: Floats | None = None) -> DeviceMatrix:
    checks.check_matrix(tensor, bias)
    rows, columns = tensor.shape
    nbytes = tensor.nbytes + (0 if bias is None else bias.nbytes)
    bias_range = None if bias is None else memory.upload(bias)
    return DeviceMatrix(tensor.type, (rows, columns), upload_parts(memory, tensor), bias_range, nbytes)


def upload_parts(memory: DeviceMemory, tensor: AnyTensor) -> tuple[Part, ...]:
    """Packs a tensor ``(O, I)`` into device memory, a chunk of rows at a time."""
    rows, columns = tensor.shape
    row_bytes = sum(packing.section_bytes(tensor.type, columns))
    largest = memory.info.max_range
    most = largest // row_bytes
    if not most:
        got = f"rows of {columns} columns in {tensor.type.name} take {row_bytes} bytes"
        raise UserError(f"{got}: {memory.info.name} allows ranges of {largest}")
    most = min(most, MOST_ROWS)
    firsts = range(0, rows, most - most % 64 if most > 64 else most)
    return tuple(_upload_part(memory, tensor, first, min(first + firsts.step, rows)) for first in firsts)


def _upload_part(memory: DeviceMemory, tensor: AnyTensor, first: int, last: int) -> Part:
    rows, columns = last - first, tensor.shape[1]
    sizes = packing.section_bytes(tensor.type, columns)
    taken = memory.allocate(aligned(rows * sum(sizes), 4))
    factors = tensor.row_factors
    for start, data in packing.row_chunks(tensor, first, last):
        begin = 0
        chunk_factors = None if factors is None else factors[start : start + len(data)]
        for section, size in zip(packing.pack(tensor.type, data, columns, chunk_factors), sizes, strict=True):
            offset = taken.offset + begin + (start - first) * size
            memory.device.write(taken.held, offset, section.reshape(-1))
            begin += rows * size
    return Part(first, rows, taken)


def device_predictor(memory: DeviceMemory, tensors: PredictorTensors) -> DevicePredictor:
    checks.check_predictor(tensors)
    first, second = device_matrix(memory, tensors.first), device_matrix(memory, tensors.second)
    begins, numbers, start = mask_words(tensors.ends), [], 0
    for expert, end in enumerate(tensors.ends):
        for half in range(2 * (begins[expert + 1] - begins[expert])):
            numbers.append((start + 32 * half, end, expert))
        start = end
    return DevicePredictor(
        first,
        second,
        threshold=memory.upload(tensors.threshold),
        relu=tensors.relu,
        experts=len(tensors.ends),
        chosen=tensors.chosen,
        words=begins[-1],
        neurons=memory.upload(np.array(numbers, np.uint32)),
        nbytes=first.nbytes + second.nbytes + tensors.threshold.nbytes,
    )
