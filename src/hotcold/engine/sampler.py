"""Choosing the next token from its logits.

The steps come in llama.cpp's order: logit bias, repetition penalty, top-k, top-p, min-p, temperature. The
backend ranks the vocabulary. Where all of it may be drawn from, it ranks as many as the draw turns out to
need, mostly the first :data:`FIRST_CANDIDATES`. A random number depends on the request's seed and the token's
position alone, so a request gives the same text whatever runs beside it."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from hotcold.engine.values import LARGEST, real, whole
from hotcold.errors import UserError
from hotcold.kernels.backend import Backend, Buffer, Floats, Ints

FIRST_CANDIDATES = 1000  #: that are ranked first where there is no top-k
_MORE = 8  # times as many are ranked next, if the draw is not decided among them

_U64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment: 2^64 / golden ratio, odd


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen; a value that is not allowed is a ValueError."""

    temperature: float = 0.8  #: 0 (always the most likely token) to 100; divides the logits
    top_k: int = 40  #: keep the k most likely; 0 keeps all
    top_p: float = 0.95  #: keep the fewest most likely whose probabilities reach this sum; 1 keeps all
    min_p: float = 0.05  #: keep those at least this likely, relative to the most likely one; 0 keeps all
    repeat_penalty: float = 1.0  #: divides recent tokens' logits when positive, else multiplies; 1 is none
    repeat_last_n: int = 64  #: how many tokens are recent; 0 is none, -1 all
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
            "logit_bias": dict(_bias(id, value) for id, value in self.logit_bias.items()),
        }
        if self.seed is not None:
            checked["seed"] = whole("seed", self.seed, 0, _U64, "leave it out for a random one")
        for name, value in checked.items():  # NumPy's numbers become Python's
            object.__setattr__(self, name, value)

    def with_seed(self) -> Self:
        """These, with a random seed drawn from the system where there is none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


class Allowed(NamedTuple):
    """What may be chosen once, beside what the parameters of all tokens say."""

    mask: npt.NDArray[np.uint64] | None = None  #: ``[ceil(V / 64)]``, a bit for each id; None allows all
    bias: Mapping[int, float] | None = None  #: added to single logits, as ``logit_bias``


class Logprobs(NamedTuple):
    """Of one token, under the model's own distribution: before bias, penalty, mask and temperature."""

    logprob: float  #: natural logarithm of the chosen token's probability
    top: tuple[tuple[int, float], ...]  #: the likeliest ids and theirs, in descending order, ties by lower id


class Sampler:
    """Chooses tokens for any number of requests and remembers nothing of them. Not thread-safe. ``backend``
    is the one that has the logits."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def sample(
        self,
        buffer: Buffer,
        row: int,
        params: SamplingParams,
        position: int,
        recent: Sequence[int] = (),
        allowed: npt.NDArray[np.uint64] | None = None,
        bias: Mapping[int, float] | None = None,
    ) -> int:
        """The id of the next token, from a row of a buffer of logits ``[R, V]`` float32, and parameters with
        a seed or temperature 0.

        The token's ``position`` in its sequence is the key of the random number, with the seed; ``recent`` is
        the sequence so far, for the repetition penalty; ``allowed`` is a bit mask ``[ceil(V / 64)]`` of ids,
        and ``bias`` is added to the parameters' own. ``ValueError``: logits that are not numbers, a mask or a
        bias that does not fit the vocabulary, or nothing allowed."""
        logits: Floats = self._backend.read(buffer, row, row + 1)[0]
        words = -(-len(logits) // 64)
        if allowed is not None and (allowed.dtype != np.uint64 or allowed.shape != (words,)):
            raise UserError(f"a mask of {allowed.dtype} {allowed.shape}: uint64 ({words},) is needed")
        adjusted = _adjustments(logits, params, recent, bias or {})
        greedy = params.temperature == 0
        if params.seed is None and not greedy:
            raise ValueError("the seed is None: draw one with SamplingParams.with_seed()")
        first = int(logits.argmax())  # the lowest id on a tie; NaN counts as the largest
        best = float(logits[first])
        if not best < math.inf:
            raise UserError(f"the model's logits contain {best}, not a finite number: its file is damaged")
        if greedy and not adjusted and allowed is None and best > -math.inf:
            return first
        added = None
        if adjusted:
            added = (np.array([*adjusted], np.int32), np.array([*adjusted.values()], np.float32))
        k = 1 if greedy else min(params.top_k or len(logits), len(logits))
        totals = None
        if k == len(logits) > FIRST_CANDIDATES:
            totals = _totals(logits, added, allowed, params)
            k = FIRST_CANDIDATES
        while True:
            ids, values = self._backend.top_k(buffer, row, k, added, allowed)
            if not len(ids) or values[0] == -math.inf:
                raise UserError("no token may be chosen: the logits, their bias or the mask forbid every one")
            if greedy or params.seed is None:
                return int(ids[0])
            if len(ids) < k or k == len(logits):
                totals = None  # these are all
            index = draw(values, params, random_uniform(params.seed, position), totals)
            if index is not None:
                return int(ids[index])
            k = min(_MORE * k, len(logits))

    def logprobs(self, buffer: Buffer, row: int, id: int, top: int) -> Logprobs:
        """Of the token ``id``, and of the ``top`` likeliest, from a row of a buffer of logits ``[R, V]``
        float32 without NaN."""
        logits: Floats = self._backend.read(buffer, row, row + 1)[0]
        values = logits.astype(np.float64)
        best = values.max()
        total = best + math.log(float(np.exp(values - best).sum()))
        likeliest = []
        if top:
            ids, _ = self._backend.top_k(buffer, row, min(top, len(logits)))
            likeliest = [(int(each), float(values[each] - total)) for each in ids]
        return Logprobs(float(values[id] - total), tuple(likeliest))


class Totals(NamedTuple):
    """Sums over all candidates, relative to the most likely one."""

    weights: float  #: exp(logit)
    heated: float  #: exp(logit / temperature)


def _totals(
    logits: Floats,
    bias: tuple[Ints, Floats] | None,
    allowed: npt.NDArray[np.uint64] | None,
    params: SamplingParams,
) -> Totals:
    values = logits.astype(np.float64)
    if bias is not None:
        values[bias[0]] = logits[bias[0]] + bias[1]  # in float32, as they are ranked
    if allowed is not None:
        bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[: len(logits)]
        values = values[bits.astype(np.bool_)]
    best = values.max(initial=-math.inf)
    if best == -math.inf:
        return Totals(0.0, 0.0)  # nothing is allowed, as the ranking will show
    values -= best
    with np.errstate(over="ignore"):
        return Totals(float(np.exp(values).sum()), float(np.exp(values / params.temperature).sum()))


def _adjustments(
    logits: Floats, params: SamplingParams, recent: Sequence[int], bias: Mapping[int, float]
) -> dict[int, float]:
    """What to add to single logits, by id, for the logit bias and then the repetition penalty."""
    adjusted = dict(params.logit_bias)
    for id, value in bias.items():
        if not value < math.inf:
            raise UserError(f"the bias of token {id} is {value}: a number, or -inf to forbid it, is needed")
        adjusted[id] = adjusted.get(id, 0.0) + value
    outside = [id for id in (min(adjusted, default=0), max(adjusted, default=0)) if not 0 <= id < len(logits)]
    if outside:
        raise UserError(f"logit_bias names token {outside[0]}: allowed are the ids 0 to {len(logits) - 1}")
    penalty, n = params.repeat_penalty, params.repeat_last_n
    if penalty == 1 or n == 0 or not len(recent):
        return adjusted
    ids = list(set(recent if n < 0 else recent[-n:]))
    for id, logit in zip(ids, logits[ids].tolist(), strict=True):
        value = logit + adjusted.get(id, 0.0)
        if value > -math.inf:
            adjusted[id] = (value / penalty if value > 0 else value * penalty) - logit
    return adjusted


def draw(values: Floats, params: SamplingParams, uniform: float, totals: Totals | None = None) -> int | None:
    """Draws from candidates by top-p, min-p and temperature: an index into ``values``. ``values`` are ``[k]``
    logits in descending order, of which the first is finite; ``uniform`` is the random number, in [0, 1).

    With ``totals``, of all candidates, ``values`` are the first of more: None where these do not decide."""
    logits = values.astype(np.float64)
    logits -= logits[0]
    n = len(logits)
    if params.top_p < 1:
        sums = np.exp(logits).cumsum()
        total = totals.weights if totals else sums[-1]
        n = min(n, int(sums.searchsorted(params.top_p * total)) + 1)
    if params.min_p > 0:
        n = min(n, int(np.count_nonzero(logits >= math.log(params.min_p))))
    if n == 1:
        return 0
    with np.errstate(over="ignore"):  # a tiny temperature: minus infinity is right
        sums = np.exp(logits[:n] / params.temperature).cumsum()
    total = sums[-1]
    if totals and n == len(logits):  # the candidates that are kept may go on beyond these
        if params.top_p < 1 or params.min_p > 0:
            return None
        total = totals.heated
    # Where total is the last sum, the product is below it even when rounded, as uniform <= 1 - 2^-53: the
    # index is below n, and a candidate without probability is never chosen.
    index = int(sums.searchsorted(uniform * total, side="right"))
    return index if index < n else None


def random_uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2^-53, that depends on its arguments alone.

    Element ``position`` of the splitmix64 sequence (Steele, Lea and Flood, OOPSLA 2014) whose start is itself
    drawn from the seed, so that the sequences of neighbouring seeds have nothing in common."""
    return (splitmix64(splitmix64(seed, 0), position) >> 11) * 2.0**-53


def splitmix64(seed: int, index: int) -> int:
    """Element ``index``, from 0, of the splitmix64 sequence that starts at ``seed``; 64 bits."""
    z = (seed + (index + 1) * _GOLDEN) & _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)


def _bias(id: Any, value: Any) -> tuple[int, float]:
    id = whole("a token id of logit_bias", id, 0, LARGEST, "ids are the tokenizer's")
    if value == -math.inf:
        return id, -math.inf
    return id, real(f"logit_bias of token {id}", value, -1e4, 1e4, "-inf forbids the token")
