"""Keys and values of every layer, in pages of 32 positions that sequences take and give back."""

from collections.abc import Hashable
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
    """Numbers of pages, and who owns them. Owners are the only record, and one instruction changes it: an
    interrupt never leaves a page without an owner or a place among the free ones."""

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"KV cache of {pages} pages: at least 1 is needed")
        self.pages = pages
        self._owned: dict[Hashable, list[int]] = {}

    @property
    def free_pages(self) -> int:
        return self.pages - sum(map(len, self._owned.values()))

    def allocate(self, owner: Hashable, n: int) -> list[int]:
        """Gives an owner without pages ``n`` of them, those of low numbers first, so that warm ones are used
        again; KVCacheFull if fewer are free, and then none is given."""
        if n < 0:
            raise ValueError(f"{n} pages asked for: at least 0 is needed")
        if owner in self._owned:
            raise ValueError(f"{owner!r:.60} has pages: release them first")
        if n > self.free_pages:
            raise KVCacheFull(f"{n} pages asked for: {self.free_pages} of {self.pages} are free")
        taken = {page for pages in self._owned.values() for page in pages}
        free = (page for page in range(self.pages) if page not in taken)
        given = list(islice(free, n))
        self._owned[owner] = given
        return given

    def owns(self, owner: Hashable) -> bool:
        return owner in self._owned

    def release(self, owner: Hashable) -> None:
        """Takes an owner's pages back; harmless when it has none."""
        self._owned.pop(owner, None)

    def clear(self) -> None:
        """Takes all pages back."""
        self._owned.clear()


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
