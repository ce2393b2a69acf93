"""The loop: schedule rows, run the model, choose tokens.

An engine is pure token ids and knows no text. It is not safe for use from several threads at once. An
interrupt (Ctrl-C) at any moment leaves each request before a token or after it: whoever goes on stepping gets
the same tokens, and whoever aborts gets all pages back."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hotcold.engine.request import Request
from hotcold.engine.sampler import Sampler
from hotcold.engine.scheduler import Scheduler
from hotcold.engine.session import Session
from hotcold.errors import UserError
from hotcold.kernels.backend import Floats


class Engine:
    def __init__(self, session: Session) -> None:
        self.session = session
        self.model = model = session.model
        batch = session.transformer.batch
        self.scheduler = Scheduler(batch, session.cache, context=model.context, chunk=model.chunk)
        self.sampler = Sampler(model.backend)
        self._logits: Floats = session.transformer.logits
        self._stop_ids = model.tokenizer.stop_ids

    def check(self, request: Request) -> None:
        """UserError: the prompt leaves no room for one token in the context, or an id is outside the
        vocabulary."""
        vocab = self.model.config.vocab
        ids = np.asarray(request.prompt)
        if ids.dtype.kind not in "iu":
            raise UserError(f"the prompt holds {ids.dtype}: token ids, whole numbers, are needed")
        for what, id in (
            ("the prompt", ids.min()),
            ("the prompt", ids.max()),
            ("logit_bias", max(request.params.logit_bias, default=0)),
        ):
            if not 0 <= id < vocab:
                raise UserError(f"{what} names token {id}: allowed are the ids 0 to {vocab - 1}")
        self.scheduler.check(request)

    def add(self, request: Request) -> None:
        """Queues a request; :meth:`step` starts it when a row and pages are free. Errors are those of
        :meth:`check`, and of :meth:`Session.claim`: something else uses the session."""
        self.check(request)
        self.session.claim(self)
        if request.ignore_eos and self._stop_ids:
            bias = {**request.params.logit_bias, **dict.fromkeys(self._stop_ids, -math.inf)}
            request.params = replace(request.params, logit_bias=bias)
        self.scheduler.add(request)

    def step(self) -> list[tuple[Request, list[int]]]:
        """Runs the model once; returns the requests that got tokens, or ended, with their new tokens. Empty
        when nothing was to do, or only a part of a prompt was read.

        A request whose token cannot be chosen ends alone, with :attr:`Request.error`; an exception from here
        is one of the model, and nobody's token is lost by it."""
        start = time.perf_counter()
        step = self.scheduler.schedule()  # fills the batch
        if not step.decode and not step.prompts:
            return []
        self.session.run()  # from the batch to logits
        results = [(request, self._continue(request, row)) for row, request in enumerate(step.sampled)]
        self.scheduler.advance(step)  # not before: an interrupted step is repeated
        self.scheduler.settle()
        seconds = time.perf_counter() - start
        if step.prompts:
            self.session.counters.prompt_s += seconds
        else:
            self.session.counters.decode_s += seconds
        return results

    def run(self, requests: Sequence[Request]) -> None:
        """Runs these to their end, beside each other and whatever else is queued; then raises the error of
        the first that failed. Where anything else is raised, they are cancelled."""
        try:
            try:
                for request in requests:
                    self.add(request)
                while not all(request.finished for request in requests):
                    self.step()
            finally:
                self._abort_all(requests)
        finally:
            self._abort_all(requests)  # again: an interrupt may have ended the first time
        for request in requests:
            if request.error is not None:
                raise request.error

    def abort(self, request: Request) -> None:
        """Ends a request as ``cancelled`` and gives its pages back; harmless when it has finished."""
        if not request.finished:
            request.finish("cancelled")
        self.scheduler.remove(request)

    @property
    def in_use(self) -> str:
        """Says what :meth:`Session.claim` tells another user; empty where no request is unfinished."""
        unfinished = self.scheduler.unfinished
        return f"an engine with {unfinished} unfinished requests" if unfinished else ""

    def _abort_all(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.abort(request)

    def _continue(self, request: Request, row: int) -> list[int]:
        """Chooses a request's next token from a row of logits; returns its new tokens."""
        try:
            token = self._sample(request, row)
        except Exception as error:
            request.error = error
            request.finish("error")
            return []
        if request.timings.first_token is None:
            request.timings.first_token = time.perf_counter()
        if token in self._stop_ids:
            request.finish("stop")
            return []
        request.output.append(token)  # the step of this request is done
        return [token]

    def _sample(self, request: Request, row: int) -> int:
        params = request.params
        recent = [*request.prompt, *request.output] if params.repeat_penalty != 1 else ()
        return self.sampler.sample(self._logits[row], params, request.length, recent)
