"""How far ahead of their use weights are fetched: what suits the processor, or what the environment says."""

import os
import re
from typing import NamedTuple, Self

from hotcold.errors import UserError
from hotcold.kernels import _native

VARIABLE = "HOTCOLD_FETCH"  #: of the environment: bytes ahead and level of the cache, as in ``8K:2``
MOST_AHEAD = 1 << 20

_PROCESSOR = _native.fetching()  # the row of csrc/simd/cpu_isa.cpp that this processor has


class Fetching(NamedTuple):
    """Changes how fast memory is read, and no result."""

    ahead: int  #: bytes between what is fetched and what is used, up to :data:`MOST_AHEAD`
    level: int  #: of the cache that they are fetched into, 1 or 2

    @classmethod
    def parse(cls, text: str) -> Self:
        """``3K:1`` or ``3072:1``. UserError: it is neither."""
        found = re.fullmatch(r"([0-9]{1,7})(K?):([12])", text)
        ahead = int(found[1]) << 10 * len(found[2]) if found else MOST_AHEAD + 1
        if found is None or ahead > MOST_AHEAD:
            raise UserError(f"{text!r}: give bytes ahead (up to 1024K) and cache level (1 or 2), as in 8K:2")
        return cls(ahead, int(found[3]))

    def __str__(self) -> str:
        whole = self.ahead % 1024 == 0
        return f"{self.ahead // 1024 if whole else self.ahead}{'K' * whole}:{self.level}"


def default_fetching() -> Fetching:
    """What :data:`VARIABLE` says, else what suits the processor. UserError: it says nothing sensible."""
    text = os.environ.get(VARIABLE)
    if not text:
        return Fetching(*_PROCESSOR)
    try:
        return Fetching.parse(text)
    except UserError as error:
        raise UserError(f"{VARIABLE} is {error}") from None


def use_fetching(fetching: Fetching) -> None:
    """For all backends of this process, from their next program on; where it changes, none may be running."""
    if _native.fetching() != fetching:
        _native.set_fetching(*fetching)
