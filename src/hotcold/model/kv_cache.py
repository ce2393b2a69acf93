"""Keeps the state of sequences between steps: keys and values of every layer, in pages of 32 positions that
sequences take and give back."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from heapq import heappop, heappush

from hotcold.errors import UserError
from hotcold.kernels.backend import Backend, Buffer
from hotcold.model.config import Config
from hotcold.model.devices import Devices


class KVCacheFull(UserError):
    """Fewer pages are free than were asked for."""


class PagePool:
    """Numbers of pages, who owns them, and what those hold that nobody owns.

    A page may have several owners, and is free when it has none. One whose positions are worth finding again
    has a key (:meth:`keep`, :meth:`find`): such pages are given away last, the longest unused first, and then
    lose it. After an exception in the middle of a change, Ctrl-C for instance, only :meth:`clear` helps."""

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"KV cache of {pages} pages: at least 1 is needed")
        self.pages = pages
        self.clear()

    def clear(self) -> None:
        """Takes all pages back, and forgets what they hold."""
        self._owned: dict[Hashable, list[int]] = {}
        self._owners = [0] * self.pages  # how many each page has
        self._pages: dict[Hashable, int] = {}  # by key
        self._keys: dict[int, Hashable] = {}  # by page
        # Pages without an owner: a heap of those without a key; those with one, the longest unused first.
        self._blank = list(range(self.pages))
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def free_pages(self) -> int:
        """That nobody owns, those with a key among them."""
        return len(self._blank) + len(self._kept)

    @property
    def kept_pages(self) -> int:
        """That nobody owns, and that have a key."""
        return len(self._kept)

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
        for page in shared:
            self._take(page)
        self._owned[owner] = given = [*shared, *(self._give() for _ in range(n))]
        return given

    def fits(self, n: int, shared: Sequence[int] = ()) -> bool:
        """Whether :meth:`allocate` would give these; ValueError as there."""
        if len(set(shared)) < len(shared) or not all(map(self._holds, shared)):
            raise ValueError(f"pages {[*shared]} to share: each must be owned or kept, and named once")
        return n <= self.free_pages - sum(self._owners[page] == 0 for page in shared)

    def extend(self, owner: Hashable) -> bool:
        """Gives an owner one page more, at the end of its list; False where none is free."""
        if not self.free_pages:
            return False
        self._owned[owner].append(self._give())
        return True

    def share(self, owner: Hashable, first: int, shared: Sequence[int]) -> None:
        """Puts pages that others own or that have a key in the place of an owner's own ones, from its page
        ``first`` on; those are given back. ValueError as of :meth:`allocate`."""
        pages = self._owned[owner]
        before = pages[first : first + len(shared)]
        self.fits(0, [*pages[:first], *shared])  # or it raises
        for page in shared:
            self._take(page)
        pages[first : first + len(shared)] = shared
        self._give_back(before)

    def owns(self, owner: Hashable) -> bool:
        return owner in self._owned

    def release(self, owner: Hashable) -> None:
        """Takes an owner's pages back, those that it shares for itself alone; harmless when it has none."""
        self._give_back(self._owned.pop(owner, ()))

    def keep(self, page: int, key: Hashable) -> None:
        """Says what lies in a page that somebody owns, to which nobody writes from now on. Where the key has
        a page, or the page a key, these stay."""
        if not self._owners[page]:
            raise ValueError(f"page {page} is kept as {key!r:.60}: somebody must own it")
        if key not in self._pages and page not in self._keys:
            self._pages[key] = page
            self._keys[page] = key

    def find(self, key: Hashable) -> int | None:
        """The page that is kept under a key."""
        return self._pages.get(key)

    def _holds(self, page: int) -> bool:
        """Whether there is something in the page."""
        return 0 <= page < self.pages and (self._owners[page] > 0 or page in self._keys)

    def _take(self, page: int) -> None:
        """Counts one more owner of a page that has some, or a key."""
        if not self._owners[page]:
            del self._kept[page]
        self._owners[page] += 1

    def _give(self) -> int:
        """A free page, which loses its key and has one owner."""
        if self._blank:
            page = heappop(self._blank)
        else:
            page, _ = self._kept.popitem(last=False)
            del self._pages[self._keys.pop(page)]
        self._owners[page] = 1
        return page

    def _give_back(self, pages: Sequence[int]) -> None:
        """Counts one owner less; the last page of a text becomes free first, and so is given away first."""
        for page in reversed(pages):
            self._owners[page] -= 1
            if self._owners[page]:
                continue
            if page in self._keys:
                self._kept[page] = None
            else:
                heappush(self._blank, page)


class SequenceState:
    """The state of all sequences between steps (PagedAttention, arXiv 2309.06180).

    Position p of a sequence lies in the sequence's page ``p // PAGE`` of :attr:`pages`. ``layers`` has the
    arrays of all pages for each layer (:meth:`AttentionShape.page_arrays`). A mixer whose state is not a list
    of positions will have slots here, from a pool beside :attr:`pages`. ModelError: the type's blocks do not
    fit the model's heads."""

    def __init__(
        self, backend: Backend | Devices, config: Config, pages: int, type: str = "f16", slots: int = 0
    ) -> None:
        self.pages = PagePool(pages)
        layers = zip(Devices.of(backend, config.layers).layers, config.mixers, strict=True)
        self.layers: list[list[Buffer]] = [
            [ops.zeros((pages, *shape), dtype) for shape, dtype in mixer.page_arrays(type)]
            + [ops.zeros((slots, *shape), dtype) for shape, dtype in mixer.slot_arrays()]
            for ops, mixer in layers
        ]
