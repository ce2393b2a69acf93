"""Device memory as the ``vulkan`` backend's buffers: ranges of the extension's allocations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hotcold.kernels.gpu import ALIGNMENT

if TYPE_CHECKING:
    from hotcold.kernels._native import VulkanMemory


@dataclass(frozen=True, eq=False)
class Range:
    """Bytes of device memory. ``memory`` None is scratch; its offset is known when a recording ends."""

    memory: VulkanMemory | None
    offset: int
    nbytes: int

    @property
    def held(self) -> VulkanMemory:
        """The memory of the range; scratch has none."""
        assert self.memory is not None
        return self.memory

    def is_same(self, other: Range) -> bool:
        return (self.memory, self.offset, self.nbytes) == (other.memory, other.offset, other.nbytes)

    def overlaps(self, other: Range) -> bool:
        same_memory = self.memory is other.memory
        return same_memory and max(self.offset, other.offset) < min(self.end, other.end)

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def part(self, offset: int, nbytes: int) -> Range:
        """Returns bytes ``offset`` to ``offset + nbytes`` of this range."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} of a range of {self.nbytes}")
        return Range(self.memory, self.offset + offset, nbytes)


@dataclass(frozen=True, eq=False)
class DeviceBuffer:
    """A buffer on a device, made by :meth:`VulkanBackend.zeros`."""

    owner: object  #: the backend
    range: Range
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def width(self) -> int:
        """Values of one row."""
        return math.prod(self.shape[1:])

    @property
    def host(self) -> npt.NDArray[np.uint8] | None:
        """The bytes, if the buffer is in host memory."""
        return self.range.held.host

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize


def shape_of(buffer: DeviceBuffer) -> npt.NDArray[Any]:
    """Returns an array of its type and shape with undefined values, for checks.py, which takes arrays."""
    return np.empty(buffer.shape, buffer.dtype)


def bytes_of(shape: tuple[int, ...], dtype: npt.DTypeLike) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-nbytes // alignment) * alignment
