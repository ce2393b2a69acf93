"""A backend's buffers and tables for a step, shared by its layers; and the interface of mixers."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from hotcold.kernels.backend import Backend, Batch, BatchLimits, Buffer, Chosen, Floats, RopeTable
from hotcold.model.mixers.rope import Rope
from hotcold.model.reading import upload


class Mixer(Protocol):
    """Combines rows with earlier rows of their sequence, like attention. It is made for one layer with its
    weights, state and buffers; layers share buffers."""

    def __call__(self, read: Buffer, batch: Batch, out: Buffer, *, add: bool) -> None:
        """Computes rows ``read`` and their state; sets ``out`` or adds to it (``add``); both ``[T, D]``."""


class DeviceBuffers:
    """A backend, its rotation tables, and the buffers of a step."""

    def __init__(
        self, ops: Backend, limits: BatchLimits, tables: Mapping[Rope, tuple[Floats, Floats]]
    ) -> None:
        """``tables`` are cosines and sines."""
        if limits.decode > ops.decode_rows or limits.tokens > ops.step_rows:
            most = f"{ops.decode_rows} decode rows and {ops.step_rows} in all"
            raise ValueError(f"steps of {limits}: backend {ops.name!r} takes {most}")
        self.ops = ops
        self.ropes = {
            rope: RopeTable(upload(ops, cos), upload(ops, sin), rope.interleaved)
            for rope, (cos, sin) in tables.items()
        }
        self._rows = limits.tokens
        self._buffers: dict[tuple[str, tuple[int, ...]], Buffer] = {}
        self._choices: dict[tuple[str, int], Chosen] = {}

    def buffer(self, name: str, *shape: int) -> Buffer:
        """Returns a buffer of this shape for each row of a step; equal names and shapes share one."""
        if (name, shape) not in self._buffers:
            self._buffers[name, shape] = self.ops.zeros((self._rows, *shape))
        return self._buffers[name, shape]

    def choices(self, name: str, k: int) -> Chosen:
        """Returns buffers for k choices (of experts or other router outputs) of each row of a step."""
        if (name, k) not in self._choices:
            ids, factors = self.ops.zeros((self._rows, k), np.int32), self.ops.zeros((self._rows, k))
            self._choices[name, k] = Chosen(ids, factors)
        return self._choices[name, k]

    def ones(self) -> Buffer:
        """Returns a buffer with a 1 for each row of a step."""
        new = ("one", (1,)) not in self._buffers
        buffer = self.buffer("one", 1)
        if new:
            self.ops.write(buffer, np.ones((self._rows, 1), np.float32))
        return buffer
