"""Keys and values of every layer, in pages of 32 positions that sequences take and give back."""

from collections.abc import Hashable, Sequence
from itertools import islice

import numpy as np

from hotcold.errors import UserError
from hotcold.formats.blocks import BLOCK_TYPES
from hotcold.kernels.backend import PAGE, Backend, Buffer
from hotcold.model.config import Config, ModelError
from hotcold.model.devices import Devices

#: What keys and values are rounded to, by the name of its block type, and what arrays hold it.
CACHE_TYPES = {"f16": np.float16, "q8_0": np.uint8, "f32": np.float32}


class KVCacheFull(UserError):
    """Fewer pages are free than were asked for."""


class PagePool:
    """Numbers of pages, and who owns them: a sequence, or whoever keeps a prefix for later. A page may have
    several owners, and is free when it has none. Owners are the only record, and one instruction changes it:
    an interrupt never leaves a page without an owner or a place among the free ones."""

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"KV cache of {pages} pages: at least 1 is needed")
        self.pages = pages
        self._owned: dict[Hashable, list[int]] = {}

    @property
    def free_pages(self) -> int:
        return self.pages - len(self._taken())

    def allocate(self, owner: Hashable, n: int, shared: Sequence[int] = ()) -> list[int]:
        """Gives an owner without pages those of ``shared``, which others own and go on owning, and then ``n``
        free ones, those of low numbers first, so that warm ones are used again; returns all of them.

        KVCacheFull: fewer are free. ValueError: a page of ``shared`` has no owner, or is named twice. Then
        none is given. What lies in a shared page belongs to all its owners: none of them may write to it."""
        if n < 0:
            raise ValueError(f"{n} pages asked for: at least 0 is needed")
        if owner in self._owned:
            raise ValueError(f"{owner!r:.60} has pages: release them first")
        taken = self._taken()
        if len(set(shared)) < len(shared) or not taken.issuperset(shared):
            raise ValueError(f"pages {[*shared]} to share: each must be owned, and named once")
        if n > self.pages - len(taken):
            raise KVCacheFull(f"{n} pages asked for: {self.pages - len(taken)} of {self.pages} are free")
        free = (page for page in range(self.pages) if page not in taken)
        given = [*shared, *islice(free, n)]
        self._owned[owner] = given
        return given

    def owns(self, owner: Hashable) -> bool:
        return owner in self._owned

    def pages_of(self, owner: Hashable) -> tuple[int, ...]:
        """An owner's pages, in the order in which they were given; none where it is no owner."""
        return tuple(self._owned.get(owner, ()))

    def release(self, owner: Hashable) -> None:
        """Takes an owner's pages back, those that it shares for itself alone; harmless when it has none."""
        self._owned.pop(owner, None)

    def clear(self) -> None:
        """Takes all pages back."""
        self._owned.clear()

    def _taken(self) -> set[int]:
        return {page for pages in self._owned.values() for page in pages}


class KVCache(PagePool):
    """A fixed number of pages (PagedAttention, arXiv 2309.06180), of a type in :data:`CACHE_TYPES`.

    Position p of a sequence lies in the sequence's page ``p // PAGE``. ``layers`` are (K, V) of each layer,
    as ``Backend.store_kv`` has them. ModelError: the type's blocks do not fit the model's heads."""

    def __init__(self, backend: Backend | Devices, config: Config, pages: int, type: str = "f16") -> None:
        super().__init__(pages)
        dtype = np.dtype(CACHE_TYPES[type])
        row = self.page_bytes(config, type) // (config.layers * 2 * config.kv_heads * PAGE)
        shape = (pages, config.kv_heads, PAGE, row // dtype.itemsize)
        self.layers: list[tuple[Buffer, Buffer]] = [
            (each.zeros(shape, dtype), each.zeros(shape, dtype))
            for each in Devices.of(backend, config.layers).layers
        ]

    @staticmethod
    def page_bytes(config: Config, type: str = "f16") -> int:
        block = BLOCK_TYPES[type.upper()]
        if config.head_dim % block.weights:
            seen = f"its blocks of {block.weights} do not fit heads of {config.head_dim}"
            raise ModelError(f"KV cache of type {type} (--cache-type): {seen}: use f16")
        return config.layers * 2 * config.kv_heads * PAGE * block.row_bytes(config.head_dim)
