"""Buffers that are NumPy arrays: how the backends that compute in host memory move values in and out."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def write(buffer: Array, values: Array, row: int) -> None:
    """As :meth:`hotcold.kernels.backend.Backend.write`."""
    if values.dtype != buffer.dtype:
        raise TypeError(f"values of {values.dtype}: this buffer holds {buffer.dtype}")
    most = len(buffer) - row
    if values.shape[1:] != buffer.shape[1:] or not 0 <= len(values) <= most or row < 0:
        seen = f"values of shape {values.shape} from row {row} on"
        raise ValueError(f"{seen}: this buffer has room for {most} rows of {buffer.shape[1:]}")
    buffer[row : row + len(values)] = values


def read(buffer: Array, start: int, stop: int | None) -> Array:
    """As :meth:`hotcold.kernels.backend.Backend.read`: a view."""
    if not 0 <= start <= (len(buffer) if stop is None else stop) <= len(buffer):
        raise ValueError(f"rows {start} to {stop} of a buffer that has {len(buffer)}")
    view = buffer[start:stop]
    view.flags.writeable = False
    return view
