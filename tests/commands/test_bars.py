"""A progress bar counts its updates, and is gone when the work is done."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from support.checkpoints import golden_checkpoint

from hotcold.commands import cli
from hotcold.commands.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """In place of stderr; not a fixture, since pytest sets stderr anew when a test begins."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setenv("TERM", "xterm")
    return found


def test_things_are_not_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    with progress("windows") as advance:
        advance(3, 7)
    assert "3/7" in terminal.getvalue() and "bytes" not in terminal.getvalue()


def test_no_total_is_shown_before_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    with progress("windows"):
        pass
    assert "0/?" in terminal.getvalue() and "/100" not in terminal.getvalue()


def test_the_line_is_erased_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    with progress("windows") as advance:
        advance(7, 7)
    assert "\x1b[2K" in terminal.getvalue().rpartition("7/7")[2]


def test_converting_counts_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    terminal = a_terminal(monkeypatch)
    assert cli.main(["convert", str(golden_checkpoint("tiny-llama")), "-o", str(tmp_path / "x.gguf")]) == 0
    assert "converting" in terminal.getvalue() and " kB" in terminal.getvalue()


@pytest.mark.parametrize("verb", ["perplexity", "profile"])
def test_windows_are_counted_to_the_last(verb: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not from 0, and not beyond."""
    (tmp_path / "text").write_text("Peter and Heidi went up the mountain with the goats. " * 5)
    output = ["-o", str(tmp_path / "x")] if verb == "profile" else []
    terminal = a_terminal(monkeypatch)
    assert cli.main([verb, "-f", str(tmp_path / "text"), "-c", "16", *output]) == 0
    counts = re.findall(r"(\d+)/(\d+)\b", terminal.getvalue().rpartition("windows")[2])
    done, total = map(int, counts[-1])
    assert done == total > 2
