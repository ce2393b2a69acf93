"""The loop: schedule rows, run the model, choose tokens.

An engine is pure token ids and knows no text. It is not safe for use from several threads at once."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from hotcold.engine.loading import LoadedModel
from hotcold.engine.request import Request
from hotcold.engine.sampler import Sampler
from hotcold.engine.scheduler import Scheduler
from hotcold.kernels.backend import Floats


class Engine:
    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        batch = model.transformer.batch
        self.scheduler = Scheduler(batch, model.cache, context=model.context, chunk=model.chunk)
        self.sampler = Sampler(model.backend)
        self._logits: Floats = model.transformer.logits
        self._stop_ids = model.tokenizer.stop_ids

    def add(self, request: Request) -> None:
        """Queues a request; :meth:`step` starts it when a row and pages are free. ``ValueError``: the prompt
        leaves no room for one token in the context; the message has both numbers."""
        self.scheduler.add(request)
        if request.ignore_eos and self._stop_ids:
            bias = {**request.params.logit_bias, **dict.fromkeys(self._stop_ids, -math.inf)}
            request.params = replace(request.params, logit_bias=bias)

    def step(self) -> list[tuple[Request, list[int]]]:
        """Runs the model once; returns the requests that got tokens, or ended, with their new tokens. Empty
        when nothing was to do, or only a part of a prompt was read."""
        start = time.perf_counter()
        step = self.scheduler.schedule()  # fills the batch
        if not step.decode and not step.prompts:
            return []
        self.model.run()  # from the batch to logits
        tokens = [self._sample(row, request) for row, request in enumerate(step.sampled)]
        self.scheduler.advance(step)  # from here on nothing can fail: an interrupted step is repeated
        accepted = [(r, self._accept(r, token)) for r, token in zip(step.sampled, tokens, strict=True)]
        seconds, counters = time.perf_counter() - start, self.model.counters
        if step.prompts:
            counters.prompt_s += seconds
        else:
            counters.decode_s += seconds
        return accepted

    def run(self, requests: Sequence[Request]) -> None:
        """Runs these to their end, beside each other and whatever else is queued; cancelled on an error."""
        try:
            for request in requests:
                self.add(request)
            while not all(request.finished for request in requests):
                self.step()
        finally:
            for request in requests:
                self.abort(request)

    def abort(self, request: Request) -> None:
        """Ends a request as ``cancelled`` and gives its pages back; harmless when it has finished."""
        if not request.finished:
            request.finish("cancelled")
        self.scheduler.remove(request)

    def _sample(self, row: int, request: Request) -> int:
        params = request.params
        recent = [*request.prompt, *request.output] if params.repeat_penalty != 1 else ()
        position = len(request.prompt) + len(request.output)
        return self.sampler.sample(self._logits[row], params, position, recent)

    def _accept(self, request: Request, token: int) -> list[int]:
        """Appends the token, or ends the request; returns its new tokens."""
        if request.timings.first_token is None:
            request.timings.first_token = time.perf_counter()
        if token in self._stop_ids:
            request.finish("stop")
            self.scheduler.remove(request)
            return []
        request.output.append(token)
        full = len(request.prompt) + len(request.output) >= self.model.context
        if full or len(request.output) >= request.max_tokens:
            request.context_full = full and len(request.output) < request.max_tokens
            request.finish("length")
            self.scheduler.remove(request)
        return [token]
