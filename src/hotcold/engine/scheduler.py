"""The scheduler: chooses the rows of the next step, decode rows first, then prompt rows.

A request starts when a row of the page table and the pages of its present tokens are free. Pages of later
tokens are allocated one at a time. When none is free, the scheduler preempts the youngest request: the
request keeps its tokens and returns to the front of the queue, and its keys and values are computed again
later. The oldest request is never preempted for another one, so each accepted request ends.

The rows from :attr:`Request.computed` to the last token are still to be computed; the last one gives the next
token. A decoding request has one such row. Rows of a scored prompt follow the decode rule, and a step takes
as many as fit. Generated tokens of a preempted request are computed again: as prompt rows if these have the
same bits as decode rows (``prefill_equals_decode``), else as decode rows.

Rows of draft tokens may follow a decode row (:mod:`hotcold.engine.speculation`), as far as rows and pages are
free. To undo rejected tokens, :attr:`Request.computed` stays before their rows. Where layers keep states, the
request takes the slot written before those rows.

A request may begin with pages that other requests computed (:class:`PrefixCache`). Its own rows come after
these pages, so no request writes to a shared page. The same holds for state slots (:class:`States`).

An exception such as Ctrl-C may come between any two instructions. :meth:`Scheduler.drop` then ends all
running requests instead of repairing them. It finds each unfinished request in a list, so a request enters
the new list before it leaves the old one."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from hotcold.engine.pace import Pace
from hotcold.engine.prefix_cache import CachedPrefix, PrefixCache
from hotcold.engine.request import PromptTooLongError, Request, RequestError
from hotcold.engine.speculation import Speculation
from hotcold.engine.states import States
from hotcold.kernels.backend import PAGE, Batch
from hotcold.model.kv_cache import PagePool, SlotPool

_LONGEST_RETRY_S = 60.0

_arrival = attrgetter("arrival")


@dataclass(slots=True)
class Step:
    """The rows of one step, the requests that own them, and the use of each row of logits."""

    #: requests that decode, each with the position after its rows
    decode: list[tuple[Request, int]] = field(default_factory=list)
    #: request of each decode row, and the index of the answer token that the row chooses (negative: none)
    rows: list[tuple[Request, int]] = field(default_factory=list)
    #: requests with prompt rows, as ``decode``
    prompts: list[tuple[Request, int]] = field(default_factory=list)
    #: requests that get a token, each with its first row of logits; rows of its draft tokens follow
    sampled: list[tuple[Request, int]] = field(default_factory=list)
    drafts: Mapping[Request, Sequence[int]] = field(default_factory=dict)  #: draft tokens to verify
    rejected: dict[Request, int] = field(default_factory=dict)  #: rejected draft tokens
    logits: int = 0  #: rows of logits
    #: scored prompt tokens: the request, the token's position, and the row of logits before the token
    scored: list[tuple[Request, int, int]] = field(default_factory=list)
    #: pooled prompts: the request, its first position in this step, the row of logits there, and the count
    pooled: list[tuple[Request, int, int, int]] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)  #: requests that begin with this step
    ended: list[Request] = field(default_factory=list)  #: requests that ended before this step


class Scheduler:
    """Fills a :class:`Batch` in place from running requests, and starts waiting requests. ``context`` limits
    the positions of a sequence, ``pace`` the prompt rows of a step, and ``max_waiting`` the queue.
    ``prefill_equals_decode``: prompt rows have the same bits as decode rows. ``slots`` holds at least one
    state slot for each sequence, or is None if no layer keeps states. ``speculation`` drafts tokens, if
    given."""

    def __init__(
        self,
        batch: Batch,
        cache: PagePool,
        prefixes: PrefixCache | None = None,
        *,
        context: int,
        pace: Pace,
        prefill_equals_decode: bool = True,
        max_waiting: int | None = None,
        slots: SlotPool | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.batch = batch
        self.states = None if slots is None else States(slots, prefixes)
        self.cache = cache
        self.prefixes = prefixes
        self._pool_is_small = cache.pages * PAGE < context
        self.context = min(context, cache.pages * PAGE)
        self.pace = pace
        self.prefill_equals_decode = prefill_equals_decode
        self.max_waiting = max_waiting
        self.speculation = speculation
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        #: requests of a failed step; each runs alone for one step, to find the request that fails
        self.suspects: list[Request] = []
        #: prompt rows computed, including scored prompts and recomputation after preemption
        self.prompt_rows = 0
        self.reused = 0  #: prompt tokens served from the prefix cache
        self._changing = False  # True while pages and lists change, and after an exception there
        self._arrivals = 0
        self._time_limits = False  # whether any request so far has a time limit
        self._ended_at = 0.0
        self._seconds_per_end = 1.0

    @property
    def unfinished(self) -> int:
        """Number of running and waiting requests."""
        return sum(not request.finished for request in (*self.running, *self.waiting))

    def check(self, request: Request) -> None:
        """Raises RequestError if the context or the KV cache cannot hold the prompt and one token."""
        prompt = len(request.job.prompt)
        if prompt >= self.context:
            raise PromptTooLongError(prompt, self.context, cache=self._pool_is_small)

    def add(self, request: Request) -> None:
        """Queues a request. RequestError: the queue is full, or the prompt is too long."""
        if request.finished or request in self.running or request in self.waiting:
            raise ValueError("this request was added before: create a new one")
        self.check(request)
        free_rows = self.batch.limits.sequences - len(self.running)
        if self.max_waiting is not None and len(self.waiting) - free_rows >= self.max_waiting:
            wait = max(math.ceil(self._seconds_per_end), 1)
            got = f"{len(self.running)} requests run and {len(self.waiting)} wait"
            raise RequestError(f"{got}, which is the limit: try again in {wait} s", "queue_full", float(wait))
        request.timings.added = time.perf_counter()
        request.arrival = self._arrivals
        self._arrivals += 1
        self._time_limits |= request.job.deadline_s is not None or request.job.timeout_s is not None
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Removes a finished request and frees its row and pages; does nothing if it was removed before."""
        self._begin()
        if request in self.waiting:
            self.waiting.remove(request)
        self._settle()
        self._changing = False

    def drop(self, why: str = "was interrupted") -> list[Request]:
        """Cancels the running requests with an error, frees their pages, and returns them. Waiting requests
        stay in the queue. After an exception during a change of pages, the whole cache is cleared, shared
        pages included."""
        whole = not self._changing
        self._changing = True  # an exception from here on makes the next call drop everything again
        for request in self.running:
            if not request.finished:
                message = f"a step {why}, which ended the running requests: send the request again"
                request.error = RequestError(message, "engine_failed")
                request.finish("cancelled")
        self.waiting = deque(request for request in self.waiting if not request.finished)
        if whole:
            for request in self.running:
                self._release(request)
        else:
            self.cache.clear()
            if self.states is not None:
                self.states.slots.clear()
        if self.speculation is not None:
            self.speculation.drop()
        dropped, self.running, self.suspects = self.running, [], []
        self._changing = False
        return dropped

    def fail_all(self, make_error: Callable[[], Exception]) -> list[Request]:
        """Ends all requests, each with its own error; returns them."""
        unfinished = [request for request in (*self.running, *self.waiting) if not request.finished]
        for request in unfinished:
            request.fail(make_error())
        self.drop()
        return unfinished

    def _begin(self) -> None:
        """Begins a change of pages and lists; first drops the requests of an interrupted change."""
        if self._changing:
            self.drop()
        self._changing = True

    def _release(self, request: Request) -> None:
        self.cache.release(request)
        if self.states is not None:
            self.states.release(request)

    def _settle(self) -> list[Request]:
        """Ends requests that have all their tokens; removes ended requests and returns them."""
        ended = []
        for request in self.running:
            if request.finish_reason is None:
                tokens = len(request.output)
                wants_more = tokens < request.job.max_tokens or not request.complete
                if wants_more and len(request.job.prompt) + tokens < self.context:
                    continue
                request.finish("length")
            self._release(request)
            ended.append(request)
        if ended:
            self.running = [request for request in self.running if not request.finished]
            now = time.perf_counter()
            if self._ended_at:
                seconds = min((now - self._ended_at) / len(ended), _LONGEST_RETRY_S)
                self._seconds_per_end += 0.2 * (seconds - self._seconds_per_end)
            self._ended_at = now
        return ended

    def schedule(self) -> Step:
        """Fills the batch with the rows of the next step."""
        self._begin()
        step = Step()
        if self.states is not None:
            self.states.begin()
        if self._time_limits:
            self._end_overdue(step)
        step.ended += self._settle()
        self._allocate_pages()
        self._admit(step)
        decoding, reading = [], []
        self.suspects = [each for each in self.suspects if each in self.running]
        for request in self.suspects[:1] or self.running:
            if self._decodes(request):
                decoding.append(request)
            else:
                reading.append(request)
        decoding, reading = self.pace.choose(decoding, reading)
        if self.speculation is not None and not self.suspects:
            step.drafts = self._drafts(self.speculation, decoding)
        rows = n_decode = self._put_decode_rows(decoding, step)
        if reading:
            rows = self._put_prompts(n_decode, sorted(reading, key=_arrival), step)
        sequences = max((request.row for request in self.running), default=-1) + 1
        self.batch.counts[:] = (rows, n_decode, step.logits, sequences)
        self._changing = False
        return step

    def advance(self, step: Step) -> list[Request]:
        """Records computed rows after the step's tokens are chosen; removes and returns ended requests."""
        self._begin()
        for request, put in step.decode:
            start, end = request.computed, put - step.rejected.get(request, 0)
            if start < len(request.job.prompt):
                self.prompt_rows += end - start
            request.computed = end
            if self.states is not None:
                self.states.written(request, start)
            if end // PAGE > start // PAGE:
                self._keep(request)
        for request, end in step.prompts:
            start = request.computed
            self.prompt_rows += end - start
            request.computed = end
            if self.states is not None:
                self.states.written(request, start)
            self._keep(request)
        del self.suspects[:1]
        if len(self.running) > self.batch.limits.decode:  # requests that had a turn move to the end
            served = {request for request, _ in step.decode}
            self.running = sorted(self.running, key=served.__contains__)
        ended = self._settle()
        self._changing = False
        return ended

    def fail(self, step: Step, error: Exception) -> list[Request]:
        """Handles a failed step that one request caused; returns the requests that ended. A request that ran
        alone ends with the error. Otherwise each request runs alone in one of the next steps, to find the
        cause. No row of the failed step counts, so the step can be repeated."""
        self._begin()
        ran = [request for request, _ in (*step.decode, *step.prompts) if not request.finished]
        if len(ran) > 1 or any(map(len, step.drafts.values())):  # a draft token may have caused the error
            self.suspects = ran
        else:
            del self.suspects[:1]
            for request in ran:
                request.fail(error)
        if self.speculation is not None:
            self.speculation.drop()
        ended = self._settle()
        self._changing = False
        return ended

    def _keep(self, request: Request) -> None:
        if self.prefixes is not None:
            self.prefixes.keep(request)
        if self.states is not None:
            self.states.keep(request)

    def _decodes(self, request: Request) -> bool:
        """Returns whether the request's next row follows the decode rule."""
        if request.computed < len(request.job.prompt):
            return request.job.scored
        return not self.prefill_equals_decode or request.computed == request.length - 1 or request.job.scored

    def _end_overdue(self, step: Step) -> None:
        """Ends requests whose time limit has passed, with an error."""
        now = time.perf_counter()
        for request in (*self.running, *self.waiting):
            error = None if request.finished else request.overdue(now)
            if error is not None:
                request.fail(error)
                if request not in self.running:
                    step.ended.append(request)
        if any(request.finished for request in self.waiting):
            self.waiting = deque(request for request in self.waiting if not request.finished)

    # --- pages ----------------------------------------------------------------------------------------

    def _allocate_pages(self) -> None:
        """Allocates a page for the last token of each running request."""
        lacking = [each for each in self.running if each.length > len(each.pages) * PAGE]
        for request in sorted(lacking, key=_arrival):
            while request in self.running and request.length > len(request.pages) * PAGE:
                if not self.cache.extend(request):
                    self._preempt_youngest()

    def _preempt_youngest(self) -> None:
        """Preempts the youngest request: returns it to the front of the queue."""
        youngest = max(self.running, key=_arrival)
        youngest.preempted += 1
        self.preemptions += 1
        self.waiting.appendleft(youngest)
        self.running.remove(youngest)
        self._release(youngest)

    def _admit(self, step: Step) -> None:
        while self.waiting and self._start(self.waiting[0]):
            step.started.append(self.waiting.popleft())

    def _start(self, request: Request) -> bool:
        """Gives a request a row, pages for its tokens and slots for its state; returns False if too few are
        free. One page for each running request stays free, so that none is preempted in the next step."""
        if len(self.running) == self.batch.limits.sequences:
            return False
        cached = self.prefixes.find(request) if self.prefixes is not None else CachedPrefix()
        pages = -(-request.length // PAGE) - len(cached.pages)
        if not self.cache.fits(pages + len(self.running), cached.pages):
            return False
        if self.states is not None and not self.states.start(request, cached):
            return False
        request.row = min(set(range(self.batch.limits.sequences)) - {other.row for other in self.running})
        request.computed = request.kept = 0
        request.pages = self.cache.allocate(request, pages, cached.pages)
        self.running.append(request)
        self._skip_pages(request, len(cached.pages))
        if request.timings.started is None:
            request.timings.started = request.progress = time.perf_counter()
        return True

    def _skip_pages(self, request: Request, pages: int) -> None:
        """Skips the first pages of a request, which the prefix cache holds."""
        skipped = pages * PAGE - request.computed
        if not request.preempted:
            request.reused += skipped
        self.reused += skipped
        request.computed = pages * PAGE
        request.kept = pages
        self.batch.pages[request.row, :pages] = request.pages[:pages]

    # --- draft tokens ---------------------------------------------------------------------------------

    def _drafts(self, speculation: Speculation, decoding: Sequence[Request]) -> dict[Request, Sequence[int]]:
        """Returns the draft tokens of the next step, each with a row, a page and a slot. There are none while
        a request has more than one token to compute: such tokens take the spare rows."""
        limits, served = self.batch.limits, decoding[: self.batch.limits.decode]
        spare = min(limits.decode - len(served), limits.logits - len(self.running))
        if self.states is not None:
            spare = min(spare, self.states.slots.spare)
        if spare < 1 or any(each.computed < each.length - 1 for each in served):
            return {}
        most_drafts = {each: self._tokens_left(each) - 1 for each in served}
        chosen = speculation.choose(most_drafts, len(served), spare)
        given = {each: tokens[: self._with_pages(each, len(tokens))] for each, tokens in chosen.items()}
        if self.states is None:
            return given
        return {each: tokens[: self.states.lend(each, len(tokens))] for each, tokens in given.items()}

    def _tokens_left(self, request: Request) -> int:
        """Returns how many tokens the request may still get."""
        return min(request.job.max_tokens - len(request.output), self.context - request.length)

    def _with_pages(self, request: Request, tokens: int) -> int:
        """Returns how many of these draft tokens get a page; leaves a free page for each running request."""
        while request.length + tokens > len(request.pages) * PAGE:
            if self.cache.free_pages <= len(self.running) or not self.cache.extend(request):
                return len(request.pages) * PAGE - request.length
        return tokens

    # --- rows -----------------------------------------------------------------------------------------

    def _put_decode_rows(self, requests: Sequence[Request], step: Step) -> int:
        """Adds one row for each request, and further rows for requests with more tokens to compute, as far as
        they fit; returns the number of rows of the step."""
        batch = self.batch
        limits, row = batch.limits, 0
        unread = [each for each in requests if each.computed < each.length - 1]
        extra: dict[Request, int] = {}
        if unread:
            spare = min(limits.decode - len(requests), limits.logits - len(self.running))
            unread.sort(key=_arrival)
            wanted = [each.length - 1 - each.computed for each in unread]
            extra = dict(zip(unread, divided(max(spare, 0), wanted), strict=True))
        for request in requests[: limits.decode]:
            start, last, prompt = request.computed, request.length - 1, len(request.job.prompt)
            drafts = step.drafts.get(request, ())
            end = start + 1 + extra.get(request, 0) + len(drafts)
            for position in range(start, end):
                scored = len(request.prompt_logprobs) <= position + 1 < prompt
                if position == last:
                    step.sampled.append((request, step.logits))
                elif scored:
                    step.scored.append((request, position + 1, step.logits))
                if position >= last or scored:
                    batch.logits_rows[step.logits] = row + position - start
                    step.logits += 1
                step.rows.append((request, position + 1 - prompt))
            row = self._put(row, request, start, end, drafts)
            step.decode.append((request, end))
        return row

    def _put(self, row: int, request: Request, start: int, end: int, drafts: Sequence[int] = ()) -> int:
        """Adds the rows of a request's positions, draft tokens last; returns the row after them."""
        tokens = request.tokens(start, end - len(drafts))
        if drafts:
            tokens = [*tokens, *drafts]
        if self.states is None:
            return self.batch.put(row, request.row, start, tokens, request.pages)
        return self.batch.put(
            row,
            request.row,
            start,
            tokens,
            request.pages,
            state_from=self.states.slots.at(request.state),
            state_to=self.states.targets(request),
        )

    def _put_prompts(self, row: int, requests: Sequence[Request], step: Step) -> int:
        """Adds prompt rows of as many requests as fit; returns the number of rows of the step."""
        batch = self.batch
        for request in requests:
            self._skip_shared_pages(request)
        ends = [each.length if self.prefill_equals_decode else len(each.job.prompt) for each in requests]
        if self.states is not None:
            ends = [self.states.end(each, end) for each, end in zip(requests, ends, strict=True)]
        wanted = [end - each.computed for each, end in zip(requests, ends, strict=True)]
        limit = self.pace.rows(max(each.computed for each in requests), awaited=bool(step.sampled))
        given = divided(min(limit, batch.limits.tokens - row), wanted)
        for after, request, rows in zip(range(len(requests))[::-1], requests, given, strict=True):
            if request.job.pooling == "mean":  # each row needs a row of logits; later requests need one each
                rows = min(rows, batch.limits.logits - step.logits - after)
            if not rows:
                continue
            start, end = request.computed, request.computed + rows
            row = self._put(row, request, start, end)
            step.prompts.append((request, end))
            if request.job.pooling is not None:
                first = request.length - 1 if request.job.pooling == "last" else start
                last = min(end, 1) if request.job.pooling == "cls" else end
                count = max(last - first, 0)
                if count:
                    step.pooled.append((request, first, step.logits, count))
                rows_of_vector = range(row - (end - first), row - (end - last))
                batch.logits_rows[step.logits : step.logits + count] = rows_of_vector
                step.logits += count
            elif end == request.length:
                batch.logits_rows[step.logits] = row - 1
                step.sampled.append((request, step.logits))
                step.logits += 1
        return row

    def _skip_shared_pages(self, request: Request) -> None:
        """Skips pages with the request's next tokens that other requests computed since it started."""
        if self.prefixes is None:
            return
        first = request.computed // PAGE
        cached = self.prefixes.find(request, first)
        if cached.pages:
            self.cache.share(request, first, cached.pages)
            if self.states is not None:
                self.states.read_from(request, cached.slot)
            self._skip_pages(request, first + len(cached.pages))


def divided(rows: int, wanted: Sequence[int]) -> list[int]:
    """Divides the rows of a step among requests in order of arrival. The first request gets at least half of
    the rows; the others go to the smallest demands first. So neither a long prompt nor the short ones after
    it are starved."""
    given = [min(wanted[0], -(-rows // 2)), *[0] * (len(wanted) - 1)]
    left = rows - given[0]
    for i in sorted(range(len(wanted)), key=lambda i: wanted[i] - given[i]):
        extra = min(wanted[i] - given[i], left)
        given[i] += extra
        left -= extra
    return given
