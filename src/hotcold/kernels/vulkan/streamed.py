"""FFN weights that stay in the processor's memory. Each op copies them to the device's staging memory before
it computes. All such FFNs of a device share that memory: a copy waits for the previous FFN's op."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from hotcold.kernels.backend import FFNTensors
from hotcold.kernels.gpu import GPUError, GPUMemoryError
from hotcold.kernels.vulkan.buffers import DeviceMemory
from hotcold.kernels.vulkan.ffn_weights import DeviceFFN, ffn_weights
from hotcold.kernels.vulkan.matrix import Part
from hotcold.kernels.vulkan.memory import Range, aligned
from hotcold.kernels.vulkan.recording import Copy, Recording
from hotcold.values import size


@dataclass(frozen=True, eq=False)
class StreamedFFN(DeviceFFN):
    """An FFN of one layer whose parts are in the processor's memory; its table is in the device's."""

    @property
    def staging_bytes(self) -> int:
        return sum(aligned(part.range.nbytes) for part in (*self.gate, *self.up, *self.down))

    def copy(self, recording: Recording) -> DeviceFFN:
        """Records the copies; returns the weights that they make in staging memory."""
        staging, offset = recording.memory.staging, 0
        copies: dict[str, tuple[Part, ...]] = {}
        for name, parts in (("gate", self.gate), ("up", self.up), ("down", self.down)):
            copies[name] = ()
            for part in parts:
                target = staging.part(offset, part.range.nbytes)
                offset += aligned(target.nbytes)
                recording.work(64 * target.nbytes)  # a link of 3 GB/s takes this long
                recording.steps.append(Copy(part.range, target))
                copies[name] += (replace(part, range=target),)
        return DeviceFFN(**vars(self) | copies)


class _HostMemory(DeviceMemory):
    """Memory of the processor that a device can copy; tables still go to the device's memory."""

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__(memory.device)
        self._memory = memory

    def allocate(self, nbytes: int, where: str = "upload") -> Range:
        try:
            return super().allocate(nbytes, where)
        except GPUMemoryError as error:  # less on the GPU would not help: then more would be streamed
            got = f"{self.info.name} cannot get {size(nbytes)} more of the processor's memory"
            raise GPUError(f"`cold_prompts=gpu`: {got}: use `cold_prompts=cpu`") from error

    def upload(self, values: npt.NDArray[Any]) -> Range:
        return self._memory.upload(values)


def streamed_weights(memory: DeviceMemory, tensors: FFNTensors) -> StreamedFFN:
    """Makes the weights, and reserves staging memory. GPUError: the driver gives too little of the
    processor's memory."""
    weights = StreamedFFN(**vars(ffn_weights(_HostMemory(memory), tensors)))
    memory.reserve_staging(weights.staging_bytes)
    return weights
