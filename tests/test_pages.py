"""The pages for readers: short sentences, plain words, and paragraphs without ragged lines.

docs/log.md is exempt, since it is history."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.prose import avoided, paragraphs, plain, ragged

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name != "log.md"),
]
MOST_WORDS = 30
WIDTH = 100


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?:])[\")]*\s+(?=[\"(\[]*[A-Z0-9\u00a7])", text)


def phrases(text: str) -> list[str]:
    return [f"{line}: {phrase}" for line, lines in paragraphs(text) for phrase in avoided(plain(lines))]


def faults(text: str) -> list[str]:
    found = phrases(text)
    for number, lines in paragraphs(text):
        words = plain(lines)
        if lines[0].lstrip().startswith("|") or words.startswith("Refused, except"):  # a list for programs
            continue
        if wide := [line for line in lines if len(line) > WIDTH and " " in line.strip()]:
            found.append(f"{number}: a line of {len(wide[0])} columns: {WIDTH} are allowed")
        for sentence in sentences(words):
            count = sum(any(map(str.isalnum, word)) for word in sentence.split())
            if count > MOST_WORDS:
                found.append(f"{number}: {count} words, {MOST_WORDS} are allowed: {sentence[:60]} ...")
        for i in ragged(lines, WIDTH):
            found.append(f"{number + i}: a line of {len(lines[i])} columns within a paragraph: re-flow it")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_reads_well(page: Path) -> None:
    assert faults(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (" ".join(["word"] * 31) + ".", "31 words"),
        ("A line" + " of a page" * 10, "106 columns"),
        ("- One. W" + " ".join(["word"] * 31) + ".", "31 words"),
        ("| a cell | for those that read |", "those that"),
        ("It goes\non and on.", "goes on"),
        ("A short line\nand more of the same paragraph.", "12 columns"),
    ],
)
def test_a_fault_is_found(text: str, fault: str) -> None:
    assert any(fault in each for each in faults(text))


@pytest.mark.parametrize(
    "text",
    [
        " ".join(["a"] * 30) + ".\n" + " ".join(["A"] * 30) + ".",
        "It uses `those that` and `goes on`.",
        "```sh\nnobody\n```\n",
        "## Nobody\n\nA line.\n\n- an entry\n- another one\n",
        "This told a page.",
    ],
)
def test_plain_text_has_no_fault(text: str) -> None:
    assert faults(text) == []


def anchors(page: Path) -> set[str]:
    """The addresses of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path) if path else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), target


@pytest.mark.parametrize(("page", "lines"), [("README.md", 150), ("docs/results.md", 500)])
def test_a_page_stays_short(page: str, lines: int) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= lines
