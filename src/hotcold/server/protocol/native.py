"""llama.cpp's own ``/completion``: the request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotcold.engine.request import Grammar, Job
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
    Neutral,
    Shape,
    Text,
    Whole,
    check_depth,
)
from hotcold.server.protocol.limits import LARGEST, MAX_LOGPROBS
from hotcold.server.protocol.native_reply import NativeReply
from hotcold.server.protocol.prompts import Ids

_PROMPT = Either({str: Text(), list: Ids()}, "a string or a list of token ids")
FIELDS: Fields = {
    "prompt": Field(_PROMPT, None, "What is continued; token ids are taken as they are.", required=True),
    "n_predict": Field(
        Whole(-1, LARGEST), None, "The most tokens; -1: to the end of the context. 0 only reads the prompt."
    ),
    "max_tokens": Field(Whole(-1, LARGEST), None, "Another name of n_predict."),
    "stream": Field(Flag(), False, "Sends the text piece by piece, as server-sent events without a [DONE]."),
    "n_probs": Field(Whole(0, MAX_LOGPROBS), 0, "So many of the likeliest tokens beside each one."),
    "return_tokens": Field(Flag(), False, "Gives token ids, too."),
    **sampling.FIELDS,
    **constraints.FIELDS,
    "ignore_eos": Field(Flag(), False, "Never chooses a token that ends the text."),
    "cache_prompt": Field(Flag(), True, "Whether what is computed may serve later requests."),
    "timings_per_token": Field(Flag(), False, "Each event of a stream has timings."),
    "id_slot": Field(Whole(-1, LARGEST), None, "Has no effect: any slot will do."),
    "n_keep": Field(Whole(-1, LARGEST), None, "Has no effect: a text ends with its context."),
    "n_discard": Field(Whole(0, LARGEST), None, "Has no effect, as n_keep."),
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
    """What one request asks for."""

    facts: Facts
    prompt: str | list[int]
    max_tokens: int  #: 0 generates nothing that is shown
    params: SamplingParams
    stop: tuple[str, ...]
    ignore_eos: bool
    logprobs: int | None
    grammar: Grammar | None
    cache: bool
    return_tokens: bool
    stream: bool
    timings_per_token: bool

    def encode(self) -> list[list[int]]:
        """The prompt's tokens, in a list of one. Not for an event loop's thread. Names of control tokens are
        these tokens, since it is a program that writes whole prompts."""
        return [self.facts.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt]

    def jobs(self, prompts: Sequence[Sequence[int]]) -> list[Job]:
        """One."""
        (ids,) = prompts
        if not ids:
            raise invalid("prompt has no tokens: give at least one", "prompt")
        job = Job(
            prompt=ids,
            params=self.params,
            max_tokens=max(self.max_tokens, 1),
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            grammar=self.grammar,
            cache=self.cache,
            deadline_s=self.facts.deadline_s,
        )
        return [job]

    def reply(self, prompts: Sequence[Sequence[int]]) -> NativeReply:
        """What is sent of the job's pieces."""
        (ids,) = prompts
        return NativeReply(
            self.facts,
            self.prompt if isinstance(self.prompt, str) else self.facts.tokenizer.decode(ids),
            self.settings(),
            silent=self.max_tokens == 0,
            logprobs=self.logprobs is not None,
            return_tokens=self.return_tokens,
            stream=self.stream,
            every_timings=self.timings_per_token,
        )

    def settings(self) -> dict[str, Any]:
        """``generation_settings``: what was asked for, with the defaults."""
        bias = [{"token": id, "bias": value} for id, value in self.params.logit_bias.items() if value > -1e9]
        return {
            **settings(self.params),
            "n_ctx": self.facts.context,
            "n_predict": self.max_tokens,
            "max_tokens": self.max_tokens,
            "stop": list(self.stop),
            "ignore_eos": self.ignore_eos,
            "n_probs": self.logprobs or 0,
            "logit_bias": bias,
            "stream": self.stream,
            "grammar": self.grammar.source if self.grammar and self.grammar.kind == "gbnf" else "",
        }


def settings(params: SamplingParams) -> dict[str, Any]:
    """Under llama.cpp's names. A seed that is not known yet is -1."""
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
    """APIError for what is wrong. Unknown fields are ignored."""
    check_depth(body)
    values = BODY.read(body, "")
    prompt = values["prompt"]
    if not isinstance(prompt, str):
        facts.check_ids(prompt, "prompt")
    return NativeCall(
        facts=facts,
        prompt=prompt,
        max_tokens=_length(values, facts),
        params=sampling.params(values, facts),
        stop=sampling.stops(values),
        ignore_eos=values["ignore_eos"],
        logprobs=values["n_probs"] or None,
        grammar=constraints.grammar(values, facts),
        cache=values["cache_prompt"],
        return_tokens=values["return_tokens"],
        stream=values["stream"],
        timings_per_token=values["timings_per_token"],
    )


def props(facts: Facts, chat_template: str = "") -> dict[str, Any]:
    """``/props``. The model's path is nobody's business."""
    return {
        "default_generation_settings": {
            "n_ctx": facts.context,
            "params": {**settings(facts.sampling), "n_predict": facts.default_max_tokens},
        },
        "total_slots": facts.slots,
        "model_alias": facts.name,
        "model_path": facts.name,
        "chat_template": chat_template,
        "modalities": {"vision": False, "audio": False},
        "build_info": facts.fingerprint,
    }


def _length(values: Mapping[str, Any], facts: Facts) -> int:
    given = (values[name] for name in ("n_predict", "max_tokens"))
    found = next((each for each in given if each is not None), facts.default_max_tokens)
    return LARGEST if found == -1 else int(found)
