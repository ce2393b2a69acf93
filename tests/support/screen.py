"""A terminal's screen: what stays visible of a text with the escape sequences that programs here write."""

from __future__ import annotations

import re
import unicodedata

_PARTS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[\s\S]")


class Screen:
    """``lines`` are the lines that have left it at the top, and those on it, without spaces at the end.
    ``styles`` has, for each, the numbers of the styles that were in force where a letter was written;
    ``drawn`` are the lines with these styles as escape sequences."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self._columns, self._rows = columns, rows
        self._cells: list[list[tuple[str, str]]] = [[]]  # a character and its style
        self._row = self._column = 0
        self._style = ""

    @property
    def lines(self) -> list[str]:
        return ["".join(character for character, _ in row).rstrip() for row in self._cells]

    @property
    def styles(self) -> list[set[str]]:
        return [
            {style for character, style in row if character not in ("", " ")} - {""} for row in self._cells
        ]

    @property
    def drawn(self) -> list[str]:
        return ["".join(f"\x1b[0;{style}m{character}" for character, style in row) for row in self._cells]

    def feed(self, text: str) -> Screen:
        for part in _PARTS.findall(text):
            if part.startswith("\x1b["):
                self._obey(part[2:-1], part[-1])
            elif part == "\n":
                self._down()
            elif part == "\r":
                self._column = 0
            elif part == "\b":
                self._column = max(self._column - 1, 0)
            elif part >= " ":
                self._put(part)
        return self

    def _obey(self, numbers: str, letter: str) -> None:
        if letter == "m":
            self._style = "" if numbers in ("", "0") else numbers
        elif letter == "A":
            self._row = max(self._row - int(numbers or 1), len(self._cells) - self._rows, 0)
        elif letter == "K" and numbers == "2":
            self._cells[self._row] = []
        elif letter in "JK":
            assert numbers in ("", "0"), numbers
            del self._cells[self._row][self._column :]
            if letter == "J":
                del self._cells[self._row + 1 :]
        elif letter == "C":
            self._column += int(numbers or 1)
        else:
            assert letter in "hl", f"{numbers}{letter} is not known here"

    def _down(self) -> None:
        self._row += 1
        self._column = 0
        if self._row == len(self._cells):
            self._cells.append([])

    def _put(self, character: str) -> None:
        width = 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if self._column + width > self._columns:
            self._down()
        row = self._cells[self._row]
        row += [(" ", "")] * (self._column - len(row))
        row[self._column : self._column + width] = [(character, self._style), ("", self._style)][:width]
        self._column += width
