"""Decides whether a stream is a terminal with colours, and prints dim text there."""

import os
import sys
from typing import TextIO

_DIM, _END = "\x1b[2m", "\x1b[0m"


def drawable(stream: TextIO) -> bool:
    """True if text on this stream may be styled, and drawn again."""
    return stream.isatty() and os.environ.get("TERM", "xterm") not in ("", "dumb", "unknown")


def colourless() -> bool:
    """True if the user wants no colours (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def quiet(text: str, stream: TextIO) -> str:
    """Returns a text in dim letters if the stream is a terminal with colours."""
    return f"{_DIM}{text}{_END}" if text and drawable(stream) and not colourless() else text


def quiet_prompt(text: str) -> str:
    """Returns a prompt for ``input`` in dim letters. The marks around the colours tell GNU Readline that they
    have no width; BSD's readline does not know such marks."""
    readline = sys.modules.get("readline")
    if readline is None or "libedit" in (readline.__doc__ or "") or colourless() or not drawable(sys.stdout):
        return text
    return f"\x01{_DIM}\x02{text}\x01{_END}\x02"
