"""Number of prompt rows in a step while other requests wait for their next token."""

import math
from typing import TypeVar

T = TypeVar("T")

#: Seconds of a step with prompt rows while requests wait: each gets a token at least every 250 ms.
STEP_S = 0.2
_FEWEST = 8  # rows: a smaller step mostly reads weights and takes hardly less time


class Pace:
    """Chooses the number of prompt rows from the time of the last step with prompt rows. A step with ``n``
    rows takes about ``a + b * n`` seconds. The next one gets ``n * step_s / (a + b * n)`` rows. Within a few
    steps, this converges to the number of rows that takes ``step_s``. Results do not depend on it.
    ``separate``: a step has either prompt rows or decode rows, in turns if both wait."""

    def __init__(self, most: int, step_s: float = STEP_S, *, separate: bool = False) -> None:
        self._separate = separate
        self._decoded = False  # in the last step where both kinds of rows waited
        self._most = most  # rows of a step when no request waits
        self._step_s = step_s
        self._fitting = float(most)  # rows that take step_s, estimated from the last step

    def rows(self, *, awaited: bool) -> int:
        """Returns the limit for prompt rows of the next step. ``awaited``: other requests wait for its
        end."""
        return math.ceil(min(max(self._fitting, _FEWEST), self._most)) if awaited else self._most

    def choose(self, decoding: list[T], reading: list[T]) -> tuple[list[T], list[T]]:
        """Returns the requests of the next step: those with decode rows, and those with prompt rows."""
        if not (self._separate and decoding and reading):
            return decoding, reading
        self._decoded = not self._decoded
        return (decoding, []) if self._decoded else ([], reading)

    def note(self, rows: int, seconds: float) -> None:
        """Records the time of a step with this many prompt rows."""
        self._fitting = rows * self._step_s / max(seconds, 1e-9)
