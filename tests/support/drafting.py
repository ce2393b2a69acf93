"""Guesses of tests: right or wrong on purpose, as many as there is room for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hotcold.engine.draft_block import BlockDrafts
from hotcold.engine.drafts import look_up
from hotcold.engine.request import Request
from hotcold.engine.speculation import Speculation, speculation_of
from hotcold.kernels.backend import DECODE_ROWS
from hotcold.runtime.session import Session

#: What a request will say, from which guesses are made that are right.
Known = Callable[[Request], Sequence[int]]


class Reckless(Speculation):
    """Verifies a random number of guesses in each step, whatever they cost; each is the ``known`` token with
    probability ``share``, and a random one else."""

    def __init__(self, known: Known, share: float, vocab: int, seed: int = 0) -> None:
        super().__init__([look_up], DECODE_ROWS, DECODE_ROWS)
        self._known = known
        self._share = share
        self._vocab = vocab
        self._random = np.random.default_rng(seed)

    def choose(self, buffers: Mapping[Request, int], rows: int, spare: int) -> dict[Request, Sequence[int]]:
        chosen: dict[Request, Sequence[int]] = {}
        for request, limit in buffers.items():
            most = min(limit, spare)
            n = int(self._random.integers(0, most + 1)) if most > 0 else 0
            if n:
                coming = list(self._known(request)[len(request.output) :])
                chosen[request] = [self._propose(coming, i) for i in range(n)]
                spare -= n
        return chosen

    def _propose(self, coming: Sequence[int], i: int) -> int:
        if i < len(coming) and self._random.random() < self._share:
            return coming[i]
        return int(self._random.integers(self._vocab))


def eager(session: Session) -> Speculation:
    """Only the block of the file guesses, and all guesses pay."""
    found = speculation_of(session)
    assert found is not None
    block = [each for each in found._drafters if isinstance(each, BlockDrafts)]
    only = Speculation(block, 7, session.model.limits.decode)
    costs: Any = only.costs
    costs.measured, costs.of = lambda rows: True, lambda rows: 1.0
    return only
