"""Reads messages of one or more lines, and commands, from the user."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from hotcold.commands.colours import quiet_prompt
from hotcold.commands.interrupts import Interrupts
from hotcold.errors import UserError

Completions: TypeAlias = Callable[[str], list[str]]

PROMPT, MORE = "> ", ". "
_QUOTES = '"""'
_HISTORY = 2000  # limit of lines in the history file


class LineInput:
    """Reads messages from standard input, in a terminal with a prompt and editing. ``history`` is a file of
    earlier lines, to which new lines are appended. ``plain``: whether the prompt has no colour.
    ``completions`` returns completions of the last word of a line that begins with a slash."""

    def __init__(
        self,
        interrupts: Interrupts,
        history: Path | None = None,
        completions: Completions | None = None,
        *,
        plain: bool = False,
    ) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._interrupts = interrupts
        self._readline = _readline() if self.interactive else None
        self._history = history
        self._plain = plain
        if self._readline is not None and completions is not None:
            _complete(self._readline, completions)
        if self._readline is not None and history is not None and history.exists():
            self._readline.read_history_file(history)

    def read(self) -> str | None:
        """Returns the next message; None at the end. A backslash at the end of a line, or three quotes before
        and after, make several lines one message. KeyboardInterrupt: Ctrl-C, and the typed text is dropped.
        UserError: the input is not UTF-8."""
        line = self._line(PROMPT)
        if line is None:
            return None
        if line.lstrip().startswith(_QUOTES):
            return self._quoted(line.lstrip().removeprefix(_QUOTES))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            next_line = self._line(MORE)
            if next_line is None:
                break
            lines.append(next_line)
        return "\n".join(lines)

    def typed(self) -> bool:
        """Returns whether the line that Ctrl-C ended had text."""
        return self._readline is not None and bool(self._readline.get_line_buffer())

    def close(self) -> None:
        """Writes the history, if there is a file for it."""
        if self._readline is not None and self._history is not None:
            self._readline.write_history_file(self._history)

    def _quoted(self, line: str) -> str:
        lines: list[str] = []
        next_line: str | None = line
        while next_line is not None:
            before, quotes, _ = next_line.partition(_QUOTES)
            lines.append(before)
            if quotes:
                break
            next_line = self._line(MORE)
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str | None:
        with self._interrupts.heard():
            try:
                if self.interactive:
                    with contextlib.suppress(EOFError):
                        return input(prompt if self._plain else quiet_prompt(prompt))
                    return None
                line = sys.stdin.readline()
            except UnicodeDecodeError as error:
                byte = error.object[error.start]
                raise UserError(f"standard input is not UTF-8 text: it has the byte {byte:#04x}") from None
            return line.removesuffix("\n") if line else None


def _readline() -> ModuleType | None:
    """Returns the module that makes ``input`` edit lines; None on systems without it."""
    try:
        import readline
    except ImportError:
        return None
    readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one message
    readline.set_history_length(_HISTORY)
    return readline


def _complete(readline: ModuleType, completions: Completions) -> None:
    """Lets the tab key complete commands. In other lines it does nothing."""
    candidates: list[str] = []

    def complete(_word: str, number: int) -> str | None:
        line = readline.get_line_buffer()[: readline.get_endidx()]
        if number == 0:
            candidates[:] = completions(line) if line.startswith("/") else []
        return candidates[number] if number < len(candidates) else None

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    readline.parse_and_bind(
        "bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete"
    )
