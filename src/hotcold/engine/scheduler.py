"""Which rows the next step computes: decode rows first, then a chunk of the prompts that are being read.

A request starts when there are a row of the page table and the pages of the tokens that it has; those of the
tokens to come are taken one by one. Where none is left, the request that came last goes back to the front of
the queue: it keeps its tokens, and their keys and values are computed again. So the oldest request goes on,
and each that is accepted comes to its end.

Every row from :attr:`Request.computed` to the last token is still to be computed, and the last one gives the
next token. For a request that decodes this is one row. Rows of a prompt that is scored follow the decode
rule, as many in a step as there is room for. What was generated before a request lost its pages is read again
like a prompt where that gives the same bits (``prefill_equals_decode``), and follows the decode rule where it
does not.

A row that decodes may have rows of guessed tokens behind it (:mod:`hotcold.engine.speculation`), as far as
rows and pages are free; those that turn out wrong are undone by :attr:`Request.computed`, and by the choice
of a slot where layers keep states.

A request may begin with pages that others computed (:class:`PrefixCache`): its own rows are those after them,
so nobody writes to a page that is shared. The same holds for slots of states (:class:`States`).

An exception, Ctrl-C for instance, may come between any two instructions. Nothing is repaired then:
:meth:`Scheduler.drop` ends what runs. It needs each unfinished request to be in a list at any moment, so a
request enters the new list before it leaves the old one."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from hotcold.engine.pace import Pace
from hotcold.engine.prefix_cache import Found, PrefixCache
from hotcold.engine.request import PromptTooLongError, Request, RequestError
from hotcold.engine.speculation import Speculation
from hotcold.engine.states import States
from hotcold.kernels.backend import PAGE, Batch
from hotcold.model.kv_cache import PagePool, SlotPool

_LONGEST_RETRY_S = 60.0

_arrival = attrgetter("arrival")


@dataclass(slots=True)
class Step:
    """The rows of one step: which requests own them, and what their logits are for."""

    decode: list[tuple[Request, int]] = field(default_factory=list)  #: and the position after its rows
    #: of each decode row, who owns it and which token of the answer it chooses; below 0 where none
    rows: list[tuple[Request, int]] = field(default_factory=list)
    prompts: list[tuple[Request, int]] = field(default_factory=list)  #: as ``decode``
    #: and the row of logits for the next token; behind it are those for the tokens after each guess
    sampled: list[tuple[Request, int]] = field(default_factory=list)
    drafts: Mapping[Request, Sequence[int]] = field(default_factory=dict)  #: that this step verifies
    wrong: dict[Request, int] = field(default_factory=dict)  #: of ``decode``, how many rows do not count
    logits: int = 0  #: rows of logits
    #: of prompts: the request, the position that its next token has, and the row of logits that judges it
    scored: list[tuple[Request, int, int]] = field(default_factory=list)
    #: of prompts that become a vector: the request, its first position here, the row of logits that this has,
    #: and how many
    pooled: list[tuple[Request, int, int, int]] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)  #: before it


class Scheduler:
    """Fills a :class:`Batch` in place from running requests, and admits waiting ones as rows and pages allow.

    ``context`` is the most positions of a sequence, ``pace`` chooses the prompt rows of a step,
    ``max_waiting`` is the most requests that may wait for a row. ``prefill_equals_decode``: rows of a prompt
    and rows that decode give the same bits. ``slots`` are those of states, one for each sequence at least;
    None where no layer keeps one. ``speculation`` chooses guesses, None for none."""

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
        #: requests of a step that failed, for one of them: each runs a step by itself before others run on
        self.suspects: list[Request] = []
        #: that were computed; those of scored prompts and of tokens read again among them
        self.prompt_rows = 0
        self.reused = 0  #: positions that were not
        self._changing = False  # pages and lists; an exception meanwhile leaves it True
        self._arrivals = 0
        self._time_limits = False  # whether any request has had one
        self._ended_at = 0.0
        self._seconds_per_end = 1.0

    @property
    def unfinished(self) -> int:
        """How many requests run or wait."""
        return sum(not request.finished for request in (*self.running, *self.waiting))

    def check(self, request: Request) -> None:
        """Raises RequestError when a prompt leaves no room for one token in the context, or in the cache."""
        prompt = len(request.job.prompt)
        if prompt >= self.context:
            raise PromptTooLongError(prompt, self.context, cache=self._pool_is_small)

    def add(self, request: Request) -> None:
        """Queues a request. RequestError: too many wait already, or it is too long."""
        if request.finished or request in self.running or request in self.waiting:
            raise ValueError("this request was added before: create a new one")
        self.check(request)
        free_rows = self.batch.limits.sequences - len(self.running)
        if self.max_waiting is not None and len(self.waiting) - free_rows >= self.max_waiting:
            wait = max(math.ceil(self._seconds_per_end), 1)
            seen = f"{len(self.running)} requests run and {len(self.waiting)} wait"
            raise RequestError(
                f"{seen}, which is the limit: try again in {wait} s", "queue_full", float(wait)
            )
        request.timings.added = time.perf_counter()
        request.arrival = self._arrivals
        self._arrivals += 1
        self._time_limits |= request.job.deadline_s is not None or request.job.timeout_s is not None
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forgets a finished request and gives its row and pages back; harmless when it is already gone."""
        self._begin()
        if request in self.waiting:
            self.waiting.remove(request)
        self._settle()
        self._changing = False

    def drop(self, why: str = "was interrupted") -> list[Request]:
        """Cancels the requests that run, with an error, and takes their pages back; returns them. Those that
        wait go on waiting. Where an exception came while pages changed hands, the cache begins anew, without
        the pages that were kept for others."""
        whole = not self._changing
        self._changing = True  # so that whoever comes after an interrupt from here on does this again
        for request in self.running:
            if not request.finished:
                told = f"a step {why}, which ended the running requests: send the request again"
                request.error = RequestError(told, "engine_failed")
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
        """Ends all requests, each with an error of its own; returns them."""
        unfinished = [request for request in (*self.running, *self.waiting) if not request.finished]
        for request in unfinished:
            request.fail(make_error())
        self.drop()
        return unfinished

    def _begin(self) -> None:
        """Begins a change of pages and lists, after what an exception broke off has been dropped."""
        if self._changing:
            self.drop()
        self._changing = True

    def _release(self, request: Request) -> None:
        self.cache.release(request)
        if self.states is not None:
            self.states.release(request)

    def _settle(self) -> list[Request]:
        """Ends requests that have all their tokens, and forgets those that ended; returns these."""
        ended = []
        for request in self.running:
            if request.finish_reason is None:
                tokens = len(request.output)
                going_on = tokens < request.job.max_tokens or not request.complete
                if going_on and len(request.job.prompt) + tokens < self.context:
                    continue
                request.finish("length")
            self._release(request)
            ended.append(request)
        if ended:
            self.running = [request for request in self.running if not request.finished]
            now = time.perf_counter()
            if self._ended_at:
                each = min((now - self._ended_at) / len(ended), _LONGEST_RETRY_S)
                self._seconds_per_end += 0.2 * (each - self._seconds_per_end)
            self._ended_at = now
        return ended

    def schedule(self) -> Step:
        """Fills the batch with the next step's rows."""
        self._begin()
        step = Step()
        if self.states is not None:
            self.states.begin()
        if self._time_limits:
            self._end_overdue(step)
        step.ended += self._settle()
        self._grow()
        self._admit(step)
        decoding, reading = [], []
        self.suspects = [each for each in self.suspects if each in self.running]
        for request in self.suspects[:1] or self.running:
            if self._decodes(request):
                decoding.append(request)
            else:
                reading.append(request)
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
        """Records which rows are in the cache, after the step's tokens are chosen; forgets the requests that
        ended, and returns them."""
        self._begin()
        for request, put in step.decode:
            start, end = request.computed, put - step.wrong.get(request, 0)
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
        if len(self.running) > self.batch.limits.decode:  # those served go to the end of the queue
            served = {request for request, _ in step.decode}
            self.running = sorted(self.running, key=served.__contains__)
        ended = self._settle()
        self._changing = False
        return ended

    def fail(self, step: Step, error: Exception) -> list[Request]:
        """After a step that failed for what one of its requests needs: ends that one, where it was alone, or
        lets each of them run alone once to find it. Nothing of the step counts, and it can be run again.
        Returns the requests that ended."""
        self._begin()
        ran = [request for request, _ in (*step.decode, *step.prompts) if not request.finished]
        if len(ran) > 1 or any(map(len, step.drafts.values())):  # a guess that nobody needs, perhaps
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
        """Whether its next row follows the decode rule."""
        if request.computed < len(request.job.prompt):
            return request.job.scored
        return not self.prefill_equals_decode or request.computed == request.length - 1 or request.job.scored

    def _end_overdue(self, step: Step) -> None:
        """Ends requests that have passed a time limit, with an error."""
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

    def _grow(self) -> None:
        """Sees to it that each running request has a page for its last token."""
        lacking = [each for each in self.running if each.length > len(each.pages) * PAGE]
        for request in sorted(lacking, key=_arrival):
            while request in self.running and request.length > len(request.pages) * PAGE:
                if not self.cache.extend(request):
                    self._make_room()

    def _make_room(self) -> None:
        """Sends the request that came last back to the front of the queue."""
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
        """Gives a request a row, the pages of its tokens and slots for its state; False where not enough are
        free. Each request that runs has a page left over, so that none is sent back at once."""
        if len(self.running) == self.batch.limits.sequences:
            return False
        found = self.prefixes.find(request) if self.prefixes is not None else Found()
        pages = -(-request.length // PAGE) - len(found.pages)
        if not self.cache.fits(pages + len(self.running), found.pages):
            return False
        if self.states is not None and not self.states.start(request, found):
            return False
        request.row = min(set(range(self.batch.limits.sequences)) - {other.row for other in self.running})
        request.computed = request.kept = 0
        request.pages = self.cache.allocate(request, pages, found.pages)
        self.running.append(request)
        self._skip(request, len(found.pages))
        if request.timings.started is None:
            request.timings.started = request.progress = time.perf_counter()
        return True

    def _skip(self, request: Request, pages: int) -> None:
        """Goes on behind a request's first pages, which others computed."""
        skipped = pages * PAGE - request.computed
        if not request.preempted:
            request.reused += skipped
        self.reused += skipped
        request.computed = pages * PAGE
        request.kept = pages
        self.batch.pages[request.row, :pages] = request.pages[:pages]

    # --- guesses --------------------------------------------------------------------------------------

    def _drafts(self, speculation: Speculation, decoding: Sequence[Request]) -> dict[Request, Sequence[int]]:
        """The guesses of the next step, of which each has a row, a page and a slot. None where a request has
        more tokens to compute than one: those take the rows."""
        limits, served = self.batch.limits, decoding[: self.batch.limits.decode]
        spare = min(limits.decode - len(served), limits.logits - len(self.running))
        if self.states is not None:
            spare = min(spare, self.states.slots.spare)
        if spare < 1 or any(each.computed < each.length - 1 for each in served):
            return {}
        most_drafts = {each: self._tokens_left(each) - 1 for each in served}
        chosen = speculation.choose(most_drafts, len(served), spare)
        given = {each: tokens[: self._paged(each, len(tokens))] for each, tokens in chosen.items()}
        if self.states is None:
            return given
        return {each: tokens[: self.states.lend(each, len(tokens))] for each, tokens in given.items()}

    def _tokens_left(self, request: Request) -> int:
        """How many tokens it may still get."""
        return min(request.job.max_tokens - len(request.output), self.context - request.length)

    def _paged(self, request: Request, more: int) -> int:
        """How many of so many tokens after its last one have a page; it takes one that nobody will want."""
        while request.length + more > len(request.pages) * PAGE:
            if self.cache.free_pages <= len(self.running) or not self.cache.extend(request):
                return len(request.pages) * PAGE - request.length
        return more

    # --- rows -----------------------------------------------------------------------------------------

    def _put_decode_rows(self, requests: Sequence[Request], step: Step) -> int:
        """Adds one row of each request, and of those that have more as many as there is room for; returns the
        number of rows of the step."""
        batch = self.batch
        limits, row = batch.limits, 0
        more = [each for each in requests if each.computed < each.length - 1]
        extra: dict[Request, int] = {}
        if more:
            spare = min(limits.decode - len(requests), limits.logits - len(self.running))
            more.sort(key=_arrival)
            wanted = [each.length - 1 - each.computed for each in more]
            extra = dict(zip(more, divided(max(spare, 0), wanted), strict=True))
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
        """Adds the rows of a request's positions, guesses last; returns the row after them."""
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
            self._look_again(request)
        ends = [each.length if self.prefill_equals_decode else len(each.job.prompt) for each in requests]
        if self.states is not None:
            ends = [self.states.end(each, end) for each, end in zip(requests, ends, strict=True)]
        wanted = [end - each.computed for each, end in zip(requests, ends, strict=True)]
        given = divided(min(self.pace.rows(awaited=bool(step.sampled)), batch.limits.tokens - row), wanted)
        for after, request, rows in zip(range(len(requests))[::-1], requests, given, strict=True):
            if request.job.pooling == "mean":  # each of its rows takes a row of logits; others need one each
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

    def _look_again(self, request: Request) -> None:
        """Others may have computed what comes next since the request started, if they began alike."""
        if self.prefixes is None:
            return
        first = request.computed // PAGE
        found = self.prefixes.find(request, first)
        if found.pages:
            self.cache.share(request, first, found.pages)
            if self.states is not None:
                self.states.read_from(request, found.slot)
            self._skip(request, first + len(found.pages))


def divided(rows: int, wanted: Sequence[int]) -> list[int]:
    """How many rows each request gets, in order of arrival: the first gets half of them at least, and the
    others go to those that want least. So neither a long prompt nor the short ones after it stand still."""
    given = [min(wanted[0], -(-rows // 2)), *[0] * (len(wanted) - 1)]
    left = rows - given[0]
    for i in sorted(range(len(wanted)), key=lambda i: wanted[i] - given[i]):
        more = min(wanted[i] - given[i], left)
        given[i] += more
        left -= more
    return given
