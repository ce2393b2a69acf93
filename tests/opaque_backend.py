"""A backend as a GPU's is seen from above: its buffers are handles that nobody can look into.

It wraps one that computes in host memory. Values pass only through ``write``, ``read`` and ``copy``; what is
read is a copy, as if it had come from a device. ``pytest --backend opaque`` opens every backend as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.kernels.backend import Backend, Batch, Buffer, Mailbox, Program


def _refuse(name: str) -> Callable[..., Any]:
    def refused(self: object, *_: object, **__: object) -> Any:
        raise TypeError(f"{name} of a buffer: only its backend sees its values (write, read, copy)")

    return refused


class Handle:
    """A buffer that refuses whatever an array allows."""

    __slots__ = ("__weakref__", "_device", "_inner")

    def __init__(self, device: OpaqueBackend, inner: Any) -> None:
        self._device, self._inner = device, inner

    for _name in (
        "__array__", "__array_interface__", "__array_struct__", "__array_ufunc__", "__array_function__",
        "__buffer__", "__dlpack__", "__getitem__", "__setitem__", "__len__", "__iter__", "__bool__",
        "__add__", "__iadd__", "__sub__", "__mul__", "__matmul__", "__truediv__", "__neg__", "__eq__",
        "__lt__", "__gt__", "__contains__",
    ):  # fmt: skip
        locals()[_name] = _refuse(_name)
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:  # shape, dtype, nbytes, ndim, reshape, ...
        raise TypeError(f"{name} of a buffer: only its backend knows it")


class OpaqueProgram:
    """Refuses steps with more rows than it was recorded for."""

    def __init__(self, inner: Program, rows: int | None, batches: list[Batch]) -> None:
        self.inner, self._rows, self._batches = inner, rows, batches

    def run(self) -> None:
        for batch in self._batches:
            if self._rows is not None and batch.n_tokens > self._rows:
                raise ValueError(f"{batch.n_tokens} rows: this program was recorded for {self._rows}")
        self.inner.run()


class OpaqueBackend:
    """``program_rows`` are sizes that steps get programs of their own for."""

    def __init__(self, inner: Any, program_rows: tuple[int, ...] = (1, 16)) -> None:
        self._inner = inner
        self.program_rows = program_rows
        self._batches: list[Batch] | None = None  # of what is being recorded

    def __getattr__(self, name: str) -> Any:
        """Weights and what is asked of them go through; an op is given its buffers as they are inside."""
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        def call(*args: Any, **more: Any) -> Any:
            if self._batches is not None:
                self._batches += [each for each in (*args, *more.values()) if isinstance(each, Batch)]
            return value(*map(self._inside, args), **{key: self._inside(each) for key, each in more.items()})

        return call

    def _inside(self, value: Any) -> Any:
        if isinstance(value, Handle):
            if value._device is not self:
                raise TypeError("a buffer of another backend: copy moves its values")
            return value._inner
        if isinstance(value, list | tuple):
            return [self._inside(each) for each in value]
        # Norm, RopeTable and FFNStats hold buffers. A mailbox's arrays are host memory.
        if is_dataclass(value) and any(isinstance(getattr(value, f.name), Handle) for f in fields(value)):
            changed = {f.name: self._inside(getattr(value, f.name)) for f in fields(value)}
            return replace(value, **changed)
        return value

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Buffer:
        return Handle(self, self._inner.zeros(shape, dtype))

    def write(self, buffer: Buffer, values: npt.NDArray[Any], row: int = 0) -> None:
        self._inner.write(self._inside(buffer), values, row)

    def read(self, buffer: Buffer, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = self._inner.read(self._inside(buffer), start, stop).copy()
        values.flags.writeable = False
        return values

    def copy(self, source: Backend, values: Buffer, out: Buffer, rows: int) -> None:
        self.write(out, source.read(values, 0, rows))

    def record(self, fn: Callable[[], None], rows: int | None = None) -> Program:
        self._batches = batches = []
        try:
            return OpaqueProgram(self._inner.record(fn, rows), rows, batches)
        finally:
            self._batches = None

    def serve(self, link: Any, layers: Sequence[tuple[int, Program]]) -> None:
        inner = [(layer, program.inner) for layer, program in layers]  # type: ignore[attr-defined]
        self._inner.serve(link, inner)

    def post(self, box: Mailbox, x: Buffer, mask: Buffer | None, batch: Batch) -> None:
        self._inner.post(box, self._inside(x), self._inside(mask), batch)

    def top_k(self, logits: Buffer, row: int, k: int, bias: Any = None, allowed: Any = None) -> Any:
        return self._inner.top_k(self._inside(logits), row, k, bias, allowed)
