"""Checks users' numbers, and formats values for users."""

import numbers
import re
from collections.abc import Iterable
from typing import Any

from hotcold.errors import UserError

LARGEST = (1 << 31) - 1
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def integer(name: str, value: Any) -> int:
    """An integer of Python or NumPy as a Python int; UserError for anything else."""
    if not _is(numbers.Integral, value):
        raise UserError(f"{name} is {value!r:.40}: a whole number is needed")
    return int(value)


def whole(name: str, value: Any, low: int, high: int = LARGEST, hint: str = "") -> int:
    """An integer of Python or NumPy from ``low`` to ``high`` as a Python int; UserError for anything else."""
    if not _is(numbers.Integral, value) or not low <= value <= high:
        allowed = f"allowed are the whole numbers {low} to {high}"
        raise UserError(f"{name} is {value!r:.40}: {allowed}{f' ({hint})' if hint else ''}")
    return int(value)


def real(name: str, value: Any, low: float, high: float, hint: str = "") -> float:
    """A number of Python or NumPy from ``low`` to ``high`` as a Python float; UserError for anything else."""
    if not _is(numbers.Real, value) or not low <= value <= high:
        allowed = f"allowed are {low:g} to {high:g}"
        raise UserError(f"{name} is {value!r:.40}: {allowed}{f' ({hint})' if hint else ''}")
    return float(value)


def _is(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def scaled(n: float, step: int = 1000, units: tuple[str, ...] = ("", "K", "M", "B", "T")) -> str:
    """A number for people, such as ``7.34 M``."""
    power = 0
    while n >= step and power < len(units) - 1:
        n /= step
        power += 1
    return f"{n:.2f} {units[power]}" if power else f"{n:g} {units[0]}".rstrip()


def size(n: int) -> str:
    """A number of bytes for people, such as ``7.34 MiB``."""
    return scaled(n, 1024, _UNITS)


def sizes(parts: Iterable[tuple[str, int]]) -> str:
    """Numbers of bytes for people, such as ``KV cache 1.50 MiB, steps 2.25 MiB``; zeros are left out."""
    return ", ".join(f"{name} {size(n)}" for name, n in parts if n)


def exact_size(n: int) -> str:
    """A number of bytes in the form of options, such as ``843MiB``, the inverse of :func:`read_size`."""
    power = 0
    while n and n % 1024 == 0 and power < len(_UNITS) - 1:
        n //= 1024
        power += 1
    return f"{n}{_UNITS[power]}"


def enough_size(n: int) -> str:
    """The smallest size in whole MiB that holds ``n`` bytes, in the form of options."""
    return exact_size(-(-n >> 20) << 20)


def round_size(n: int) -> int:
    """Rounds bytes down to whole MiB, or below 64 MiB to whole KiB, so that :func:`exact_size` is short."""
    unit = 1 << (20 if n >= 1 << 26 else 10)
    return n // unit * unit


def read_size(text: str) -> int:
    """Reads the size in a user's text: ``8GiB``, ``512 MiB``, ``64KiB``, ``100B``, or ``8``, which is GiB."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMGT]iB|B)?", text)
    if not match:
        got = f"{printable(text, 40)!r} is not a size"
        raise UserError(f"{got} such as 8GiB, 512MiB or 64KiB (a bare number is GiB)")
    return int(float(match[1]) * 1024 ** _UNITS.index(match[2] or "GiB"))


def bytes_of(name: str, value: Any) -> int:
    """Returns the bytes of an option's value: a number of bytes, or a text that :func:`read_size` reads."""
    if not isinstance(value, str):
        return integer(name, value)
    try:
        return read_size(value)
    except UserError as error:
        raise UserError(f"`{name}`: {error}") from None


def not_utf8(error: UnicodeDecodeError) -> str:
    """The message that names the first wrong byte of a text."""
    return f"is not UTF-8 text: byte {error.object[error.start]:#04x} at {error.start}"


def printable(text: str, limit: int = 200) -> str:
    """``text`` on one line without control characters (escaped), cut to ``limit``: safe for a terminal."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)


def shown(value: object, limit: int = 60) -> str:
    """A foreign value for an error message: plain ASCII, cut to ``limit``."""
    if getattr(value, "ndim", 0):
        return f"an array of {len(value)}"  # type: ignore[arg-type]
    return printable(ascii(value[:limit] if isinstance(value, str | list) else value), limit)
