"""Answers on a terminal: what is on the screen, whatever the pieces in which an answer came."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.screen import Screen

from hotcold.commands import display
from hotcold.commands.display import MarkdownDisplay, PlainDisplay
from hotcold.commands.live_lines import LiveLines
from hotcold.commands.markdown import decided

MARKDOWN = """# A title

Some **bold text**, *emphasis*, `code`, a [link](https://example.org/x) and <https://auto.org>. It is so long
that it wraps, and then
it breaks where the text does, with <b>HTML</b> and ![a picture](https://x.org/y.png).

- one
- two with a very long text that has to be wrapped because it does not fit into one line at all
  - nested
- three

```python
def f(x):

    return "a string"
```

| name | value |
|---|---:|
| a | 1 |
| b | 22 |

> quoted text

[1]: https://defined.org

Rule
---
The end is a line of its own
"""
SCREEN = """\
A title

Some bold text, emphasis, code, a link (https://example.org/x) and
https://auto.org. It is so long
that it wraps, and then
it breaks where the text does, with <b>HTML</b> and !a picture
(https://x.org/y.png).

 • one
 • two with a very long text that has to be wrapped because it does not fit
   into one line at all
    • nested
 • three

  def f(x):

      return "a string"

 name  value
 ───────────
 a         1
 b        22

▌ quoted text

[1]: https://defined.org

Rule

The end is a line of its own
"""


@pytest.fixture(autouse=True)
def _a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(display, "_INTERVAL_S", 0)
    monkeypatch.setattr(display, "_SHARE", 0)


def drawn(capsys: pytest.CaptureFixture[str], text: str, size: int, thinking: str = "") -> str:
    shown = MarkdownDisplay()
    for start in range(0, len(thinking), size):
        shown.write(thinking[start : start + size], thinking=True)
    for start in range(0, len(text), size):
        shown.write(text[start : start + size])
    shown.end()
    return capsys.readouterr().out


@pytest.mark.parametrize("size", [3, 17, 1 << 20])
def test_markdown_in_pieces(capsys: pytest.CaptureFixture[str], size: int) -> None:
    screen = Screen().feed(drawn(capsys, MARKDOWN, size))
    assert "\n".join(screen.lines) == SCREEN
    assert screen.styles[0] == {"1;4"}  # the title
    assert {"1", "3", "36", "4"} <= screen.styles[2]  # bold, emphasis, code, an address


def test_a_table_longer_than_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    """Columns grow when their beginning has left the screen: the rest is right, and nothing is missing."""
    rows = [f"| {i} | {'x' * i} |" for i in range(40)]
    lines = Screen().feed(drawn(capsys, "\n".join(["| a | b |", "|---|---|", *rows, ""]), 40)).lines
    assert [line.split() for line in lines[-39:-1]] == [[str(i), "x" * i] for i in range(2, 40)]


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(f"{'  ' * i}- level{i}" for i in range(14)),
        "\n".join(f"{'  ' * i}- level{i}" for i in range(60)),
        "".join(f"{'>' * (i + 1)} level{i}\n\n" for i in range(60)),
        "|".join(f"c{i}" for i in range(60)) + "\n" + "|".join(["-"] * 60) + "\n" + "|".join(
            f"v{i}" for i in range(60)),
    ],
    ids=["list", "deep list", "quote", "table"],
)  # fmt: skip
def test_nothing_of_what_is_nested_deeply_is_left_out(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen().feed(drawn(capsys, text, len(text))).lines
    assert max(map(len, screen)) <= 80
    shown = "".join("".join(screen).split())
    assert [word for word in re.findall(r"\w+", text) if word not in shown] == []


def test_thinking_is_dim_and_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    thinking = f"{'long ' * 20}\n\n* no *Markdown*\n\n"
    screen = Screen().feed(drawn(capsys, "Yes", 4, thinking))
    wrapped = [" ".join(["long"] * 16), " ".join(["long"] * 4)]
    assert screen.lines == [*wrapped, "", "* no *Markdown*", "", "Yes", ""]
    assert screen.styles[0] == screen.styles[3] == {"2"} and screen.styles[5] == set()


def test_no_color(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = drawn(capsys, MARKDOWN, 1 << 20, "Hm")
    codes = {int(code) for codes in re.findall(r"\x1b\[([0-9;]*)m", out) for code in codes.split(";")}
    assert codes == {0, 1, 3, 4}  # bold, italic, underlined: neither colours nor dim letters


def test_what_steers_terminals_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    out = drawn(capsys, "a\x1b[2Jb\x07c\x9bd\r\ne", 2)
    assert Screen().feed(out).lines == ["a�[2Jb�c�d", "e", ""]


def test_a_line_of_spaces_is_read_once() -> None:
    """Long ones took minutes where each space may belong to two parts of a pattern."""
    spaces = " " * 200_000
    assert decided(f"a\n{spaces}") == "a\n"
    assert decided(f"a\n{spaces}b") == f"a\n{spaces}b"


@pytest.mark.parametrize("line", ["", "  ", "-", "> -", " ==", "1", "12. ", "| : -", "> 1)", "`` "])
def test_lines_of_marks_wait(line: str) -> None:
    assert decided(f"a\n{line}") == "a\n"
    assert decided(f"a\n{line}b") == f"a\n{line}b"


def test_an_answer_that_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    shown = MarkdownDisplay()
    shown.resume("Before.\n\n- one\n- t")
    shown.write("wo\n")
    shown.end()
    assert Screen().feed(capsys.readouterr().out).lines == [" • one", " • two", ""]


@pytest.mark.parametrize(
    "text", ["", " \n", "\n\n", "```", "-", "#", "| a |\n|", "1", "1.", "[x]", "&amp;", "`"]
)
def test_ends_in_the_middle(capsys: pytest.CaptureFixture[str], text: str) -> None:
    out = drawn(capsys, text, 1)
    assert out.endswith("\n") and "\x1b[" not in out.replace("\x1b[J", "")


@pytest.mark.parametrize("text", [" " * 30000 + "x", "> " * 15000 + "x", "-" * 30000 + "x", ">" * 30000])
def test_a_long_line_of_marks_takes_no_time_to_decide(text: str) -> None:
    """An expression that goes back over its spaces would take minutes."""
    from hotcold.commands.markdown import decided

    assert decided(text) == (text if text.endswith("x") else "")


def test_other_streams_get_the_text_itself(capsys: pytest.CaptureFixture[str]) -> None:
    shown = display.display(plain=False)
    assert isinstance(shown, PlainDisplay)  # standard output is no terminal here
    shown.write("no", thinking=True)
    for piece in ("# a\r", "\x1b[1m ", "\n"):
        shown.write(piece)
    shown.end()
    assert capsys.readouterr().out == "# a\r\x1b[1m \n"


def test_the_width_changes_in_the_middle_of_an_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text that is drawn after a change has no broken word, and nothing is missing from there on."""
    words = [f"word{i}x{'y' * (i % 17)}" for i in range(2400)]
    paragraphs = [" ".join(words[i : i + 40]) for i in range(0, len(words), 40)]
    text = "\n\n".join([*paragraphs[:30], "- " + "\n- ".join(paragraphs[30:33]), *paragraphs[33:]])
    shown, thirds = MarkdownDisplay(), len(text) // 3
    outputs = []
    for width, start in ((80, 0), (40, thirds), (200, 2 * thirds)):
        monkeypatch.setenv("COLUMNS", str(width))
        for at in range(start, start + thirds + 3, 7):
            shown.write(text[at : min(at + 7, start + thirds if width < 200 else len(text))])
        if width == 200:
            shown.end()
        outputs.append((width, capsys.readouterr().out.split("\x1b[H\x1b[J")))
    assert [len(parts) for _, parts in outputs] == [1, 2, 2]
    for width, parts in outputs:
        lines = Screen(columns=width).feed(parts[-1]).lines
        assert max(map(len, lines)) < width
        shown_words = [word for line in lines for word in line.split() if word != "•"]
        cut = shown_words.pop() if width < 200 else ""  # the word that was being written
        first = words.index(shown_words[0])
        assert shown_words == words[first : first + len(shown_words)]
        assert "".join(words[first + len(shown_words) :][:1]).startswith(cut)
        if width != 80:
            assert len(lines) >= 24  # what fits on the screen was drawn again
    assert shown_words[-1] == words[-1]


def test_the_height_changes_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = MarkdownDisplay()
    shown.write("one\n\ntwo ")
    monkeypatch.setenv("LINES", "10")
    shown.write("three")
    shown.end()
    assert Screen().feed(capsys.readouterr().out).lines == ["one", "", "two three", ""]


LINES = st.lists(st.text("ab", max_size=3), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(LINES, st.integers(0, 3)), max_size=6))
def test_lines_that_change(steps: list[tuple[list[str], int]]) -> None:
    """The screen shows the settled lines, and then those drawn last."""
    written: list[str] = []

    class Out:
        write = staticmethod(written.append)
        flush = staticmethod(lambda: None)

    settled: list[str] = []
    before, sys.stdout = sys.stdout, Out()  # type: ignore[assignment]
    try:
        live = LiveLines(24)
        for lines, count in steps:
            live.draw(lines)
            assert Screen().feed("".join(written)).lines == [*settled, *lines]
            kept = min(count, len(lines) - 1)
            live.settle(kept)
            settled += lines[:kept]
    finally:
        sys.stdout = before
