"""Options of the training of predictors. Needs no torch."""

import math
from dataclasses import dataclass

from hotcold.errors import UserError


@dataclass(frozen=True)
class TrainOptions:
    max_marked: float = 1.5  #: the most neurons to mark, as a multiple of the active neurons
    epochs: int = 12  #: the most passes over the text for each rank
    rate: float = 3e-3  #: largest step of Adam
    relu: bool = False  #: ReLU between the factors, as in PowerInfer's predictors

    def __post_init__(self) -> None:
        for name, value in (("max_marked", self.max_marked), ("rate", self.rate)):
            if not 0 < value < math.inf:
                raise UserError(f"`{name}` is {value}: a finite number above 0 is needed")
        if self.epochs < 1:
            raise UserError(f"`epochs` is {self.epochs}: at least 1 is needed")
