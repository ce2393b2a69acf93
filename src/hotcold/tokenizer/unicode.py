"""Checks that a string is text."""

import re

from hotcold.errors import UserError

_SURROGATE = re.compile("[\ud800-\udfff]")


def check_unicode(text: str, label: str = "the text") -> None:
    """Raises UserError for a lone surrogate, which is no character."""
    if surrogate := _SURROGATE.search(text):
        got = f"a lone surrogate, U+{ord(surrogate[0]):04X}, at character {surrogate.start()}"
        raise UserError(f"{label} has {got}: only valid Unicode is allowed (was the input UTF-8?)")
