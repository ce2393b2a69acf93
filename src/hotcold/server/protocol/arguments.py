"""Arguments of calls for dialects that have them as objects."""

import json
from typing import Any

from hotcold.chat.messages import CUT_OFF


def input_of(arguments: str) -> dict[str, Any]:
    """The object that a call's arguments are; those that were cut off are a text in it."""
    try:
        found = json.loads(arguments or "{}")
        json.dumps(found, allow_nan=False)  # a number that is too large is infinite here
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {CUT_OFF: arguments}
