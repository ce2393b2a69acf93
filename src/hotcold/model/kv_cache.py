"""Keys and values of every layer, in pages of 32 positions that sequences take and give back."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from heapq import heappop, heappush

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
    """Numbers of pages, who owns them, and what those hold that nobody owns.

    A page may have several owners, and is free when it has none. One whose positions are worth finding again
    has a key (:meth:`keep`, :meth:`find`): such pages are given away last, the longest unused first, and then
    lose it. Owners and keys are the only record, and one instruction changes either: an interrupt never
    leaves a page without an owner or a place among the free ones. What follows from them, and is asked for at
    every step, is set aside while they change; after an interrupt it is made anew."""

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"KV cache of {pages} pages: at least 1 is needed")
        self.pages = pages
        self._owned: dict[Hashable, list[int]] = {}
        self._keys: dict[Hashable, int] = {}
        self._derived: _Derived | None = None

    @property
    def free_pages(self) -> int:
        """That nobody owns, those with a key among them."""
        derived = self._now()
        return len(derived.blank) + len(derived.kept)

    @property
    def kept_pages(self) -> int:
        """That nobody owns, and that have a key."""
        return len(self._now().kept)

    def allocate(self, owner: Hashable, n: int, shared: Sequence[int] = ()) -> list[int]:
        """Gives an owner without pages those of ``shared``, which others own or which have a key, and then
        ``n`` free ones, those of low numbers first, so that warm ones are used again; returns all of them, in
        the list that :meth:`extend` and :meth:`share` change.

        KVCacheFull: fewer are free. ValueError: a page of ``shared`` is blank, or is named twice. Then none
        is given. What lies in a shared page belongs to all its owners: none of them may write to it."""
        if n < 0:
            raise ValueError(f"{n} pages asked for: at least 0 is needed")
        if owner in self._owned:
            raise ValueError(f"{owner!r:.60} has pages: release them first")
        if not self.fits(n, shared):
            raise KVCacheFull(f"{n} pages asked for: {self.free_pages} of {self.pages} are free")
        derived, self._derived = self._now(), None
        for page in shared:
            derived.take(page)
        given = [*shared, *(self._give(derived) for _ in range(n))]
        self._owned[owner] = given
        self._derived = derived
        return given

    def fits(self, n: int, shared: Sequence[int] = ()) -> bool:
        """Whether :meth:`allocate` would give these; ValueError as there."""
        derived = self._now()
        if len(set(shared)) < len(shared) or not all(map(derived.holds, shared)):
            raise ValueError(f"pages {[*shared]} to share: each must be owned or kept, and named once")
        return n <= self.free_pages - sum(derived.owners[page] == 0 for page in shared)

    def extend(self, owner: Hashable) -> bool:
        """Gives an owner one page more, at the end of its list; False where none is free."""
        if not self.free_pages:
            return False
        derived, self._derived = self._now(), None
        self._owned[owner].append(self._give(derived))
        self._derived = derived
        return True

    def share(self, owner: Hashable, first: int, shared: Sequence[int]) -> None:
        """Puts pages that others own or that have a key in the place of an owner's own ones, from its page
        ``first`` on; those are given back. ValueError as of :meth:`allocate`."""
        pages = self._owned[owner]
        before = pages[first : first + len(shared)]
        self.fits(0, [*pages[:first], *shared])  # or it raises
        derived, self._derived = self._now(), None
        for page in shared:
            derived.take(page)
        pages[first : first + len(shared)] = shared
        for page in reversed(before):
            derived.release(page)
        self._derived = derived

    def owns(self, owner: Hashable) -> bool:
        return owner in self._owned

    def pages_of(self, owner: Hashable) -> tuple[int, ...]:
        """An owner's pages, in the order in which they were given; none where it is no owner."""
        return tuple(self._owned.get(owner, ()))

    def release(self, owner: Hashable) -> None:
        """Takes an owner's pages back, those that it shares for itself alone; harmless when it has none."""
        if owner not in self._owned:
            return
        derived, self._derived = self._now(), None
        for page in reversed(self._owned.pop(owner)):  # so that the last ones of a chain are given away first
            derived.release(page)
        self._derived = derived

    def keep(self, page: int, key: Hashable) -> None:
        """Says what lies in a page that somebody owns, to which nobody writes from now on. Where the key has
        a page, or the page a key, these stay."""
        derived = self._now()
        if not derived.owners[page]:
            raise ValueError(f"page {page} is kept as {key!r:.60}: somebody must own it")
        if key in self._keys or page in derived.keys:
            return
        self._derived = None
        self._keys[key] = page
        derived.keys[page] = key
        self._derived = derived

    def find(self, key: Hashable) -> int | None:
        """The page that is kept under a key."""
        return self._keys.get(key)

    def clear(self) -> None:
        """Takes all pages back, and forgets what they hold."""
        self._derived = None
        self._keys.clear()
        self._owned.clear()
        self._derived = None

    def _give(self, derived: "_Derived") -> int:
        """A free page, which loses its key."""
        if derived.blank:
            page = heappop(derived.blank)
        else:
            page, _ = derived.kept.popitem(last=False)
            del self._keys[derived.keys.pop(page)]
        derived.owners[page] = 1
        return page

    def _now(self) -> "_Derived":
        if self._derived is None:
            self._derived = _Derived(self.pages, self._owned, self._keys)
        return self._derived


class _Derived:
    """What follows from owners and keys."""

    def __init__(self, pages: int, owned: dict[Hashable, list[int]], keys: dict[Hashable, int]) -> None:
        self.owners = [0] * pages  #: how many each page has
        for each in owned.values():
            for page in each:
                self.owners[page] += 1
        self.keys = {page: key for key, page in keys.items()}  #: of pages that have one
        #: that nobody owns: a heap of those without a key; with one, the longest unused first
        self.blank = [page for page in range(pages) if not self.owners[page] and page not in self.keys]
        self.kept = OrderedDict.fromkeys(page for page in keys.values() if not self.owners[page])

    def holds(self, page: int) -> bool:
        """Whether there is something in the page."""
        return 0 <= page < len(self.owners) and (self.owners[page] > 0 or page in self.keys)

    def take(self, page: int) -> None:
        """One more owner for a page that has some, or a key."""
        if not self.owners[page]:
            del self.kept[page]
        self.owners[page] += 1

    def release(self, page: int) -> None:
        """One owner less."""
        self.owners[page] -= 1
        if self.owners[page]:
            return
        if page in self.keys:
            self.kept[page] = None
        else:
            heappush(self.blank, page)


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
            raise ModelError(f"KV cache of type {type} (`cache_type`): {seen}: use f16")
        return config.layers * 2 * config.kv_heads * PAGE * block.row_bytes(config.head_dim)
