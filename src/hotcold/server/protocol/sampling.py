"""Sampling and length: the fields that all routes have."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from hotcold.engine.request import Job
from hotcold.errors import UserError
from hotcold.runtime.sampling import SamplingParams
from hotcold.server.protocol.errors import APIError, invalid
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.fields import (
    Either,
    Field,
    Fields,
    Items,
    Neutral,
    Real,
    Schema,
    Text,
    Whole,
    refuse,
)
from hotcold.server.protocol.limits import LARGEST, MAX_BIAS, MAX_SEED, MAX_STOP_LENGTH, MAX_STOPS

#: llama.cpp's other samplers. They are off, so their place has no effect.
_OFF = ("dry", "top_n_sigma", "typ_p", "typical_p", "tfs_z", "xtc", "infill", "adaptive_p")
#: Samplers in the order of their application, and values that switch them off.
_NOTHING: dict[str, dict[str, Any]] = {
    "penalties": {
        "repeat_penalty": 1.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    },
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}  # fmt: skip
SAMPLERS = tuple(_NOTHING)


class BiasKind:
    """``{"id": number}``, or llama.cpp's ``[[id, number], ...]``; ``false`` instead forbids the token."""

    def read(self, value: Any, param: str) -> dict[int, float]:
        if not isinstance(value, dict | list):
            refuse(param, value, "an object of token ids and numbers is needed")
        if len(value) > MAX_BIAS:
            refuse(param, value, f"at most {MAX_BIAS} entries are allowed")
        pairs = value.items() if isinstance(value, dict) else map(self._pair, value)
        return {self._id(id, param): self._number(number, f"{param}[{id}]") for id, number in pairs}

    def _pair(self, value: Any) -> tuple[Any, Any]:
        if not isinstance(value, list) or len(value) != 2:
            refuse("logit_bias", value, "pairs of a token id and a number are needed")
        return value[0], value[1]

    def _id(self, value: Any, param: str) -> int:
        id = value
        if isinstance(id, str) and id.isascii() and id.isdecimal() and len(id) <= 10:
            id = int(id)
        if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id <= LARGEST:
            refuse(f"a token of {param}", value, "ids of the tokenizer are needed")
        return id

    def _number(self, value: Any, param: str) -> float:
        if value is False:
            return -math.inf
        return Real(-100, 100, "false forbids the token").read(value, param)

    def schema(self) -> Schema:
        number = {"anyOf": [Real(-100, 100).schema(), {"const": False}]}
        by_id = {
            "type": "object",
            "maxProperties": MAX_BIAS,
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": number,
        }
        pair = {"type": "array", "prefixItems": [{"type": "integer", "minimum": 0}, number], "minItems": 2}
        return {"anyOf": [by_id, {"type": "array", "maxItems": MAX_BIAS, "items": {**pair, "maxItems": 2}}]}


_STOP = Text(0, MAX_STOP_LENGTH)
STOP = Field(
    Either({str: _STOP, list: Items(_STOP, 0, MAX_STOPS)}, "a string, or a list of strings,"),
    note="Ends the answer, and is not part of it; an empty one has no effect.",
)
#: The limit of an answer's tokens, by any of its names.
LENGTH = Whole(-1, LARGEST, "-1: until the context is full; leave it out for the server's default", 0)
SEED = Field(
    Whole(-(1 << 63), MAX_SEED, "-1: a random seed"),
    note="The same seed gives the same answer; -1 is a random seed, as in llama.cpp. With several choices "
    "the first one has this seed; the seeds of the others follow from it.",
)


def _fields() -> Fields:
    penalty = Real(-2, 2, "0 is none")
    repeat = Real(0.01, 100, "1 is none")
    share = Real(0, 1)
    count = Whole(-1, LARGEST)
    return {
        "temperature": Field(Real(0, 100, "0 is greedy"), None, "0 always takes the likeliest token."),
        "top_p": Field(
            share, None, "Keeps the likeliest tokens whose probabilities add up to this; 1 keeps all."
        ),
        "top_k": Field(count, None, "Keeps the k likeliest tokens; 0 and -1 keep all."),
        "min_p": Field(
            share, None, "Keeps tokens at least this likely, relative to the likeliest; 0 keeps all."
        ),
        "repeat_penalty": Field(repeat, None, "Divides the logits of recent tokens; 1 changes nothing."),
        "repetition_penalty": Field(repeat, None, "Another name for repeat_penalty."),
        "repeat_last_n": Field(count, None, "Number of recent tokens; -1 is all."),
        "frequency_penalty": Field(
            penalty, None, "Subtracted from a token's logit for each time it was generated."
        ),
        "presence_penalty": Field(penalty, None, "Subtracted from the logits of tokens that were generated."),
        "samplers": Field(
            Items(Text(1, 32), 0, 32),
            None,
            "Samplers that are not in the list have no effect. The others always run in this order: "
            f"{', '.join(SAMPLERS)}.",
        ),
        "logit_bias": Field(BiasKind(), None, "Token ids and what to add to their logits, -100 to 100."),
        "seed": SEED,
        "stop": STOP,
    }


#: Fields of all routes. :attr:`Facts.sampling` has the defaults.
FIELDS = _fields()

#: The fields that other dialects have, too.
SHARED: Fields = {
    name: FIELDS[name]
    for name in (
        "temperature", "top_p", "top_k", "min_p", "repeat_penalty", "repeat_last_n", "frequency_penalty",
        "presence_penalty", "seed",
    )
}  # fmt: skip

#: Other programs' sampling methods, which are not supported, with the values that request nothing.
UNSUPPORTED: Fields = {
    "mirostat": Field(Neutral((0,))),
    "typical_p": Field(Neutral((1,))),
    "tfs_z": Field(Neutral((1,))),
    "top_a": Field(Neutral((0,))),
    "top_n_sigma": Field(Neutral((-1, 0))),
    "dry_multiplier": Field(Neutral((0,))),
    "xtc_probability": Field(Neutral((0,))),
    "dynatemp_range": Field(Neutral((0,))),
    "length_penalty": Field(Neutral((1,))),
    "use_beam_search": Field(Neutral((False,))),
    "min_tokens": Field(Neutral((0,))),
    "bad_words": Field(Neutral(([],))),
    "stop_token_ids": Field(Neutral(([],))),
    "allowed_token_ids": Field(Neutral()),
    "lora": Field(Neutral(([],))),
}


#: Fields with the same name and value in :class:`SamplingParams`.
_SAME = {each.name for each in fields(SamplingParams)} & FIELDS.keys() - {"seed", "logit_bias"}


def params(values: Mapping[str, Any], facts: Facts) -> SamplingParams:
    """Makes sampling parameters of the values that :data:`FIELDS` read, with the server's defaults."""
    values = _without_samplers(values)
    for id in values["logit_bias"] or ():
        if id >= facts.vocab:
            message = f"logit_bias has token {id}: allowed are the ids 0 to {facts.vocab - 1}"
            raise APIError(message, param="logit_bias", code="invalid_value")
    changes = {name: values[name] for name in _SAME if values[name] is not None}
    if values["repetition_penalty"] is not None:
        changes.setdefault("repeat_penalty", values["repetition_penalty"])
    if "top_k" in changes:
        changes["top_k"] = max(changes["top_k"], 0)
    if values["logit_bias"] is not None:
        changes["logit_bias"] = values["logit_bias"]
    if values["seed"] is not None:
        changes["seed"] = None if values["seed"] == -1 else values["seed"] % (MAX_SEED + 1)
    try:
        return replace(facts.sampling, **changes)
    except UserError as error:
        raise APIError(str(error), code="invalid_value") from None


def _without_samplers(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Switches off the samplers that ``samplers`` does not list."""
    names = values["samplers"]
    if names is None:
        return values
    unknown = [name for name in names if name not in (*SAMPLERS, *_OFF)]
    if unknown:
        allowed = f"allowed are {', '.join(SAMPLERS)}"
        raise invalid(f"samplers has {unknown[0]!r}: {allowed}", "samplers")
    off = [_NOTHING[name] for name in SAMPLERS if name not in names]
    return {**values, **{name: value for each in off for name, value in each.items()}}


def stops(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the texts that end an answer. Many clients send empty ones, which have no effect."""
    texts = values["stop"]
    return tuple(each for each in ([texts] if isinstance(texts, str) else texts or []) if each)


def job(
    values: Mapping[str, Any], facts: Facts, *, max_tokens: int, logprobs: int | None, **route_fields: Any
) -> Job:
    """Makes a job without its prompt. ``route_fields`` are fields of :class:`Job` that only one route has."""
    return Job(
        params=params(values, facts),
        max_tokens=max_tokens,
        stop=stops(values),
        ignore_eos=values["ignore_eos"],
        logprobs=logprobs,
        cache=values["cache_prompt"],
        deadline_s=facts.deadline_s,
        timeout_s=facts.timeout_s,
        **route_fields,
    )


def length(values: Mapping[str, Any], names: Sequence[str], default: int) -> int:
    """Returns the limit of an answer's tokens: the first of the names that has a value."""
    limit = next((values[name] for name in names if values[name] is not None), default)
    return LARGEST if limit == -1 else int(limit)
