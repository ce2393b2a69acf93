"""Makes one vector of the rows that a text's tokens have after a model's last norm."""

import numpy as np
import numpy.typing as npt

from hotcold.engine.sampler import DamagedModelError


class Pool:
    """The sum of rows so far, in order of position, so that no size of a step changes a bit of it."""

    def __init__(self) -> None:
        self._sum: npt.NDArray[np.float64] | None = None

    def add(self, rows: npt.NDArray[np.float32], *, first: bool) -> None:
        """Adds rows of a text's tokens; ``first`` says that they begin the text, perhaps once more."""
        if first or self._sum is None:
            self._sum = np.zeros(rows.shape[1])
        for row in rows:
            self._sum += row

    def vector(self) -> tuple[float, ...]:
        """The sum, divided by its length; float32. DamagedModelError: it has none."""
        assert self._sum is not None
        length = float(np.sqrt(self._sum @ self._sum))
        if not 0 < length < np.inf:
            raise DamagedModelError(
                f"the embedding of a text has the length {length}: the model's file is damaged"
            )
        found: list[float] = (self._sum / length).astype(np.float32).tolist()
        return tuple(found)
