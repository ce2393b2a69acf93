"""The pages for readers: short sentences, plain words, and paragraphs without ragged lines.

docs/log.md is exempt, since it is history."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name != "log.md"),
]
MOST_WORDS = 30
WIDTH, RAGGED = 100, 60

#: Phrases without a noun or an actor, each with plain words for it.
AVOIDED = {
    "those that": "name the things", "that which": "name the thing", "of which": "begin a new sentence",
    "so many": "this number of", "nobody": "name the actor", "somebody": "name the actor",
    "whoever": "name the actor", "is told": "gets", "are told": "get", "at hand": "available",
    "in vain": "without effect", "but for": "except", "takes turns": "alternates", "lies in": "is in",
    "lie in": "are in", "goes on": "continues", "sees to": "ensures", "beside which": "next to it",
    "for the rest": "otherwise",
}  # fmt: skip
_AVOIDED = re.compile(rf"\b({'|'.join(AVOIDED)})\b", re.IGNORECASE)


def paragraphs(text: str) -> Iterator[tuple[int, list[str]]]:
    """The lines of each paragraph, list entry and row of a table, with the number of the first one."""
    lines: list[str] = []
    fenced, first = False, 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        starts = re.match(r"\s*([-*]|\d+\.)\s", line) or line.lstrip().startswith("|")
        ends = not line.strip() or line.startswith(("#", "!", "<")) or line.lstrip().startswith("```")
        if lines and (starts or ends or fenced):
            yield first, lines
            lines = []
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not ends:
            first = first if lines else number
            lines.append(line)


def plain(lines: list[str]) -> str:
    """The words of a paragraph: code is one sign, addresses and marks are left out."""
    text = re.sub(r"`[^`]*`", "\u00a7", " ".join(line.strip() for line in lines))
    return re.sub(r"[*_]{2}|^([-*]|\d+\.)\s", "", re.sub(r"\]\([^)]*\)", "]", text))


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?:])[\")]*\s+(?=[\"(\[]*[A-Z0-9\u00a7])", text)


def avoided(text: str) -> list[str]:
    return [
        f"{number}: {each!r}: {AVOIDED[each.lower()]}"
        for number, lines in paragraphs(text)
        for each in _AVOIDED.findall(plain(lines))
    ]


def faults(text: str) -> list[str]:
    found = avoided(text)
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
        for i, (line, following) in enumerate(pairwise(lines)):
            next_word = following.split()[0]
            if len(line) < RAGGED and len(line) + 1 + len(next_word) <= WIDTH:
                found.append(f"{number + i}: a line of {len(line)} columns within a paragraph: re-flow it")
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
        "The categories bind fortunes.",
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
