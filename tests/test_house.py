"""The house rules: names, how code is laid out, and the promises of README.md and CONTRIBUTING.md."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hotcold.commands.cli import ALIASES
from hotcold.commands.command_line import parser_of
from hotcold.errors import UserError

ROOT = Path(__file__).resolve().parent.parent


def files(*tops: str, pattern: str = "*") -> list[Path]:
    found = [path for top in tops for path in (ROOT / top).rglob(pattern)]
    return sorted(path for path in found if path.is_file())


PYTHON = files("src", "tests", "benchmarks", "tools", pattern="*.py")
NATIVE = [
    path
    for path in files("csrc", "tests/native", pattern="*.[ch]*")
    if "khronos" not in path.parts  # not ours
]
PRODUCT = files("src", pattern="*.py")

MOST_LINES_OF_A_FUNCTION = 80

#: Words that say nothing, and PowerInfer's second and third names for one thing.
BANNED = {"manager", "handler", "helper", "helpers", "utils", "util", "worker", "workers", "bucket", "ctx"}
#: names of factors in PowerInfer's files, allowed only where files are read and written
FACTORS = {"fc1", "fc2"}
READS_FACTORS = {"src/hotcold/sparse/predictor.py"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def words(name: str) -> set[str]:
    """The lower-case words of a snake_case or CamelCase name."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}


def defined_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Names that the source itself chooses, with their lines, without names that it only uses."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def banned(name: str, file: str) -> bool:
    bare = name.strip("_")
    # A context is a number of positions here, never an object that is passed around.
    if "context" in words(bare) and re.match(r"[A-Z]+[a-z]", bare):
        return True
    if set(bare.split("_")) & FACTORS:
        return file not in READS_FACTORS
    return bool(words(bare) & BANNED) or bare == "gpu_idx"


def tracked_files() -> list[Path]:
    """Every text file of the repository; without git, every file that is not hidden or built."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        paths = [path for top in ("src", "tests", "csrc", "docs") for path in (ROOT / top).rglob("*")]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:4096]]


def long_functions(nodes: Iterable[ast.AST]) -> list[str]:
    """Functions that do not fit on a screen, with one argument a line: they do two things."""
    found = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = [(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in found]
    return [f"{name} has {lines} lines" for name, lines in lengths if lines > MOST_LINES_OF_A_FUNCTION]


def test_the_check_of_lengths_works() -> None:
    body = "    pass\n" * (MOST_LINES_OF_A_FUNCTION - 1)
    assert long_functions(ast.walk(ast.parse("def f():\n" + body))) == []
    long = "class Room:\n    async def f():\n" + body.replace("    ", "        ") * 2
    assert long_functions(ast.walk(ast.parse(long)))


def folded(source: str) -> list[int]:
    """Lines with ``# fmt: skip`` that do not end a table, which is a constant of its module."""
    if "# fmt: " not in source:
        return []
    tables = set()
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if all(isinstance(target, ast.Name) and target.id.isupper() for target in targets):
            tables.add(node.end_lineno)
    marked = [n for n, line in enumerate(source.splitlines(), 1) if "# fmt: " in line]
    return [n for n in marked if n not in tables]


def test_only_tables_are_laid_out_by_hand() -> None:
    found = {relative(path): folded(path.read_text(encoding="utf-8")) for path in PRODUCT}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("T = {\n    1: 2, 3: 4,\n}  # fmt: skip", []),
        ("T: list[int] = [\n    1, 2,\n]  # fmt: skip", []),
        ("x = f(\n    1, 2,\n)  # fmt: skip", [3]),
        ("def f():\n    return {\n        1: 2, 3: 4,\n    }  # fmt: skip", [4]),
        ("# fmt: off\nx = 1", [1]),
    ],
)
def test_the_check_of_tables_works(source: str, lines: list[int]) -> None:
    assert folded(source) == lines


#: In a statement without its brackets' content: assignments or calls that a comma joins.
CHAIN = re.compile(
    r"(?:[\w.\[\]*]|->|::)+\s*(?:[-+*/|&^]|<<|>>)?=[^=].*,"
    r"|(?:\+\+|--)[\w.]+,"
    r"|(?:[\w.:]|->)+\(\)\s*,"
)
#: Parts that are no code: comments, directives, strings and characters.
NO_CODE = re.compile(
    r"//[^\n]*|/\*.*?\*/|^[ \t]*#(?:\\\n|[^\n])*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'",
    re.DOTALL | re.MULTILINE,
)


def native_statements(source: str) -> Iterator[tuple[int, str]]:
    """The last line of each statement of C++, and its text without what brackets hold."""
    code = NO_CODE.sub(lambda found: "\n" * found[0].count("\n"), source)
    depth, line, text = 0, 1, ""
    for character in code:
        line += character == "\n"
        depth -= character in ")]"
        if depth:
            pass
        elif character in ";{}":
            if character == ";" and text.strip():
                yield line, re.sub(r"<[^<>;=]*>", "", text).strip()
            text = ""
        else:
            text += character
        depth += character in "(["


def crowded(source: str) -> list[int]:
    """Lines of C++ with a second statement, or with several that commas make look like one."""
    found = list(native_statements(source))
    second = [line for (before, _), (line, _) in pairwise(found) if line == before]
    return sorted(second + [line for line, text in found if CHAIN.match(text)])


def test_one_statement_a_line() -> None:
    """Python's are ruff's to check."""
    found = {relative(path): crowded(path.read_text(encoding="utf-8")) for path in NATIVE}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("int a = 1, b = 2;", []),
        ("for (i = 0, j = 1; i < n; ++i, ++j) f(i, j);", []),
        ("call(a = 1, b);\ncall(c);", []),
        ("x = pair<int, float>(1, 2);", []),
        ("Point p{f(), g()};", []),
        ("Both() : a(1), b(2) {}", []),
        ('const char* s = "a; b, c"; // d; e', []),
        ("a = 1; b = 2;", [1]),
        ("a = 1,\nb = 2;", [2]),
        ("p->a[i] += 1, ++b;", [1]),
        ("++a, b = 1;", [1]),
        ("v.push_back(1), w.push_back(2);", [1]),
        ("if (x) { f(); g(); }", [1]),
    ],
)
def test_the_check_of_statements_works(source: str, lines: list[int]) -> None:
    assert crowded(source) == lines


def broken_rules(path: Path) -> list[str]:
    """Long functions, and names that say nothing. A file is parsed and walked through once."""
    file = relative(path)
    found = [f"{file}: its own name"] if words(path.stem) & BANNED else []
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    found += [f"{file}:{line}: {name}" for name, line in defined_names(nodes) if banned(name, file)]
    return found + [f"{file}: {text}" for text in long_functions(nodes)]


@pytest.mark.parametrize("top", sorted({path.relative_to(ROOT).parts[0] for path in PYTHON}))
def test_files_keep_the_rules(top: str) -> None:
    files = [path for path in PYTHON if path.relative_to(ROOT).parts[0] == top]
    assert [each for path in files for each in broken_rules(path)] == []


def test_the_check_of_files_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rule is broken once in a file."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "test_utils.py"
    body = "    pass\n" * MOST_LINES_OF_A_FUNCTION
    path.write_text(f"def f(ctx):\n{body}", encoding="utf-8")
    file = path.name
    faults = [": its own name", ":1: ctx", f": f has {MOST_LINES_OF_A_FUNCTION + 1} lines"]
    assert broken_rules(path) == [file + each for each in faults]


def test_native_names_say_something() -> None:
    for path in NATIVE:
        source = re.sub(r"//.*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", "", path.read_text(encoding="utf-8"))
        names = set(re.findall(r"[A-Za-z_]\w*", source))
        assert [name for name in names if banned(name, relative(path))] == [], relative(path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("KVCacheManager", True),
        ("request_handler", True),
        ("utils", True),
        ("_helper", True),
        ("HTTPWorker", True),
        ("RunContext", True),
        ("fc1", True),
        ("Context", True),
        ("ctx", True),
        ("context", False),
        ("DEFAULT_CONTEXT", False),
        ("context_length", False),
        ("handle", False),
        ("networker", False),
    ],
)
def test_the_check_of_names_works(name: str, expected: bool) -> None:
    assert banned(name, "src/hotcold/engine/engine.py") is expected


def test_no_path_of_one_machine_is_in_the_repository() -> None:
    tops = "work|root|home|opt|mnt|Users|private|media|scratch"
    pattern = re.compile(rf"(?<![\w.*}}/:-])/({tops})/\w|\b[A-Z]:\\\\?[A-Za-z]")
    files = tracked_files()
    assert files
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            assert not pattern.search(line), f"{relative(path)}:{number}: {line.strip()}"


def readme_commands() -> list[str]:
    """The lines of the README's first fenced block."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block
    return block[1].splitlines()


def test_the_readme_starts_with_the_two_commands() -> None:
    assert readme_commands() == [
        'pip install . && hotcold generate -p "Once upon a time"',
        "pip install '.[test]' && pytest",
    ]


def documented_commands() -> list[str]:
    """Every ``hotcold`` command of the README and of the pages in docs, with its page before it."""
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        if page.name == "deploy.md":
            continue  # tests/test_deploy.py
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^ *```sh\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
            commands = re.findall(r"(?:^|\| )(hotcold .*)$", block, re.MULTILINE)
            found += [f"{page.name}: {command}" for command in commands]
    return found


def test_pages_have_commands() -> None:
    pages = {line.partition(":")[0] for line in documented_commands()}
    assert {"README.md", "chat.md", "convert.md", "gpu.md", "hub.md", "server.md"} <= pages


def test_documented_commands_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some options refuse files that exist
    made = cache(parser_of)
    wrong = []
    for line in documented_commands():
        _, verb, *arguments = shlex.split(line.partition(": ")[2], comments=True)
        try:
            made(ALIASES.get(verb, verb)).parse_strictly(arguments)
        except (UserError, SystemExit, ModuleNotFoundError) as error:
            wrong.append(f"{line}: {error!r}")
    assert wrong == []


def run_python_of(page: str) -> dict[str, Any]:
    """Runs the page's ``python`` block and returns its names."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    return names


@pytest.mark.parametrize("page", ["README.md", "docs/embedding.md"])
def test_the_python_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_python_of(page)
    names["llm"].close()
    lines = capsys.readouterr().out
    if page == "README.md":
        assert names["piece"].finish_reason in lines
    else:
        assert "tok/s (median" in lines and names["king"].text in lines
        assert str(names["plan"].gpu_bytes) in lines
    assert not list(tmp_path.iterdir())


def test_the_python_of_the_page_on_grammars_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run_python_of("docs/grammar.md")
    notes, _, answer = capsys.readouterr().out.partition("\n")
    assert notes == "()"
    assert isinstance(json.loads(answer)["age"], int)


@pytest.mark.skipif(os.name == "nt" or shutil.which("bash") is None, reason="needs bash")
def test_ci_runs_the_commands_of_the_readme() -> None:
    """As they are, in a new bare root, whose installation the desktop takes over; at the end everything."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    (reads,) = [line for line in script if line.startswith("mapfile -t commands ")]
    program = f"{reads}\nprintf '%s\\n' \"${{commands[@]}}\""
    done = subprocess.run(["bash", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == readme_commands()
    lines = "\n".join(script).replace("\\\n", "").splitlines()
    bare = [line for line in lines if line.lstrip().startswith('"${bare[@]}" ')]
    assert [re.findall(r"\$\{commands\[(\d)\]\}", line) for line in bare] == [[], ["0", "1"], [], []]
    assert script[-1].startswith("pytest --full ")


def test_the_map_of_the_folders_is_complete() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = re.search(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block
    named: set[str] = set()
    parents: list[str] = []
    for line in block[1].splitlines():
        found = re.match(r"( *)(\S+)", line)
        assert found
        depth = len(found[1]) // 2
        parents[depth:] = [found[2].rstrip("/")]
        named.add("/".join(parents))
        assert (ROOT / "/".join(parents)).exists(), line
    for folder in (ROOT / "src" / "hotcold").glob("*/__init__.py"):
        assert relative(folder.parent) in named
