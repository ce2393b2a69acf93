"""`hotcold` whose answers in conversations wait after some tokens: until the file of ``WAITING_FOR`` exists,
or until Ctrl-C. So a test may take as long as it likes to do something during an answer. All of the answer so
far is shown then."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hotcold.commands import chat_terminal, display
from hotcold.commands.cli import main
from hotcold.engine.generation import stream

TOKENS = 20  # before it waits


def waiting(*args: Any) -> Iterator[Any]:
    file = os.environ.get("WAITING_FOR")
    for number, piece in enumerate(stream(*args), 1):
        yield piece
        while number == TOKENS and not (file and Path(file).exists()):
            time.sleep(0.01)


if __name__ == "__main__":
    chat_terminal.stream = waiting
    display._INTERVAL_S = display._SHARE = 0
    sys.exit(main())
