"""Number of prompt rows in a step while other requests wait for their next token."""

import math
from collections import deque
from typing import TypeVar

T = TypeVar("T")

#: Seconds of a step with prompt rows while requests wait: each gets a token at least every 250 ms.
STEP_S = 0.2
_FEWEST = 8  # rows: a smaller step mostly reads weights and takes hardly less time
_STEPS = 3  # steps that the choice remembers, so that it grows only if several of them were short
_POSITION = 1024  # attention to this many positions takes at most the time of the rest of a row


class Pace:
    """Chooses the number of prompt rows from the times of the last steps with prompt rows, so that a step
    takes about ``step_s``. Results do not depend on it.

    A step takes a fixed time, and for each row a time that grows with the row's position. Neither is known,
    so the choice uses bounds of both: it never takes more rows than fit, if the fixed time is at most half of
    ``step_s``. Within a few steps it converges to the number of rows that takes ``step_s``.

    ``separate``: a step has either prompt rows or decode rows, in turns if both wait."""

    def __init__(self, most: int, step_s: float = STEP_S, *, separate: bool = False) -> None:
        self._separate = separate
        self._decoded = False  # in the last step where both kinds of rows waited
        self._most = most  # rows of a step when no request waits
        self._step_s = step_s
        self._chosen = most
        #: of the last steps: the number of rows that takes step_s, and the mean position of the rows
        self._fitting: deque[tuple[float, float]] = deque(maxlen=_STEPS)

    def rows(self, position: int, *, awaited: bool) -> int:
        """Returns the limit for prompt rows of the next step. ``position`` is the first position of the
        request that is furthest. ``awaited``: other requests wait for the end of the step."""
        limits = [float(self._most)]
        if awaited:
            limits += [
                rows * (_POSITION + before) / (_POSITION + max(position, before))
                for rows, before in self._fitting
            ]
        self._chosen = math.ceil(max(min(limits), min(_FEWEST, self._most)))
        return self._chosen

    def choose(self, decoding: list[T], reading: list[T]) -> tuple[list[T], list[T]]:
        """Returns the requests of the next step: those with decode rows, and those with prompt rows."""
        if not (self._separate and decoding and reading):
            return decoding, reading
        self._decoded = not self._decoded
        return (decoding, []) if self._decoded else ([], reading)

    def note(self, rows: int, position: float, seconds: float) -> None:
        """Records the time of a step with this many prompt rows at this mean position."""
        if seconds <= self._step_s and rows < self._chosen and self._fitting:
            return  # the end of a prompt: more rows may fit
        fixed = self._step_s / 2 if seconds > self._step_s else 0.0
        self._fitting.append((rows * (self._step_s - fixed) / max(seconds - fixed, 1e-9), position))
