"""Numbers that users give: Python's or NumPy's, within bounds that an error names."""

import numbers
from typing import Any

from hotcold.errors import UserError

LARGEST = (1 << 31) - 1


def integer(name: str, value: Any) -> int:
    """An integer of Python or NumPy, as Python's; UserError for anything else."""
    if not _is(numbers.Integral, value):
        raise UserError(f"{name} is {value!r:.40}: a whole number is needed")
    return int(value)


def whole(name: str, value: Any, low: int, high: int = LARGEST, hint: str = "") -> int:
    """An integer of Python or NumPy from ``low`` to ``high``, as Python's; UserError for anything else."""
    if not _is(numbers.Integral, value) or not low <= value <= high:
        allowed = f"allowed are the whole numbers {low} to {high}"
        raise UserError(f"{name} is {value!r:.40}: {allowed}{f' ({hint})' if hint else ''}")
    return int(value)


def real(name: str, value: Any, low: float, high: float, hint: str = "") -> float:
    """A number of Python or NumPy from ``low`` to ``high``, as Python's; UserError for anything else."""
    if not _is(numbers.Real, value) or not low <= value <= high:
        allowed = f"allowed are {low:g} to {high:g}"
        raise UserError(f"{name} is {value!r:.40}: {allowed}{f' ({hint})' if hint else ''}")
    return float(value)


def _is(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
