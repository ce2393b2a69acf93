"""Rows of buffers as the reference's ops take them: checked, and no more than a step has."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.kernels.backend import Batch, Buffer, Floats, Rows


def rows_of(
    what: str,
    array: Buffer,
    batch: Batch,
    tail: tuple[int, ...],
    dtype: npt.DTypeLike = np.float32,
    rows: Rows = Rows.TOKENS,
) -> npt.NDArray[Any]:
    """The rows of this step, after checking that the buffer has room for the largest one."""
    most, now = batch.limits.tokens, batch.n_tokens
    if rows == Rows.LOGITS:
        most, now = batch.limits.logits, batch.n_logits
    if array.ndim and len(array) < most:
        raise ValueError(f"{what} has {len(array)} rows: this batch needs {most}")
    check(what, array, (len(array) if array.ndim else most, *tail), dtype)
    step: npt.NDArray[Any] = array[:now]
    return step


def flat_rows(what: str, array: Buffer, batch: Batch, width: int, rows: Rows = Rows.TOKENS) -> Floats:
    """Does what :func:`rows_of` does, whatever axes the values of a row have."""
    if array.ndim > 2 and array.flags.c_contiguous:
        array = array.reshape(len(array), -1)  # a view
    return rows_of(what, array, batch, (width,), rows=rows)


def check(what: str, array: Buffer, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> None:
    if array.dtype != dtype:
        raise TypeError(f"{what} is {array.dtype}: {np.dtype(dtype)} is needed")
    if array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(f"{what} of shape {array.shape}: {shape}, without gaps, is needed")
