"""What the backends that compute in host memory share: buffers that are NumPy arrays, and mailboxes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.kernels import _cpu
from hotcold.kernels.backend import Batch, BatchLimits, Chosen, Mailbox

Array = npt.NDArray[Any]


def write(buffer: Array, values: Array, row: int) -> None:
    """As :meth:`hotcold.kernels.backend.Backend.write`."""
    if values.dtype != buffer.dtype:
        raise TypeError(f"values of {values.dtype}: this buffer holds {buffer.dtype}")
    most = len(buffer) - row
    if values.shape[1:] != buffer.shape[1:] or len(values) > most or row < 0:
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


def mailboxes(
    link: _cpu.Link, limits: BatchLimits, dim: int, words: Mapping[int, int], experts: int
) -> dict[int, Mailbox]:
    """As :meth:`hotcold.kernels.backend.Backend.mailboxes`. One layer is out at a time, so all of them share
    x, y and chosen, and those of one width a mask."""
    batch, rows = Batch(limits), limits.tokens
    x, y = (np.zeros((rows, dim), np.float32) for _ in range(2))
    masks = {width: np.zeros((rows, width), np.uint64) for width in {*words.values()} if width}
    chosen = None
    if experts:
        chosen = Chosen(np.zeros((rows, experts), np.int32), np.zeros((rows, experts), np.float32))
    return {
        layer: Mailbox(link, layer, batch, x, masks.get(width), y, chosen) for layer, width in words.items()
    }


def own_link(box: Mailbox) -> _cpu.FlagLink:
    """TypeError: the mailbox is another kind of backend's."""
    if not isinstance(box.link, _cpu.FlagLink):
        raise TypeError(f"a mailbox with a {type(box.link).__name__}: this backend's own are needed")
    return box.link
