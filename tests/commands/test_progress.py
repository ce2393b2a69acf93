"""Progress bars: on a terminal, and nowhere else."""

from __future__ import annotations

import io
import sys

import pytest

from hotcold.commands.progress import phases, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_is_printed_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("windows") as advance:
        advance(1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress("windows") as advance:
        advance(3, 7)
    with progress("loading", in_bytes=True) as advance:
        advance(2_000_000, 8_000_000)
    written = terminal.getvalue()
    assert "windows" in written and "3/7" in written
    assert "loading" in written and "2.0/8.0 MB" in written
    assert capsys.readouterr().out == ""


def test_a_bar_for_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with phases() as advance:
        for done in (1, 2):
            advance("loading", done * 4_000_000, 8_000_000)
        advance("rounds", 2, 5)
        advance("layers", 6, 7)
    written = terminal.getvalue()
    places = [written.index(words) for words in ("loading", "8.0/8.0 MB", "rounds", "2/5", "layers", "6/7")]
    assert places == sorted(places)


def test_phases_that_nobody_sees(capsys: pytest.CaptureFixture[str]) -> None:
    with phases() as advance:
        advance("loading", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_is_left_clean_when_work_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(KeyboardInterrupt), progress("windows") as advance:
        advance(1, 2)
        raise KeyboardInterrupt
    show_cursor, hide_cursor = "\x1b[?25h", "\x1b[?25l"
    written = terminal.getvalue()
    assert hide_cursor in written and written.rindex(show_cursor) > written.rindex(hide_cursor)
