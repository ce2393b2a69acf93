"""Parameters of sampling, and the values that a model's file recommends (``general.sampling.*``)."""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from hotcold.errors import UserError
from hotcold.values import LARGEST, real, shown, whole

_U64 = (1 << 64) - 1
_PREFIX = "general.sampling."
#: llama.cpp's names of what a file may recommend, and ours.
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
    """Parameters of sampling. ValueError: a value is not allowed."""

    temperature: float = 0.8  #: 0 (always the most likely token) to 100; divides the logits
    top_k: int = 40  #: keep the k most likely; 0 keeps all
    top_p: float = 0.95  #: keep the fewest most likely whose probabilities reach this sum; 1 keeps all
    min_p: float = 0.05  #: keep those at least this likely, relative to the most likely one; 0 keeps all
    repeat_penalty: float = 1.0  #: divides recent tokens' logits when positive, else multiplies; 1 is none
    repeat_last_n: int = 64  #: how many tokens are recent; 0 is none, -1 all
    #: taken from a token's logit for each time that it was generated, the prompt not counted; -2 to 2
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0  #: taken once from the logits of tokens that were generated; -2 to 2
    seed: int | None = None  #: of the random numbers, 0 to 2^64 - 1; None: :meth:`with_seed` draws one
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
        for name, value in checked.items():  # NumPy's numbers become Python's
            object.__setattr__(self, name, value)

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty depends on how often a token was generated."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0

    def with_seed(self) -> Self:
        """These, with a random seed drawn from the system where there is none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


def sampling_of_file(metadata: Mapping[str, Any]) -> tuple[SamplingParams, tuple[str, ...]]:
    """The recommendations of a file, and a note on each that is not followed."""
    found, notes = SamplingParams(), []
    for key, value in metadata.items():
        if not key.startswith(_PREFIX):
            continue
        name = _OF_FILES.get(key.removeprefix(_PREFIX))
        if name is None:
            notes.append(f"the file recommends {key} {shown(value, 40)}, which is not supported here")
            continue
        try:
            found = replace(found, **{name: value})
        except UserError as error:
            notes.append(f"{key} of the file is ignored: {error}")
    return found, tuple(notes)


def _bias(id: Any, value: Any) -> tuple[int, float]:
    id = whole("a token id in logit_bias", id, 0, LARGEST, "ids are the tokenizer's")
    if value == -math.inf:
        return id, -math.inf
    return id, real(f"logit_bias of token {id}", value, -1e4, 1e4, "-inf forbids the token")
