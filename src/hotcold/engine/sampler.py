"""The sampler: chooses the next token from its logits.

The steps have llama.cpp's order: logit bias, repetition penalty, frequency and presence penalty, top-k,
top-p, min-p, temperature. With a top-k the backend ranks ``k`` tokens, and the draw follows the ranks.
Without one nothing is ranked, and the draw follows the ids. A random number depends only on the request's
seed and the token's position, so a request gives the same text in any batch."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.kernels.backend import Backend, Buffer, Floats, Ints
from hotcold.runtime.sampling import SamplingParams

_BLOCK = 256  # tokens whose probabilities are summed together, if none are ranked
_BINS, _BINS_PER_NAT = 8192, 64  # of logits below the largest one; the last bin has all lower logits

_U64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment: 2^64 / golden ratio, odd


class DamagedModelError(UserError):
    """The model's logits or vectors are invalid, independently of the request."""


def mask_of(ids: Iterable[int], vocab: int) -> npt.NDArray[np.uint64]:
    """Returns a mask ``[ceil(vocab / 64)]`` with the bits of these ids."""
    bits = np.zeros(-(-vocab // 64) * 64, np.uint8)
    bits[[*ids]] = 1
    return np.packbits(bits, bitorder="little").view(np.uint64)


class Allowed(NamedTuple):
    """The tokens that a constraint allows for one choice, and their bias besides the parameters' bias."""

    mask: npt.NDArray[np.uint64] | None = None  #: ``[ceil(V / 64)]``, a bit for each id; None: all allowed
    bias: Mapping[int, float] | None = None  #: added to single logits, as ``logit_bias``


class Logprobs(NamedTuple):
    """Log-probabilities under the model's own distribution: before bias, penalty, mask and temperature."""

    logprob: float  #: natural logarithm of the chosen token's probability
    top: tuple[tuple[int, float], ...]  #: likeliest ids with theirs, in descending order, ties by lower id


class Sampler:
    """Chooses tokens for any number of requests; stateless, but not thread-safe. ``backend`` has the
    logits."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def sample(
        self,
        buffer: Buffer,
        row: int,
        params: SamplingParams,
        position: int,
        recent: Collection[int] = (),
        allowed: npt.NDArray[np.uint64] | None = None,
        bias: Mapping[int, float] | None = None,
        generated: Sequence[int] = (),
    ) -> int:
        """Returns the id of the next token, from a row of a buffer of logits ``[R, V]`` float32.

        ``params`` need a seed or temperature 0. The seed and the token's ``position`` in its sequence
        determine the random number. ``recent``: the sequence so far, or the set of tokens for the repetition
        penalty. ``allowed``: a bit mask ``[ceil(V / 64)]`` of ids. ``bias``: added to the parameters' bias.
        ``generated``: the answer's tokens so far, for the frequency and presence penalties. UserError: logits
        that are not numbers, a mask or bias that does not fit the vocabulary, or nothing allowed. ValueError:
        no seed."""
        logits: Floats = self._backend.read(buffer, row, row + 1)[0]
        words = -(-len(logits) // 64)
        if allowed is not None and (allowed.dtype != np.uint64 or allowed.shape != (words,)):
            raise UserError(f"a mask of {allowed.dtype} {allowed.shape}: uint64 ({words},) is needed")
        adjusted = _adjustments(logits, params, recent, bias or {}, generated)
        greedy = params.temperature == 0
        if params.seed is None and not greedy:
            raise ValueError("the seed is None: draw one with SamplingParams.with_seed()")
        first = int(logits.argmax())  # the lowest id on a tie; NaN counts as the largest
        best = float(logits[first])
        if not best < math.inf:
            got = f"the model's logits contain {best}, not a finite number"
            raise DamagedModelError(f"{got}: its file is damaged")
        if greedy and not adjusted and allowed is None and best > -math.inf:
            return first
        added = None
        if adjusted:
            added = (np.array([*adjusted], np.int32), np.array([*adjusted.values()], np.float32))
        k = 1 if greedy else min(params.top_k or len(logits), len(logits))
        if params.seed is not None and k == len(logits) and not greedy:
            uniform = random_uniform(params.seed, position)
            return draw_by_id(_adjusted(logits, added, allowed), params, uniform)
        ids, values = self._backend.top_k(buffer, row, k, added, allowed)
        if not len(ids) or values[0] == -math.inf:
            raise _nothing_allowed()
        if greedy or params.seed is None:
            return int(ids[0])
        return int(ids[draw(values, params, random_uniform(params.seed, position))])

    def logprobs(self, buffer: Buffer, row: int, id: int, top: int) -> Logprobs:
        """Returns the log-probabilities of token ``id`` and of the ``top`` likeliest ones, from a row of a
        buffer of logits ``[R, V]`` float32 without NaN."""
        logits: Floats = self._backend.read(buffer, row, row + 1)[0]
        values = logits.astype(np.float64)
        best = values.max()
        total = best + math.log(float(np.exp(values - best).sum()))
        likeliest = []
        if top:
            ids, _ = self._backend.top_k(buffer, row, min(top, len(logits)))
            likeliest = [(int(each), float(values[each] - total)) for each in ids]
        return Logprobs(float(values[id] - total), tuple(likeliest))


def _nothing_allowed() -> UserError:
    return UserError(
        "no token can be chosen: the grammar, the bias and the logits together forbid all of them"
    )


def _adjusted(
    logits: Floats, bias: tuple[Ints, Floats] | None, allowed: npt.NDArray[np.uint64] | None
) -> Floats:
    """Returns the logits to draw from: float32 with biases, minus infinity where a token is not allowed."""
    if bias is None and allowed is None:
        return logits
    values = logits.copy()
    if bias is not None:
        values[bias[0]] += bias[1]
    if allowed is not None:
        bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[: len(logits)]
        values[bits == 0] = -math.inf
    return values


def _adjustments(
    logits: Floats,
    params: SamplingParams,
    recent: Collection[int],
    bias: Mapping[int, float],
    generated: Sequence[int],
) -> dict[int, float]:
    """Returns the amounts to add to single logits, by id, for the logit bias and then the penalties."""
    adjusted = dict(params.logit_bias)
    for id, value in bias.items():
        if not value < math.inf:
            raise UserError(f"the bias of token {id} is {value}: a number, or -inf to forbid it, is needed")
        adjusted[id] = adjusted.get(id, 0.0) + value
    outside = [id for id in (min(adjusted, default=0), max(adjusted, default=0)) if not 0 <= id < len(logits)]
    if outside:
        raise UserError(f"logit_bias has token {outside[0]}: allowed are the ids 0 to {len(logits) - 1}")
    penalty, n = params.repeat_penalty, params.repeat_last_n
    if penalty != 1 and n != 0 and len(recent):
        last = recent if n < 0 or not isinstance(recent, Sequence) else recent[-n:]
        ids = list(set(last))
        for id, logit in zip(ids, logits[ids].tolist(), strict=True):
            value = logit + adjusted.get(id, 0.0)
            if value > -math.inf:
                adjusted[id] = (value / penalty if value > 0 else value * penalty) - logit
    if params.counts_tokens:
        for id, count in Counter(generated).items():
            less = count * params.frequency_penalty + params.presence_penalty
            adjusted[id] = adjusted.get(id, 0.0) - less
    return adjusted


def draw(values: Floats, params: SamplingParams, uniform: float) -> int:
    """Draws from ranked candidates by top-p, min-p and temperature; returns an index into ``values``.
    ``values``: ``[k]`` logits in descending order, the first one finite. ``uniform``: random number in [0,
    1)."""
    logits = values.astype(np.float64)
    logits -= logits[0]
    n = len(logits)
    if params.top_p < 1:
        sums = np.exp(logits).cumsum()
        n = min(n, int(sums.searchsorted(params.top_p * sums[-1])) + 1)
    if params.min_p > 0:
        n = min(n, int(np.count_nonzero(logits >= math.log(params.min_p))))
    with np.errstate(over="ignore"):  # a tiny temperature: minus infinity is right
        sums = np.exp(logits[:n] / params.temperature).cumsum()
    # The product is below the last sum even when rounded, as uniform <= 1 - 2^-53. So the index is below n,
    # and a candidate without probability is never chosen.
    return int(sums.searchsorted(uniform * sums[-1], side="right"))


def draw_by_id(values: Floats, params: SamplingParams, uniform: float) -> int:
    """Draws from the whole vocabulary by top-p, min-p and temperature. Returns the first id at which the
    cumulative probability of the kept ids, in order of id, exceeds ``uniform``. ``values`` ``[V]``: logits
    below infinity. UserError: all are minus infinity."""
    best = values.max()
    if best == -math.inf:
        raise _nothing_allowed()
    ids = _kept(values, best, params)
    weights = (values if ids is None else values[ids]) - best
    with np.errstate(over="ignore"):
        # A lower temperature would separate no further logits, and its inverse would not be finite.
        weights *= np.float32(1 / max(params.temperature, 1e-30))
    np.exp(weights, out=weights)
    blocks = None
    if ids is not None:  # only blocks with kept ids: the others add nothing
        weights, blocks = _in_blocks(weights, ids, len(values))
    # A cumulative sum takes as long as all other work: sum whole blocks, then only within the drawn block.
    sums = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64).cumsum()
    point = uniform * sums[-1]  # below the last sum, as in draw()
    block = int(sums.searchsorted(point, side="right"))
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.float64)
    rest = point - (sums[block - 1] if block else 0.0)
    index = int(inside.searchsorted(rest, side="right"))
    # The block's own sum may be rounded differently: then take the last token with any probability.
    index = min(index, int(inside.searchsorted(inside[-1])))
    return (block if blocks is None else int(blocks[block])) * _BLOCK + index


def _kept(values: Floats, best: np.float32, params: SamplingParams) -> npt.NDArray[np.intp] | None:
    """Returns the ids that top-p and min-p keep, in ascending order; None if both keep all."""
    least = np.float32(-math.inf)
    if params.min_p > 0:  # rounded up, to keep the same ids as float64, which is slow to compare
        exact = np.float64(best) + math.log(params.min_p)
        least = np.float32(exact)
        if least < exact:
            least = np.nextafter(least, np.float32(math.inf))
    if params.top_p < 1:
        ids = _top_p(values - best, params.top_p)
        return ids[values[ids] >= least]
    return np.flatnonzero(values >= least) if params.min_p > 0 else None


def _in_blocks(weights: Floats, ids: npt.NDArray[np.intp], vocab: int) -> tuple[Floats, npt.NDArray[np.intp]]:
    """Returns the blocks of a vocabulary's weights that have any kept id, concatenated, and their indices.
    The last block of a vocabulary may be shorter."""
    block_of_id = ids // _BLOCK
    begins = np.flatnonzero(np.diff(block_of_id, prepend=-1))
    blocks = block_of_id[begins]
    dense = np.zeros(len(blocks) * _BLOCK, np.float32)
    positions = np.repeat(np.arange(len(blocks)), np.diff(begins, append=len(ids)))
    dense[positions * _BLOCK + ids % _BLOCK] = weights
    return dense[: len(dense) - max((int(blocks[-1]) + 1) * _BLOCK - vocab, 0)], blocks


def _top_p(logits: Floats, top_p: float) -> npt.NDArray[np.intp]:
    """Returns the ids that top-p keeps, in ascending order; ``logits`` are relative to the largest one. Only
    the bin in which the sum is reached is sorted."""
    below = logits * -_BINS_PER_NAT
    bins = np.minimum(below, _BINS - 1, out=below).astype(np.intp)
    weights = np.exp(logits, out=below)
    sums = np.bincount(bins, weights).cumsum()
    wanted = top_p * sums[-1]
    last = int(sums.searchsorted(wanted))
    ids = np.flatnonzero(bins <= last)
    of_last = ids[bins[ids] == last]
    of_last = of_last[np.argsort(-logits[of_last], kind="stable")]  # ties by lower id
    inside = weights[of_last].cumsum(dtype=np.float64) + (sums[last - 1] if last else 0.0)
    left_out = of_last[int(inside.searchsorted(wanted)) + 1 :]
    return np.delete(ids, ids.searchsorted(left_out))


def random_uniform(seed: int, position: int) -> float:
    """Returns a number in [0, 1), a multiple of 2^-53, that depends only on the arguments. It is element
    ``position`` of a splitmix64 sequence (Steele, Lea and Flood, OOPSLA 2014). The start of the sequence is
    itself drawn from the seed, so that the sequences of neighbouring seeds have nothing in common."""
    return (splitmix64(splitmix64(seed, 0), position) >> 11) * 2.0**-53


def splitmix64(seed: int, index: int) -> int:
    """Returns element ``index``, from 0, of the splitmix64 sequence that starts at ``seed``; 64 bits."""
    z = (seed + (index + 1) * _GOLDEN) & _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)
