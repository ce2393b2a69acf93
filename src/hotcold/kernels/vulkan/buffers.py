"""Allocation, writing and reading of buffers in a device's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.kernels import _native, checks
from hotcold.kernels.backend import Backend, Buffer
from hotcold.kernels.vulkan.memory import DeviceBuffer, Range, aligned, bytes_of

_PIECE = 256 << 20  # bytes of one trial allocation


class DeviceMemory:
    """The memory of one device, and its buffers."""

    def __init__(self, device: _native.VulkanDevice) -> None:
        self.device = device
        self.info = device.info
        self._staging: Range | None = None
        self._staging_bytes = 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the driver allocated of the device's memory."""
        return self.device.allocated_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the processor's memory, for copies and exchange."""
        return self.device.host_bytes

    def check_memory(self, nbytes: int) -> None:
        piece = min(_PIECE, self.info.max_allocation, aligned(max(nbytes // 16, 1)))
        taken = [self.device.allocate(min(piece, nbytes - at)) for at in range(0, nbytes, piece)]
        del taken

    def check_budget(self) -> None:
        self.device.check_budget()

    def allocate(self, nbytes: int, where: str = "device") -> Range:
        """Allocates memory; its content is undefined."""
        return Range(self.device.allocate(aligned(max(nbytes, 4)), where), 0, nbytes)

    def reserve_staging(self, nbytes: int) -> None:
        """Makes :attr:`staging` at least this large."""
        self._staging_bytes = max(self._staging_bytes, nbytes)

    @property
    def staging(self) -> Range:
        """The device memory to which the streamed weights of one FFN at a time are copied."""
        if self._staging is None or self._staging.nbytes < self._staging_bytes:
            self._staging = self.allocate(self._staging_bytes)  # earlier programs keep theirs
        return self._staging

    def upload(self, values: npt.NDArray[Any]) -> Range:
        """Makes device memory with these values, padded to whole words with zeros."""
        data = np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
        data = np.pad(data, (0, -len(data) % 4))
        taken = self.allocate(len(data))
        self.device.write(taken.held, 0, data)
        return taken

    def zeros(
        self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32, *, on_host: bool = False
    ) -> Buffer:
        nbytes = bytes_of(shape, dtype)
        taken = self.allocate(nbytes, "download" if on_host else "device")
        buffer = DeviceBuffer(self, taken, tuple(shape), np.dtype(dtype))
        if on_host:
            self.write(buffer, np.zeros(shape, dtype))
        else:
            self.device.clear(taken.held)
        return buffer

    def write(self, buffer: Buffer, values: npt.NDArray[Any], row: int = 0) -> None:
        target = self.own(buffer)
        checks.check_write(values, row, target.shape, target.dtype)
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        if (host := target.host) is not None:
            host[row * target.row_bytes :][: len(data)] = data
        else:
            self.device.write(target.range.held, target.range.offset + row * target.row_bytes, data)

    def read(self, buffer: Buffer, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        source = self.own(buffer)
        stop = checks.check_read(start, stop, source.shape[0])
        if (host := source.host) is not None:  # steps end before their results are read
            data = host[start * source.row_bytes : stop * source.row_bytes]
        else:
            data = np.empty((stop - start) * source.row_bytes, np.uint8)
            self.device.read(source.range.held, source.range.offset + start * source.row_bytes, data)
        values = data.view(source.dtype).reshape(stop - start, *source.shape[1:])
        values.flags.writeable = False
        return values

    def copy(self, source: Backend, values: Buffer, out: Buffer, rows: int) -> None:
        self.write(out, source.read(values, 0, rows))

    def own(self, buffer: Buffer) -> DeviceBuffer:
        """Returns this device's buffer. TypeError: another backend made it."""
        if not isinstance(buffer, DeviceBuffer) or buffer.owner is not self:
            raise TypeError(f"a {type(buffer).__name__}: buffers of this device are needed (Backend.zeros)")
        return buffer

    def vector(self, label: str, buffer: Buffer, *shape: int) -> Range:
        """Returns the range of a float32 buffer of exactly this shape."""
        device_buffer = self.own(buffer)
        if device_buffer.dtype != np.float32:
            raise TypeError(f"{label} is {device_buffer.dtype}: float32 is needed")
        if device_buffer.shape != shape:
            raise ValueError(f"{label} of shape {device_buffer.shape}: {shape} is needed")
        return device_buffer.range
