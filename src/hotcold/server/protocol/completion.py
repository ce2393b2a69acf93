"""OpenAI's ``/v1/completions``: the request."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from hotcold.engine.request import Job
from hotcold.server.protocol import constraints, sampling
from hotcold.server.protocol.chat import EXTENSIONS, MODEL, STREAMING, include_usage, picture
from hotcold.server.protocol.completion_reply import CompletionReply
from hotcold.server.protocol.errors import invalid
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.fields import (
    Field,
    Fields,
    Flag,
    Items,
    Neutral,
    Schema,
    Shape,
    Text,
    Whole,
    check_depth,
    refuse,
)
from hotcold.server.protocol.filling import SUFFIX, check_model, filled_texts
from hotcold.server.protocol.limits import LARGEST, MAX_CHOICES, MAX_JOBS, MAX_LOGPROBS
from hotcold.server.protocol.prompts import Ids

Prompt: TypeAlias = str | list[int]

DEFAULT_MAX_TOKENS = 16  #: OpenAI's default


class Prompts:
    """A text, token ids, or a list of texts or of lists of ids."""

    def __init__(self, limit: int = MAX_JOBS) -> None:
        self._most = limit

    _text = Text()
    _ids = Ids()

    def read(self, value: Any, param: str) -> list[Prompt]:
        if isinstance(value, str):
            return [self._text.read(value, param)]
        if not isinstance(value, list):
            refuse(param, value, "a string, token ids, or a list of these is needed")
        if value and not isinstance(value[0], str | list):
            return [self._ids.read(value, param)]
        kind = self._text if value and isinstance(value[0], str) else self._ids
        prompts: list[Prompt] = Items(kind, 1, self._most).read(value, param)
        return prompts

    def schema(self) -> Schema:
        one = [self._text.schema(), self._ids.schema()]
        several = [{"type": "array", "minItems": 1, "maxItems": self._most, "items": kind} for kind in one]
        return {"anyOf": [*one, *several]}


_LENGTH = Whole(-1, LARGEST, "-1: until the context is full; leave it out for 16")

FIELDS: Fields = {
    "model": MODEL,
    "prompt": Field(Prompts(), None, "The text to continue, or its token ids.", required=True),
    "max_tokens": Field(
        _LENGTH, None, f"Limit of tokens ({DEFAULT_MAX_TOKENS}); -1: until the context is full."
    ),
    "n_predict": Field(_LENGTH, None, "Another name for max_tokens."),
    "suffix": SUFFIX,
    "n": Field(Whole(1, MAX_CHOICES), 1, "Number of continuations of each prompt."),
    "best_of": Field(Whole(0, LARGEST), None, "At most n: continuations that are not returned are not "
                                              "generated."),
    "echo": Field(Flag(), False, "Returns the prompt before its continuation, also with log-probabilities."),
    "logprobs": Field(Whole(0, MAX_LOGPROBS), None, "Number of likeliest tokens for each token."),
    **STREAMING,
    **sampling.FIELDS,
    **constraints.FIELDS,
    **EXTENSIONS,
    **sampling.UNSUPPORTED,
    **constraints.UNSUPPORTED,
    "n_probs": Field(Neutral((0,)), note="Use logprobs."),
}  # fmt: skip
BODY = Shape(FIELDS)


@dataclass(frozen=True)
class CompletionCall:
    """The jobs and options of one request."""

    facts: Facts
    prompts: list[Prompt]
    suffix: str  #: if not empty, the answer is the text between prompt and suffix
    n: int  #: continuations of each prompt
    job: Job  #: the job of each continuation, without its prompt
    silent: bool  #: whether the generated token is hidden
    echo: bool
    stream: bool
    include_usage: bool
    timings_per_token: bool

    @property
    def texts(self) -> list[Prompt]:
        """All texts that make the prompts."""
        return [*self.prompts, *([self.suffix] if self.suffix else [])]

    def encode(self) -> list[list[int]]:
        """Returns the tokens of each prompt. Slow for long texts: not for an event loop's thread.

        Names of control tokens become these tokens, since programs write whole prompts. With a suffix they
        stay text, since prompt and suffix are parts of a file."""
        if self.suffix:
            return filled_texts(self.facts, self.prompts, self.suffix)
        return [self.facts.encode(each) if isinstance(each, str) else each for each in self.prompts]

    def jobs(self, prompts: Sequence[Sequence[int]]) -> list[Job]:
        """Returns ``n`` jobs for each prompt, in the order of the choices in the reply."""
        if not all(prompts):
            raise invalid("prompt has no tokens: give at least one", "prompt")
        repeated = [ids for ids in prompts for _ in range(self.n)]
        return [replace(self.job, prompt=ids).nth(i) for i, ids in enumerate(repeated)]

    def reply(self, prompts: Sequence[Sequence[int]]) -> CompletionReply:
        """Makes the reply."""
        texts = [
            each if isinstance(each, str) else self.facts.tokenizer.decode(each) if self.echo else ""
            for each in self.prompts
        ]
        return CompletionReply(
            self.facts,
            [(text, ids) for text, ids in zip(texts, prompts, strict=True) for _ in range(self.n)],
            n=self.n,
            echo=self.echo,
            silent=self.silent,
            logprobs=self.job.logprobs is not None,
            include_usage=self.include_usage,
            every_timings=self.timings_per_token,
        )


def parse(body: object, facts: Facts) -> CompletionCall:
    """Reads the body of a request. Raises APIError for wrong values; ignores unknown fields."""
    check_depth(body)
    values = BODY.read(body, "")
    prompts, n = values["prompt"], values["n"]
    if len(prompts) * n > MAX_JOBS:
        got = f"prompt has {len(prompts)} texts and n is {n}"
        raise invalid(f"{got}: together at most {MAX_JOBS} continuations are allowed", "n")
    if values["best_of"] is not None and values["best_of"] > n:
        got = f"best_of is {values['best_of']} and n is {n}"
        raise invalid(f"{got}: best_of above n is not supported", "best_of", "unsupported_parameter")
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            facts.check_ids(prompt, f"prompt[{i}]" if len(prompts) > 1 else "prompt")
    if values["suffix"]:
        check_model(facts, "suffix")
        if values["echo"]:
            raise invalid("suffix and echo are both given: leave one of them out", "echo")
    scored = values["echo"] and values["logprobs"] is not None
    default = DEFAULT_MAX_TOKENS if facts.max_tokens is None else facts.max_tokens
    length = sampling.length(values, ("max_tokens", "n_predict"), default)
    return CompletionCall(
        facts=facts,
        prompts=prompts,
        suffix=values["suffix"],
        n=n,
        job=sampling.job(
            values,
            facts,
            max_tokens=max(length, 0 if scored else 1),
            logprobs=values["logprobs"],
            echo=scored,
            grammar=constraints.grammar(values, facts),
            picture=picture(values),
        ),
        silent=length == 0,
        echo=values["echo"],
        stream=values["stream"],
        include_usage=include_usage(values),
        timings_per_token=values["timings_per_token"],
    )
