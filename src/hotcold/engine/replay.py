"""Guesses from texts that are known already: right as often as somebody wants, to measure what guesses
bring."""

from collections.abc import Sequence

import numpy as np

from hotcold.engine.guesses import Guess, Kind
from hotcold.engine.request import Request


class Replay:
    """Guesses the tokens of texts that it was told, each of them right with probability ``share``, and one
    that is wrong else. A :class:`~hotcold.engine.guesses.Guesser`."""

    def __init__(self, share: float, vocab: int) -> None:
        self._share = share
        self._vocab = vocab
        self._guesses: dict[int, list[int]] = {}  # by seed

    def tell(self, seed: int, text: Sequence[int]) -> None:
        """Takes the answer of the request with this seed."""
        right = np.random.default_rng(seed).random(len(text)) < self._share
        wrong = [(id + 1) % self._vocab for id in text]
        self._guesses[seed] = [text[i] if yes else wrong[i] for i, yes in enumerate(right)]

    def forget(self) -> None:
        """Forgets all texts."""
        self._guesses = {}

    def __call__(self, request: Request, most: int) -> Guess | None:
        start = len(request.output)
        coming = self._guesses.get(request.seed, ())[start : start + most]
        return Guess(coming, Kind.REPLAY) if coming else None
