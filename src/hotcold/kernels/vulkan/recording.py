"""A program under construction: dispatches with their ranges, in order.

A shader gets the batch as binding 0, then the ranges in order; push constants are 32-bit words. The extension
puts barriers between dispatches that need them: it knows which ranges each one writes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hotcold.kernels.backend import Batch, BatchLimits, Buffer, Rows
from hotcold.kernels.vulkan.buffers import DeviceMemory
from hotcold.kernels.vulkan.memory import Range, aligned

if TYPE_CHECKING:
    from hotcold.kernels._native import VulkanMemory, VulkanRecorder

#: Row counts of a step's programs, besides the largest. Prompts of up to 64 rows have small tiles.
PROGRAM_ROWS = (1, 2, 4, 8, 16, 64)


@dataclass(frozen=True)
class Written:
    """A range that a dispatch writes, and may read."""

    range: Range


@dataclass(frozen=True)
class Status:
    memory: VulkanMemory  #: memory of the words; a program clears it before each run
    words: npt.NDArray[np.int32]
    check: Callable[[npt.NDArray[np.int32]], None]

    def raise_if_set(self) -> None:
        if self.words[0]:
            self.check(self.words.copy())


@dataclass(frozen=True)
class Dispatch:
    shader: str
    constants: tuple[int, ...]
    ranges: tuple[Range | Written, ...]
    push: bytes
    groups: tuple[int, int, int]


@dataclass(frozen=True)
class Cut:
    """Marks where a new submit begins."""

    def record(self, recorder: VulkanRecorder) -> None:
        recorder.cut()


@dataclass(frozen=True)
class Copy:
    """Copies a range to another of the same size; neither is scratch."""

    source: Range
    target: Range

    def record(self, recorder: VulkanRecorder) -> None:
        source, target = self.source, self.target
        recorder.copy(source.held, source.offset, target.held, target.offset, source.nbytes)


def batch_bytes(limits: BatchLimits) -> int:
    """Returns bytes of a batch on a device: a header of 17 words, and its arrays
    (csrc/shaders/batch.glsl)."""
    pages = limits.sequences * limits.pages_per_sequence
    return 4 * (17 + 5 * limits.tokens + pages + 4 * limits.sequences + limits.logits)


class Recording:
    """Collects the ops of a program. ``rows`` is the largest step that the program runs."""

    #: The most multiplications of one submit: a quarter of a second on a weak integrated GPU, at 200 billion
    #: a second. Watchdogs end a submit after 2 s on Windows and on newer Linux kernels.
    MOST_WORK = 50_000_000_000

    def __init__(self, memory: DeviceMemory, batch: Batch, rows: int) -> None:
        self.memory, self.batch, self.rows = memory, batch, rows
        #: The most decode rows, and the most rows with logits.
        self.decode = min(rows, batch.limits.decode)
        self.logits = batch.limits.logits
        self.steps: list[object] = []  #: dispatches, and steps of link.py
        self.kept: list[object] = []  #: buffers and weights that must outlive the program
        #: Bounds of the batch's numbers, which shaders trust; checked before every run.
        self.bounds: dict[str, int] = {}
        self.scratch_bytes = 0
        self._work = 0
        self._scratch = 0
        self._previous_scratch = 0  #: of the previous op
        #: Words in host memory that shaders set on an invalid step, with the functions that raise the error.
        self.statuses: list[Status] = []

    def new_op(self) -> None:
        """Frees the previous op's scratch."""
        self._previous_scratch, self._scratch = self._scratch, 0

    def keep_scratch(self) -> None:
        """Keeps the previous op's scratch, which a dispatch of both ops reads."""
        self._scratch = max(self._scratch, self._previous_scratch)
        self._previous_scratch = 0

    def scratch(self, nbytes: int) -> Range:
        """Returns memory for the current op; its content is undefined."""
        taken = Range(None, self._scratch, nbytes)
        self._scratch += aligned(nbytes)
        self.scratch_bytes = max(self.scratch_bytes, self._scratch)
        return taken

    def status(self, check: Callable[[npt.NDArray[np.int32]], None]) -> Range:
        """Makes four words, 0 before every step. If a step sets the first, ``check`` gets all of them."""
        memory = self.memory.device.allocate(16, "download")
        words = memory.host
        assert words is not None
        self.statuses.append(Status(memory, words.view(np.int32), check))
        return Range(memory, 0, 16)

    def rows_of(self, rows: Rows) -> int:
        """Returns the most rows that an op covers."""
        return self.logits if rows == Rows.LOGITS else self.rows

    def range_of(
        self,
        label: str,
        buffer: Buffer,
        width: int,
        dtype: npt.DTypeLike = np.float32,
        rows: Rows = Rows.TOKENS,
    ) -> Range:
        """Returns the range of a buffer, which must have the op's rows, of ``width`` values each."""
        device_buffer, most = self.memory.own(buffer), self.rows_of(rows)
        if device_buffer.dtype != dtype:
            raise TypeError(f"{label} is {device_buffer.dtype}: {np.dtype(dtype)} is needed")
        if device_buffer.shape[0] < most or device_buffer.width != width:
            got = f"{device_buffer.shape[0]} rows of {device_buffer.width}"
            raise ValueError(f"{label}: expected at least {most} rows of {width}, got {got}")
        return device_buffer.range

    def work(self, multiplications: int) -> None:
        """Announces the next dispatch's work; begins a new submit if the current one would be too long."""
        if self._work and self._work + multiplications > self.MOST_WORK:
            self.steps.append(Cut())
            self._work = 0
        self._work += multiplications

    def bound(self, name: str, most: int) -> None:
        """Requires ``name`` (tokens, positions, pages or state_slots) to be below ``most`` in every step."""
        self.bounds[name] = min(most, self.bounds.get(name, most))

    def run(
        self,
        shader: str,
        ranges: Sequence[Range | Written],
        push: Sequence[int | float],
        groups: tuple[int, int, int],
        constants: Sequence[int] = (),
    ) -> None:
        """Appends a dispatch. ``push`` becomes 32-bit words: ints, and floats as float32. ``constants`` are
        specialisation constants 0, 1, ... None of ``groups`` may exceed 65535."""
        if max(groups) > 65535:
            raise ValueError(f"{shader}: groups {groups}: at most 65535 each")
        if 0 in groups:
            return
        words = b"".join(
            struct.pack("<f", word) if isinstance(word, float) else struct.pack("<I", int(word) & 0xFFFFFFFF)
            for word in push
        )
        self.steps.append(Dispatch(shader, tuple(constants), tuple(ranges), words, groups))
