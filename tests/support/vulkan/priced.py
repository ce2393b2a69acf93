"""A GPU that computes nothing, whose dispatches take a known time on a clock of its own.

A dispatch takes a fixed time, and the bytes of its weights, or of its keys and values, at its kernel's rate.
It takes longer if it waits for one before it. Rows of an FFN are read by the share of neurons that its mask
and ``active`` leave. A program takes a fixed time besides."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hotcold.formats.blocks import block_type
from hotcold.kernels.gpu import LinkSpeed
from hotcold.kernels.vulkan import backend as vulkan
from hotcold.kernels.vulkan.backend import VulkanBackend
from hotcold.kernels.vulkan.packing import shader_type

FLOATS = [shader_type(block_type(name)) for name in ("F32", "F16", "BF16")]
GATE, UP, ONLY_UP, OUTPUT = range(4)  # STAGE of ffn_rows.comp


@dataclass(eq=False)
class Memory:
    nbytes: int
    where: str
    written: dict[int, npt.NDArray[np.uint8]] = field(
        default_factory=dict
    )  #: by offset; large data is left out

    @property
    def host(self) -> npt.NDArray[np.uint8] | None:
        if self.where == "device":
            return None
        return self.written.setdefault(0, np.zeros(self.nbytes, np.uint8))


@dataclass
class Prices:
    """Rates are bytes per second, for quantised and for float types: so low that a small model's bytes take
    about as long as the waits between its dispatches."""

    gemv: tuple[float, float] = (30e9, 25e9)
    ffn_rows: tuple[float, float] = (22e9, 20e9)
    ffn_down: tuple[float, float] = (13e9, 10e9)
    attention: float = 8e9
    barrier_s: float = 2.2e-6
    dispatch_s: float = 0.5e-6
    step_s: float = 30e-6


@dataclass(frozen=True)
class Range:
    memory: Memory
    begin: int
    end: int
    written: bool

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def meets(self, other: Range) -> bool:
        return self.memory is other.memory and self.begin < other.end and other.begin < self.end


@dataclass(frozen=True)
class Dispatch:
    shader: str
    constants: tuple[int, ...]
    ranges: tuple[Range, ...]
    push: tuple[int, ...]
    waits: bool


class Program:
    def __init__(self, device: PricedDevice, dispatches: Sequence[Dispatch]) -> None:
        self.device, self.dispatches = device, dispatches
        self._of_down = 1.0  # share of down's rows that the last gates left

    def run(self) -> None:
        prices = self.device.prices
        waits = sum(each.waits for each in self.dispatches)
        fixed = prices.step_s + waits * prices.barrier_s + len(self.dispatches) * prices.dispatch_s
        self.device.now += fixed + sum(map(self._read_s, self.dispatches))

    def _read_s(self, each: Dispatch) -> float:
        """The seconds of the weights, or of the keys and values, that a dispatch reads."""
        prices = self.device.prices
        if each.shader == "attention":
            return sum(range.nbytes for range in each.ranges[2:4]) / prices.attention
        read = {(id(r.memory), r.begin): r for r in each.ranges if not r.written and r.memory.written}
        nbytes = sum(range.nbytes for range in read.values())
        if each.shader == "gemv":
            return nbytes / prices.gemv[each.constants[0] in FLOATS]
        if each.shader in ("ffn_rows", "ffn_gate_up"):
            return self._share(each) * nbytes / prices.ffn_rows[each.constants[2] in FLOATS]
        if each.shader.startswith("ffn_down"):
            share = self._of_down * self._of_experts(each)
            return share * nbytes / prices.ffn_down[each.constants[2] in FLOATS]
        return 0.0

    def _of_experts(self, each: Dispatch) -> float:
        chosen, experts = each.push[4:6]
        return chosen / experts

    def _share(self, each: Dispatch) -> float:
        """The share of rows that a dispatch of ffn_rows reads."""
        _, _, _, stage, listed, masked, skips, *_ = each.constants
        named, active = 1.0, 1.0
        if masked:
            mask = each.ranges[3]
            bits = [data for offset, data in mask.memory.written.items() if offset == mask.begin]
            named = int(np.unpackbits(bits[0]).sum()) / each.push[1] if bits else self.device.active
        elif skips:
            active = self.device.active
        if stage != OUTPUT:
            self._of_down = named * active
        return self._of_experts(each) * {0: 1.0, 1: named, 2: named * active}[listed]


class Recorder:
    def __init__(self, device: PricedDevice) -> None:
        self.device = device
        self.dispatches: list[Dispatch] = []
        self._before: list[Range] = []

    def batch(self, *arguments: object) -> None: ...
    def clear(self, memory: Memory) -> None: ...
    def cut(self) -> None: ...

    def dispatch(self, pipeline: Any, ranges: Sequence[Any], push: bytes, *groups: int) -> None:
        shader, constants = pipeline
        taken = tuple(Range(memory, at, at + n, written) for memory, at, n, written in ranges)
        hazard = any(
            (one.written or other.written) and one.meets(other) for one in taken for other in self._before
        )
        self._before = [*taken] if hazard else [*self._before, *taken]
        words = struct.unpack(f"<{len(push) // 4}I", push)
        self.dispatches.append(Dispatch(shader, constants, taken, words, hazard))

    def finish(self) -> Program:
        return Program(self.device, self.dispatches)


class PricedDevice:
    """In place of ``_native.VulkanDevice``."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.now = 0.0  #: seconds
        self.active = 1.0  #: share of active or predicted neurons, where no mask was written
        self.allocated_bytes = self.host_bytes = 0
        facts = {"index": 0, "name": "priced", "driver": "a test", "uuid": "0", "kind": "discrete"}
        sizes = {"max_range": 1 << 32, "max_allocation": 1 << 32, "memory_bytes": 1 << 34}
        self.info = SimpleNamespace(**facts, **sizes, unified=False)

    def check_budget(self) -> None: ...

    def allocate(self, nbytes: int, where: str = "device") -> Memory:
        return Memory(nbytes, where)

    def pipeline(
        self, shader: str, ranges: int, push: int, constants: Sequence[int], *more: object
    ) -> tuple[str, tuple[int, ...]]:
        return shader, tuple(constants)

    def link(self, *arguments: object) -> SimpleNamespace:
        """For layers that are not split."""
        return SimpleNamespace(stop=lambda: None)

    def recorder(self) -> Recorder:
        return Recorder(self)

    def write(self, memory: Memory, offset: int, data: npt.NDArray[np.uint8]) -> None:
        memory.written[offset] = data.copy() if data.nbytes <= 1 << 12 else data[:0]

    def read(self, memory: Memory, offset: int, data: npt.NDArray[np.uint8]) -> None:
        data[:] = 0

    def clear(self, memory: Memory) -> None: ...


def priced_backend(monkeypatch: pytest.MonkeyPatch, prices: Prices) -> tuple[VulkanBackend, PricedDevice]:
    """A backend on such a device, whose link takes the time of a program and no other."""
    device = PricedDevice(prices)
    monkeypatch.setattr(vulkan, "spirv", lambda name: name)
    for probe in ("rounds_exactly", "errors"):  # of the device's arithmetic: by either name
        monkeypatch.setattr(vulkan, probe, lambda device: frozenset(), raising=False)
    monkeypatch.setattr(vulkan._native, "VulkanDevice", lambda index, budget: device)
    link = LinkSpeed(20.0, 20.0, 10.0, prices.step_s, 20e-6, None)
    monkeypatch.setattr(VulkanBackend, "link_speed", lambda self, nbytes, runs: link)
    return VulkanBackend(0), device
