"""A request: one text to continue, its progress, and its timings."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self

from hotcold.engine.pooling import Pool
from hotcold.engine.sampler import Allowed, Logprobs, splitmix64
from hotcold.engine.text import stop_strings
from hotcold.engine.thought import Thought
from hotcold.errors import UserError
from hotcold.runtime.pooling import Pooling
from hotcold.runtime.sampling import SamplingParams
from hotcold.values import real, whole
from hotcold.watch.live import Viewer

MAX_LOGPROBS = 20  #: limit for the alternatives of a token

#: ``stop``: the model or a stop string ended the text; ``length``: ``max_tokens`` or the end of the context;
#: ``cancelled``: a client, or a failed step; ``error``: a token could not be chosen. :attr:`Request.error`
#: has the cause of a failed step and of ``error``.
FinishReason = Literal["stop", "length", "cancelled", "error"]


class RequestError(UserError):
    """Reason why a request could not start or continue. ``code`` is for programs; ``retry_after_s`` is the
    time after which a retry may succeed, or None if a retry would fail again."""

    def __init__(
        self, message: str, code: str = "invalid_request", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class PromptTooLongError(RequestError):
    """A prompt that leaves no token of the context for an answer (or of the KV cache, if ``cache`` is True).
    ``at_least``: ``tokens`` is a lower bound, since the prompt was refused before it was encoded."""

    def __init__(self, tokens: int, context: int, *, at_least: bool = False, cache: bool = False) -> None:
        length = f"{'at least ' if at_least else ''}{tokens} tokens"
        holder = "the KV cache" if cache else "the context"
        fix = "enlarge the KV cache" if cache else "load the model with a larger `context`"
        limit = f"the prompt has {length} and {holder} holds {context}, including one for the answer"
        super().__init__(f"{limit}: shorten the prompt, or {fix}", "context_length_exceeded")
        self.tokens, self.context, self.at_least = tokens, context, at_least


@dataclass
class Timings:
    """Moments of a request on the monotonic clock, in seconds; None until they happen."""

    added: float | None = None
    started: float | None = None  #: first row in a batch
    first_token: float | None = None
    finished: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from the moment the request was added, so it includes the queue."""
        return None if self.added is None or self.first_token is None else self.first_token - self.added

    @property
    def queued_s(self) -> float | None:
        """Time in the queue."""
        return None if self.added is None or self.started is None else self.started - self.added


class Constraint(Protocol):
    """Decides which tokens may come next, for example by a grammar."""

    def __call__(self, output: Sequence[int]) -> Allowed:
        """Returns the tokens that may follow ``output``, the tokens generated so far; must not change it. An
        exception ends only this request.

        An optional method ``prepare(output) -> None`` is called when the request starts and after each chosen
        token: threads can then compute the next mask while the model runs. The method returns at once, and
        may be called again with the same tokens, or not at all.

        With draft tokens, two more optional methods help; both return soon. ``forced(output) ->
        Sequence[int]`` gives tokens that must come next. ``possible(output, tokens) -> int`` tells how many
        of these may follow. Neither decides about the output."""


#: ``checked`` is the result of checking one of the others; only this package makes it.
GrammarKind = Literal["json_schema", "json_object", "regex", "gbnf", "lark", "checked"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A text in one of several notations; the whole answer must match it."""

    kind: GrammarKind
    source: str = ""  #: JSON of the schema, the expression, or the grammar's text; empty for ``json_object``
    #: parts of a schema that are not enforced, such as ``uniqueItems at properties.tags``
    notes: tuple[str, ...] = ()
    param: str = field(default="", compare=False)  #: field of the request that error messages name


@dataclass(frozen=True, slots=True)
class Job:
    """A text to continue, and the settings. It is plain data that can be sent to another process. UserError:
    a value that is not allowed. The engine, which knows the model, checks the prompt."""

    prompt: Sequence[int] = ()  #: token ids, at least one
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 200  #: limit for generated tokens, at least 1; 0 if the prompt is :attr:`scored`
    stop: tuple[str, ...] = ()  #: strings that end the answer, which does not contain them
    ignore_eos: bool = False  #: forbid tokens that end the text; a complete grammar still ends it
    #: number of likeliest tokens to return with each token's log-probability, 0 to 20; None: no
    #: log-probabilities
    logprobs: int | None = None
    #: with ``logprobs``: also compute log-probabilities of the prompt, by the decode rule of the mode
    echo: bool = False
    grammar: Grammar | None = None  #: grammar that the answer must match
    #: marks of a thought before the answer; None: the whole text is the answer
    thought: Thought | None = None
    cache: bool = True  #: whether it shares KV pages with other requests
    borders: tuple[int, ...] = ()  #: prompt positions up to which later prompts are likely to be equal
    #: seconds in which the request must end, time in the queue included; then it ends with an error
    deadline_s: float | None = None
    #: limit in seconds for the time in the queue and between tokens; then the request ends with an error
    timeout_s: float | None = None
    shown: tuple[int, ...] = ()  #: control tokens whose names the text contains; others add no text
    picture: bool = False  #: whether pieces contain frames of active neurons
    pooling: Pooling | None = None  #: makes one vector of the prompt, without generating

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {"stop": stop_strings(self.stop)}
        if self.logprobs is not None:
            checked["logprobs"] = whole("logprobs", self.logprobs, 0, MAX_LOGPROBS, "None gives none")
        fewest = 0 if self.scored else 1
        checked["max_tokens"] = whole("max_tokens", self.max_tokens, fewest, hint="0 with echo and logprobs")
        for name in ("deadline_s", "timeout_s"):
            if (limit := getattr(self, name)) is not None:
                checked[name] = real(name, limit, 0, 1e9, "seconds")
        if self.pooling in ("mean", "cls"):
            checked["cache"] = False  # the hidden rows of cached tokens are not available
        for name, value in checked.items():  # NumPy numbers become Python numbers
            object.__setattr__(self, name, value)

    @property
    def scored(self) -> bool:
        """True if the prompt gets log-probabilities, so that all of its rows are decode rows."""
        return self.echo and self.logprobs is not None

    def nth(self, index: int) -> Self:
        """Returns the job of one of several answers. The seeds of all but the first derive from the job's
        seed, if it has one."""
        seed = self.params.seed
        if index == 0 or seed is None:
            return self
        return replace(self, params=replace(self.params, seed=splitmix64(seed, index) >> 1))


@dataclass(eq=False, slots=True)
class Request:
    """A job and its progress in an engine: output, finish reason, and the scheduler's records about it."""

    job: Job
    constraint: Constraint | None = None  #: gives the mask of each token, for example by the job's grammar
    params: SamplingParams = field(init=False)  #: the job's, with a seed and the engine's forbidden tokens
    made: float = field(default_factory=time.perf_counter, init=False)  #: time of creation
    progress: float = field(init=False)  #: time of creation, start, or latest token
    viewer: Viewer | None = field(init=False)  #: records active neurons
    output: list[int] = field(default_factory=list)  #: tokens so far, without a token that ends the text
    output_logprobs: list[Logprobs] = field(default_factory=list)  #: of ``output``, if requested
    #: with ``echo``: log-probabilities of the prompt's tokens so far, in order; None for the first token
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None  #: None before the end
    error: Exception | None = None  #: cause of the end, if the reason is ``error`` or a step failed
    timings: Timings = field(default_factory=Timings)
    guessed: int = 0  #: draft tokens verified
    accepted: int = 0  #: draft tokens accepted
    reused: int = 0  #: prompt tokens served from the prefix cache
    preempted: int = 0  #: number of preemptions
    arrival: int = -1  #: number in order of arrival at the scheduler
    # ``computed`` to ``slot`` are valid while the request runs.
    computed: int = 0  #: positions whose K and V are in the cache
    pages: list[int] = field(default_factory=list)  #: its pages of the KV cache, in order of position
    page_keys: list[bytes] = field(default_factory=list)  #: keys of its first pages in the prefix cache
    kept: int = 0  #: number of its pages in the prefix cache
    row: int = -1  #: its row in the batch's page table
    state: int = -1  #: slot of the state that its next step reads; -1: zeros, or no states
    slot: int = -1  #: its own slot, which its next step writes; -1: no states
    borders: tuple[int, ...] = ()  #: positions where its steps must end, so that the state there can be kept
    last_copy: bytes | None = None  #: key of the state copy at its latest generated page end
    vector: tuple[float, ...] | None = None  #: result of a job with pooling
    pool: Pool = field(default_factory=Pool)
    lookup: Any = None  #: index of its tokens for prompt lookup
    acceptance: dict[Any, float] = field(default_factory=dict)  #: acceptance rates of draft tokens by drafter
    _different: set[int] = field(default_factory=set)  # distinct tokens among the first ``_looked_at``
    _looked_at: int = 0

    def __post_init__(self) -> None:
        job = self.job
        if not len(job.prompt):
            raise UserError("the prompt has no tokens: give at least one (a text, or the BOS token)")
        self.params = job.params.with_seed()
        self.progress = self.made
        self.viewer = Viewer() if job.picture else None
        if job.scored:
            self.prompt_logprobs = [None]  # nothing comes before the first token

    @property
    def seed(self) -> int:
        assert self.params.seed is not None  # set at creation
        return self.params.seed

    @property
    def length(self) -> int:
        """Number of tokens so far, prompt and output. K and V of the last one are not in the cache yet."""
        return len(self.job.prompt) + len(self.output)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def complete(self) -> bool:
        """True if it has all requested tokens and log-probabilities."""
        n = len(self.output)
        return n >= self.job.max_tokens and (n > 0 or len(self.prompt_logprobs) == len(self.job.prompt))

    @property
    def context_full(self) -> bool:
        """True if the end of the context ended the request."""
        return self.finish_reason == "length" and not self.complete

    def overdue(self, now: float) -> RequestError | None:
        """Returns the error of a request that has passed a time limit of its job at ``now``, else None."""
        deadline, timeout = self.job.deadline_s, self.job.timeout_s
        if deadline is not None and now - self.made >= deadline:
            limit = f"the request did not end within {deadline:g} seconds (`deadline_s`)"
        elif timeout is not None and now - self.progress >= timeout:
            limit = f"the request got no token for {timeout:g} seconds (`timeout_s`)"
        else:
            return None
        if self.output:
            state = f"{len(self.output)} tokens were generated"
        elif self.computed:
            state = f"{self.computed} of {len(self.job.prompt)} prompt tokens were computed"
        else:
            state = "it waited in the queue"
        return RequestError(f"{limit}: {state}", "deadline")

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        """Returns the tokens from position ``start`` to ``stop``, of the prompt and then of the output."""
        prompt = self.job.prompt
        if stop <= len(prompt):
            return prompt[start:stop]
        return [*prompt[start:], *self.output[max(start - len(prompt), 0) : stop - len(prompt)]]

    def recent(self, n: int) -> Collection[int]:
        """Returns the last ``n`` tokens, or for -1 all distinct ones; the cost grows only with new tokens."""
        length = self.length
        if n >= 0:
            return self.tokens(max(length - n, 0), length)
        self._different.update(self.tokens(self._looked_at, length))
        self._looked_at = length
        return self._different

    def fail(self, error: Exception) -> None:
        """Ends only this request, with an error."""
        self.error = error
        self.finish("error")

    def finish(self, reason: FinishReason) -> None:
        self.timings.finished = time.perf_counter()
        self.finish_reason = reason
