"""Types of the arrays that backends share."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

#: A buffer of :meth:`~hotcold.kernels.backend.Backend.zeros`: values ``[rows, ...]``. Only the backend's own
#: methods may index it or read its shape.
Buffer: TypeAlias = Any
Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int32]
Masks: TypeAlias = npt.NDArray[np.uint64]
