"""A picture of `hotcold chat` in a terminal of 80 columns, for docs/: runs it in a pseudo-terminal, asks, and
writes what the terminal then shows as SVG.

    python tools/terminal_picture.py -m SmolLM2-135M-Instruct.Q4_1.gguf --output docs/terminal.svg

The last line is one JSON object: the file, its size, and how many lines it shows."""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.screen import Screen
from support.terminal import PseudoTerminal

MOST_BYTES = 100_000  # of a picture in a repository
COLUMNS = 80
QUESTIONS = [
    "List three tips for boiling an egg, with the most important word in **bold**.",
    "Write a short function in Python that adds two numbers.",
]
_FONTS = 'ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace'


def conversation(model: str, questions: list[str], seed: int, length: int) -> Screen:
    """The screen after the answers."""
    program = [sys.executable, "-m", "hotcold"]
    shown = ["chat", "-m", model]
    with PseudoTerminal([*program, *shown, "-s", str(seed), "-n", str(length)]) as terminal:
        terminal.wait_for("\n> ")
        for question in questions:
            terminal.send(f"{question}\n")
            terminal.wait_for("generation .* tok/s")
            terminal.wait_for("\n> ")
        screen = Screen(COLUMNS).feed(f"$ hotcold chat -m {Path(model).name}\n")
        return screen.feed(re.sub(r"\x1b(\[[0-9;?]*)?$", "", terminal.raw))  # without half a sequence


def picture(screen: Screen) -> str:
    """The screen's lines as SVG, which loads nothing from elsewhere."""
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True)
    for line in screen.drawn:
        console.print(Text.from_ansi(line), no_wrap=True, crop=True, highlight=False)
    svg = console.export_svg(title="hotcold chat", theme=MONOKAI, unique_id="hotcold")
    svg = re.sub(r"@font-face \{.*?\n    \}", "", svg, flags=re.DOTALL)
    return re.sub(r"\n\s*\n+", "\n", svg.replace("Fira Code, monospace", _FONTS))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", required=True, help="a GGUF file of a model with a chat template")
    parser.add_argument("--questions", nargs="+", default=QUESTIONS)
    parser.add_argument("-s", "--seed", type=int, default=7)
    parser.add_argument("-n", "--length", type=int, default=200, help="the most tokens of the answer (200)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    screen = conversation(args.model, args.questions, args.seed, args.length)
    print("\n".join(screen.lines), file=sys.stderr)
    args.output.write_text(picture(screen), encoding="utf-8")
    size = args.output.stat().st_size
    report = {"file": str(args.output), "bytes": size, "lines": len(screen.lines), "limit": MOST_BYTES}
    print(json.dumps(report))
    return 0 if size <= MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
