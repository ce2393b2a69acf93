"""Hands on, from their old addresses, the names that ``hotcold`` exports now."""

import warnings
from collections.abc import Callable
from typing import Any

import hotcold


def moved(module: str, **names: str) -> Callable[[str], Any]:
    """Makes the ``__getattr__`` of an old module: for each old name, the one that ``hotcold`` exports, with a
    warning."""

    def attribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        told = f"{module}.{name} goes with version 0.2: take hotcold.{names[name]}"
        warnings.warn(told, DeprecationWarning, stacklevel=2)
        return getattr(hotcold, names[name])

    return attribute
