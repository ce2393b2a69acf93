"""Which slots hold the states of running requests, and the copies from which others may go on.

A running request owns one slot, and its steps read and write the state there, in place: a step that an
exception breaks off ends its requests anyhow, so a second slot for each would be memory for nothing. A copy
is made without copying: where a step ends at a border of pages that is worth keeping, what the request has
written becomes the copy, and the next step reads that and writes another slot. Steps only ever read a copy,
so no exception can spoil it.

Borders worth keeping are the last one of a prompt but for a few tokens, from which the same prompt (``n``)
and the next turn go on; the one up to which a prompt begins like another and then goes its own way, the end
of a system prompt, say, which shows with the second of them; and the last border that a request has
generated, which replaces the one before it: a conversation's end. Copies are given away as pages are, those
that were unused longest first."""

from hotcold.engine.prefix_cache import Found, PrefixCache
from hotcold.engine.request import Request
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

    def start(self, request: Request, found: Found) -> bool:
        """Gives a request a slot of its own, and lets it read the state that was found first; False where no
        slot is free."""
        request.state = found.slot
        if found.slot >= 0:
            self.slots.hold(request, found.slot)
        own = self.slots.take(request)
        if own is None and found.slot >= 0 and self.slots.forget(found.slot):
            own = found.slot  # all others are in use, and nobody else reads this one
        if own is None:
            self.slots.release(request)
            return False
        request.slot = own
        request.borders = ()
        if self._prefixes is not None:
            last = min(self._prefixes.last_page(request), max(request.length - _OPENING, 0) // PAGE)
            borders = {min(found.known, last) * PAGE, last * PAGE}
            request.borders = tuple(sorted(each for each in borders if each > len(found.pages) * PAGE))
        return True

    def read_from(self, request: Request, copy: int) -> None:
        """Lets a request that runs read another's state first."""
        self._let_go(request)
        self.slots.hold(request, copy)
        request.state = copy

    def end(self, request: Request, end: int) -> int:
        """Where a step with rows of a prompt up to ``end`` ends, so that it destroys no state that is to be
        kept."""
        return min((each for each in request.borders if request.computed < each < end), default=end)

    def written(self, request: Request) -> None:
        """Notes that a step has written a request's slot."""
        self._let_go(request)
        request.state = request.slot

    def keep(self, request: Request) -> None:
        """Keeps a copy of the state that a step has written, where it is worth it, and gives the request
        another slot; where none is free the state is not kept."""
        key = self._prefixes.state_key(request) if self._prefixes is not None else None
        generated = request.computed >= len(request.job.prompt)
        if key is None or not (generated or request.computed in request.borders):
            return
        if self.slots.find(key) is not None:
            return
        if generated and request.last_copy is not None:
            before = self.slots.find(request.last_copy)
            if before is not None and not self.slots.owners(before):
                self.slots.forget(before)
        own = self.slots.take(request)
        if own is None:
            return
        self.slots.keep(request.slot, key)
        request.slot = own
        if generated:
            request.last_copy = key

    def release(self, request: Request) -> None:
        """Takes a request's slots back; copies stay for others."""
        self.slots.release(request)

    def _let_go(self, request: Request) -> None:
        """Gives back a copy that a request has read, or would have read."""
        if request.state not in (-1, request.slot):
            self.slots.drop(request, request.state)
