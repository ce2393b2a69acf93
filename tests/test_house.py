"""The house rules: sizes, names, and what a README promises."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def files(*tops: str, pattern: str = "*") -> list[Path]:
    found = [path for top in tops for path in (ROOT / top).rglob(pattern)]
    return sorted(path for path in found if path.is_file())


PYTHON = files("src", "tests", "benchmarks", pattern="*.py")
NATIVE = files("csrc", "tests/native", pattern="*.[ch]*")
PRODUCT = files("src", pattern="*.py") + files("csrc", pattern="*.[ch]*")

MOST_LINES_OF_A_FILE = 499
MOST_LINES_OF_A_FUNCTION = 59
MOST_PARAMETERS = 6
MOST_LINES_OF_THE_PRODUCT = 11_999

#: Words that say nothing, and PowerInfer's second and third names for one thing.
BANNED = {"manager", "handler", "helper", "helpers", "utils", "util", "worker", "workers", "bucket", "ctx"}
#: names of factors in PowerInfer's files, allowed only where files are read and written
FACTORS = {"fc1", "fc2"}
READS_FACTORS = {"src/hotcold/sparse/predictor.py"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, waist: bool) -> int:
    """How many a caller may give; not self, and not the keyword-only options of the kernel interface."""
    given = function.args
    names = [parameter.arg for parameter in [*given.posonlyargs, *given.args]]
    if names and names[0] in ("self", "cls"):
        names = names[1:]
    return len(names) + (0 if waist else len(given.kwonlyargs))


def words(name: str) -> set[str]:
    """The lower-case words of a snake_case or CamelCase name."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}


def defined_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that the source itself chooses, with their lines; those that it only uses are not its own."""
    for node in ast.walk(tree):
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


@pytest.mark.parametrize("path", [*PYTHON, *NATIVE], ids=relative)
def test_a_file_fits_in_the_head(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES_OF_A_FILE


@pytest.mark.parametrize("path", PYTHON, ids=relative)
def test_a_function_fits_on_a_screen(path: Path) -> None:
    waist = path.parent == ROOT / "src" / "hotcold" / "kernels"
    for function in functions(path):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        assert lines <= MOST_LINES_OF_A_FUNCTION, f"{function.name} has {lines} lines"
        count = parameters(function, waist)
        assert count <= MOST_PARAMETERS, f"{function.name} has {count} parameters"


def test_the_product_stays_small() -> None:
    lines = [line for path in PRODUCT for line in path.read_text(encoding="utf-8").splitlines()]
    total = sum(1 for line in lines if line.strip())  # a limit on blank lines would only make code dense
    assert total <= MOST_LINES_OF_THE_PRODUCT


@pytest.mark.parametrize("path", PYTHON, ids=relative)
def test_names_say_something(path: Path) -> None:
    file = relative(path)
    assert not words(path.stem) & BANNED
    for name, line in defined_names(ast.parse(path.read_text(encoding="utf-8"))):
        assert not banned(name, file), f"line {line}: {name}"


@pytest.mark.parametrize("path", NATIVE, ids=relative)
def test_native_names_say_something(path: Path) -> None:
    source = re.sub(r"//.*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", "", path.read_text(encoding="utf-8"))
    assert [name for name in set(re.findall(r"[A-Za-z_]\w*", source)) if banned(name, relative(path))] == []


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


def test_ci_runs_the_commands_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    for line in readme_commands():
        for command in line.split(" && "):
            assert command in script, f"{command!r} is no line of .ci/run"
    assert script[-1] == "pytest"


def test_the_tree_of_the_readme_is_the_tree() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
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
