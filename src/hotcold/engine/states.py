"""Gives running requests the slots that hold their states, and keeps copies from which later requests go on.

A running request owns one slot, and its steps read and write the state there, in place: a step that an
exception breaks off ends its requests anyhow, so a second slot for each would waste memory. Making a copy
copies no value: where a step ends at a page's end that is worth keeping, the slot that the request has
written becomes the copy, and the next step reads it and writes another slot. Steps only ever read a copy, so
no exception can spoil it.

A step that verifies guesses writes the state after each of its rows, those after guesses into spare slots.
The one after the last right guess becomes the request's own by changing numbers, and the others are
forgotten.

States are kept at these page ends:

- the last one of a prompt, for the same prompt (``n``), and the last one before the tokens that open an
  answer, for the next turn, which may have others there;
- the last one before each message border of the prompt (:attr:`Job.borders`);
- the end of the pages that a prompt shares with earlier ones, such as a system prompt: it shows with the
  second of them;
- the last one that a request has generated, which replaces the one before: a conversation's end.

Where no slot is free for a copy, the least useful one makes way (:mod:`hotcold.engine.state_copies`)."""

from hotcold.engine.prefix_cache import Found, PrefixCache, shares
from hotcold.engine.request import Request
from hotcold.engine.state_copies import Copy, least_useful
from hotcold.kernels.backend import PAGE
from hotcold.model.kv_cache import SlotPool

#: Tokens at a prompt's end that its next turn may lack: a template ends prompts with some that open or close
#: a thought, and leaves these out of past turns.
_OPENING = 6


class States:
    """Gives requests slots; without ``prefixes`` no copy is kept."""

    def __init__(self, slots: SlotPool, prefixes: PrefixCache | None) -> None:
        self.slots = slots
        self._prefixes = prefixes
        self._copies: dict[bytes, Copy] = {}  # by the key of their slots, some of which are gone
        self._borrowed: dict[Request, range] = {}  # spare slots of this step, one for each guess
        self._next = slots.slots  # the first spare slot that nobody has in this step

    def start(self, request: Request, found: Found) -> bool:
        """Gives a request a slot of its own, and lets it read the state that was found first; False where no
        slot is free."""
        request.state = found.slot
        if found.slot >= 0:
            self.slots.hold(request, found.slot)
        self._mark_used(request)
        own = self._take(request, request.length)
        if own is None and found.slot >= 0 and self.slots.forget(found.slot):
            own = found.slot  # all others are in use, and nobody else reads this one
        if own is None:
            self.slots.release(request)
            return False
        request.slot = own
        request.borders = self._borders(request, found)
        return True

    def _borders(self, request: Request, found: Found) -> tuple[int, ...]:
        """Returns the positions of a request's tokens at which its state is worth keeping."""
        if self._prefixes is None or not shares(request):
            return ()
        ends = (request.length, max(request.length - _OPENING, 0), *request.job.borders)
        pages = {found.known, *(end // PAGE for end in ends)}
        return tuple(PAGE * each for each in sorted(pages) if each > len(found.pages))

    def _mark_used(self, request: Request) -> None:
        """Notes which copies a request begins with."""
        keys = request.page_keys
        for key, copy in self._copies.items():
            if copy.pages <= len(keys) and keys[copy.pages - 1] == key:
                copy.used = request.arrival
                copy.border = _has_border(request, copy.pages)

    def read_from(self, request: Request, copy: int) -> None:
        """Lets a request that runs read another's state first."""
        self._let_go(request)
        self.slots.hold(request, copy)
        request.state = copy

    def end(self, request: Request, end: int) -> int:
        """Where a step with rows of a prompt up to ``end`` ends, so that it destroys no state that is to be
        kept."""
        return min((each for each in request.borders if request.computed < each < end), default=end)

    def begin(self) -> None:
        """Begins a step: no spare slot is lent."""
        self._borrowed = {}
        self._next = self.slots.slots

    def lend(self, request: Request, drafts: int) -> int:
        """Lends slots for the states after guesses of the coming step; returns how many guesses get one."""
        first, end = self._next, self.slots.slots + self.slots.spare
        self._next = min(first + drafts, end)
        self._borrowed[request] = range(first, self._next)
        return self._next - first

    def targets(self, request: Request) -> list[int]:
        """Returns the slots that the coming step writes: for the state after the request's own last row, and
        after each guess."""
        at = self.slots.at
        return [at(request.slot), *map(at, self._borrowed.get(request, ()))]

    def written(self, request: Request, start: int) -> None:
        """Notes that a step has written a request's states from a position on, of which those before
        :attr:`Request.computed` are right."""
        self._let_go(request)
        borrowed, end = self._borrowed.get(request, ()), request.computed
        if borrowed and end > start + 1:
            own = [request.slot, *borrowed]  # that of position start, and of each guess
            border = end // PAGE * PAGE
            if start < border < end:
                self._keep_passed(request, border, own[border - start - 1])
            self.slots.exchange(request.slot, own[end - start - 1])
        request.state = request.slot

    def keep(self, request: Request) -> None:
        """Keeps a copy of the state that a step has written, where it is worth it, and gives the request
        another slot; where no slot is free the state is not kept."""
        key = self._key(request, request.computed)
        own = None if key is None else self._slot_for_copy(request, request.computed)
        if key is None or own is None:
            return
        self._keep(request, request.computed, request.slot, key)
        request.slot = own

    def _keep_passed(self, request: Request, border: int, slot: int) -> None:
        """Keeps the state at a border that right guesses have passed, which lies in a slot of the step's."""
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
        """Returns the key of the state before a position; None if it is not worth keeping, or is kept."""
        key = self._prefixes.state_key(request, position) if self._prefixes is not None else None
        generated = position >= len(request.job.prompt)
        if key is None or not (generated or position in request.borders):
            return None
        return None if self.slots.find(key) is not None else key

    def _slot_for_copy(self, request: Request, position: int) -> int | None:
        """Takes one more slot for a request. Past its prompt, it gives up the copy that it made before."""
        if position >= len(request.job.prompt) and request.last_copy is not None:
            self._forget(request.last_copy)
        return self._take(request, position)

    def _take(self, request: Request, position: int) -> int | None:
        """Takes one more slot for a request that has come to a position, in place of the least useful copy
        if need be; None where no slot is free."""
        if self.slots.kept and self.slots.kept == self.slots.free:
            self._forget(least_useful(self._unread(), request.arrival, position // PAGE))
        return self.slots.take(request)

    def _unread(self) -> dict[bytes, Copy]:
        """Returns the copies that no request reads. Forgets those that have lost their slot."""
        unread = {}
        for key, copy in [*self._copies.items()]:
            slot = self.slots.find(key)
            if slot is None:
                del self._copies[key]
            elif not self.slots.owners(slot):
                unread[key] = copy
        return unread

    def _forget(self, key: bytes) -> None:
        """Gives up a copy, unless several requests read it."""
        slot = self.slots.find(key)
        if slot is None or self.slots.forget(slot):
            self._copies.pop(key, None)

    def release(self, request: Request) -> None:
        """Takes a request's slots back; copies stay for others."""
        self.slots.release(request)

    def _let_go(self, request: Request) -> None:
        """Gives back a copy that a request has read, or would have read."""
        if request.state not in (-1, request.slot):
            self.slots.drop(request, request.state)


def _has_border(request: Request, pages: int) -> bool:
    """Whether a message border lies in the page of a request after so many."""
    return any(border // PAGE == pages for border in request.job.borders)
