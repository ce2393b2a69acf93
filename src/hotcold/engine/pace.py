"""Number of prompt rows in a step while other requests wait for their next token."""

import math

#: Seconds of a step with prompt rows while requests wait: each gets a token at least every 250 ms.
STEP_S = 0.2
_FEWEST = 8  # rows: a smaller step mostly reads weights and takes hardly less time


class Pace:
    """Chooses the number of prompt rows from the time of the last step with prompt rows. A step with ``n``
    rows takes about ``a + b * n`` seconds. The next one gets ``n * step_s / (a + b * n)`` rows. Within a few
    steps, this converges to the number of rows that takes ``step_s``. Results do not depend on it."""

    def __init__(self, most: int, step_s: float = STEP_S) -> None:
        self._most = most  # rows of a step when no request waits
        self._step_s = step_s
        self._fitting = float(most)  # rows that take step_s, estimated from the last step

    def rows(self, *, awaited: bool) -> int:
        """Returns the limit for prompt rows of the next step. ``awaited``: other requests wait for its
        end."""
        return math.ceil(min(max(self._fitting, _FEWEST), self._most)) if awaited else self._most

    def note(self, rows: int, seconds: float) -> None:
        """Records the time of a step with this many prompt rows."""
        self._fitting = rows * self._step_s / max(seconds, 1e-9)
