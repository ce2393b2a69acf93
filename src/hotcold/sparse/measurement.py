"""The measurement of a model's predictors by which ``--sparsity auto`` decides; a sidecar stores it."""

import math
import numbers
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np

MOST_RATIO = 1.001  #: the perplexity that ``auto`` accepts, over that of ``exact``

_KEY = "measured."
_MOST_WIDTHS = 100  # an interval this many times too wide would need 10,000 times the text


@dataclass(frozen=True)
class Measurement:
    """The cost and the gain of all predictors against ``exact``, which is lossless.

    The cost is measured on the decode path, with text that was not used for fitting."""

    tokens: int
    kl_mean: float  #: KL(exact || predicted), nats a token
    ppl_ratio: float  #: perplexity over that of ``exact``
    ppl_ratio_low: float  #: 95 % interval of the ratio; 0 and infinity for fewer than LEAST_TOKENS
    ppl_ratio_high: float
    speed_ratio: float  #: tokens a second over those of ``exact``
    speed_low: float  #: the slowest and the fastest round
    speed_high: float

    @property
    def objection(self) -> str:
        """The reason why ``auto`` does not use the predictors; empty if it does."""
        if self.ppl_ratio_low > MOST_RATIO:
            return f"perplexity is more than {MOST_RATIO} times that of exact"
        if not self.ppl_ratio_high <= MOST_RATIO:
            missing_tokens = self.more_tokens
            fix = (
                "more held-out tokens decide"
                if missing_tokens is None
                else f"about {missing_tokens} more held-out tokens decide"
            )
            return f"perplexity may be more than {MOST_RATIO} times that of exact: {fix}"
        if not self.speed_low > 1:
            return "generation was not faster than exact in every round"
        return ""

    @property
    def cost(self) -> str:
        low, high = self.ppl_ratio_low, self.ppl_ratio_high
        interval = f"[{low:.5f}, {high:.5f}]" if math.isfinite(high) else "(no 95 % interval)"
        return f"perplexity {self.ppl_ratio:.5f} {interval} times that of exact over {self.tokens} tokens"

    @property
    def gain(self) -> str:
        return f"{self.speed_ratio:.2f} [{self.speed_low:.2f}, {self.speed_high:.2f}] times as fast"

    @property
    def more_tokens(self) -> int | None:
        """The number of further tokens after which the interval would exclude MOST_RATIO, if its width
        shrinks with the root of the number; None: the ratio is too close, or there is no interval."""
        low, high = self.ppl_ratio_low, self.ppl_ratio_high
        if not (math.isfinite(high) and min(low, high, self.ppl_ratio) > 0):
            return None
        distance = abs(math.log(self.ppl_ratio / MOST_RATIO))
        width = math.log(high / low) / 2
        if width > _MOST_WIDTHS * distance:
            return None
        return max(1, math.ceil(self.tokens * ((width / distance) ** 2 - 1)))

    def report(self) -> dict[str, Any]:
        """The report for ``--json``, with the verdict."""
        figures = {name: figure if math.isfinite(figure) else None for name, figure in asdict(self).items()}
        if figures["ppl_ratio_high"] is None:
            figures["ppl_ratio_low"] = None
        return figures | {"used_by_auto": not self.objection, "objection": self.objection or None}

    def metadata(self) -> dict[str, Any]:
        """The keys of the sidecar, without their prefix."""
        floats = {name: np.float64(each) for name, each in asdict(self).items()}
        return {_KEY + name: each for name, each in (floats | {"tokens": self.tokens}).items()}

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Self | None:
        """The measurement in keys without their prefix; None if there is none. ValueError: it is damaged."""
        names = [each.name for each in fields(cls)]
        if not any(_KEY + name in keys for name in names):
            return None
        figures = {}
        for name in names:
            value: Any = keys.get(_KEY + name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) >= 0:
                raise ValueError(f"{_KEY}{name} is {value!r:.40}: a number of at least 0 is needed")
            figures[name] = float(value)
        if not 1 <= figures["tokens"] < math.inf:
            raise ValueError(
                f"{_KEY}tokens is {figures['tokens']:g}: a finite number of at least 1 is needed"
            )
        return cls(int(figures.pop("tokens")), **figures)
