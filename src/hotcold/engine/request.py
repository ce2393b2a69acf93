"""One text to continue: what was asked, what came out so far, and how long it took."""

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


class PromptTooLongError(RequestError):
    """Raised for a prompt that leaves no token of the context for an answer, or none of the KV cache if
    ``cache`` is the smaller of both. ``at_least`` marks a lower bound, of a prompt that was refused before it
    was encoded."""

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
        """Returns the tokens that may follow ``output``, the tokens generated so far, which it must not
        change. An exception ends the request alone.

        It may have a method ``prepare(output) -> None``, which is called as soon as a token is chosen, and
        when the request starts: threads can then find what is allowed next while the model runs. That method
        returns at once, and may be called again with the same tokens, or not at all.

        Where tokens are guessed, two more methods may help, which return soon: ``forced(output) ->
        Sequence[int]``, tokens that come next because nothing else may, and ``possible(output, tokens) ->
        int``, how many of these may follow. Neither decides anything."""


#: ``checked`` is what a check has made of one of the others; nobody else makes it.
GrammarKind = Literal["json_schema", "json_object", "regex", "gbnf", "lark", "checked"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A text in one of several notations that an answer must match from its first character to its last."""

    kind: GrammarKind
    source: str = ""  #: JSON of the schema, the expression, or the grammar's text; nothing of ``json_object``
    #: what of a schema the answer is not held to, such as ``uniqueItems at properties.tags``
    notes: tuple[str, ...] = ()
    param: str = field(default="", compare=False)  #: field of the request that errors name


@dataclass(frozen=True, slots=True)
class Job:
    """A text to continue, and how. It is plain data, which may cross to another process. UserError: a value
    that is not allowed. The engine, which knows the model, checks the prompt."""

    prompt: Sequence[int] = ()  #: token ids, at least one
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 200  #: the most tokens to generate, 1 or more; 0 where the prompt is :attr:`scored`
    stop: tuple[str, ...] = ()  #: strings that end the answer where they come up, and are no part of it
    ignore_eos: bool = False  #: never choose a token that would end the text; a complete form ends it
    #: how many of the likeliest tokens to state beside each token's probability, 0 to 20; None states nothing
    logprobs: int | None = None
    #: with ``logprobs``: the prompt's tokens get log-probabilities, too, by the decode rule of the mode
    echo: bool = False
    grammar: Grammar | None = None  #: what the answer must match
    thought: Thought | None = None  #: what may come before the answer; None: the whole text is the answer
    cache: bool = True  #: whether its pages may be those of other requests, and theirs its own
    borders: tuple[int, ...] = ()  #: positions of the prompt up to which later prompts are likely to be equal
    #: seconds in which the request must end, waiting included; after these it ends with an error
    deadline_s: float | None = None
    #: seconds that the request may wait in the queue, and after that without a new token; it then ends with
    #: an error
    timeout_s: float | None = None
    shown: tuple[int, ...] = ()  #: control tokens whose names are part of its text; others add nothing to it
    picture: bool = False  #: whether pieces bring frames of which neurons fired
    pooling: Pooling | None = None  #: makes one vector of the prompt, and nothing is generated

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
            checked["cache"] = False  # rows that others computed are gone
        for name, value in checked.items():  # NumPy's numbers become Python's
            object.__setattr__(self, name, value)

    @property
    def scored(self) -> bool:
        """Whether the prompt's tokens get log-probabilities, so that all of its rows are decode rows."""
        return self.echo and self.logprobs is not None

    def nth(self, index: int) -> Self:
        """The job of one text of several: all but the first have seeds that follow from the given one, if
        one is given."""
        seed = self.params.seed
        if index == 0 or seed is None:
            return self
        return replace(self, params=replace(self.params, seed=splitmix64(seed, index) >> 1))


@dataclass(eq=False, slots=True)
class Request:
    """A job, and how far an engine has come with it: ``output`` and ``finish_reason``, and what the scheduler
    and the clock keep about it."""

    job: Job
    constraint: Constraint | None = None  #: asked before each token; that of the job's grammar, say
    params: SamplingParams = field(init=False)  #: the job's, with a seed and without what it must not choose
    made: float = field(default_factory=time.perf_counter, init=False)  #: when it was made
    progress: float = field(init=False)  #: when it was made, started, or got its latest token
    viewer: Viewer | None = field(init=False)  #: watches which neurons fire
    output: list[int] = field(default_factory=list)  #: so far, without a token that ends the text
    output_logprobs: list[Logprobs] = field(default_factory=list)  #: of ``output``'s tokens, if asked for
    #: with ``echo``: of the prompt's tokens, in order, as far as they are; the first has none
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None  #: None while it runs
    error: Exception | None = None  #: why it ended, where the reason is ``error`` or a step failed
    timings: Timings = field(default_factory=Timings)
    guessed: int = 0  #: tokens that were guessed and verified
    accepted: int = 0  #: of those, the ones that were right
    reused: int = 0  #: positions of the prompt that others had computed, in pages that are only read
    preempted: int = 0  #: how often its pages were taken for an older request, and computed again
    arrival: int = -1  #: its place among all requests of its scheduler
    computed: int = 0  #: positions whose K and V are in the cache, while it runs
    pages: list[int] = field(default_factory=list)  #: of the cache, in order of position, while it runs
    page_keys: list[bytes] = field(default_factory=list)  #: what its first pages are found under
    kept: int = 0  #: of its pages, while it runs, those that others may find
    row: int = -1  #: its row in the batch's page table, while it runs
    #: slots of the state that its next step reads, -1 for zeros, and of the one that it writes, which is its
    #: own; -1 where no layer keeps a state
    state: int = -1
    slot: int = -1
    borders: tuple[int, ...] = ()  #: positions at which its steps end, so that the state there can be kept
    last_copy: bytes | None = None  #: what the state at the latest page that it has generated is found under
    vector: tuple[float, ...] | None = None  #: of a job with a pooling, at its end
    pool: Pool = field(default_factory=Pool)
    lookup: Any = None  #: the index of its tokens, where guesses are looked up in them
    acceptance: dict[Any, float] = field(default_factory=dict)  #: acceptance rates of draft tokens by drafter
    #: the different tokens among so many first ones, once they were asked for; more are added as they come
    _different: set[int] = field(default_factory=set)
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
        assert self.params.seed is not None  # drawn when the request was made
        return self.params.seed

    @property
    def length(self) -> int:
        """Tokens so far, prompt and output. The last one's K and V are not in the cache yet."""
        return len(self.job.prompt) + len(self.output)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def complete(self) -> bool:
        """Whether it has all that it asked for."""
        n = len(self.output)
        return n >= self.job.max_tokens and (n > 0 or len(self.prompt_logprobs) == len(self.job.prompt))

    @property
    def context_full(self) -> bool:
        """Whether the end of the context stopped it."""
        return self.finish_reason == "length" and not self.complete

    def overdue(self, now: float) -> RequestError | None:
        """The error of a request that has passed a time limit of its job at ``now``; None within them."""
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
        """Tokens from position ``start`` to ``stop``, of the prompt and then of the output."""
        prompt = self.job.prompt
        if stop <= len(prompt):
            return prompt[start:stop]
        return [*prompt[start:], *self.output[max(start - len(prompt), 0) : stop - len(prompt)]]

    def recent(self, n: int) -> Collection[int]:
        """The last ``n`` tokens; -1: all different ones. Costs what is new, not what the sequence is long."""
        length = self.length
        if n >= 0:
            return self.tokens(max(length - n, 0), length)
        self._different.update(self.tokens(self._looked_at, length))
        self._looked_at = length
        return self._different

    def fail(self, error: Exception) -> None:
        """Ends alone, with an error."""
        self.error = error
        self.finish("error")

    def finish(self, reason: FinishReason) -> None:
        self.timings.finished = time.perf_counter()
        self.finish_reason = reason
