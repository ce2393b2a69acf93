"""One text to continue: what was asked, what came out so far, and how long it took."""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from hotcold.engine.sampler import Allowed, Logprobs, SamplingParams
from hotcold.errors import UserError

MAX_LOGPROBS = 20  #: alternatives that a request may ask for

#: The model, or a stop string, ended the text; ``max_tokens`` or the end of the context did; somebody
#: cancelled it; or a token could not be chosen (:attr:`Request.error` says why).
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass
class Timings:
    """Moments of a request on the monotonic clock, in seconds; None until they happen."""

    added: float | None = None
    first_token: float | None = None
    finished: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from the moment the request was added (so waiting counts)."""
        return None if self.added is None or self.first_token is None else self.first_token - self.added


class Constraint(Protocol):
    """Says which tokens may come next: a grammar, say."""

    def __call__(self, output: Sequence[int]) -> Allowed:
        """What is allowed after the tokens generated so far, which it may read and must not change. An
        exception ends the request alone. It must depend on its argument only: a step that was interrupted is
        repeated, and asks again."""


@dataclass(eq=False, slots=True)
class Request:
    """``output`` and ``finish_reason`` are the truth about how far it is: each changes in one instruction, so
    an interrupt finds the request before a token or after it, and what else depends on them is derived."""

    prompt: Sequence[int]  #: token ids, at least one
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 200  #: the most tokens to generate, 1 or more
    ignore_eos: bool = False  #: never choose a token that would end the text
    #: how many of the likeliest tokens to state beside each token's probability, 0 to 20; None states nothing
    logprobs: int | None = None
    constraint: Constraint | None = None  #: asked before each token
    #: owners in the cache, whose pages one after the other hold K and V of the prompt's first tokens: those
    #: that still have them when the request starts are not computed again
    prefix: Sequence[Hashable] = ()
    output: list[int] = field(default_factory=list)  #: so far, without a token that ends the text
    #: of the tokens of ``output``, if asked for; while a step is interrupted it may have one entry more
    output_logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None  #: None while it runs
    error: Exception | None = None  #: why it ended, where the reason is ``error``
    context_full: bool = False  #: whether it was the end of the context that stopped it
    timings: Timings = field(default_factory=Timings)
    reused: int = 0  #: positions of the prompt that came with the prefix, in pages that are only read
    computed: int = 0  #: positions of the prompt whose K and V are in the cache, until the first token
    pages: list[int] = field(default_factory=list)  #: of the cache, in order of position, while it runs
    row: int = -1  #: its row in the batch's page table, while it runs

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise UserError("the prompt has no tokens: give at least one (a text, or the BOS token)")
        if self.max_tokens < 1:
            raise UserError(f"max_tokens is {self.max_tokens}: allowed are 1 and more")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise UserError(f"logprobs is {self.logprobs}: allowed are 0 to {MAX_LOGPROBS}, or None")
        self.params = self.params.with_seed()

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
    def decoding(self) -> bool:
        """Whether the whole prompt is in the cache, so that the next row is a decode row."""
        return bool(self.output)

    def finish(self, reason: FinishReason) -> None:
        self.timings.finished = time.perf_counter()
        self.finish_reason = reason
