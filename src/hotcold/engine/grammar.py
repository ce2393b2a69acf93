"""The old address of Grammars, for version 0.1 alone: what ``hotcold`` exports now."""

import warnings
from typing import Any

import hotcold

_NAMES = {"Grammars": "Grammars", "schema_grammar": "schema_grammar"}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    told = f"{__name__}.{name} goes with version 0.2: take hotcold.{_NAMES[name]}"
    warnings.warn(told, DeprecationWarning, stacklevel=2)
    return getattr(hotcold, _NAMES[name])
