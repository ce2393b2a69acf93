"""State of sequences between steps: keys and values in pages of 32 positions, and states of recurrent layers
in slots. Sequences allocate and release both."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from hotcold.errors import UserError
from hotcold.kernels.backend import PAGE, Backend, Batch, Buffer
from hotcold.model.config import Config
from hotcold.model.devices import Devices

#: Copies of states take by default at most 1 / n of the free memory.
COPIES_PART = 8

#: Most draft tokens of a step with a state after each: states take memory, and later drafts often fail.
MOST_DRAFT_STATES = 4


class KVCacheFull(UserError):
    """Error of an allocation of more pages than are free."""


class _Pool:
    """Numbers of places, their owners, and the cached contents of places without owners.

    A place may have several owners, and is free without any. A place with reusable content has a key
    (:meth:`keep`, :meth:`find`). Such places are reused last, least recently used first, and then lose their
    key. After an exception in the middle of a change, such as Ctrl-C, only :meth:`clear` is safe."""

    _what = "place"

    def __init__(self, places: int) -> None:
        self._places = places
        self.clear()

    def clear(self) -> None:
        """Frees all places and forgets their contents."""
        self._owned: dict[Hashable, list[int]] = {}
        self._owners = [0] * self._places  # number of owners of each
        self._by_key: dict[Hashable, int] = {}
        self._keys: dict[int, Hashable] = {}  # by place
        # Free places: a heap of places without a key; places with a key, least recently used first.
        self._blank = list(range(self._places))
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Number of free places, including places with a key."""
        return len(self._blank) + len(self._kept)

    @property
    def kept(self) -> int:
        """Number of free places with a key."""
        return len(self._kept)

    def owns(self, owner: Hashable) -> bool:
        return owner in self._owned

    def release(self, owner: Hashable) -> None:
        """Releases an owner's places, shared ones only for this owner; harmless without any."""
        self._give_back(self._owned.pop(owner, ()))

    def keep(self, place: int, key: Hashable) -> None:
        """Gives a key to an owned place, which is no longer written to. Existing keys stay."""
        if not self._owners[place]:
            raise ValueError(f"{self._what} {place} is kept as {key!r:.60}: it must have an owner")
        if key not in self._by_key and place not in self._keys:
            self._by_key[key] = place
            self._keys[place] = key

    def find(self, key: Hashable) -> int | None:
        """Returns the place with this key."""
        return self._by_key.get(key)

    def _holds(self, place: int) -> bool:
        """Returns whether the place has content."""
        return 0 <= place < self._places and (self._owners[place] > 0 or place in self._keys)

    def _take(self, place: int) -> None:
        """Adds an owner to a place that has owners or a key."""
        if not self._owners[place]:
            del self._kept[place]
        self._owners[place] += 1

    def _give(self) -> int:
        """Takes a free place, which loses its key and gets one owner."""
        if self._blank:
            place = heappop(self._blank)
        else:
            place, _ = self._kept.popitem(last=False)
            del self._by_key[self._keys.pop(place)]
        self._owners[place] = 1
        return place

    def _give_back(self, places: Sequence[int]) -> None:
        """Removes an owner of each place; the last place becomes free first, and so is reused first."""
        for place in reversed(places):
            self._owners[place] -= 1
            if self._owners[place]:
                continue
            if place in self._keys:
                self._kept[place] = None
            else:
                heappush(self._blank, place)


class PagePool(_Pool):
    """Numbers of pages, each with 32 positions of a sequence."""

    _what = "page"

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"KV cache of {pages} pages: at least 1 is needed")
        self.pages = pages
        super().__init__(pages)

    @property
    def free_pages(self) -> int:
        """Number of free pages, including pages with a key."""
        return self.free

    @property
    def kept_pages(self) -> int:
        """Number of free pages with a key."""
        return self.kept

    def allocate(self, owner: Hashable, n: int, shared: Sequence[int] = ()) -> list[int]:
        """Allocates pages for an owner without pages: those of ``shared``, which have owners or a key, then
        ``n`` free ones. Low numbers come first, so that recently used memory is reused. Returns the list of
        all its pages, which :meth:`extend` and :meth:`share` change.

        KVCacheFull: too few are free. ValueError: a page of ``shared`` is blank, or listed twice. Both
        allocate nothing. No owner may write to a shared page."""
        if n < 0:
            raise ValueError(f"{n} pages asked for: at least 0 is needed")
        if owner in self._owned:
            raise ValueError(f"{owner!r:.60} has pages: release them first")
        if not self.fits(n, shared):
            raise KVCacheFull(f"{n} pages asked for: {self.free_pages} of {self.pages} are free")
        for page in shared:
            self._take(page)
        self._owned[owner] = pages = [*shared, *(self._give() for _ in range(n))]
        return pages

    def fits(self, n: int, shared: Sequence[int] = ()) -> bool:
        """Returns whether :meth:`allocate` would succeed; ValueError as there."""
        if len(set(shared)) < len(shared) or not all(map(self._holds, shared)):
            raise ValueError(f"pages {[*shared]} to share: each must be owned or kept, and named once")
        return n <= self.free_pages - sum(self._owners[page] == 0 for page in shared)

    def extend(self, owner: Hashable) -> bool:
        """Adds a page to the end of an owner's list; False if none is free."""
        if not self.free_pages:
            return False
        self._owned[owner].append(self._give())
        return True

    def share(self, owner: Hashable, first: int, shared: Sequence[int]) -> None:
        """Replaces an owner's pages from its page ``first`` on with pages that have owners or a key; releases
        the replaced ones. ValueError as in :meth:`allocate`."""
        pages = self._owned[owner]
        before = pages[first : first + len(shared)]
        self.fits(0, [*pages[:first], *shared])  # raises ValueError
        for page in shared:
            self._take(page)
        pages[first : first + len(shared)] = shared
        self._give_back(before)


class SlotPool(_Pool):
    """Numbers of slots, each with the state of recurrent layers after some tokens of a sequence.

    A running sequence owns the slot that its steps write to, alone and without a key. A slot with a key is a
    copy for sequences that begin with it; they own it, too, until a step has read it.

    ``spare`` further slots have no owner: the next step overwrites their states, unless :meth:`exchange`
    gives a state another number. So :meth:`at` maps a slot to its index in buffers."""

    _what = "slot"

    def __init__(self, slots: int, spare: int = 0) -> None:
        if slots < 1:
            raise ValueError(f"{slots} slots for the states of sequences: at least 1 is needed")
        self.slots = slots
        self.spare = spare
        super().__init__(slots)

    def clear(self) -> None:
        super().clear()
        self._indices = list(range(self.slots + self.spare))

    def at(self, slot: int) -> int:
        """Returns the index of a slot in buffers; -1 stays -1."""
        return slot if slot < 0 else self._indices[slot]

    def exchange(self, slot: int, other: int) -> None:
        """Swaps the states of two slots, without copying values."""
        indices = self._indices
        indices[slot], indices[other] = indices[other], indices[slot]

    def take(self, owner: Hashable) -> int | None:
        """Allocates one more slot for an owner; None if none is free."""
        if not self.free:
            return None
        slot = self._give()
        self._owned.setdefault(owner, []).append(slot)
        return slot

    def hold(self, owner: Hashable, slot: int) -> None:
        """Adds an owner to a slot with owners or a key. ValueError: it is blank, or already the owner's."""
        owned = self._owned.get(owner, [])
        if slot in owned or not self._holds(slot):
            raise ValueError(f"slot {slot} to hold: it must be owned or kept, and not by {owner!r:.60} yet")
        self._take(slot)
        self._owned[owner] = [*owned, slot]

    def owners(self, slot: int) -> int:
        """Returns the number of owners."""
        return self._owners[slot]

    def drop(self, owner: Hashable, slot: int) -> None:
        """Releases one of an owner's slots."""
        owned = self._owned[owner]
        owned.remove(slot)
        if not owned:
            del self._owned[owner]
        self._give_back([slot])

    def forget(self, slot: int) -> bool:
        """Removes a slot's key, unless the slot has several owners; returns whether the slot now has none."""
        if slot not in self._keys:
            return True
        if self._owners[slot] > 1:
            return False
        del self._by_key[self._keys.pop(slot)]
        if not self._owners[slot]:
            del self._kept[slot]
            heappush(self._blank, slot)
        return True


def copies_within(free_bytes: int, config: Config, pages: int) -> int:
    """Returns the default number of state copies: as many as fit into their part of free memory, at most one
    for each page of the KV cache. Copies are made at ends of pages."""
    return min(max(free_bytes, 0) // COPIES_PART // config.slot_bytes, pages) if config.slot_bytes else 0


def spare_slots_of(config: Config, draft_max: int) -> int:
    """Returns the slots for states after draft tokens, as many as a step may verify; 0 without states."""
    return min(draft_max, MOST_DRAFT_STATES) if config.slot_bytes else 0


@dataclass(frozen=True)
class Reservation:
    """Pages and a slot reserved for one unscheduled sequence."""

    pages: list[int]
    slot: int  #: for its state; -1 in models without states

    def put(self, batch: Batch, start: int, tokens: Sequence[int]) -> int:
        """Fills a batch's first rows with tokens of the sequence from position ``start`` on, where the last
        step ended. Returns the number of rows."""
        state = self.slot if start else -1
        return batch.put(0, 0, start, tokens, self.pages, state_from=state, state_to=self.slot)


class SequenceState:
    """State of all sequences between steps.

    Position p of a sequence is in the sequence's page ``p // PAGE`` of :attr:`pages` (PagedAttention, arXiv
    2309.06180). States of recurrent layers are in slots of :attr:`slots` (None without such layers); the last
    ``spare`` slots are for draft tokens. ``layers`` has each layer's arrays of all pages (:meth:`page_arrays`
    of its shape), then of all slots (:meth:`slot_arrays`). ModelError: the type's blocks do not fit the
    model's heads."""

    def __init__(
        self,
        backend: Backend | Devices,
        config: Config,
        pages: int,
        type: str = "f16",
        slots: int = 0,
        spare: int = 0,
    ) -> None:
        self.pages = PagePool(pages)
        self.slots = SlotPool(slots - spare, spare) if config.slot_bytes else None
        layers = zip(Devices.from_backend(backend, config.layers).layers, config.mixers, strict=True)
        self.layers: list[list[Buffer]] = []
        for ops, mixer in layers:
            if mixer.pages_of is not None:
                self.layers.append(self.layers[mixer.pages_of])
                continue
            arrays = [ops.zeros((pages, *shape), dtype) for shape, dtype in mixer.page_arrays(type)]
            arrays += [ops.zeros((slots, *shape), dtype) for shape, dtype in mixer.slot_arrays()]
            self.layers.append(arrays)

    def take(self, owner: Hashable, positions: int) -> Reservation:
        """Reserves pages and a slot for a sequence of ``positions``. KVCacheFull: too few are free."""
        pages = self.pages.allocate(owner, -(-positions // PAGE))
        if self.slots is None:
            return Reservation(pages, -1)
        slot = self.slots.take(owner)
        if slot is None:
            self.pages.release(owner)
            raise KVCacheFull(f"a slot for a state asked for: 0 of {self.slots.slots} are free")
        return Reservation(pages, self.slots.at(slot))

    def release(self, owner: Hashable) -> None:
        """Releases an owner's pages and slots; harmless without any."""
        self.pages.release(owner)
        if self.slots:
            self.slots.release(owner)

    def clear(self) -> None:
        """Frees everything and forgets its content."""
        self.pages.clear()
        if self.slots:
            self.slots.clear()
