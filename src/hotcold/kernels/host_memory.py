"""Buffers and mailboxes of the backends that compute in host memory; buffers are NumPy arrays."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.kernels import _native, checks
from hotcold.kernels.backend import Batch, BatchLimits, Chosen, Mailbox

Array = npt.NDArray[Any]


def write(buffer: Array, values: Array, row: int) -> None:
    """Implements :meth:`hotcold.kernels.backend.Backend.write`."""
    checks.check_write(values, row, buffer.shape, buffer.dtype)
    buffer[row : row + len(values)] = values


def read(buffer: Array, start: int, stop: int | None) -> Array:
    """Implements :meth:`hotcold.kernels.backend.Backend.read`; returns a view."""
    view = buffer[start : checks.check_read(start, stop, len(buffer))]
    view.flags.writeable = False
    return view


def mailboxes(
    link: _native.Link, limits: BatchLimits, dim: int, words: Mapping[int, int], experts: int
) -> dict[int, Mailbox]:
    """Implements :meth:`hotcold.kernels.backend.Backend.mailboxes`. One layer is out at a time, so all
    mailboxes share x, y and chosen, and those of one width a mask."""
    batch, rows = Batch(limits), limits.tokens
    x, y = (np.zeros((rows, dim), np.float32) for _ in range(2))
    masks = {width: np.zeros((rows, width), np.uint64) for width in {*words.values()} if width}
    chosen = None
    if experts:
        chosen = Chosen(np.zeros((rows, experts), np.int32), np.zeros((rows, experts), np.float32))
    return {
        layer: Mailbox(link, layer, batch, x, masks.get(width), y, chosen) for layer, width in words.items()
    }


def own_link(box: Mailbox) -> _native.FlagLink:
    """The link of a mailbox. TypeError: the mailbox is another kind of backend's."""
    if not isinstance(box.link, _native.FlagLink):
        raise TypeError(f"a mailbox with a {type(box.link).__name__}: this backend's own are needed")
    return box.link
