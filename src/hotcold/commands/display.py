"""Shows a text of a model while it grows: as it is, or on a terminal as Markdown."""

import shutil
import sys
import time
from typing import TYPE_CHECKING, Protocol

from hotcold.commands.colours import colourless, drawable
from hotcold.commands.live_lines import LiveLines

if TYPE_CHECKING:
    from rich.console import Console

_INTERVAL_S = 0.04  # between two drawings
_SHARE = 9  # and at least this multiple of the time of the last drawing
_REPLACED = "\N{REPLACEMENT CHARACTER}"
#: Characters that would control the terminal, and line breaks.
_CONTROLS: dict[int, str] = {
    **dict.fromkeys((*range(32), *range(127, 160)), _REPLACED),
    **dict.fromkeys((0x0A, 0x2028, 0x2029), "\n"),
    0x09: "    ",
    0x0D: "",
}


class Display(Protocol):
    def write(self, text: str, *, thinking: bool = False) -> None:
        """Shows more text, or more of the thinking."""

    def resume(self, text: str) -> None:
        """Takes the text shown before, which the next text continues."""

    def end(self, *, always: bool = False) -> None:
        """Ends the text with a line break; with ``always`` also if it ends with one."""


def display(*, plain: bool) -> Display:
    """Returns the display for standard output."""
    return PlainDisplay() if plain or not drawable(sys.stdout) else MarkdownDisplay()


class PlainDisplay:
    """Prints texts as they are, and no thinking."""

    def __init__(self) -> None:
        self._last = ""  # character

    def write(self, text: str, *, thinking: bool = False) -> None:
        if text and not thinking:
            self._last = text[-1]
            print(text, end="", flush=True)

    def resume(self, text: str) -> None:
        pass

    def end(self, *, always: bool = False) -> None:
        if always or self._last != "\n":
            print()
        sys.stdout.flush()


class MarkdownDisplay:
    """Draws Markdown on a terminal. The block that still grows is drawn again; earlier blocks stay. Thinking
    is wrapped, and is not Markdown. If the width of the terminal changes, the text on the screen is drawn
    again, because terminals break existing lines at any letter."""

    def __init__(self) -> None:
        self._columns = 0
        self._lines = LiveLines(0)
        self._open = ""  # the text whose lines may change
        self._settled: list[
            tuple[str, bool]
        ] = []  # the parts of text before it, each with whether it is thinking
        self._gap = False  # whether an empty line comes before it
        self._thinking = False
        self._due = 0.0
        self._console: Console | None = None
        self._fit()

    def write(self, text: str, *, thinking: bool = False) -> None:
        if thinking != self._thinking:
            self._turn(thinking)
        text = text.translate(_CONTROLS)
        self._open += text if self._open else text.lstrip("\n")
        if time.monotonic() >= self._due:
            self._draw(last=False)

    def resume(self, text: str) -> None:
        from hotcold.commands.markdown import blocks

        text = text.translate(_CONTROLS)
        parsed = blocks(text)
        self._open = text[parsed[-1].start :] if parsed else text

    def end(self, *, always: bool = False) -> None:
        self._draw(last=True)
        self._lines.finish()

    def _fit(self) -> None:
        """Reads the current size of the terminal."""
        size = shutil.get_terminal_size()
        self._lines.rows = size.lines
        columns = max(
            size.columns - 1, 20
        )  # one column less, so that a terminal that counts one more breaks no line
        if columns == self._columns:
            return
        before, self._columns, self._console = self._columns, columns, None
        if not before:
            return
        shown: list[str] = []
        for text, thinking in reversed(self._settled):
            parts = [lines for _, lines in (self._thoughts(text) if thinking else self._blocks(text))]
            gap = [] if thinking else [""]
            lines = [line for part in parts for line in (*gap, *part)]
            shown = [*lines, *([""] if thinking and shown else []), *shown]
            if len(shown) >= size.lines:
                break
        self._lines.restart(shown[1:] if shown and not shown[0] else shown)

    def _turn(self, thinking: bool) -> None:
        """Switches from thinking to the text, or back."""
        if self._open.strip():
            self._draw(last=True)
            self._lines.finish()
            self._gap = True
            self._settled.append((self._open, self._thinking))
        self._open, self._thinking = "", thinking

    def _draw(self, *, last: bool) -> None:
        from hotcold.commands.markdown import decided

        began = time.monotonic()
        self._fit()
        text = self._open if last or self._thinking else decided(self._open)
        parts = self._thoughts(text) if self._thinking else self._blocks(text)
        shown: list[str] = []
        settled = 0
        gap = self._gap
        for _, lines in parts:
            settled = len(shown)
            shown += [""] * gap + lines
            gap = not self._thinking
        self._lines.draw(shown)
        if len(parts) > 1:
            self._lines.settle(settled)
            self._settled.append((self._open[: parts[-1][0]], self._thinking))
            self._open = self._open[parts[-1][0] :]
            self._gap = gap
        now = time.monotonic()
        self._due = now + max(_INTERVAL_S, _SHARE * (now - began))

    def _blocks(self, text: str) -> list[tuple[int, list[str]]]:
        """Returns where each block of a text begins, and its lines."""
        from hotcold.commands.markdown import blocks, lines_of

        console = self._with_styles()
        return [(block.start, lines_of(block, console)) for block in blocks(text)]

    def _thoughts(self, text: str) -> list[tuple[int, list[str]]]:
        """Returns where each line of thinking begins, and its wrapped lines."""
        from hotcold.commands.markdown import plain_lines

        console, style = self._with_styles(), "italic" if colourless() else "dim"
        paragraphs: list[tuple[int, list[str]]] = []
        start = 0
        for line in text.rstrip().split("\n"):
            paragraphs.append((start, plain_lines(line, style, console) or [""]))
            start += len(line) + 1
        return paragraphs

    def _with_styles(self) -> "Console":
        if self._console is None:
            from rich.console import Console

            from hotcold.commands.markdown import STYLES

            self._console = Console(
                force_terminal=True,
                width=self._columns,
                theme=STYLES,
                no_color=colourless(),
                highlight=False,
                markup=False,
                emoji=False,
            )
        return self._console
