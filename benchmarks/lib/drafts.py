"""Drafts of known texts, which measure what speculation can gain."""

import math
from collections.abc import Sequence

import numpy as np

from hotcold.engine.drafts import Draft, Kind
from hotcold.engine.request import Request


class Replay:
    """Drafts the tokens of known texts. Each is right with probability ``share``, else a wrong token takes
    its place. A :class:`~hotcold.engine.drafts.Drafter`."""

    def __init__(self, share: float, vocab: int) -> None:
        self._share = share
        self._vocab = vocab
        self._drafts: dict[int, list[int]] = {}  # by seed

    def add(self, seed: int, text: Sequence[int]) -> None:
        """Takes the answer of the request with this seed."""
        right = np.random.default_rng(seed).random(len(text)) < self._share
        wrong = [(id + 1) % self._vocab for id in text]
        self._drafts[seed] = [text[i] if yes else wrong[i] for i, yes in enumerate(right)]

    def __call__(self, request: Request, most: int) -> Draft | None:
        start = len(request.output)
        coming = self._drafts.get(request.seed, ())[start : start + most]
        return Draft(coming, Kind.MODEL) if coming else None


def best_possible(share: float, costs: Sequence[float]) -> float:
    """The highest speed with drafts whose tokens are right with probability ``share``: tokens per cost
    of one row, over all numbers of rows. ``costs`` are the costs of steps of 1, 2, ... rows."""
    if share >= 1:
        return max((i + 1) * costs[0] / cost for i, cost in enumerate(costs))
    tokens = [(1 - math.pow(share, i + 1)) / (1 - share) for i in range(len(costs))]
    return max(n * costs[0] / cost for n, cost in zip(tokens, costs, strict=True))
