"""Log lines about causes that unauthenticated clients can repeat: one line a minute for each cause."""

import asyncio
from collections.abc import Callable

MINUTE_S = 60.0
_MOST_CAUSES = 100


class RareLines:
    """Writes the first line of a cause at once and counts the following ones. After a minute it writes the
    count, if it is not zero. An instance belongs to one event loop."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._counts: dict[str, int] = {}  # for each cause of the last minute: lines since the first

    def add(self, cause: str, line: str = "") -> None:
        """Writes or counts a line; by default the line is ``cause``."""
        if cause in self._counts:
            self._counts[cause] += 1
        elif len(self._counts) < _MOST_CAUSES:
            self._write(line or f"hotcold: note: {cause}")
            self._open(cause)

    def close(self) -> None:
        """Writes the counts of this minute."""
        for cause, count in self._counts.items():
            self._write_count(cause, count)
        self._counts.clear()

    def _open(self, cause: str) -> None:
        self._counts[cause] = 0
        asyncio.get_running_loop().call_later(MINUTE_S, self._end, cause)

    def _end(self, cause: str) -> None:
        if count := self._counts.pop(cause, 0):
            self._write_count(cause, count)
            self._open(cause)

    def _write_count(self, cause: str, count: int) -> None:
        if count:
            self._write(f"hotcold: note: {cause}, {count} more times in a minute")
