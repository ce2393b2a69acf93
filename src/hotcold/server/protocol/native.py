"""llama.cpp's own ``/completion``: the request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotcold.engine.request import Job
from hotcold.runtime.sampling import SamplingParams
from hotcold.server.protocol import constraints, sampling
from hotcold.server.protocol.errors import invalid
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.fields import (
    Anything,
    Either,
    Field,
    Fields,
    Flag,
    Items,
    Neutral,
    Shape,
    Text,
    Whole,
    check_depth,
)
from hotcold.server.protocol.limits import LARGEST, MAX_LOGPROBS, MAX_PARTS
from hotcold.server.protocol.native_reply import NativeReply
from hotcold.server.protocol.prompts import Ids
from hotcold.server.protocol.replies import Reply

_PROMPT = Either({str: Text(), list: Ids()}, "a string or a list of token ids")
FIELDS: Fields = {
    "prompt": Field(_PROMPT, None, "The text to continue, or its token ids.", required=True),
    "n_predict": Field(
        Whole(-1, LARGEST), None, "Limit of tokens; -1: until the context is full. 0 only computes the "
                                  "prompt."
    ),
    "max_tokens": Field(Whole(-1, LARGEST), None, "Another name for n_predict."),
    "stream": Field(Flag(), False, "Streams the text as server-sent events, without a [DONE]."),
    "n_probs": Field(Whole(0, MAX_LOGPROBS), 0, "Number of likeliest tokens for each token."),
    "return_tokens": Field(Flag(), False, "Also returns token ids."),
    **sampling.FIELDS,
    **constraints.FIELDS,
    "ignore_eos": Field(Flag(), False, "Chooses no token that ends the text, unless a grammar requires it."),
    "cache_prompt": Field(Flag(), True, "Whether later requests may reuse the computed prompt."),
    "timings_per_token": Field(Flag(), False, "Adds timings to each event of a stream."),
    "response_fields": Field(
        Items(Text(1, 256), 0, MAX_PARTS), None, "Fields to return in the reply or the last event of a "
                                                 "stream; a/b is b in a."
    ),
    "id_slot": Field(Whole(-1, LARGEST), None, "Has no effect: the server chooses a slot."),
    "n_keep": Field(Whole(-1, LARGEST), None, "Has no effect: a text ends when the context is full."),
    "n_discard": Field(Whole(0, LARGEST), None, "Has no effect, like n_keep."),
    "n_cmpl": Field(Neutral((1,))),
    "n_indent": Field(Neutral((0,))),
    "t_max_predict_ms": Field(Neutral((0, -1))),
    "post_sampling_probs": Field(Neutral((False,))),
    "image_data": Field(Neutral(([],))),
    "multimodal_data": Field(Neutral(([],))),
    "input_extra": Field(Neutral(([],))),
    **sampling.UNSUPPORTED,
    **constraints.UNSUPPORTED,
    "hotcold": Field(Anything(), None, "Has no effect on this route."),
}  # fmt: skip
BODY = Shape(FIELDS)


@dataclass(frozen=True)
class NativeCall:
    """The job and options of one request."""

    facts: Facts
    prompt: str | list[int]
    job: Job  #: the job without its prompt
    silent: bool  #: whether the generated token is hidden
    gbnf: str  #: the request's grammar in GBNF
    return_tokens: bool
    stream: bool
    timings_per_token: bool
    response_fields: tuple[str, ...]  #: fields to return; empty: all

    @property
    def texts(self) -> Sequence[str | int]:
        """All texts that make the prompt."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    def encode(self) -> list[list[int]]:
        """Returns a list with the prompt's tokens. Not for an event loop's thread. Names of control tokens
        become these tokens, since programs write whole prompts."""
        return [self.facts.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt]

    def jobs(self, prompts: Sequence[Sequence[int]]) -> list[Job]:
        """Returns the one job of the request."""
        (ids,) = prompts
        if not ids:
            raise invalid("prompt has no tokens: give at least one", "prompt")
        return [replace(self.job, prompt=ids)]

    def reply(self, prompts: Sequence[Sequence[int]]) -> Reply:
        """Makes the reply."""
        (ids,) = prompts
        return NativeReply(
            self.facts,
            self.shown(ids),
            self.settings(),
            silent=self.silent,
            logprobs=self.job.logprobs is not None,
            return_tokens=self.return_tokens,
            every_timings=self.timings_per_token,
            fields=self.response_fields,
        )

    def shown(self, ids: Sequence[int]) -> str:
        """Returns the prompt's text."""
        return self.prompt if isinstance(self.prompt, str) else self.facts.tokenizer.decode(ids)

    def settings(self) -> dict[str, Any]:
        """Returns ``generation_settings``: the request's values and the defaults."""
        job = self.job
        n_predict = 0 if self.silent else job.max_tokens
        bias = [{"token": id, "bias": value} for id, value in job.params.logit_bias.items() if value > -1e9]
        return {
            **settings(job.params),
            "n_ctx": self.facts.context,
            "n_predict": n_predict,
            "max_tokens": n_predict,
            "stop": list(job.stop),
            "ignore_eos": job.ignore_eos,
            "n_probs": job.logprobs or 0,
            "logit_bias": bias,
            "stream": self.stream,
            "grammar": self.gbnf,
        }


def settings(params: SamplingParams) -> dict[str, Any]:
    """Returns sampling parameters by llama.cpp's names. An unknown seed is -1."""
    return {
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repeat_penalty,
        "repeat_last_n": params.repeat_last_n,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "samplers": list(sampling.SAMPLERS),
    }


def parse(body: object, facts: Facts) -> NativeCall:
    """Reads the body of a request. Raises APIError for wrong values; ignores unknown fields."""
    check_depth(body)
    values = BODY.read(body, "")
    if not isinstance(prompt := values["prompt"], str):
        facts.check_ids(prompt, "prompt")
    return call_of(values, facts)


def call_of(values: Mapping[str, Any], facts: Facts) -> NativeCall:
    """Returns the call of the values that :data:`FIELDS` read."""
    length = sampling.length(values, ("n_predict", "max_tokens"), facts.default_max_tokens)
    return NativeCall(
        facts=facts,
        prompt=values["prompt"],
        job=sampling.job(
            values,
            facts,
            max_tokens=max(length, 1),
            logprobs=values["n_probs"] or None,
            grammar=constraints.grammar(values, facts),
        ),
        silent=length == 0,
        gbnf=values["grammar"] or "",
        return_tokens=values["return_tokens"],
        stream=values["stream"],
        timings_per_token=values["timings_per_token"],
        response_fields=tuple(values["response_fields"] or ()),
    )
