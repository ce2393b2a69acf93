"""Lines about causes that strangers may repeat as often as they like: one a minute for each cause."""

import asyncio
from collections.abc import Callable

MINUTE_S = 60.0
_MOST_CAUSES = 100


class RareLines:
    """Writes the first line of a cause at once, and counts further ones. After a minute it writes how many
    came meanwhile, if any. It belongs to one event loop."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._counts: dict[str, int] = {}  # of causes that had a line in the last minute: others since then

    def add(self, cause: str, line: str = "") -> None:
        """Writes or counts a line, by default ``cause`` itself."""
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
