"""Calls the layers of one backend, and holds what they share while they compute a step."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from hotcold.kernels.backend import Backend, Batch, BatchLimits, Buffer, Chosen, Floats, RopeTable
from hotcold.model.mixers.rope import Rope
from hotcold.model.reading import upload


class Mixer(Protocol):
    """Lets rows see earlier rows of their sequence, as attention does. It is made for one layer, whose
    weights, state and buffers it knows; several layers have buffers in common."""

    def __call__(self, read: Buffer, batch: Batch, out: Buffer, *, add: bool) -> None:
        """Computes the rows ``read`` and their state. ``out`` is set, or with ``add`` added to; both are
        ``[T, D]``."""


class DeviceBuffers:
    """A backend, its tables of rotations, and room for what a step computes."""

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
        """A buffer of this shape for each row of a step. Layers that ask for the same name and shape share
        it."""
        if (name, shape) not in self._buffers:
            self._buffers[name, shape] = self.ops.zeros((self._rows, *shape))
        return self._buffers[name, shape]

    def choices(self, name: str, k: int) -> Chosen:
        """Room for the choices of each row of a step, of k experts or of what else a router gives."""
        if (name, k) not in self._choices:
            ids, factors = self.ops.zeros((self._rows, k), np.int32), self.ops.zeros((self._rows, k))
            self._choices[name, k] = Chosen(ids, factors)
        return self._choices[name, k]

    def ones(self) -> Buffer:
        """A number for each row of a step, all of them 1."""
        new = ("one", (1,)) not in self._buffers
        buffer = self.buffer("one", 1)
        if new:
            self.ops.write(buffer, np.ones((self._rows, 1), np.float32))
        return buffer
