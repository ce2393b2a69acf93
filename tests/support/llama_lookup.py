"""llama.cpp's look-up decoding (``common_ngram_cache_draft`` with the text's cache alone): what it guesses
of a text, and how many steps that takes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

#: By the length of what is looked up: how often it must have been seen, and in what share of these the guess.
_LEAST, _PERCENT = (2, 2, 1, 1), (66, 50, 50, 50)


class LlamaLookup:
    """Counts what followed each one to four tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            for n in range(1, min(4, len(self.tokens)) + 1):
                self._next[(*self.tokens[-n:],)][token] += 1
            self.tokens.append(token)

    def draft(self, most: int) -> list[int]:
        found: list[int] = []
        while len(found) < most:
            last = [*self.tokens[-4:], *found][-4:]
            best = next((each for n in range(len(last), 0, -1) if (each := self._best(last[-n:])) >= 0), -1)
            if best < 0:
                break
            found.append(best)
        return found

    def _best(self, last: Sequence[int]) -> int:
        """The likeliest token; -1 where none is likely."""
        followers, n = self._next.get((*last,)), len(last) - 1
        if not followers:
            return -1
        token, count = max(followers.items(), key=lambda each: each[1])
        total = sum(followers.values())
        return token if total >= _LEAST[n] and 100 * count >= _PERCENT[n] * total else -1


def steps_of(prompt: Sequence[int], answer: Sequence[int], most: int) -> int:
    """Steps until an answer is there, its first token aside."""
    lookup, done, steps = LlamaLookup(), 1, 0
    lookup.extend([*prompt, *answer[:1]])
    while done < len(answer):
        coming = answer[done:]
        drafts = lookup.draft(most)
        pairs = enumerate(zip(drafts, coming, strict=False))
        right = next((i for i, (draft, token) in pairs if draft != token), min(len(drafts), len(coming)))
        lookup.extend(coming[: right + 1])
        done += right + 1
        steps += 1
    return steps
