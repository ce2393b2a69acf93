"""How many prompt rows a step has while other requests wait for their next token."""

import math

#: Seconds that a step with prompt rows may take while requests wait: they get a token at least every 250 ms.
STEP_S = 0.2
_FEWEST = 8  # rows: with fewer a step mostly reads weights, and takes hardly less time


class Pace:
    """Chooses the number of prompt rows by the time of the last step that had any.

    A step with ``n`` rows takes about ``a + b * n`` seconds. The next one gets ``n * step_s / (a + b * n)``
    rows, which comes to the number that takes ``step_s`` within a few steps. Results do not depend on it."""

    def __init__(self, most: int, step_s: float = STEP_S) -> None:
        self._most = most  # rows of a step for which no request waits
        self._step_s = step_s
        self._fitting = float(most)  # by the last step

    def rows(self, *, awaited: bool) -> int:
        """The most prompt rows of the next step. ``awaited``: other requests wait for its end."""
        return math.ceil(min(max(self._fitting, _FEWEST), self._most)) if awaited else self._most

    def note(self, rows: int, seconds: float) -> None:
        """Notes how long a step with this many prompt rows took."""
        self._fitting = rows * self._step_s / max(seconds, 1e-9)
