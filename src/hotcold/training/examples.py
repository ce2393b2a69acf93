"""The tokens that predictors learn from: a predictor's input, and each neuron's contribution."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.kernels.backend import Floats
from hotcold.kernels.numpy_ffn import ReferenceFFN
from hotcold.sparse.expert_fitting import Inputs, rows_by_expert
from hotcold.sparse.fitting import Activity

_ROWS_TOGETHER = 1024  # tokens whose neurons are computed at a time


@dataclass(frozen=True)
class Examples:
    """T tokens of a layer with E experts of N neurons; a layer without experts counts as one expert."""

    x: Floats  #: ``[T, D]``, the predictor's input
    rows: list[npt.NDArray[np.int64]]  #: by expert, the tokens that chose it, ascending
    #: by expert, ``[rows, N]``: |h| times the norm of the down row; 0 if the neuron is not active
    adds: list[Floats]

    @classmethod
    def collect(cls, parts: list[ReferenceFFN], inputs: Inputs, path: Path) -> "Examples":
        """Computes the neurons' contributions into a file and maps it: memory holds a part of it at a time.

        UserError: an input is not finite. OSError: the file cannot be written."""
        x = inputs["normed"]
        rows = rows_by_expert(inputs, len(parts))
        with path.open("wb") as file:
            for part, part_rows in zip(parts, rows, strict=True):
                for at in range(0, len(part_rows), _ROWS_TOGETHER):
                    part_inputs = x[part_rows[at : at + _ROWS_TOGETHER]]
                    if not np.isfinite(part_inputs).all():
                        raise UserError("an input of the FFN is not finite: the model's file is damaged")
                    file.write(
                        np.ascontiguousarray(Activity.from_ffn(part, part_inputs).weight, np.float32).data
                    )
        adds = np.memmap(path, np.float32, mode="r")
        ends = np.cumsum([len(part_rows) * part.neurons for part, part_rows in zip(parts, rows, strict=True)])
        by_part = np.split(adds, ends[:-1])
        shaped = [values.reshape(-1, part.neurons) for values, part in zip(by_part, parts, strict=True)]
        return cls(x, rows, shaped)

    @property
    def tokens(self) -> int:
        return len(self.x)

    @property
    def pairs(self) -> int:
        """The number of pairs of a token and a neuron in its experts."""
        return sum(adds.size for adds in self.adds)

    def mean_added(self) -> float:
        """The mean contribution of an active neuron; 1 if none is ever active."""
        active = sum(np.count_nonzero(adds) for adds in self.adds)
        return float(sum(adds.sum(dtype=np.float64) for adds in self.adds)) / active if active else 1.0

    def rates(self) -> npt.NDArray[np.float64]:
        """Each neuron's share of active tokens among the tokens of its expert, ``[E * N]``."""
        rates = [(adds > 0).mean(axis=0) if len(adds) else np.zeros(adds.shape[1]) for adds in self.adds]
        return np.concatenate(rates)

    def by_expert(self) -> Iterator[tuple[slice, npt.NDArray[np.int64], Floats]]:
        """By expert, the place of its neurons among the layer's, its tokens, and what the neurons add."""
        end = 0
        for rows, adds in zip(self.rows, self.adds, strict=True):
            begin, end = end, end + adds.shape[1]
            yield slice(begin, end), rows, adds
