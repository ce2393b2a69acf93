"""A backend on a device, for tests that look into buffers: these are arrays, mirrored on the device.

What an op is given is taken to the device before it runs, and back after it; a program does so for all that
its ops were given. Arrays that lie at one address are one buffer, whatever their shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.kernels import calls
from hotcold.kernels.backend import Backend, Program
from hotcold.kernels.vulkan.backend import VulkanBackend
from hotcold.kernels.vulkan.memory import DeviceBuffer

Array = npt.NDArray[Any]

OPS = (
    "embed", "norm", "linear", "rope", "store_kv", "attention", "predict", "ffn", "router", "add", "gather",
    "softcap", "post", "collect", "short_conv", "gated_delta", "decay", "ssm_scan", "multiply",
    "linear_heads", "join_heads",
)  # fmt: skip


class Mirrors:
    """Arrays on a device."""

    def __init__(self, device: VulkanBackend) -> None:
        self.device = device
        self.pairs: dict[tuple[int, int], tuple[Array, DeviceBuffer]] = {}

    def of(self, value: Any, name: str = "buffer") -> Any:
        """The value with arrays replaced by buffers of the device."""
        if isinstance(value, np.ndarray):
            return self._buffer(value, name)
        if isinstance(value, list | tuple):
            return [self.of(each, name) for each in value]
        arrays = is_dataclass(value) and any(
            isinstance(getattr(value, f.name), np.ndarray) for f in fields(value)
        )
        if arrays or type(value).__module__ == calls.__name__:
            return replace(value, **{f.name: self.of(getattr(value, f.name), f.name) for f in fields(value)})
        return value

    def _buffer(self, array: Array, name: str) -> DeviceBuffer:
        if not array.flags.c_contiguous:
            raise ValueError(f"{name} with gaps between its values: a device has none")
        key = array.ctypes.data, array.nbytes
        if key not in self.pairs:
            self.pairs[key] = array, self.device.zeros(array.shape, array.dtype)
        own = self.pairs[key][1]
        return DeviceBuffer(own.owner, own.range, array.shape, array.dtype)

    def take_there(self) -> None:
        for array, buffer in self.pairs.values():
            if array.size:
                self.device.write(buffer, array)

    def take_back(self) -> None:
        for array, buffer in self.pairs.values():
            if array.flags.writeable and array.size:
                array[:] = self.device.read(buffer)


class MirroredProgram:
    def __init__(self, inner: Program, mirrors: Mirrors) -> None:
        self._inner, self._mirrors = inner, mirrors

    def run(self) -> None:
        self._mirrors.take_there()
        self._inner.run()
        self._mirrors.take_back()


class MirroredBackend:
    def __init__(self, inner: VulkanBackend) -> None:
        self.inner = inner
        self._recorded: Mirrors | None = None

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if name not in OPS:
            return value

        def call(*args: Any, **more: Any) -> None:
            mirrors = self._recorded or Mirrors(self.inner)
            own = [mirrors.of(each, f"{name} argument {i}") for i, each in enumerate(args)]
            named = {key: mirrors.of(each, f"{name} {key}") for key, each in more.items()}
            if self._recorded is None:
                mirrors.take_there()
            value(*own, **named)
            if self._recorded is None:
                mirrors.take_back()

        return call

    def zeros(
        self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32, *, on_host: bool = False
    ) -> Array:
        return np.zeros(shape, dtype)

    def write(self, buffer: Array, values: Array, row: int = 0) -> None:
        mirrors = Mirrors(self.inner)
        own = mirrors.of(buffer)
        mirrors.take_there()
        self.inner.write(own, values, row)
        mirrors.take_back()

    def read(self, buffer: Array, start: int = 0, stop: int | None = None) -> Array:
        mirrors = Mirrors(self.inner)
        own = mirrors.of(buffer)
        mirrors.take_there()
        return self.inner.read(own, start, stop)

    def copy(self, source: Backend, values: Any, out: Array, rows: int) -> None:
        self.write(out, source.read(values, 0, rows))

    def top_k(self, logits: Array, row: int, k: int, bias: Any = None, allowed: Any = None) -> Any:
        mirrors = Mirrors(self.inner)
        own = mirrors.of(logits)
        mirrors.take_there()
        return self.inner.top_k(own, row, k, bias, allowed)

    def record(self, fn: Callable[[], None], rows: int | None = None) -> MirroredProgram:
        self._recorded = mirrors = Mirrors(self.inner)
        try:
            return MirroredProgram(self.inner.record(fn, rows), mirrors)
        finally:
            self._recorded = None
