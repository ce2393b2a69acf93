"""A backend with opaque buffers, like a GPU's.

It wraps one that computes in host memory. Values pass only through ``write``, ``read`` and ``copy``; what is
read is a copy, as if it had come from a device. ``pytest --backend opaque`` opens every backend as one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.kernels import calls
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
        "__array__", "__array_ufunc__", "__array_function__",
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

    def __init__(self, backend: OpaqueBackend, fn: Callable[[], None], rows: int | None) -> None:
        self._batches: list[Batch] = []
        self._backend, self._rows = backend, rows
        backend.programs.append(self)
        try:
            self.inner = backend.inner.record(fn, rows)
        finally:
            backend.programs.pop()

    def note(self, batch: Batch) -> None:
        """An op of this program reads the batch: now, or when it runs."""
        if batch not in self._batches:
            self._batches.append(batch)

    def run(self) -> None:
        self._backend.programs.append(self)  # some backends call its function only now
        try:
            self._check()
            self.inner.run()
            self._check()
        finally:
            self._backend.programs.pop()

    def _check(self) -> None:
        for batch in self._batches:
            if self._rows is not None and batch.n_tokens > self._rows:
                raise ValueError(f"{batch.n_tokens} rows: this program was recorded for {self._rows}")


def _is_value(value: Any) -> bool:
    """True for a call or a part of one: these hold buffers. A mailbox's arrays are host memory."""
    return type(value).__module__ == calls.__name__


class OpaqueBackend:
    """``program_rows`` are sizes that steps get programs of their own for."""

    def __init__(self, inner: Any, program_rows: tuple[int, ...] = (1, 16)) -> None:
        self.inner = inner
        self.program_rows = program_rows
        self._running = threading.local()

    @property
    def programs(self) -> list[OpaqueProgram]:
        """Notes that this thread records or runs."""
        found: list[OpaqueProgram] = self._running.__dict__.setdefault("programs", [])
        return found

    def __getattr__(self, name: str) -> Any:
        """Weights and what is asked of them go through; an op is given its buffers as they are inside."""
        value = getattr(self.inner, name)
        if not callable(value):
            return value

        def call(*args: Any, **more: Any) -> Any:
            for program in self.programs:
                for each in (*args, *more.values()):
                    batch = each.batch if _is_value(each) and hasattr(each, "batch") else each
                    if isinstance(batch, Batch):
                        program.note(batch)
            return value(*map(self._inside, args), **{key: self._inside(each) for key, each in more.items()})

        return call

    def _inside(self, value: Any) -> Any:
        if isinstance(value, Handle):
            if value._device is not self:
                raise TypeError("a buffer of another backend: copy moves its values")
            return value._inner
        if isinstance(value, list | tuple):
            return [self._inside(each) for each in value]
        if _is_value(value):
            changed = {f.name: self._inside(getattr(value, f.name)) for f in fields(value)}
            return replace(value, **changed)
        return value

    def zeros(
        self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32, *, on_host: bool = False
    ) -> Buffer:
        return Handle(self, self.inner.zeros(shape, dtype, on_host=on_host))

    def write(self, buffer: Buffer, values: npt.NDArray[Any], row: int = 0) -> None:
        self.inner.write(self._inside(buffer), values, row)

    def read(self, buffer: Buffer, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = self.inner.read(self._inside(buffer), start, stop).copy()
        values.flags.writeable = False
        return values

    def copy(self, source: Backend, values: Buffer, out: Buffer, rows: int) -> None:
        self.write(out, source.read(values, 0, rows))

    def record(self, fn: Callable[[], None], rows: int | None = None) -> Program:
        return OpaqueProgram(self, fn, rows)

    def serve(self, link: Any, layers: Sequence[tuple[int, Program]]) -> None:
        inner = [(layer, program.inner) for layer, program in layers]  # type: ignore[attr-defined]
        self.inner.serve(link, inner)

    def post(self, box: Mailbox, x: Buffer, mask: Buffer | None, batch: Batch, chosen: Any = None) -> None:
        self.inner.post(box, self._inside(x), self._inside(mask), batch, self._inside(chosen))

    def top_k(self, logits: Buffer, row: int, k: int, bias: Any = None, allowed: Any = None) -> Any:
        return self.inner.top_k(self._inside(logits), row, k, bias, allowed)
