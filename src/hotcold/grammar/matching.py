"""Holds one answer to a grammar: decides which tokens may come next."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from hotcold.engine.sampler import Allowed
from hotcold.grammar.compiler import Mask, Matcher, TooManyStates
from hotcold.grammar.error import GrammarError

#: Processor time for the masks of one answer, in total, with an addition for each token. A highly ambiguous
#: grammar gets slower with each token, up to the library's own bounds.
MASKS_S = 1.0
MASK_S = 0.02
_MOST_FORCED = 256  # bytes to tokenise: far more than the draft tokens of a step
_ENDLESS = 4096  # forced bytes: finding more takes too long for each token

_Value = TypeVar("_Value")


class GrammarConstraint:
    """The constraint of one answer. Results depend only on the given tokens: the matcher goes back if it was
    further. Safe to use from several threads."""

    def __init__(
        self,
        start: Callable[[], Matcher],
        pool: ThreadPoolExecutor,
        spelled: Callable[[bytes], Sequence[int]] = lambda _: (),
    ) -> None:
        self._start = start
        self._pool = pool
        self._spelled = spelled
        self._lock = threading.Lock()
        self._matcher: Matcher | None = start()
        self._consumed: list[int] = []
        self._endless = False  # True if the forced bytes are too long to compute
        self._spent_s = 0.0
        self._last: tuple[list[int], Mask] | None = None
        self._coming: tuple[list[int], Future[Mask]] | None = None

    def prepare(self, output: Sequence[int]) -> None:
        """Starts computing the mask after these tokens; returns at once."""
        tokens = list(output)
        try:
            self._coming = tokens, self._pool.submit(self._mask, tokens)
        except RuntimeError:  # closed
            self._coming = None

    def __call__(self, output: Sequence[int]) -> Allowed:
        """The mask after these tokens, which a thread has computed if it was prepared. GrammarError: these
        tokens do not match, or the mask would cost too much."""
        tokens = list(output)
        coming = self._coming
        # A mask that no thread has begun is computed here: most take less time than waking a thread.
        if coming is not None and coming[0] == tokens and not coming[1].cancel():
            return Allowed(coming[1].result())
        return Allowed(self._mask(tokens))

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        """Grammar-forced tokens after these, in one tokenisation; none while a thread computes the mask."""
        text = b"" if self._endless else self._ask(output, self._forced_by, b"")
        return self._spelled(text[:_MOST_FORCED]) if text else ()

    def _forced_by(self, matcher: Matcher) -> bytes:
        self._endless = True  # stays True if forced() raises at a limit, since that takes long
        text = matcher.forced()
        self._endless = len(text) > _ENDLESS
        return text

    def possible(self, output: Sequence[int], tokens: Sequence[int]) -> int:
        """The number of leading ``tokens`` that may follow; all of them while a thread computes the mask."""
        return self._ask(output, lambda matcher: matcher.possible(tokens), len(tokens))

    def _ask(self, output: Sequence[int], question: Callable[[Matcher], _Value], otherwise: _Value) -> _Value:
        """Asks the matcher a quick question about the position after these tokens, without waiting."""
        tokens = list(output)
        coming = self._coming
        again = coming is not None and coming[0] == tokens and coming[1].cancel()
        if not self._lock.acquire(blocking=False):
            return otherwise
        try:
            return question(self._moved_to(tokens))
        except GrammarError:  # the mask raises it again if it is about these tokens
            self._matcher = None
            return otherwise
        finally:
            self._lock.release()
            if again:
                self.prepare(tokens)

    def _mask(self, tokens: list[int]) -> Mask:
        with self._lock:
            if self._last is None or self._last[0] != tokens:
                self._last = tokens, self._new_mask(tokens)
            return self._last[1]

    def _new_mask(self, tokens: list[int]) -> Mask:
        if self._spent_s > MASKS_S + MASK_S * len(tokens):
            raise GrammarError("the grammar is too slow: it can match the same text in too many ways")
        start = time.thread_time()
        try:
            return self._mask_after(tokens)
        except TooManyStates:  # most states are of earlier tokens, which a new matcher only consumes
            return self._mask_after(tokens)
        finally:
            self._spent_s += time.thread_time() - start

    def _mask_after(self, tokens: list[int]) -> Mask:
        matcher = self._moved_to(tokens)
        self._matcher = None  # until it has succeeded
        mask = matcher.mask()
        self._matcher = matcher
        return mask

    def _moved_to(self, tokens: list[int]) -> Matcher:
        """Returns the matcher after these tokens. GrammarError; then the next call starts a new one."""
        matcher, had = self._matcher, self._consumed
        self._matcher = None
        common = len(had)
        if matcher is not None and tokens[:common] != had:
            common = next(i for i, id in enumerate(had) if i >= len(tokens) or tokens[i] != id)
            if not matcher.rollback(len(had) - common):
                matcher = None
        if matcher is None:
            matcher, common = self._start(), 0
        if not matcher.consume(tokens[common:]):
            raise GrammarError("these tokens do not match the grammar")
        self._matcher, self._consumed = matcher, tokens
        return matcher
