"""Buffers and mailboxes of the backends that compute in host memory; buffers are NumPy arrays."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.kernels import _native, checks
from hotcold.kernels.backend import Backend, Batch, BatchLimits, Buffer, Chosen, Mailbox


class HostMemory:
    """Buffers and mailboxes as NumPy arrays; a base class of backends."""

    def zeros(
        self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32, *, on_host: bool = False
    ) -> Buffer:
        return np.zeros(shape, dtype)

    def write(self, buffer: Buffer, values: npt.NDArray[Any], row: int = 0) -> None:
        checks.check_write(values, row, buffer.shape, buffer.dtype)
        buffer[row : row + len(values)] = values

    def read(self, buffer: Buffer, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        view: npt.NDArray[Any] = buffer[start : checks.check_read(start, stop, len(buffer))]
        view.flags.writeable = False
        return view

    def copy(self, source: Backend, values: Buffer, out: Buffer, rows: int) -> None:
        self.write(out, source.read(values, 0, rows))

    def mailboxes(
        self, link: _native.Link, limits: BatchLimits, dim: int, words: Mapping[int, int], experts: int = 0
    ) -> dict[int, Mailbox]:
        """Makes mailboxes that share x, y, chosen and masks of one width: one layer is posted at a time."""
        batch, rows = Batch(limits), limits.tokens
        x, y = (np.zeros((rows, dim), np.float32) for _ in range(2))
        masks = {width: np.zeros((rows, width), np.uint64) for width in {*words.values()} if width}
        chosen = None
        if experts:
            chosen = Chosen(np.zeros((rows, experts), np.int32), np.zeros((rows, experts), np.float32))
        return {
            layer: Mailbox(link, layer, batch, x, masks.get(width), y, chosen)
            for layer, width in words.items()
        }


def own_link(box: Mailbox) -> _native.FlagLink:
    """Returns the link of a mailbox. TypeError: another kind of backend made the mailbox."""
    if not isinstance(box.link, _native.FlagLink):
        raise TypeError(f"a mailbox with a {type(box.link).__name__}: a link of this backend is needed")
    return box.link
