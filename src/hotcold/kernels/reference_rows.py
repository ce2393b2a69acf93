"""Checked rows of buffers for the reference's ops, limited to the rows of a step."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.kernels.backend import Batch, Buffer, Floats, Rows


def rows_of(
    label: str,
    array: Buffer,
    batch: Batch,
    tail: tuple[int, ...],
    dtype: npt.DTypeLike = np.float32,
    rows: Rows = Rows.TOKENS,
) -> npt.NDArray[Any]:
    """Returns this step's rows, after checking that the buffer has rows for the largest step."""
    most, now = batch.limits.tokens, batch.n_tokens
    if rows == Rows.LOGITS:
        most, now = batch.limits.logits, batch.n_logits
    if array.ndim and len(array) < most:
        raise ValueError(f"{label} has {len(array)} rows: this batch needs {most}")
    check(label, array, (len(array) if array.ndim else most, *tail), dtype)
    step: npt.NDArray[Any] = array[:now]
    return step


def flat_rows(label: str, array: Buffer, batch: Batch, width: int, rows: Rows = Rows.TOKENS) -> Floats:
    """Returns the same as :func:`rows_of`, with a row's axes flattened."""
    if array.ndim > 2 and array.flags.c_contiguous:
        array = array.reshape(len(array), -1)  # a view
    return rows_of(label, array, batch, (width,), rows=rows)


def check(label: str, array: Buffer, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> None:
    if array.dtype != dtype:
        raise TypeError(f"{label} is {array.dtype}: {np.dtype(dtype)} is needed")
    if array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(f"{label} of shape {array.shape}: {shape}, without gaps, is needed")
