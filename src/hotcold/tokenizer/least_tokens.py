"""A lower bound of the number of tokens of a text, without encoding it.

Each byte of a text weighs 1 / n, where n is the length of the longest token that contains the byte. A byte in
a token of m bytes thus weighs at most 1 / m, and a token at most 1: the number of tokens is at least the
weight of all bytes. Bytes that a tokenizer may leave out weigh 0. SentencePiece's space, U+2581, counts as a
space in both texts and tokens."""

from collections import defaultdict
from collections.abc import Collection, Iterable

import numpy as np

_ONE = 1 << 32
_PART = 1 << 16  # characters per call: other threads wait until it returns
_SPACE = "\u2581"


class LeastTokens:
    """The bound for a vocabulary with tokens of the bytes ``pieces``. ``lost`` are bytes that a text may
    lose; ``spaces``: U+2581 counts as a space."""

    def __init__(self, pieces: Iterable[bytes], lost: Collection[int], *, spaces: bool) -> None:
        self._spaces = spaces
        by_length: defaultdict[int, set[int]] = defaultdict(set)
        for piece in pieces:
            piece = piece.replace(_SPACE.encode(), b" ")
            by_length[len(piece)].update(piece)
        longest = np.zeros(256, np.int64)
        for length, indices in sorted(by_length.items()):
            longest[[*indices]] = length
        longest[[*lost]] = 0
        self._weights = np.where(longest > 0, _ONE // np.maximum(longest, 1), 0)

    def of(self, text: str) -> int:
        """The least possible number of tokens of a text."""
        total = 0
        for at in range(0, len(text), _PART):
            part = text[at : at + _PART]
            data = (part.replace(_SPACE, " ") if self._spaces else part).encode(errors="replace")
            total += int(np.bincount(np.frombuffer(data, np.uint8), minlength=256) @ self._weights)
        return total // _ONE
