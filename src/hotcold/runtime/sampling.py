"""Sampling parameters, and the values that a model's file recommends (``general.sampling.*``)."""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from hotcold.errors import UserError
from hotcold.values import LARGEST, real, shown, whole

_U64 = (1 << 64) - 1
_PREFIX = "general.sampling."
#: Parameters that a file may recommend: llama.cpp's names, and ours.
_OF_FILES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repeat_penalty",
    "penalty_last_n": "repeat_last_n",
}


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling. UserError: a value is not allowed."""

    temperature: float = 0.8  #: divides the logits; 0 (always the likeliest token) to 100
    top_k: int = 40  #: keep the k likeliest tokens; 0 keeps all
    top_p: float = 0.95  #: keep the fewest likeliest tokens whose probabilities reach this sum; 1 keeps all
    min_p: float = 0.05  #: keep tokens with this probability relative to the likeliest one; 0 keeps all
    #: divides positive logits of recent tokens, multiplies negative ones; 1: none
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64  #: number of recent tokens; 0: none, -1: all
    #: subtracted from a token's logit for each time that it was generated, prompt excluded; -2 to 2
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0  #: subtracted once from the logits of generated tokens; -2 to 2
    seed: int | None = None  #: seed of the random numbers, 0 to 2^64 - 1; None: :meth:`with_seed` draws one
    #: token id -> number added to its logit; minus infinity forbids the token
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "temperature": real("temperature", self.temperature, 0, 100, "0 is greedy"),
            "top_k": whole("top_k", self.top_k, 0, LARGEST, "0 is all"),
            "top_p": real("top_p", self.top_p, 0, 1, "1 is all"),
            "min_p": real("min_p", self.min_p, 0, 1, "0 is all"),
            "repeat_penalty": real("repeat_penalty", self.repeat_penalty, 0.01, 100, "1 is none"),
            "repeat_last_n": whole("repeat_last_n", self.repeat_last_n, -1, LARGEST, "0 is none, -1 all"),
            "frequency_penalty": real("frequency_penalty", self.frequency_penalty, -2, 2, "0 is none"),
            "presence_penalty": real("presence_penalty", self.presence_penalty, -2, 2, "0 is none"),
            "logit_bias": dict(_bias(id, value) for id, value in self.logit_bias.items()),
        }
        if self.seed is not None:
            checked["seed"] = whole("seed", self.seed, 0, _U64, "leave it out for a random seed")
        for name, value in checked.items():  # NumPy numbers become Python numbers
            object.__setattr__(self, name, value)

    @property
    def counts_tokens(self) -> bool:
        """True if a penalty depends on the number of times that a token was generated."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0

    def with_seed(self) -> Self:
        """Returns the parameters with a seed, drawn from the system if they have none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


def sampling_of_file(metadata: Mapping[str, Any]) -> tuple[SamplingParams, tuple[str, ...]]:
    """Returns the recommendations of a file, and a note on each that is not followed."""
    params, notes = SamplingParams(), []
    for key, value in metadata.items():
        if not key.startswith(_PREFIX):
            continue
        name = _OF_FILES.get(key.removeprefix(_PREFIX))
        if name is None:
            notes.append(f"the file recommends {key} {shown(value, 40)}, which is not supported here")
            continue
        try:
            params = replace(params, **{name: value})
        except UserError as error:
            notes.append(f"{key} of the file is ignored: {error}")
    return params, tuple(notes)


def _bias(id: Any, value: Any) -> tuple[int, float]:
    id = whole("a token id in logit_bias", id, 0, LARGEST, "ids are the tokenizer's")
    if value == -math.inf:
        return id, -math.inf
    return id, real(f"logit_bias of token {id}", value, -1e4, 1e4, "-inf forbids the token")
