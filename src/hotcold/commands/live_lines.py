"""Draws the lines at the end of a terminal's text that still change."""

import sys
from collections.abc import Sequence
from itertools import takewhile


class LiveLines:
    """Lines that are drawn again where they differ. The cursor stays after the last line. ``rows`` is the
    height of the terminal: lines above its top stay as they are."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._lines: list[str] = []

    @property
    def rows(self) -> int:
        return self._rows

    @rows.setter
    def rows(self, rows: int) -> None:
        self._rows = max(rows, 2)

    def draw(self, lines: Sequence[str]) -> None:
        """Draws these lines in place of the unsettled lines."""
        before, self._lines = self._lines, [*lines]
        if (text := self._change(before)) is not None:
            sys.stdout.write(text)
            sys.stdout.flush()

    def settle(self, count: int) -> None:
        """Marks the first lines as final."""
        del self._lines[:count]

    def restart(self, lines: Sequence[str]) -> None:
        """Scrolls the screen's text out at the top, and draws the last of these lines, which are final."""
        self._lines = []
        shown = "".join(f"{line}\n" for line in lines[1 - self._rows :])
        sys.stdout.write(f"\x1b[{self._rows};1H" + "\n" * self._rows + f"\x1b[H\x1b[J{shown}")
        sys.stdout.flush()

    def finish(self) -> None:
        """Marks all lines as final, and moves the cursor to the next line."""
        self._lines = []
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _change(self, before: list[str]) -> str | None:
        lines = self._lines
        if lines == before:
            return None
        if not before:
            return "\n".join(lines)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(before, lines, strict=False))))
        last = len(before) - 1
        if same > last:
            return "".join(f"\n{line}" for line in lines[same:])
        if same == last < len(lines) and lines[last].startswith(before[last]):
            return "\n".join([lines[last][len(before[last]) :], *lines[last + 1 :]])
        first = min(max(same, last - (self._rows - 1)), max(len(lines) - 1, 0))
        up = f"\x1b[{last - first}A" if last > first else ""
        return f"{up}\r\x1b[J" + "\n".join(lines[first:])
