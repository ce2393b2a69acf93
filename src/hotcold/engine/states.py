"""State slots of running requests, and copies of states for later requests.

A running request owns one slot; its steps read and write the state there, in place. An exception in a step
ends the step's requests, so a second slot for each would waste memory. Making a copy moves no data: at a page
end worth keeping, the slot just written becomes the copy, and the next step reads it and writes another slot.
Steps never write to a copy, so an exception cannot damage it.

A step that verifies draft tokens writes the state after each of its rows; states after draft tokens go to
spare slots. The state after the last accepted token becomes the request's own by an exchange of slot numbers.
The other states are dropped.

States are kept at these page ends:

- the last one of a prompt, for the same prompt (``n``);
- the last one before the tokens that open an answer, for the next turn, where these tokens may differ;
- the last one before each message border of the prompt (:attr:`Job.borders`);
- the end of the pages that a prompt shares with earlier ones, such as a system prompt: the second such prompt
  reveals it;
- the last one that a request has generated, in place of its previous one: a conversation's end.

If no slot is free for a copy, the least useful copy is dropped (:mod:`hotcold.engine.state_copies`)."""

from hotcold.engine.prefix_cache import CachedPrefix, PrefixCache, shares
from hotcold.engine.request import Request
from hotcold.engine.state_copies import Copy, least_useful
from hotcold.kernels.backend import PAGE
from hotcold.model.kv_cache import SlotPool

#: Tokens at a prompt's end that its next turn may lack: templates end a prompt with tokens that open or close
#: a thought, and omit these in past turns.
_OPENING = 6


class States:
    """Assigns state slots to requests; keeps no copies without ``prefixes``."""

    def __init__(self, slots: SlotPool, prefixes: PrefixCache | None) -> None:
        self.slots = slots
        self._prefixes = prefixes
        self._copies: dict[bytes, Copy] = {}  # by key; some may have lost their slot
        self._borrowed: dict[Request, range] = {}  # spare slots of this step, one for each draft token
        self._next = slots.slots  # first spare slot that is free in this step

    def start(self, request: Request, cached: CachedPrefix) -> bool:
        """Gives a request its own slot, and lets its first step read the cached state; returns False if no
        slot is free."""
        request.state = cached.slot
        if cached.slot >= 0:
            self.slots.hold(request, cached.slot)
        self._mark_used(request)
        slot = self._take(request, request.length)
        if slot is None and cached.slot >= 0 and self.slots.forget(cached.slot):
            slot = cached.slot  # all others are in use, and no other request reads this one
        if slot is None:
            self.slots.release(request)
            return False
        request.slot = slot
        request.borders = self._borders(request, cached)
        return True

    def _borders(self, request: Request, cached: CachedPrefix) -> tuple[int, ...]:
        """Returns the positions at which a request's state is worth keeping."""
        if self._prefixes is None or not shares(request):
            return ()
        ends = (request.length, max(request.length - _OPENING, 0), *request.job.borders)
        pages = {cached.known, *(end // PAGE for end in ends)}
        return tuple(PAGE * each for each in sorted(pages) if each > len(cached.pages))

    def _mark_used(self, request: Request) -> None:
        """Marks the copies of a request's prefixes as used."""
        keys = request.page_keys
        for key, copy in self._copies.items():
            if copy.pages <= len(keys) and keys[copy.pages - 1] == key:
                copy.used = request.arrival
                copy.border = _has_border(request, copy.pages)

    def read_from(self, request: Request, copy: int) -> None:
        """Lets the next step of a running request read a copy."""
        self._let_go(request)
        self.slots.hold(request, copy)
        request.state = copy

    def end(self, request: Request, end: int) -> int:
        """Returns the position where a step with prompt rows up to ``end`` must end, so that no state worth
        keeping is overwritten."""
        return min((each for each in request.borders if request.computed < each < end), default=end)

    def begin(self) -> None:
        """Begins a step: takes all spare slots back."""
        self._borrowed = {}
        self._next = self.slots.slots

    def lend(self, request: Request, drafts: int) -> int:
        """Reserves spare slots for the states after draft tokens; returns how many draft tokens get one."""
        first, end = self._next, self.slots.slots + self.slots.spare
        self._next = min(first + drafts, end)
        self._borrowed[request] = range(first, self._next)
        return self._next - first

    def targets(self, request: Request) -> list[int]:
        """Returns the slots that the next step writes: one for the state after the request's last token, then
        one for each draft token."""
        at = self.slots.at
        return [at(request.slot), *map(at, self._borrowed.get(request, ()))]

    def written(self, request: Request, start: int) -> None:
        """Takes over the states that a step has written from position ``start`` on; those before
        :attr:`Request.computed` are valid."""
        self._let_go(request)
        borrowed, end = self._borrowed.get(request, ()), request.computed
        if borrowed and end > start + 1:
            slots = [request.slot, *borrowed]  # states after position start and after each draft token
            border = end // PAGE * PAGE
            if start < border < end:
                self._keep_passed(request, border, slots[border - start - 1])
            self.slots.exchange(request.slot, slots[end - start - 1])
        request.state = request.slot

    def keep(self, request: Request) -> None:
        """Keeps the state just written as a copy, if it is worth keeping and a slot is free; the request then
        gets another slot."""
        key = self._key(request, request.computed)
        next_slot = None if key is None else self._slot_for_copy(request, request.computed)
        if key is None or next_slot is None:
            return
        self._keep(request, request.computed, request.slot, key)
        request.slot = next_slot

    def _keep_passed(self, request: Request, border: int, slot: int) -> None:
        """Keeps the state at a page end that accepted draft tokens have passed; it is in a spare slot."""
        key = self._key(request, border)
        copy = None if key is None else self._slot_for_copy(request, border)
        if key is None or copy is None:
            return
        self.slots.exchange(copy, slot)
        self._keep(request, border, copy, key)
        self.slots.drop(request, copy)

    def _keep(self, request: Request, position: int, slot: int, key: bytes) -> None:
        self.slots.keep(slot, key)
        pages = position // PAGE
        self._copies[key] = Copy(pages, request.arrival, _has_border(request, pages))
        if position not in request.borders:
            request.last_copy = key

    def _key(self, request: Request, position: int) -> bytes | None:
        """Returns the key of the state before a position; None if it is not worth keeping, or is already
        kept."""
        key = self._prefixes.state_key(request, position) if self._prefixes is not None else None
        generated = position >= len(request.job.prompt)
        if key is None or not (generated or position in request.borders):
            return None
        return None if self.slots.find(key) is not None else key

    def _slot_for_copy(self, request: Request, position: int) -> int | None:
        """Takes a further slot for a request. After the prompt, the request gives up its previous copy."""
        if position >= len(request.job.prompt) and request.last_copy is not None:
            self._forget(request.last_copy)
        return self._take(request, position)

    def _take(self, request: Request, position: int) -> int | None:
        """Takes a further slot for a request at a position, if need be from the least useful copy; returns
        None if no slot is free."""
        if self.slots.kept and self.slots.kept == self.slots.free:
            self._forget(least_useful(self._unread(), request.arrival, position // PAGE))
        return self.slots.take(request)

    def _unread(self) -> dict[bytes, Copy]:
        """Returns the copies that no request reads; forgets copies that have lost their slot."""
        unread = {}
        for key, copy in [*self._copies.items()]:
            slot = self.slots.find(key)
            if slot is None:
                del self._copies[key]
            elif not self.slots.owners(slot):
                unread[key] = copy
        return unread

    def _forget(self, key: bytes) -> None:
        """Drops a copy, unless several requests read it."""
        slot = self.slots.find(key)
        if slot is None or self.slots.forget(slot):
            self._copies.pop(key, None)

    def release(self, request: Request) -> None:
        """Frees a request's slots; copies stay."""
        self.slots.release(request)

    def _let_go(self, request: Request) -> None:
        """Releases the copy that a request has read or was about to read."""
        if request.state not in (-1, request.slot):
            self.slots.drop(request, request.state)


def _has_border(request: Request, pages: int) -> bool:
    """Returns whether a message border is in the page that follows the first ``pages`` of a request."""
    return any(border // PAGE == pages for border in request.job.borders)
