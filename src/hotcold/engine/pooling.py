"""Text embeddings: one vector from the hidden rows of a text's tokens, after the model's last norm."""

import numpy as np
import numpy.typing as npt

from hotcold.engine.sampler import DamagedModelError


class Pool:
    """Sum of rows in order of position, so that step sizes change no bit of it."""

    def __init__(self) -> None:
        self._sum: npt.NDArray[np.float64] | None = None

    def add(self, rows: npt.NDArray[np.float32], *, first: bool) -> None:
        """Adds rows of a text's tokens; ``first``: the text begins here, perhaps again after preemption."""
        if first or self._sum is None:
            self._sum = np.zeros(rows.shape[1])
        for row in rows:
            self._sum += row

    def vector(self) -> tuple[float, ...]:
        """Returns the sum, scaled to length 1, in float32. DamagedModelError: the length is 0 or not
        finite."""
        assert self._sum is not None
        length = float(np.sqrt(self._sum @ self._sum))
        if not 0 < length < np.inf:
            raise DamagedModelError(
                f"the embedding of a text has the length {length}: the model's file is damaged"
            )
        normalised: list[float] = (self._sum / length).astype(np.float32).tolist()
        return tuple(normalised)
