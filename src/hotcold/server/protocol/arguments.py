"""Arguments of calls, for dialects that send them as objects."""

import json
from typing import Any

from hotcold.chat.messages import CUT_OFF


def input_of(arguments: str) -> dict[str, Any]:
    """Returns the arguments of a call as an object. Incomplete arguments are a text in it."""
    input = _object_of(arguments)
    return {CUT_OFF: arguments} if input is None else input


def are_complete(arguments: str) -> bool:
    """Returns whether the arguments of a call were not cut off."""
    return bool(arguments) and _object_of(arguments) is not None


def _object_of(arguments: str) -> dict[str, Any] | None:
    try:
        input = json.loads(arguments or "{}")
        # raises ValueError for a number that is too large, which is infinite here
        json.dumps(input, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return input if isinstance(input, dict) else None
