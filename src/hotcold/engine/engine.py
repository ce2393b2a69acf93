"""The loop: schedule rows, run the model, choose tokens.

An engine is pure token ids and knows no text. It is not safe for use from several threads at once. An
interrupt (Ctrl-C) at any moment leaves each request before a token or after it: whoever goes on stepping gets
the same tokens, and whoever aborts gets all pages back. Only the events of an interrupted step are lost:
``Request.output`` has what they told."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hotcold.engine.events import Event, Finished, Token
from hotcold.engine.request import FinishReason, Request
from hotcold.engine.sampler import Sampler
from hotcold.engine.scheduler import Scheduler
from hotcold.engine.session import Session
from hotcold.errors import UserError


class Engine:
    def __init__(self, session: Session) -> None:
        self.session = session
        self.model = model = session.model
        batch = session.transformer.batch
        self.scheduler = Scheduler(batch, session.cache, context=model.context, chunk=model.chunk)
        self.sampler = Sampler(session.transformer.head)
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

    def step(self) -> list[Event]:
        """Runs the model once; returns a :class:`Token` for each request that got one, then a
        :class:`Finished` for each that ended by itself. Empty when nothing was to do, or only a part of a
        prompt was read. Whoever calls :meth:`finish` knows, and gets no event.

        A request whose token cannot be chosen ends alone, with :attr:`Request.error`; an exception from here
        is one of the model, and nobody's token is lost by it."""
        start = time.perf_counter()
        step = self.scheduler.schedule()  # fills the batch
        if not step.decode and not step.prompts:
            return _ends(step.ended)
        self.session.run()  # from the batch to logits
        tokens = [self._continue(request, row) for row, request in enumerate(step.sampled)]
        self.scheduler.advance(step)  # not before: an interrupted step is repeated
        ended = step.ended + self.scheduler.settle()
        seconds = time.perf_counter() - start
        self.session.add_seconds(seconds, prompt=bool(step.prompts))
        return [token for token in tokens if token is not None] + _ends(ended)

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

    def finish(self, request: Request, reason: FinishReason = "stop") -> None:
        """Ends a request from outside, between two steps, whether it waits, reads its prompt or decodes: its
        pages are free at once, its tokens stay, and it gets no more. ``stop`` is for who found a stop string
        in its text. Harmless when it has finished, and then the reason stays as it was."""
        if not request.finished:
            request.finish(reason)
        self.scheduler.remove(request)

    def abort(self, request: Request) -> None:
        """:meth:`finish` as ``cancelled``."""
        self.finish(request, "cancelled")

    @property
    def in_use(self) -> str:
        """Says what :meth:`Session.claim` tells another user; empty where no request is unfinished."""
        unfinished = self.scheduler.unfinished
        return f"an engine with {unfinished} unfinished requests" if unfinished else ""

    def _abort_all(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.abort(request)

    def _continue(self, request: Request, row: int) -> Token | None:
        """Chooses a request's next token from a row of logits; None where it ends instead."""
        found = None
        try:
            token = self._sample(request, row)
            if request.logprobs is not None:
                logits = self.session.transformer.logits
                found = self.sampler.logprobs(logits, row, token, request.logprobs)
        except Exception as error:
            request.error = error
            request.finish("error")
            return None
        if request.timings.first_token is None:
            request.timings.first_token = time.perf_counter()
        if token in self._stop_ids:
            request.finish("stop")
            return None
        if found is not None:
            del request.output_logprobs[len(request.output) :]  # of a step that was interrupted
            request.output_logprobs.append(found)
        request.output.append(token)  # the step of this request is done
        return Token(request, token, *found) if found else Token(request, token)

    def _sample(self, request: Request, row: int) -> int:
        params, position = request.params, request.length
        recent = [*request.prompt, *request.output] if params.repeat_penalty != 1 else ()
        logits = self.session.transformer.logits
        if request.constraint is None:
            return self.sampler.sample(logits, row, params, position, recent)
        mask, bias = request.constraint(request.output)
        return self.sampler.sample(logits, row, params, position, recent, mask, bias)


def _ends(requests: Sequence[Request]) -> list[Event]:
    return [Finished(each, each.finish_reason) for each in requests if each.finish_reason is not None]
