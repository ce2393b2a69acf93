"""A device's memory: buffers are allocated in it, written and read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.kernels import _native, checks
from hotcold.kernels.backend import Backend, Buffer
from hotcold.kernels.vulkan.memory import DeviceBuffer, Range, aligned, bytes_of

_PIECE = 256 << 20  # bytes of which room is looked for at a time


class DeviceMemory:
    """The memory of one device, and the buffers that lie in it."""

    def __init__(self, device: _native.VulkanDevice) -> None:
        self.device = device
        self.info = device.info

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the device's memory, as the driver gave it."""
        return self.device.allocated_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the processor's memory, for what is moved and exchanged."""
        return self.device.host_bytes

    def check_memory(self, nbytes: int) -> None:
        piece = min(_PIECE, self.info.max_allocation, aligned(max(nbytes // 16, 1)))
        taken = [self.device.allocate(min(piece, nbytes - at)) for at in range(0, nbytes, piece)]
        del taken

    def check_budget(self) -> None:
        self.device.check_budget()

    def allocate(self, nbytes: int) -> Range:
        """Device memory; its content is undefined."""
        return Range(self.device.allocate(aligned(max(nbytes, 4))), 0, nbytes)

    def upload(self, values: npt.NDArray[Any]) -> Range:
        """Device memory with these values, which are padded to whole words with zeros."""
        data = np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
        data = np.pad(data, (0, -len(data) % 4))
        taken = self.allocate(len(data))
        self.device.write(taken.held, 0, data)
        return taken

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Buffer:
        taken = self.allocate(bytes_of(shape, dtype))
        self.device.clear(taken.held)
        return DeviceBuffer(self, taken, tuple(shape), np.dtype(dtype))

    def write(self, buffer: Buffer, values: npt.NDArray[Any], row: int = 0) -> None:
        own = self.own(buffer)
        checks.check_write(values, row, own.shape, own.dtype)
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self.device.write(own.range.held, own.range.offset + row * own.row_bytes, data)

    def read(self, buffer: Buffer, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        own = self.own(buffer)
        stop = checks.check_read(start, stop, own.shape[0])
        data = np.empty((stop - start) * own.row_bytes, np.uint8)
        self.device.read(own.range.held, own.range.offset + start * own.row_bytes, data)
        values = data.view(own.dtype).reshape(stop - start, *own.shape[1:])
        values.flags.writeable = False
        return values

    def copy(self, source: Backend, values: Buffer, out: Buffer, rows: int) -> None:
        self.write(out, source.read(values, 0, rows))

    def own(self, buffer: Buffer) -> DeviceBuffer:
        """TypeError: another backend's."""
        if not isinstance(buffer, DeviceBuffer) or buffer.owner is not self:
            raise TypeError(f"a {type(buffer).__name__}: buffers of this device are needed (Backend.zeros)")
        return buffer

    def vector(self, what: str, buffer: Buffer, *shape: int) -> Range:
        """The range of a float32 buffer of exactly this shape."""
        own = self.own(buffer)
        if own.dtype != np.float32:
            raise TypeError(f"{what} is {own.dtype}: float32 is needed")
        if own.shape != shape:
            raise ValueError(f"{what} of shape {own.shape}: {shape} is needed")
        return own.range
