"""Which rows the next step computes: decode rows first, then a chunk of the waiting prompts.

A request may begin with pages that others own, which hold a prefix of its prompt: its own rows are those
after it, so nobody writes to a page that is shared.

A request reserves all the pages that it may ever need when it is admitted, so a running request never dies
for want of memory; one that does not fit yet waits, in order of arrival.

Ctrl-C may come between any two instructions. So nothing is kept twice: a request runs while it is in
:attr:`Scheduler.running`, which rows are free follows from that, and which pages are free from the cache's
list of owners. What an interrupt left undone, :meth:`Scheduler.settle` and the next
:meth:`Scheduler.schedule` do."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from hotcold.engine.request import Request
from hotcold.errors import UserError
from hotcold.kernels.backend import PAGE, Batch
from hotcold.model.kv_cache import PagePool


@dataclass(slots=True)
class Step:
    """The rows of one step: which request owns how many, and whose next token its logits choose."""

    decode: list[Request] = field(default_factory=list)  #: one row each
    prompts: list[tuple[Request, int]] = field(default_factory=list)  #: and where in the prompt its rows end
    sampled: list[Request] = field(default_factory=list)  #: in the order of the logits rows
    ended: list[Request] = field(default_factory=list)  #: before it


class Scheduler:
    """Fills a :class:`Batch` in place from running requests, and admits waiting ones as rows and pages allow.
    ``context`` is the most positions of a sequence, ``chunk`` the most prompt rows of a step."""

    def __init__(self, batch: Batch, cache: PagePool, *, context: int, chunk: int) -> None:
        self.batch = batch
        self.cache = cache
        self.context = context
        self.chunk = chunk
        #: called with the number of pages that a waiting request lacks: whoever keeps prefixes for later
        #: gives up as many, where it can; if still too few are free, the request waits for another to end
        self.reclaim: Callable[[int], object] = lambda pages: None
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._steps_of_one = np.arange(chunk, dtype=np.int32)

    @property
    def unfinished(self) -> int:
        """How many requests run or wait."""
        return sum(not request.finished for request in {*self.running, *self.waiting})

    def check(self, request: Request) -> None:
        """Raises UserError when a prompt leaves no room for one token, or can never fit in the cache."""
        prompt = len(request.prompt)
        if prompt >= self.context:
            fix = "shorten the prompt, or enlarge the context (-c) as far as the model allows"
            seen = f"the prompt has {prompt} tokens and the context holds {self.context}"
            raise UserError(f"{seen}, one of them for the answer: {fix}")
        if (pages := self._pages_for(request)) > self.cache.pages:
            raise UserError(f"the request may need {pages} pages of KV cache, which has {self.cache.pages}")

    def add(self, request: Request) -> None:
        if request.finished or request in self.running or request in self.waiting:
            raise ValueError("this request was added before: make another one")
        self.check(request)
        request.timings.added = time.perf_counter()
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forgets a finished request and gives its row and pages back; harmless when it is already gone."""
        if request in self.waiting:
            self.waiting.remove(request)
        self.cache.release(request)
        self.settle()

    def settle(self) -> list[Request]:
        """Ends requests that have all their tokens, and forgets those that ended; returns these."""
        ended = []
        for request in self.running:
            if not request.finished and self._is_complete(request):
                request.context_full = len(request.output) < request.max_tokens
                request.finish("length")
            if request.finished:
                self.cache.release(request)
                ended.append(request)
        if ended:
            self.running = [request for request in self.running if not request.finished]
        return ended

    def schedule(self) -> Step:
        """Fills the batch with the next step's rows. Nothing advances: an interrupted step is scheduled
        again."""
        step = Step(ended=self.settle())
        self._admit()
        batch = self.batch
        for request in self.running:
            if request.decoding and (row := len(step.decode)) < batch.limits.decode:
                position = request.length - 1
                batch.tokens[row] = request.output[-1]
                batch.positions[row] = position
                batch.sequence[row] = request.row
                batch.slots[row] = request.pages[position // PAGE] * PAGE + position % PAGE
                batch.lengths[request.row] = position + 1
                batch.logits_rows[row] = row
                step.decode.append(request)
        step.sampled += step.decode
        rows = n_decode = len(step.decode)
        if n_decode < len(self.running):
            rows = self._put_prompts(n_decode, step)
        sequences = max((request.row for request in self.running), default=-1) + 1
        batch.counts[:] = (rows, n_decode, len(step.sampled), sequences)
        return step

    def advance(self, step: Step) -> None:
        """Records which prompt rows are in the cache; when the step's tokens are chosen, since the whole
        prompt in the cache without a first token would be a state of its own."""
        for request, end in step.prompts:
            request.computed = end
        if len(self.running) > self.batch.limits.decode:  # those served go to the end of the queue
            self.running = sorted(self.running, key=set(step.decode).__contains__)

    def _is_complete(self, request: Request) -> bool:
        return len(request.output) >= request.max_tokens or request.length >= self.context

    def _pages_for(self, request: Request) -> int:
        positions = min(len(request.prompt) + request.max_tokens, self.context)
        return -(-positions // PAGE)

    def _admit(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            if request.finished:
                self.cache.release(request)
            elif request not in self.running and not self._start(request):
                return
            self.waiting.popleft()

    def _start(self, request: Request) -> bool:
        """Gives a request a row and its pages; False where not enough are free."""
        self.cache.release(request)  # those of an attempt that was interrupted
        pages = self._pages_for(request)
        rows = set(range(self.batch.limits.sequences)) - {other.row for other in self.running}
        if not rows:
            return False
        shared = self._prefix_pages(request)
        if (lacking := pages - len(shared) - self.cache.free_pages) > 0:
            self.reclaim(lacking)
            shared = self._prefix_pages(request)  # it may be among what was given up
        if pages - len(shared) > self.cache.free_pages:
            return False
        request.row = min(rows)
        request.reused = request.computed = len(shared) * PAGE
        request.pages = self.cache.allocate(request, pages - len(shared), shared)
        self.batch.pages[request.row, :pages] = request.pages
        self.running.append(request)
        return True

    def _prefix_pages(self, request: Request) -> list[int]:
        """Pages to begin with: full ones, and not all of the prompt, whose last row gives the first token."""
        found: list[int] = []
        for owner in takewhile(self.cache.owns, request.prefix):
            found += self.cache.pages_of(owner)
        return found[: (len(request.prompt) - 1) // PAGE]

    def _put_prompts(self, row: int, step: Step) -> int:
        """Adds prompt rows of as many requests as fit; returns the number of rows of the step."""
        batch = self.batch
        left = min(self.chunk, batch.limits.tokens - row)
        for request in self.running:
            if request.decoding or left == 0:
                continue
            start = request.computed
            rows = min(left, len(request.prompt) - start)
            span = slice(row, row + rows)
            positions = batch.positions[span]
            np.add(self._steps_of_one[:rows], start, out=positions)
            batch.tokens[span] = request.prompt[start : start + rows]
            batch.sequence[span] = request.row
            batch.slots[span] = batch.pages[request.row, positions // PAGE] * PAGE + positions % PAGE
            batch.lengths[request.row] = start + rows
            step.prompts.append((request, start + rows))
            row += rows
            left -= rows
            if start + rows == len(request.prompt):
                batch.logits_rows[len(step.sampled)] = row - 1
                step.sampled.append(request)
        return row
