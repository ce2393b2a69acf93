"""Keeps the state of sequences between steps: keys and values in pages of 32 positions, and what recurrent
layers keep of a whole sequence in slots. Sequences take both and give them back."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from hotcold.errors import UserError
from hotcold.kernels.backend import PAGE, Backend, Batch, Buffer
from hotcold.model.config import Config
from hotcold.model.devices import Devices

#: Copies of states take by default at most this part of the memory that is free, as 1 / n.
COPIES_PART = 8

#: Guesses of a step with a state after each, which memory pays for: more would seldom be right.
MOST_DRAFT_STATES = 4


class KVCacheFull(UserError):
    """Fewer pages are free than were asked for."""


class _Pool:
    """Numbers of places, who owns each, and what those hold that nobody owns.

    A place may have several owners, and is free when it has none. One whose content is worth finding again
    has a key (:meth:`keep`, :meth:`find`): such places are given away last, the longest unused first, and
    then lose it. After an exception in the middle of a change, Ctrl-C for instance, only :meth:`clear` helps.
    """

    _what = "place"

    def __init__(self, places: int) -> None:
        self._places = places
        self.clear()

    def clear(self) -> None:
        """Takes all back, and forgets what they hold."""
        self._owned: dict[Hashable, list[int]] = {}
        self._owners = [0] * self._places  # how many each has
        self._by_key: dict[Hashable, int] = {}
        self._keys: dict[int, Hashable] = {}  # by place
        # Places without an owner: a heap of those without a key; those with one, the longest unused first.
        self._blank = list(range(self._places))
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """That nobody owns, those with a key among them."""
        return len(self._blank) + len(self._kept)

    @property
    def kept(self) -> int:
        """That nobody owns, and that have a key."""
        return len(self._kept)

    def owns(self, owner: Hashable) -> bool:
        return owner in self._owned

    def release(self, owner: Hashable) -> None:
        """Takes an owner's places back, those that it shares for itself alone; harmless when it has none."""
        self._give_back(self._owned.pop(owner, ()))

    def keep(self, place: int, key: Hashable) -> None:
        """Says what lies in a place that somebody owns, to which nobody writes from now on. Where the key has
        a place, or the place a key, these stay."""
        if not self._owners[place]:
            raise ValueError(f"{self._what} {place} is kept as {key!r:.60}: it must have an owner")
        if key not in self._by_key and place not in self._keys:
            self._by_key[key] = place
            self._keys[place] = key

    def find(self, key: Hashable) -> int | None:
        """The place that is kept under a key."""
        return self._by_key.get(key)

    def _holds(self, place: int) -> bool:
        """Whether there is something in it."""
        return 0 <= place < self._places and (self._owners[place] > 0 or place in self._keys)

    def _take(self, place: int) -> None:
        """Counts one more owner of a place that has some, or a key."""
        if not self._owners[place]:
            del self._kept[place]
        self._owners[place] += 1

    def _give(self) -> int:
        """A free place, which loses its key and has one owner."""
        if self._blank:
            place = heappop(self._blank)
        else:
            place, _ = self._kept.popitem(last=False)
            del self._by_key[self._keys.pop(place)]
        self._owners[place] = 1
        return place

    def _give_back(self, places: Sequence[int]) -> None:
        """Counts one owner less; the last one becomes free first, and so is given away first."""
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
        """That nobody owns, those with a key among them."""
        return self.free

    @property
    def kept_pages(self) -> int:
        """That nobody owns, and that have a key."""
        return self.kept

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


class SlotPool(_Pool):
    """Numbers of slots, each with the state of a sequence after some of its tokens, in the layers that keep
    one in place of positions.

    A sequence that runs owns the slot that its steps write to, alone and without a key. A slot with a key is
    a copy for others: those that begin with it own it, too, until a step has read it.

    Behind them are ``spare`` ones, which nobody owns: what a step writes there is lost with the next step,
    but for what :meth:`exchange` gives another number. So :meth:`at` says where a slot lies in buffers."""

    _what = "slot"

    def __init__(self, slots: int, spare: int = 0) -> None:
        if slots < 1:
            raise ValueError(f"{slots} slots for the states of sequences: at least 1 is needed")
        self.slots = slots
        self.spare = spare
        super().__init__(slots)

    def clear(self) -> None:
        super().clear()
        self._lies = list(range(self.slots + self.spare))

    def at(self, slot: int) -> int:
        """The place of a slot in buffers; -1 stays -1."""
        return slot if slot < 0 else self._lies[slot]

    def exchange(self, slot: int, other: int) -> None:
        """Lets two slots change places: each has the other's state now, and no value is copied."""
        lies = self._lies
        lies[slot], lies[other] = lies[other], lies[slot]

    def take(self, owner: Hashable) -> int | None:
        """Gives an owner one free slot more, for itself; None where none is free."""
        if not self.free:
            return None
        slot = self._give()
        self._owned.setdefault(owner, []).append(slot)
        return slot

    def hold(self, owner: Hashable, slot: int) -> None:
        """Makes it an owner, too, of a slot that others own or that has a key. ValueError: it is blank, or
        the owner's already."""
        owned = self._owned.get(owner, [])
        if slot in owned or not self._holds(slot):
            raise ValueError(f"slot {slot} to hold: it must be owned or kept, and not by {owner!r:.60} yet")
        self._take(slot)
        self._owned[owner] = [*owned, slot]

    def owners(self, slot: int) -> int:
        """How many own it."""
        return self._owners[slot]

    def drop(self, owner: Hashable, slot: int) -> None:
        """Takes one of an owner's slots back."""
        owned = self._owned[owner]
        owned.remove(slot)
        if not owned:
            del self._owned[owner]
        self._give_back([slot])

    def forget(self, slot: int) -> bool:
        """Takes a slot's key away, unless several own it; says whether it has none now."""
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
    """Counts the copies of states that a model keeps by default: as many as fit into their part of free
    memory, and at most one for each page of the KV cache, at whose end it is."""
    return min(max(free_bytes, 0) // COPIES_PART // config.slot_bytes, pages) if config.slot_bytes else 0


def spare_slots_of(config: Config, draft_max: int) -> int:
    """The slots for states after guesses, as many as a step may verify; 0 where no layer keeps a state."""
    return min(draft_max, MOST_DRAFT_STATES) if config.slot_bytes else 0


@dataclass(frozen=True)
class Reservation:
    """The places that a sequence has all of its time, whose rows nobody schedules."""

    pages: list[int]
    slot: int  #: for its state; -1 where no layer keeps one

    def put(self, batch: Batch, start: int, tokens: Sequence[int]) -> int:
        """Fills a batch's first rows with its tokens from a position on, where the step before ended; returns
        how many."""
        state = self.slot if start else -1
        return batch.put(0, 0, start, tokens, self.pages, state_from=state, state_to=self.slot)


class SequenceState:
    """The state of all sequences between steps.

    Position p of a sequence lies in the sequence's page ``p // PAGE`` of :attr:`pages` (PagedAttention, arXiv
    2309.06180). What a layer keeps in place of positions lies in a slot of :attr:`slots`, None where no layer
    does; the last ``spare`` of them are for guesses. ``layers`` has each layer's arrays of all pages
    (:meth:`page_arrays` of its shape) and then of all slots (:meth:`slot_arrays`). ModelError: the type's
    blocks do not fit the model's heads."""

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
        layers = zip(Devices.of(backend, config.layers).layers, config.mixers, strict=True)
        self.layers: list[list[Buffer]] = []
        for ops, mixer in layers:
            if mixer.pages_of is not None:
                self.layers.append(self.layers[mixer.pages_of])
                continue
            arrays = [ops.zeros((pages, *shape), dtype) for shape, dtype in mixer.page_arrays(type)]
            arrays += [ops.zeros((slots, *shape), dtype) for shape, dtype in mixer.slot_arrays()]
            self.layers.append(arrays)

    def take(self, owner: Hashable, positions: int) -> Reservation:
        """Gives an owner without any the places of a sequence of so many positions. KVCacheFull: fewer pages
        are free; or no slot."""
        pages = self.pages.allocate(owner, -(-positions // PAGE))
        if self.slots is None:
            return Reservation(pages, -1)
        slot = self.slots.take(owner)
        if slot is None:
            self.pages.release(owner)
            raise KVCacheFull(f"a slot for a state asked for: 0 of {self.slots.slots} are free")
        return Reservation(pages, self.slots.at(slot))

    def release(self, owner: Hashable) -> None:
        """Takes an owner's pages and slots back; harmless when it has none."""
        self.pages.release(owner)
        if self.slots:
            self.slots.release(owner)

    def clear(self) -> None:
        """Takes everything back, and forgets what it holds."""
        self.pages.clear()
        if self.slots:
            self.slots.clear()
