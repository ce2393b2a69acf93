"""Tells how many of a token's experts are missing from memory, by replaying the experts that a text's tokens
chose."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[Any]


def missed_by_token(routes: Ids, experts: int, slots: int, pinned: int = 0) -> Doubles:
    """Returns the share of tokens that miss 0, 1, 2, ... experts, ``[k + 1]``.

    ``routes`` ``[T, k]`` are the experts that each token of a text chose, ``slots`` how many experts of the
    layer lie in memory. ``pinned`` of them, the ones that were chosen most, stay; others come and go by the
    last token that named them (csrc/disk/expert_cache.h). Which ones stay is decided by one half of the text
    and counted on the other one, as a text's own favourites are less liked by the next one.

    In a short text most first uses of an expert are of one that a longer text had named before. How far back
    such a use would have looked is estimated from those that are no first uses (Kaplan and Meier, 1958)."""
    tokens, k = routes.shape
    found = np.zeros(k + 1)
    if slots >= experts or not tokens:
        found[0] = 1
        return found
    half = tokens // 2
    parts = [(slice(half), slice(half, None)), (slice(half, None), slice(half))] if pinned and half else []
    for chosen_by, counted in parts or [(slice(0), slice(None))]:
        often = np.bincount(routes[chosen_by].ravel(), minlength=experts)
        stay = np.argsort(-often, kind="stable")[:pinned]
        found += _replayed(routes, experts, stay, slots - pinned, counted)
    shares: Doubles = found / found.sum()
    return shares


def _replayed(routes: Ids, experts: int, stay: Ids, free: int, counted: slice) -> Doubles:
    """How many of the counted tokens miss so many experts."""
    here = np.zeros(experts, bool)
    here[stay] = True
    depths, first = _depths(routes, experts, here)
    longer = _survival(depths, first, experts)
    sure = ((depths >= free) & ~here[routes]).sum(1)
    # A first use below ``free``: the chance that it looks beyond, if it looks as far as it was seen to.
    unsure = first & (depths < free)
    beyond = np.where(unsure, longer[free] / np.maximum(longer[np.where(unsure, depths, 0)], 1e-12), 0.0)
    found = np.zeros(routes.shape[1] + 1)
    for missed, chances in zip(sure[counted].tolist(), beyond[counted], strict=True):
        spread = how_many(chances)
        found[missed : missed + len(spread)] += spread
    return found


def _depths(routes: Ids, experts: int, here: npt.NDArray[np.bool_]) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """For each use, how many other experts were named later than this one was (all that were, if it never
    was), and whether it never was. Those that are always ``here`` are left out, with a depth of 0."""
    order = np.full(experts, -1, np.int64)  # the last use: the token, then the expert's number
    depths = np.zeros(routes.shape, np.int64)
    first = np.zeros(routes.shape, bool)
    for token, ids in enumerate(routes):
        own = np.flatnonzero(~here[ids])
        uses = ids[own].astype(np.int64)  # a file's are narrower than the numbers below
        depths[token, own] = (order[None, :] > order[uses, None]).sum(1)
        first[token, own] = order[uses] < 0
        order[uses] = token * experts + uses
    return depths, first


def _survival(depths: Ids, first: npt.NDArray[np.bool_], experts: int) -> Doubles:
    """The share of uses whose depth is n or more, by n, ``[E + 1]``."""
    ended = np.bincount(depths[~first], minlength=experts + 1)
    cut = np.bincount(depths[first], minlength=experts + 1)
    # A use that was cut at n is known to be n or more, and says nothing of n itself.
    at_risk = (ended + cut)[::-1].cumsum()[::-1] - cut
    hazard = ended / np.maximum(at_risk, 1)
    return np.append(1.0, np.cumprod(1 - hazard))[: experts + 1]


def how_many(chances: Sequence[float] | Doubles) -> Doubles:
    """The likelihood that 0, 1, 2, ... of some events happen, each by itself with its own chance."""
    found = np.ones(1)
    for chance in np.asarray(chances)[np.asarray(chances) > 0]:
        found = np.convolve(found, [1 - chance, chance])
    return found


def mean(spread: Doubles) -> float:
    """How many experts are missed on average, if 0, 1, 2, ... are by so many tokens."""
    return float((np.arange(len(spread)) * spread).sum())
