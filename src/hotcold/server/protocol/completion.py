"""``/v1/completions``: the request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hotcold.engine.request import Grammar, Job
from hotcold.runtime.sampling import SamplingParams
from hotcold.server.protocol import constraints, sampling
from hotcold.server.protocol.chat import EXTENSIONS, MODEL, STREAMING, include_usage
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
from hotcold.server.protocol.limits import LARGEST, MAX_CHOICES, MAX_JOBS, MAX_LOGPROBS
from hotcold.server.protocol.prompts import Ids

Prompt: TypeAlias = str | list[int]

DEFAULT_MAX_TOKENS = 16  #: OpenAI's


class Prompts:
    """A text, token ids, or a list of texts or of lists of ids."""

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
        found: list[Prompt] = Items(kind, 1, MAX_JOBS).read(value, param)
        return found

    def schema(self) -> Schema:
        one = [self._text.schema(), self._ids.schema()]
        several = [{"type": "array", "minItems": 1, "maxItems": MAX_JOBS, "items": kind} for kind in one]
        return {"anyOf": [*one, *several]}


_LENGTH = Whole(-1, LARGEST, "-1: as many as there is room for; leave it out for 16")

FIELDS: Fields = {
    "model": MODEL,
    "prompt": Field(Prompts(), None, "What is continued; token ids are taken as they are.", required=True),
    "max_tokens": Field(
        _LENGTH, None, f"The most tokens ({DEFAULT_MAX_TOKENS}); -1: as many as there is room for."
    ),
    "n_predict": Field(_LENGTH, None, "Another name of max_tokens."),
    "n": Field(Whole(1, MAX_CHOICES), 1, "How many continuations of each prompt."),
    "best_of": Field(Whole(0, LARGEST), None, "No more than n: what is not returned is not generated."),
    "echo": Field(Flag(), False, "The prompt comes before its continuation, with logprobs of its own."),
    "logprobs": Field(Whole(0, MAX_LOGPROBS), None, "So many of the likeliest tokens beside each one."),
    **STREAMING,
    **sampling.FIELDS,
    **constraints.FIELDS,
    **EXTENSIONS,
    **sampling.UNSUPPORTED,
    **constraints.UNSUPPORTED,
    "suffix": Field(Neutral(("",))),
    "n_probs": Field(Neutral((0,)), note="Use logprobs."),
}  # fmt: skip
BODY = Shape(FIELDS)


@dataclass(frozen=True)
class CompletionCall:
    """What one request asks for."""

    facts: Facts
    prompts: list[Prompt]
    n: int  #: of each prompt
    max_tokens: int  #: 0 generates nothing that is shown
    params: SamplingParams
    stop: tuple[str, ...]
    ignore_eos: bool
    echo: bool
    logprobs: int | None
    grammar: Grammar | None
    cache: bool
    picture: bool
    stream: bool
    include_usage: bool
    timings_per_token: bool

    def encode(self) -> list[list[int]]:
        """The tokens of each prompt. Takes as long as the text is: not for an event loop's thread. Names of
        control tokens are these tokens, since it is a program that writes whole prompts."""
        return [self.facts.encode(each) if isinstance(each, str) else each for each in self.prompts]

    def jobs(self, prompts: Sequence[Sequence[int]]) -> list[Job]:
        """``n`` for each prompt, one prompt after the other, as the choices come in the reply."""
        seeds = sampling.Seeds(self.params)
        scored = self.echo and self.logprobs is not None
        found: list[Job] = []
        for ids in prompts:
            if not ids:
                raise invalid("prompt has no tokens: give at least one", "prompt")
            for _ in range(self.n):
                job = Job(
                    prompt=ids,
                    params=seeds.of(len(found)),
                    max_tokens=max(self.max_tokens, 0 if scored else 1),
                    stop=self.stop,
                    ignore_eos=self.ignore_eos,
                    logprobs=self.logprobs,
                    grammar=self.grammar,
                    echo=scored,
                    cache=self.cache,
                    deadline_s=self.facts.deadline_s,
                    picture=self.picture,
                )
                found.append(job)
        return found

    def reply(self, prompts: Sequence[Sequence[int]]) -> CompletionReply:
        """What is sent of the jobs' pieces."""
        texts = [
            each if isinstance(each, str) else self.facts.tokenizer.decode(each) if self.echo else ""
            for each in self.prompts
        ]
        return CompletionReply(
            self.facts,
            [(text, ids) for text, ids in zip(texts, prompts, strict=True) for _ in range(self.n)],
            n=self.n,
            echo=self.echo,
            silent=self.max_tokens == 0,
            logprobs=self.logprobs is not None,
            stream=self.stream,
            include_usage=self.include_usage,
            every_timings=self.timings_per_token,
        )


def parse(body: object, facts: Facts) -> CompletionCall:
    """APIError for what is wrong. Unknown fields are ignored."""
    check_depth(body)
    values = BODY.read(body, "")
    prompts, n = values["prompt"], values["n"]
    if len(prompts) * n > MAX_JOBS:
        seen = f"prompt has {len(prompts)} texts and n is {n}"
        raise invalid(f"{seen}: together at most {MAX_JOBS} continuations are allowed", "n")
    if values["best_of"] is not None and values["best_of"] > n:
        seen = f"best_of is {values['best_of']} and n is {n}"
        raise invalid(f"{seen}: best_of above n is not supported here", "best_of", "unsupported_parameter")
    for i, each in enumerate(prompts):
        if not isinstance(each, str):
            facts.check_ids(each, f"prompt[{i}]" if len(prompts) > 1 else "prompt")
    return CompletionCall(
        facts=facts,
        prompts=prompts,
        n=n,
        max_tokens=_length(values, facts),
        params=sampling.params(values, facts),
        stop=sampling.stops(values),
        ignore_eos=values["ignore_eos"],
        echo=values["echo"],
        logprobs=values["logprobs"],
        grammar=constraints.grammar(values, facts),
        cache=values["cache_prompt"],
        picture=bool((values["hotcold"] or {}).get("picture")),
        stream=values["stream"],
        include_usage=include_usage(values),
        timings_per_token=values["timings_per_token"],
    )


def _length(values: Mapping[str, Any], facts: Facts) -> int:
    given = (values[name] for name in ("max_tokens", "n_predict"))
    default = DEFAULT_MAX_TOKENS if facts.max_tokens is None else facts.max_tokens
    found = next((each for each in given if each is not None), default)
    return LARGEST if found == -1 else int(found)
