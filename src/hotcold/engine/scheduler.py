"""Which rows the next step computes: decode rows first, then a chunk of the waiting prompts.

A request reserves all the pages that it may ever need when it is admitted, so a running request never dies
for want of memory; one that does not fit yet waits, in order of arrival."""

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from hotcold.engine.request import Request
from hotcold.kernels.backend import MAX_DECODE_ROWS, PAGE, Batch
from hotcold.model.kv_cache import KVCache


@dataclass(slots=True)
class Step:
    """The rows of one step: which request owns how many, and whose next token its logits choose."""

    decode: list[Request] = field(default_factory=list)  #: one row each
    prompts: list[tuple[Request, int]] = field(default_factory=list)  #: and how many rows
    sampled: list[Request] = field(default_factory=list)  #: in the order of the logits rows


class Scheduler:
    """Fills a :class:`Batch` in place from running requests, and admits waiting ones as rows and pages allow.
    ``context`` is the most positions of a sequence, ``chunk`` the most prompt rows of a step."""

    def __init__(self, batch: Batch, cache: KVCache, *, context: int, chunk: int) -> None:
        self.batch = batch
        self.cache = cache
        self.context = context
        self.chunk = chunk
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.total_pages = cache.free_pages
        self._free_rows = list(range(batch.limits.sequences - 1, -1, -1))
        self._steps_of_one = np.arange(chunk, dtype=np.int32)

    def check(self, request: Request) -> None:
        """Raises ValueError when a prompt leaves no room for one token, or can never fit in the cache."""
        prompt = len(request.prompt)
        if prompt >= self.context:
            fix = "shorten the prompt, or enlarge the context (-c) as far as the model allows"
            seen = f"the prompt has {prompt} tokens and the context holds {self.context}"
            raise ValueError(f"{seen}, one of them for the answer: {fix}")
        if (pages := self._pages_for(request)) > self.total_pages:
            raise ValueError(f"the request may need {pages} pages of KV cache, which has {self.total_pages}")

    def add(self, request: Request) -> None:
        self.check(request)
        request.timings.added = time.perf_counter()
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forgets a request and gives its pages back; harmless when it is already gone."""
        if request.row >= 0:
            self.running.remove(request)
            self.cache.release(request.pages)
            self._free_rows.append(request.row)
            request.pages, request.row = [], -1
        elif request in self.waiting:
            self.waiting.remove(request)

    def schedule(self) -> Step:
        """Fills the batch with the next step's rows. Nothing advances until :meth:`advance`."""
        if self.waiting:
            self._admit()
        step, batch = Step(), self.batch
        for request in self.running:
            if request.decoding and (row := len(step.decode)) < MAX_DECODE_ROWS:
                position = request.computed
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
        batch.counts[0], batch.counts[1], batch.counts[2] = rows, n_decode, len(step.sampled)
        return step

    def advance(self, step: Step) -> None:
        """Records that the step ran; not before, so that an interrupted step is simply repeated."""
        for request in step.decode:
            request.computed += 1
        for request, rows in step.prompts:
            request.computed += rows
        if len(self.running) > MAX_DECODE_ROWS:  # those served go to the end of the queue
            served = set(map(id, step.decode))
            self.running.sort(key=lambda request: id(request) in served)

    def _pages_for(self, request: Request) -> int:
        positions = min(len(request.prompt) + request.max_tokens, self.context)
        return -(-positions // PAGE)

    def _admit(self) -> None:
        while self.waiting and self._free_rows:
            request = self.waiting[0]
            if (need := self._pages_for(request)) > self.cache.free_pages:
                return
            self.waiting.popleft()
            request.pages = self.cache.allocate(need)
            request.row = self._free_rows.pop()
            self.batch.pages[request.row, :need] = request.pages
            # Rows are numbered from 0 and reused; the count only has to cover the highest one.
            self.batch.counts[3] = max(int(self.batch.counts[3]), request.row + 1)
            self.running.append(request)

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
            step.prompts.append((request, rows))
            row, left = row + rows, left - rows
            if start + rows == len(request.prompt):
                batch.logits_rows[len(step.sampled)] = row - 1
                step.sampled.append(request)
        return row
