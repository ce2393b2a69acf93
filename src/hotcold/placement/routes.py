"""Expert cache misses per token, counted by replaying the experts that a text's tokens chose."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[Any]


def missed_by_token(routes: Ids, experts: int, slots: int, pinned: int = 0) -> Doubles:
    """Returns the share of tokens that miss 0, 1, 2, ... experts, ``[k + 1]``.

    ``routes`` ``[T, k]``: experts that each token of a text chose; ``slots``: the layer's expert slots. The
    ``pinned`` most chosen experts are pinned; the least recently used of the others is replaced
    (csrc/disk/expert_cache.h). The pinned experts are chosen on one half of the text, and the misses are
    counted on the other: a text's favourites are less frequent in the next text.

    In a longer text, most first uses of an expert would have an earlier use. The reuse distance of such a use
    is estimated from the other uses (Kaplan and Meier, 1958)."""
    tokens, k = routes.shape
    counts = np.zeros(k + 1)
    if slots >= experts or not tokens:
        counts[0] = 1
        return counts
    half = tokens // 2
    parts = [(slice(half), slice(half, None)), (slice(half, None), slice(half))] if pinned and half else []
    for chosen_by, counted in parts or [(slice(0), slice(None))]:
        often = np.bincount(routes[chosen_by].ravel(), minlength=experts)
        stay = np.argsort(-often, kind="stable")[:pinned]
        counts += _replayed(routes, experts, stay, slots - pinned, counted)
    shares: Doubles = counts / counts.sum()
    return shares


def _replayed(routes: Ids, experts: int, stay: Ids, free: int, counted: slice) -> Doubles:
    """Returns how many of the counted tokens miss 0, 1, 2, ... experts."""
    pinned = np.zeros(experts, bool)
    pinned[stay] = True
    depths, first = _depths(routes, experts, pinned)
    longer = _survival(depths, first, experts)
    sure = ((depths >= free) & ~pinned[routes]).sum(1)
    # A first use with less than ``free`` distance: the chance that its true distance is ``free`` or more.
    unsure = first & (depths < free)
    beyond = np.where(unsure, longer[free] / np.maximum(longer[np.where(unsure, depths, 0)], 1e-12), 0.0)
    counts = np.zeros(routes.shape[1] + 1)
    for missed, chances in zip(sure[counted].tolist(), beyond[counted], strict=True):
        distribution = how_many(chances)
        counts[missed : missed + len(distribution)] += distribution
    return counts


def _depths(routes: Ids, experts: int, pinned: npt.NDArray[np.bool_]) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Returns, for each use, the number of other experts named since the expert's last use, and whether the
    use is its first one. A first use counts all experts named so far. Always ``pinned`` experts have depth
    0."""
    order = np.full(experts, -1, np.int64)  # last use of each expert: the token, then the expert's number
    depths = np.zeros(routes.shape, np.int64)
    first = np.zeros(routes.shape, bool)
    for token, ids in enumerate(routes):
        unpinned = np.flatnonzero(~pinned[ids])
        uses = ids[unpinned].astype(np.int64)  # the ids of a file have fewer bits than the products below
        depths[token, unpinned] = (order[None, :] > order[uses, None]).sum(1)
        first[token, unpinned] = order[uses] < 0
        order[uses] = token * experts + uses
    return depths, first


def _survival(depths: Ids, first: npt.NDArray[np.bool_], experts: int) -> Doubles:
    """Returns the share of uses with a depth of n or more, by n, ``[E + 1]``."""
    ended = np.bincount(depths[~first], minlength=experts + 1)
    cut = np.bincount(depths[first], minlength=experts + 1)
    # A use cut at n is known to have a depth of n or more, so it says nothing about n itself.
    at_risk = (ended + cut)[::-1].cumsum()[::-1] - cut
    hazard = ended / np.maximum(at_risk, 1)
    return np.append(1.0, np.cumprod(1 - hazard))[: experts + 1]


def how_many(chances: Sequence[float] | Doubles) -> Doubles:
    """Returns the probability that 0, 1, 2, ... of some independent events happen."""
    distribution = np.ones(1)
    for chance in np.asarray(chances)[np.asarray(chances) > 0]:
        distribution = np.convolve(distribution, [1 - chance, chance])
    return distribution


def mean(distribution: Doubles) -> float:
    """Returns the mean number of missed experts, from the share of tokens that miss 0, 1, 2, ..."""
    return float((np.arange(len(distribution)) * distribution).sum())
