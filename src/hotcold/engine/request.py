"""One text to continue: what was asked, what came out so far, and how long it took."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hotcold.engine.sampler import SamplingParams

#: The model ended the text; ``max_tokens`` or the end of the context did; or somebody cancelled it.
FinishReason = Literal["stop", "length", "cancelled"]


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


@dataclass(eq=False, slots=True)
class Request:
    prompt: Sequence[int]  #: token ids, at least one
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 200  #: the most tokens to generate, 1 or more
    ignore_eos: bool = False  #: never choose a token that would end the text
    output: list[int] = field(default_factory=list)  #: so far, without a token that ends the text
    finish_reason: FinishReason | None = None  #: None while it runs
    context_full: bool = False  #: whether it was the end of the context that stopped it
    timings: Timings = field(default_factory=Timings)
    computed: int = 0  #: positions whose K and V are in the cache
    pages: list[int] = field(default_factory=list)  #: of the cache that it owns, in order of position
    row: int = -1  #: its row in the batch's page table; -1 while it waits

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise ValueError("the prompt has no tokens: give at least one (a text, or the BOS token)")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}: allowed are 1 and more")
        self.params = self.params.with_seed()

    @property
    def seed(self) -> int:
        assert self.params.seed is not None  # drawn when the request was made
        return self.params.seed

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def decoding(self) -> bool:
        """Whether the whole prompt is in the cache, so that the next row is a decode row."""
        return self.computed >= len(self.prompt)

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.timings.finished = time.perf_counter()
