"""Guesses from texts that are known already: right as often as somebody wants, to measure what guesses
bring."""

import numpy as np

from hotcold.engine.guesses import Guess, Kind
from hotcold.engine.request import Request


class Replay:
    """Guesses the tokens of ``texts``, each of them right with probability ``share``, and one that is wrong
    else. A text is of the request with its seed. A :class:`~hotcold.engine.guesses.Guesser`."""

    def __init__(self, share: float, vocab: int) -> None:
        self.texts: dict[int, list[int]] = {}  #: the answers, by seed
        self._share = share
        self._vocab = vocab

    def __call__(self, request: Request, most: int) -> Guess | None:
        start = len(request.output)
        coming = self.texts.get(request.seed, [])[start : start + most]
        if not coming:
            return None
        # The same for a token whenever it is guessed, as of a source that knows some and others not.
        random = np.random.default_rng((request.seed, start)).random(len(coming))
        right = random < self._share
        guesses = [id if yes else (id + 1) % self._vocab for id, yes in zip(coming, right, strict=True)]
        return Guess(guesses, Kind.REPLAY)
