"""Keys and values of every layer, in pages of 32 positions that sequences take and give back."""

from collections.abc import Sequence

import numpy as np

from hotcold.formats.blocks import BLOCK_TYPES
from hotcold.kernels.backend import PAGE, Backend, Buffer
from hotcold.model.config import Config, ModelError
from hotcold.model.devices import Devices

#: What keys and values are rounded to, by the name of its block type, and what arrays hold it.
CACHE_TYPES = {"f16": np.float16, "q8_0": np.uint8, "f32": np.float32}


class KVCacheFull(ValueError):
    """Fewer pages are free than were asked for."""


class KVCache:
    """A fixed number of pages (PagedAttention, arXiv 2309.06180), of a type in :data:`CACHE_TYPES`.

    Position p of a sequence lies in the sequence's page ``p // PAGE``. ``layers`` are (K, V) of each layer,
    as ``Backend.store_kv`` has them. ModelError: the type's blocks do not fit the model's heads."""

    def __init__(self, backend: Backend | Devices, config: Config, pages: int, type: str = "f16") -> None:
        if pages < 1:
            raise ValueError(f"KV cache of {pages} pages: at least 1 is needed")
        dtype = np.dtype(CACHE_TYPES[type])
        row = self.page_bytes(config, type) // (config.layers * 2 * config.kv_heads * PAGE)
        shape = (pages, config.kv_heads, PAGE, row // dtype.itemsize)
        self.layers: list[tuple[Buffer, Buffer]] = [
            (each.zeros(shape, dtype), each.zeros(shape, dtype))
            for each in Devices.of(backend, config.layers).layers
        ]
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))  # a stack, so that warm pages are used again first
        self._taken: set[int] = set()

    @staticmethod
    def page_bytes(config: Config, type: str = "f16") -> int:
        block = BLOCK_TYPES[type.upper()]
        if config.head_dim % block.weights:
            seen = f"its blocks of {block.weights} do not fit heads of {config.head_dim}"
            raise ModelError(f"KV cache of type {type} (--cache-type): {seen}: use f16")
        return config.layers * 2 * config.kv_heads * PAGE * block.row_bytes(config.head_dim)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Takes ``n`` pages; KVCacheFull if fewer are free, and then none is taken."""
        if n < 0:
            raise ValueError(f"{n} pages asked for: at least 0 is needed")
        if n > len(self._free):
            raise KVCacheFull(f"{n} pages asked for: {len(self._free)} of {self.pages} are free")
        taken = [self._free.pop() for _ in range(n)]
        self._taken.update(taken)
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Gives pages back; ValueError if one is not taken (given back twice, say), and then none is."""
        if len(set(pages)) < len(pages):
            raise ValueError("a page is named twice: each page can be released once")
        if lost := set(pages) - self._taken:
            raise ValueError(f"page {min(lost)} is not taken: only what allocate() gave can be released")
        self._taken.difference_update(pages)
        self._free.extend(reversed(pages))
