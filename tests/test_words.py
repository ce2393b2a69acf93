"""The language of the code: plain words, filled paragraphs, first lines that say something, current names.

``tests/test_pages.py`` holds the pages to the same words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.prose import TOKENS, Passage, avoided, paragraphs, passages, plain, ragged

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 110
#: code of others
FOREIGN = {"vendor", "khronos"}
#: Texts for models are data: the strings of tests, and these files' prompts.
PROMPTS = ("tests/", "benchmarks/cpu/larger_than_memory.py", "src/hotcold/tasks/bench.py")

#: Patterns of identifiers that were renamed, searched for in each identifier: the names that replaced them.
RENAMED = {
    r"[Ss]hel(f|ves)": "expert cache",
    r"(?<![a-z])[Ww]aves?(?![a-z])": "load batch",
    r"(?<![a-z])[Tt]rays?(?![a-z])": "read buffer",
    r"Guess": "Draft",
    r"^Room$": "Reservation",
    r"^Side$": "DeviceBuffers",
    r"^Apart": "ParallelExperts",
    r"^Together": "ParallelMixers",
    r"(?<![a-z])lent(?![a-z])": "borrowed",
    r"(?<![a-z])[Ff]ire[sd]?(?![a-z])|FIRED|Firings": "active",
    r"(?<![a-z])lies(?![a-z])": "location",
    r"(?<![a-z])vain(?![a-z])": "unsuccessful, wasted",
}
#: More of them, in Python.
RENAMED_IN_PYTHON = {r"^_*seen$": "the values that it has", r"^_*[Tt]old$": "message, or what it holds"}
#: Fields of JSON and options that keep their names, in the files that write and read them.
PUBLIC = {
    "fired": ("src/hotcold/watch/live.py", "src/hotcold/server/page/", "tests/watch/", "tests/server/"),
    "seen": ("benchmarks/gpu/op_table.py",),
    "told": ("benchmarks/cpu/ram_sweep.py",),
}

#: A docstring that begins so leaves its noun to the reader: "Of a step" does not say what of it.
FRAGMENT = re.compile(r"\s*(Of|That|Those|What|Whatever|Whether|Which|Who|Whom|Whose)\b")


def folder(path: Path) -> str:
    """The folder that a test is about: one of ``src/hotcold``, or one at the top."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[: 3 if parts[0] == "src" else 2 if parts[0] == "csrc" else 1])


def sources() -> dict[str, list[Path]]:
    tops = (".ci", "benchmarks", "csrc", "examples", "fuzz", "src", "tests", "tools")
    folders: dict[str, list[Path]] = {}
    for path in sorted(path for top in tops for path in (ROOT / top).rglob("*")):
        if path.suffix in TOKENS and not FOREIGN & {*path.parts} and path.is_file():
            folders.setdefault(folder(path), []).append(path)
    return folders


SOURCES = sources()


def faults(passage: Passage) -> Iterator[str]:
    """The faults of a passage, each after its line."""
    text = passage.text
    if passage.kind == "message":
        text = re.sub(r"\\[nrt]", " ", text)
        yield from (f"{passage.line}: {phrase}" for phrase in avoided(plain([text])))
        return
    if passage.kind == "docstring" and (fragment := FRAGMENT.match(text)):
        yield f"{passage.line}: begins with {fragment[1]!r}: begin with a noun, a verb or 'True if'"
    for number, lines in paragraphs(text):
        first = passage.line + number - 1
        yield from (f"{first}: {phrase}" for phrase in avoided(plain(lines)))
        is_code = number > 1 and lines[0].startswith(" " * (passage.margin + 4))
        for i in () if is_code else ragged(lines, WIDTH):
            yield f"{first + i}: a line of {len(lines[i])} columns within a paragraph: re-flow it"


def renamed(code: str, file: str) -> list[str]:
    """The identifiers of a file's code that have a new name."""
    patterns = RENAMED | (RENAMED_IN_PYTHON if file.endswith(".py") else {})
    public = {name for name, files in PUBLIC.items() if file.startswith(files)}
    names = sorted({*re.findall(r"[A-Za-z_]\w*", code)} - public)
    return [f"{name}: {new}" for old, new in patterns.items() for name in names if re.search(old, name)]


def wrong(path: Path, name: str) -> Iterator[str]:
    """The faults of a file with this name in the repository."""
    texts, code = passages(path.read_text(encoding="utf-8"), path.suffix)
    checked = [text for text in texts if text.kind != "message" or not name.startswith(PROMPTS)]
    yield from (f"{name}:{fault}" for passage in checked for fault in faults(passage))
    yield from (f"{name}: {identifier}" for identifier in renamed(code, name))


@pytest.mark.parametrize("top", SOURCES)
def test_code_has_plain_words(top: str) -> None:
    names = {path: path.relative_to(ROOT).as_posix() for path in SOURCES[top]}
    assert [fault for path, name in names.items() for fault in wrong(path, name)] == []


def test_every_folder_is_checked() -> None:
    """Each language, and each folder of the package."""
    assert {path.suffix for paths in SOURCES.values() for path in paths} == {*TOKENS}
    packages = {path.parent.name for path in (ROOT / "src" / "hotcold").glob("*/__init__.py")}
    assert {f"src/hotcold/{name}" for name in packages} | {
        "csrc/simd",
        "tests",
        "benchmarks",
        "examples",
    } <= {*SOURCES}


PY, CC, JS = "src/hotcold/page.py", "csrc/ops/op.h", "src/hotcold/server/page/app.js"


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        (PY, 'def f():\n    """Takes those\n    that are free."""', "2: 'those that'"),
        (PY, "x = 1  # it goes\n       # on", "1: 'goes on'"),
        (PY, "#: of\n#: which", "1: 'of which'"),
        (PY, "s = 'a # b'  # Nobody reads", "1: 'nobody'"),
        (PY, r's = "a\nNobody reads"', "1: 'nobody'"),
        (PY, 'raise E(f"{x} is "\n    "told")', "1: 'is told'"),
        (PY, 's = """\nis\ntold"""', "1: 'is told'"),
        (PY, 's = r"\\"  # nobody', "1: 'nobody'"),
        (CC, "int a;  // nobody\n", "1: 'nobody'"),
        (CC, "/* It is\n * told. */", "1: 'is told'"),
        (CC, "int a = 1'000;  // it's nobody", "1: 'nobody'"),
        (CC, """char c = '"';  // nobody""", "1: 'nobody'"),
        (CC, 'f("no experts are " "told");', "1: 'are told'"),
        (JS, "const a = /['\"]/; // it's nobody", "1: 'nobody'"),
        (JS, "const a = `is told ${b}`;", "1: 'is told'"),
        ("tests/op.comp", "void f();  // so many", "1: 'so many'"),
        ("tests/a.py", "x = 1\n# but\n# for", "2: 'but for'"),
        (PY, '"""Of a page."""', "1: begins with 'Of'"),
        (PY, 'class Page:\n    """Those of a page."""', "2: begins with 'Those'"),
        (PY, 'async def f() -> int:\n    """Whether it is."""', "2: begins with 'Whether'"),
        (PY, 'def f():\n    """A short line\n    and more of it."""', "2: a line of 19 columns"),
        (PY, "    # A page.\n    # Its rows.", "1: a line of 13 columns"),
        (CC, "// - an entry\n//   in two lines", "1: a line of 13 columns"),
        (PY, "class Apart: ...", " Apart: ParallelExperts"),
        (PY, "a = _old_name(1)", " _old_name: new_name"),
        (PY, "self._told = seen", " seen: the values"),
        (CC, "if (f.fired) clear_fired(f);", " clear_fired: active"),
    ],
)
def test_a_fault_is_found(
    name: str, source: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RENAMED, "old_name", "new_name")
    path = tmp_path / Path(name).name
    path.write_text(source, encoding="utf-8")
    assert any(line.startswith(f"{name}:{fault}") for line in wrong(path, name))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        (PY, 'def f():\n    """Takes `those that` and ``so many``."""'),
        (PY, "of = 1\nwhich = 2  # of\n\n# which"),
        (PY, "# This told a page."),
        (PY, "x = 1  # of\n    # which"),
        (PY, 'f(\n    """Of a page.""",\n)'),
        (PY, "# Which page it is."),
        (PY, '"""Page."""\n\nSHORT = """Of\na line"""'),
        (PY, "# One.\n#\n# Two.\n# - an entry\n# - another one"),
        (PY, '"""Page.\n\n    python page.py\n    python page.py --all"""'),
        (PY, "#: Page:\n#:     python page.py\n#:     python page.py --all"),
        (PY, 'def f():\n    """Reads.\n\n    Args:\n        page: one.\n        row: another.\n    """'),
        (PY, '"""Page.\n\n>>> read(1)\n>>> read(2)\n"""'),
        (PY, f"# A {'word ' * 12}\n# before {'a' * 100}"),
        (PY, f"# A word before\n# {'a' * 100}"),
        (PY, "x = 1  # one thing\ny = 2  # another"),
        (PY, "class Part: ...  # Apart\ns = 'Apart'"),
        (CC, "int a;  // of\nint b;  // which"),
        (CC, "uint64_t seen = 0;  // the last epoch"),
        (JS, "frame.fired.map(told);"),
        ("tests/a.py", "s = 'Nobody knows.'"),
    ],
)
def test_plain_code_has_no_fault(name: str, source: str, tmp_path: Path) -> None:
    path = tmp_path / Path(name).name
    path.write_text(source, encoding="utf-8")
    assert [*wrong(path, name)] == []
