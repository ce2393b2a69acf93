"""One text to continue: what was asked, what came out so far, and how long it took."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from hotcold.engine.sampler import Allowed, Logprobs
from hotcold.errors import UserError
from hotcold.runtime.sampling import SamplingParams
from hotcold.watch.live import Viewer

MAX_LOGPROBS = 20  #: alternatives that a request may ask for

#: The model, or a stop string, ended the text; ``max_tokens`` or the end of the context did; somebody
#: cancelled it, or a step that it ran in failed; or a token could not be chosen. For the last two
#: :attr:`Request.error` says why.
FinishReason = Literal["stop", "length", "cancelled", "error"]


class RequestError(UserError):
    """Why a request could not start or go on. ``code`` is for programs; ``retry_after_s`` is when another try
    may succeed, None where it will not by itself."""

    def __init__(
        self, message: str, code: str = "invalid_request", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


@dataclass
class Timings:
    """Moments of a request on the monotonic clock, in seconds; None until they happen."""

    added: float | None = None
    started: float | None = None  #: when it first had a row of the batch
    first_token: float | None = None
    finished: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from the moment the request was added (so waiting counts)."""
        return None if self.added is None or self.first_token is None else self.first_token - self.added

    @property
    def queued_s(self) -> float | None:
        """How long it waited for a row."""
        return None if self.added is None or self.started is None else self.started - self.added


class Constraint(Protocol):
    """Says which tokens may come next: a grammar, say."""

    def __call__(self, output: Sequence[int]) -> Allowed:
        """What is allowed after the tokens generated so far, which it may read and must not change. An
        exception ends the request alone.

        It may have a method ``prepare(output) -> None``, which is called as soon as a token was chosen, and
        when the request starts: what is allowed next can then be found in threads while the model runs. It
        returns at once, and may be called again with the same tokens, or not at all."""


@dataclass(eq=False, slots=True)
class Request:
    """What was asked, and in ``output`` and ``finish_reason`` how far it is."""

    prompt: Sequence[int]  #: token ids, at least one
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 200  #: the most tokens to generate, 1 or more
    ignore_eos: bool = False  #: never choose a token that would end the text
    #: how many of the likeliest tokens to state beside each token's probability, 0 to 20; None states nothing
    logprobs: int | None = None
    #: with ``logprobs``: the prompt's tokens get log-probabilities, too, by the decode rule of the mode
    echo: bool = False
    cache: bool = True  #: whether its pages may be those of other requests, and theirs its own
    #: a moment on the clock of ``time.perf_counter`` after which the request ends with an error
    deadline: float | None = None
    shown: Sequence[int] = ()  #: control tokens whose names are part of its text; others add nothing to it
    constraint: Constraint | None = None  #: asked before each token
    viewer: Viewer | None = None  #: watches which neurons fire
    output: list[int] = field(default_factory=list)  #: so far, without a token that ends the text
    output_logprobs: list[Logprobs] = field(default_factory=list)  #: of ``output``'s tokens, if asked for
    #: with ``echo``: of the prompt's tokens, in order, as far as they are; the first has none
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None  #: None while it runs
    error: Exception | None = None  #: why it ended, where the reason is ``error`` or a step failed
    context_full: bool = False  #: whether it was the end of the context that stopped it
    timings: Timings = field(default_factory=Timings)
    reused: int = 0  #: positions of the prompt that others had computed, in pages that are only read
    preempted: int = 0  #: how often its pages were taken for an older request, and computed again
    arrival: int = -1  #: its place among all requests of its scheduler
    computed: int = 0  #: positions whose K and V are in the cache, while it runs
    pages: list[int] = field(default_factory=list)  #: of the cache, in order of position, while it runs
    page_keys: list[bytes] = field(default_factory=list)  #: what its first pages are found under
    kept: int = 0  #: of its pages, while it runs, those that others may find
    row: int = -1  #: its row in the batch's page table, while it runs
    #: the different tokens among so many first ones, once they were asked for; more are added as they come
    _different: set[int] = field(default_factory=set)
    _looked_at: int = 0

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise UserError("the prompt has no tokens: give at least one (a text, or the BOS token)")
        if self.max_tokens < (0 if self.scored else 1):
            raise UserError(
                f"max_tokens is {self.max_tokens}: allowed are 1 and more, 0 with echo and logprobs"
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise UserError(f"logprobs is {self.logprobs}: allowed are 0 to {MAX_LOGPROBS}, or None")
        self.params = self.params.with_seed()
        if self.scored:
            self.prompt_logprobs = [None]  # nothing comes before the first token

    @property
    def seed(self) -> int:
        assert self.params.seed is not None  # drawn when the request was made
        return self.params.seed

    @property
    def length(self) -> int:
        """Tokens so far, prompt and output. The last one's K and V are not in the cache yet."""
        return len(self.prompt) + len(self.output)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def scored(self) -> bool:
        """Whether the prompt's tokens get log-probabilities, so that all of its rows are decode rows."""
        return self.echo and self.logprobs is not None

    @property
    def complete(self) -> bool:
        """Whether it has all that it asked for."""
        n = len(self.output)
        return n >= self.max_tokens and (n > 0 or len(self.prompt_logprobs) == len(self.prompt))

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        """Those at these positions, of the prompt and then of the output."""
        prompt = len(self.prompt)
        if stop <= prompt:
            return self.prompt[start:stop]
        return [*self.prompt[start:], *self.output[max(start - prompt, 0) : stop - prompt]]

    def recent(self, n: int) -> Collection[int]:
        """The last ``n`` tokens; -1: all different ones. Costs what is new, not what the sequence is long."""
        length = self.length
        if n >= 0:
            return self.tokens(max(length - n, 0), length)
        self._different.update(self.tokens(self._looked_at, length))
        self._looked_at = length
        return self._different

    def finish(self, reason: FinishReason) -> None:
        self.timings.finished = time.perf_counter()
        self.finish_reason = reason
