"""The engine loop: schedule rows, run the model, choose tokens.

An engine works on token ids and knows no text. Several threads may use it: a method waits only for the
current step of another thread. After an exception in a method, Ctrl-C at any moment included, the engine
still works: :meth:`Engine.step` says what happens to the requests."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from hotcold.engine.events import Event, Finished, Token
from hotcold.engine.pace import STEP_S, Pace
from hotcold.engine.prefix_cache import PrefixCache
from hotcold.engine.request import FinishReason, Request
from hotcold.engine.sampler import Sampler, mask_of
from hotcold.engine.scheduler import Scheduler, Step
from hotcold.engine.speculation import Speculation
from hotcold.engine.thinking import Spelling, ThoughtConstraint
from hotcold.errors import UserError
from hotcold.kernels.backend import DiskCounts, ExpertReadError
from hotcold.runtime.counters import Figures
from hotcold.runtime.session import Session
from hotcold.watch.live import Live


@dataclass(frozen=True)
class EngineStats:
    """The present state of an engine, and its counters since it was made. None: not measured yet."""

    running: int  #: requests that run
    waiting: int  #: requests in the queue
    slots: int  #: requests that can run at a time
    pages: int  #: pages of the KV cache
    free_pages: int  #: empty pages
    shared_pages: int  #: cached pages that no request reads; reused when no page is free
    states: int  #: state slots of sequences; 0 if no layer keeps states
    free_states: int  #: empty state slots
    shared_states: int  #: cached states that no request reads; reused as pages are
    prompt_tokens: int  #: prompt tokens computed, including recomputation after preemption
    reused_tokens: int  #: prompt tokens served from the prefix cache
    generated_tokens: int
    steps: int
    preemptions: int  #: requests whose pages were taken for an older one
    prompt_s: float  #: time of steps with prompt rows
    decode_s: float  #: time of other steps
    prompt_tok_s: float | None
    tok_s: float | None
    gb_s: float | None  #: memory read in generation
    active_share: float | None  #: share of active neurons in generation
    guessed_tokens: int = 0  #: draft tokens verified
    accepted_tokens: int = 0  #: draft tokens accepted
    #: expert cache: hits, misses, bytes read, stalls and their time; None if all experts are in memory
    expert_hits: int | None = None
    expert_misses: int | None = None
    disk_bytes: int | None = None
    stalls: int | None = None
    stall_s: float | None = None


class Engine:
    """Runs requests on a session. ``max_waiting``: length of the queue; None: unlimited. ``reuse``: share KV
    pages of equal prompt prefixes (:attr:`Job.cache`). ``speculation``: drafts tokens without changing the
    output; None: no drafts."""

    def __init__(
        self,
        session: Session,
        *,
        max_waiting: int | None = None,
        reuse: bool = True,
        speculation: Speculation | None = None,
    ) -> None:
        self.session = session
        self.model = model = session.model
        separate = session.transformer.separates_prompts  # prompt rows then have a GPU's bits
        same_math = model.backend.prompt_math == "same" and not separate
        prefill_equals_decode = session.sparsity != "predicted" and same_math
        slots = session.slots
        if speculation is not None and slots is not None and not slots.spare:
            raise ValueError("draft tokens on a model with states need spare state slots: it has none")
        self.scheduler = Scheduler(
            session.transformer.batch,
            session.cache,
            PrefixCache(session.cache, session.identity, generated=prefill_equals_decode, slots=slots)
            if reuse
            else None,
            context=model.context,
            # Where experts are read from disk, a step with fewer rows reads nearly as much.
            pace=Pace(
                model.limits.chunk,
                STEP_S if model.disk_counts() is None else math.inf,
                separate=separate,
            ),
            prefill_equals_decode=prefill_equals_decode,
            max_waiting=max_waiting,
            slots=slots,
            speculation=speculation,
        )
        self.sampler = Sampler(session.transformer.head)
        self._stop_ids = model.tokenizer.stop_ids
        self._stop_mask = mask_of(self._stop_ids, model.config.vocab)
        self._steps = self._generated = 0
        self._spelling: Spelling | None = None  # made for the first request with a thought
        self._live: Live | None = None  # made for the first request with a viewer

    def check(self, request: Request) -> None:
        """Raises UserError if the context cannot hold the prompt and one token, or an id is outside the
        vocabulary."""
        vocab = self.model.config.vocab
        ids = np.asarray(request.job.prompt)
        if ids.dtype.kind not in "iu":
            raise UserError(f"the prompt holds {ids.dtype}: integer token ids are needed")
        for origin, id in (
            ("the prompt", ids.min()),
            ("the prompt", ids.max()),
            ("logit_bias", max(request.params.logit_bias, default=0)),
        ):
            if not 0 <= id < vocab:
                raise UserError(f"{origin} has token {id}: allowed are the ids 0 to {vocab - 1}")
        self.scheduler.check(request)

    def add(self, request: Request) -> None:
        """Queues a request; :meth:`step` starts it when a row and pages are free. RequestError
        ``queue_full``: the queue is full. UserError: see :meth:`check`, or another user of the session
        (:meth:`Session.claim`). ValueError: the job has a grammar, but the request has no constraint."""
        self.check(request)
        if request.job.grammar is not None and request.constraint is None:
            raise ValueError("the job has a grammar: give the request the constraint made of it")
        self.session.lock.run(partial(self._add, request))

    def _add(self, request: Request) -> None:
        self.session.claim(self)
        self._think_first(request)
        if request.job.ignore_eos and self._stop_ids:
            bias = {**request.params.logit_bias, **dict.fromkeys(self._stop_ids, -math.inf)}
            request.params = replace(request.params, logit_bias=bias)
        if request.viewer is not None:
            self._live = self._live or Live(self.session)
            request.viewer.live = self._live
        self.scheduler.add(request)

    def _think_first(self, request: Request) -> None:
        """Leaves a request's thought to the model, up to its budget. A constraint without a grammar applies
        to the thought, too."""
        job, thought = request.job, request.job.thought
        if thought is None or (job.grammar is None and (thought.budget is None or request.constraint)):
            return
        if self._spelling is None or self._spelling.shown != job.shown:
            self._spelling = Spelling(self.model.tokenizer, job.shown)
        request.constraint = ThoughtConstraint(self._spelling, job, request.constraint)

    def step(self) -> list[Event]:
        """Runs the model once; returns a :class:`Token` for each new token, then a :class:`Finished` for each
        request that ended by itself.

        The list is empty if no request had work, or if the step read only parts of prompts. Callers of
        :meth:`finish` get no event.

        A request whose token cannot be chosen ends alone, with :attr:`Request.error`. The same holds for a
        request whose expert cannot be read, unless layers keep states, since a step cannot compute states
        again. Other exceptions come from the model, or are Ctrl-C. They cancel the running requests: these
        keep their tokens, get an error that says why they ended, and free their pages. Waiting requests start
        in the next step.

        The calling thread gets the events of all threads' requests, so several threads wait with
        :meth:`run_until` instead. On a closed session all requests end with a UserError."""
        return self.session.lock.run(self._step)

    def _step(self, requests: Sequence[Request] = ()) -> list[Event]:
        """Runs a step. Raises its exception, unless only requests outside ``requests`` ran in the step."""
        try:
            return self._run_step()
        except BaseException as error:
            dropped = self.scheduler.drop(f"ended with {type(error).__name__}")
            others_ran = requests and dropped and not any(request in dropped for request in requests)
            if others_ran and isinstance(error, Exception):
                return _ends(dropped)
            raise

    def _run_step(self) -> list[Event]:
        if self.session.closed:
            return _ends(self.scheduler.fail_all(self.session.closed_error))
        start = time.perf_counter()
        step = self.scheduler.schedule()  # fills the batch
        if not step.decode and not step.prompts:
            return _ends(step.ended)
        batch = self.scheduler.batch
        prompt_positions = batch.positions[batch.counts[1] : batch.counts[0]].copy()
        for request in step.started:
            self._prepare(request)
        try:
            self._run(step)  # from the batch to logits
        except ExpertReadError as error:
            if self.session.slots is not None:
                raise
            return _ends(step.ended + self.scheduler.fail(step, error))
        for request, position, row in step.scored:
            self._score(request, position, row)
        for request, position, row, count in step.pooled:
            self._pool(request, position, row, count)
        events: list[Event] = []
        for request, row in step.sampled:
            events += self._verify(step, request, row)
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.read([*step.decode, *step.prompts])
        ended = step.ended + self.scheduler.advance(step)
        self._steps += 1
        self._generated += len(events)
        seconds = time.perf_counter() - start
        self.session.add_seconds(seconds, prompt=bool(step.prompts))
        if step.prompts:
            self.scheduler.pace.note(len(prompt_positions), float(prompt_positions.mean()), seconds)
        if step.drafts and not step.prompts:
            verified = sum(map(len, step.drafts.values()))
            self.session.count_drafts(verified, sum(step.rejected.values()))
        if self.scheduler.speculation is not None and not step.prompts:
            self.scheduler.speculation.note(len(step.rows), seconds)
            self.session.count_drafting(self.scheduler.speculation.drafting_s)
        return events + _ends(ended)

    def stats(self) -> EngineStats:
        """Returns the statistics, between two steps."""
        return self.session.lock.run(self._stats)

    def _stats(self) -> EngineStats:
        scheduler, pool, slots = self.scheduler, self.session.cache, self.session.slots
        counters = self.session.counters
        figures = Figures.from_counters(counters, self.session.footprint)
        speculation = scheduler.speculation
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            slots=scheduler.batch.limits.sequences,
            pages=pool.pages,
            free_pages=pool.free_pages - pool.kept_pages,
            shared_pages=pool.kept_pages,
            states=slots.slots if slots else 0,
            free_states=slots.free - slots.kept if slots else 0,
            shared_states=slots.kept if slots else 0,
            prompt_tokens=scheduler.prompt_rows,
            reused_tokens=scheduler.reused,
            generated_tokens=self._generated,
            steps=self._steps,
            preemptions=scheduler.preemptions,
            prompt_s=counters.prompt_s,
            decode_s=counters.decode_s,
            prompt_tok_s=figures.prompt_tok_s,
            tok_s=figures.tok_s,
            gb_s=figures.gb_s,
            active_share=figures.active_share,
            guessed_tokens=speculation.guessed if speculation else 0,
            accepted_tokens=speculation.accepted if speculation else 0,
            **_expert_cache_fields(self.model.disk_counts()),
        )

    def run(self, requests: Sequence[Request]) -> None:
        """Runs requests to their end, together with all queued ones; then raises the error of the first that
        failed. Any other exception cancels the requests."""
        try:
            for request in requests:
                self.add(request)
            self.run_until(lambda: all(request.finished for request in requests), requests)
        finally:
            for request in requests:
                self.abort(request)
        for request in requests:
            if request.error is not None:
                raise request.error

    def run_until(self, done: Callable[[], bool], requests: Sequence[Request]) -> None:
        """Runs steps until ``done``, or waits while other threads run them. Raises the exception of a step in
        which one of ``requests`` ran; other requests get it as :attr:`Request.error`."""
        self.session.lock.run_until(done, partial(self._step, requests))

    def finish(self, request: Request, reason: FinishReason = "stop") -> None:
        """Ends a running or waiting request between two steps: its pages are free at once, and it keeps its
        tokens. Callers that find a stop string in the text give ``stop``. Does nothing to a finished
        request."""
        self.session.lock.run(partial(self._finish, request, reason))

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if not request.finished:
            request.finish(reason)
        self.scheduler.remove(request)

    def abort(self, request: Request) -> None:
        """Ends a request as ``cancelled`` without waiting: during a step, the request ends after the step."""
        self.session.lock.run_soon(partial(self._finish, request, "cancelled"))

    @property
    def in_use(self) -> str:
        """Description of this engine in errors of :meth:`Session.claim`; empty if no request is
        unfinished."""
        unfinished = self.scheduler.unfinished
        return f"an engine with {unfinished} unfinished requests" if unfinished else ""

    def _score(self, request: Request, position: int, row: int) -> None:
        """Computes the log-probability of a prompt token from the row of logits before it."""
        assert request.job.logprobs is not None
        logits, token = self.session.transformer.logits, request.job.prompt[position]
        request.prompt_logprobs.append(self.sampler.logprobs(logits, row, token, request.job.logprobs))

    def _pool(self, request: Request, position: int, row: int, count: int) -> None:
        """Adds rows of a prompt to its vector; finishes the request after the last row."""
        try:
            rows = self.session.transformer.read_hidden(row, row + count)
            request.pool.add(rows, first=position == 0)
            pooled = 1 if request.job.pooling == "cls" else len(request.job.prompt)
            if position + count < pooled:
                return
            request.vector = request.pool.vector()
        except Exception as error:
            request.fail(error)
            return
        request.timings.first_token = time.perf_counter()
        request.finish("stop")

    def _prepare(self, request: Request) -> None:
        """Lets the request's constraint begin to compute its next mask."""
        prepare = getattr(request.constraint, "prepare", None)
        if prepare is None:
            return
        try:
            prepare(request.output)
        except Exception as error:
            request.fail(error)

    def _run(self, step: Step) -> None:
        watched = None if self._live is None else self._live.due(step.rows)
        if self._live is None or watched is None:
            self.session.run()
            return
        self.session.run(watched)
        self._live.take(step.rows)

    def _verify(self, step: Step, request: Request, row: int) -> list[Token]:
        """Chooses a request's next tokens: one, and a further one after each accepted draft token."""
        drafts, start = step.drafts.get(request, ()), len(request.output)
        tokens: list[Token] = []
        accepted = 0
        while (token := self._continue(request, row + accepted)) is not None:
            tokens.append(token)
            if accepted == len(drafts) or token.id != drafts[accepted]:
                break
            accepted += 1
        if drafts:
            request.guessed += len(drafts)
            request.accepted += accepted
            step.rejected[request] = len(drafts) - accepted
            if request.viewer is not None:
                request.viewer.forget(len(request.output))
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.learn(request, len(drafts), accepted, request.output[start:])
        return tokens

    def _continue(self, request: Request, row: int) -> Token | None:
        """Chooses a request's next token from a row of logits; returns None if the request ends instead."""
        if request.finished or request.job.max_tokens == 0:
            return None
        logprobs = None
        try:
            token = self._sample(request, row)
            if request.job.logprobs is not None:
                logits = self.session.transformer.logits
                logprobs = self.sampler.logprobs(logits, row, token, request.job.logprobs)
        except Exception as error:
            request.fail(error)
            return None
        request.progress = time.perf_counter()
        if request.timings.first_token is None:
            request.timings.first_token = request.progress
        if token in self._stop_ids:
            request.finish("stop")
            return None
        if logprobs is not None:
            request.output_logprobs.append(logprobs)
        request.output.append(token)
        if request.constraint is not None and not request.complete:
            self._prepare(request)
        return Token(request, token, *logprobs) if logprobs else Token(request, token)

    def _sample(self, request: Request, row: int) -> int:
        params, position = request.params, request.length
        recent = request.recent(params.repeat_last_n) if params.repeat_penalty != 1 else ()
        logits = self.session.transformer.logits
        if request.constraint is None and not params.counts_tokens:
            return self.sampler.sample(logits, row, params, position, recent)
        mask, bias = request.constraint(request.output) if request.constraint else (None, None)
        if request.job.ignore_eos and mask is not None and mask.any() and not (mask & ~self._stop_mask).any():
            return min(self._stop_ids)  # the form is complete: nothing else may follow
        return self.sampler.sample(logits, row, params, position, recent, mask, bias, request.output)


def _expert_cache_fields(counts: DiskCounts | None) -> dict[str, Any]:
    """Returns the fields of :class:`EngineStats` about the expert cache."""
    if counts is None:
        return {}
    return {
        "expert_hits": counts.hits,
        "expert_misses": counts.misses,
        "disk_bytes": counts.nbytes,
        "stalls": counts.stalls,
        "stall_s": counts.stall_s,
    }


def _ends(requests: Sequence[Request]) -> list[Event]:
    return [Finished(each, each.finish_reason) for each in requests if each.finish_reason is not None]
