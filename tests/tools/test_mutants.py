"""tools/mutants.py: what it changes, what it leaves alone, and that it tells a good test from a poor one."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="mutants.py forks, which Windows cannot")

CLAMP = '''
def clamp(value, low, high):
    """Between both."""
    if low > high:
        raise ValueError(f"{low + 1} is above {high}")
    return min(max(value, low), high)
'''
STRONG = """
import pytest
from hotcold.engine.clamp import clamp

def test_clamp():
    assert [clamp(i, 2, 3) for i in range(6)] == [2, 2, 2, 3, 3, 3] and clamp(0, 1, 1) == 1
    with pytest.raises(ValueError):
        clamp(0, 2, 1)
"""
WEAK = """
from hotcold.engine.clamp import clamp

def test_clamp():
    assert clamp(2, 2, 2) == 2
"""


def changes(source: str, monkeypatch: pytest.MonkeyPatch, repository: Path) -> list[str]:
    """The new lines of each mutant."""
    monkeypatch.syspath_prepend(repository / "tools")
    found = importlib.import_module("mutants").mutants(source, "m")
    lines = [mutant.difference().splitlines() for mutant in found]
    return [" ".join(line.strip(" +") for line in each if line.startswith("    +")) for each in lines]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", ["a <= b"]),
        ("a == b is c", ["a != b is c", "a == b is not c"]),
        ("a and b or c", ["(a and b) and c", "(a or b) or c"]),
        ("x = not a", ["x = a"]),
        ("x = a + b // c", ["x = a - b // c", "x = a + b * c"]),
        ("x = 3", ["x = 4", "x = 2"]),
        ("x = True", ["x = False"]),
        ("x: int = 3", ["x: int = 4", "x: int = 2"]),
        ("x = a if b else c", ["x = a if not b else c"]),
        ("x = a[b:c]", ["x = a[:c]", "x = a[b:]"]),
        ("x = [a for a in b if c]", ["x = [a for a in b]"]),
        ("x = f(a, b=c, help=d)", ["x = f(a, help=d)"]),
        ("x = min(a, b)", ["x = max(a, b)"]),
        ("f(a)", ["pass"]),
        ("a.b = c", ["pass"]),
        ("a += b", ["pass", "a -= b"]),
        ("if a > b:\n    raise E(1 + 2)", ["if not a > b:", "if a >= b:", "pass"]),
        ("for a in b:\n    break", ["continue"]),
        ("def f() -> int | None:\n    return g", ["return None"]),
    ],
)
def test_what_is_changed(
    source: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    assert changes(source, monkeypatch, repository) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring, 1."""',
        "x: Literal[1, 2]",
        "@dataclass(frozen=True)\nclass A(B, total=False):\n    x: int",
        "assert a < 1",
        "__all__ = sorted(key=a)",
        "if TYPE_CHECKING:\n    x = 1",
        "x = 'text'",
        "return_ = None",
    ],
)
def test_what_is_left_alone(source: str, monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
    assert changes(source, monkeypatch, repository) == []


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A package of the name hotcold with one module of one function."""
    for name, text in (("__init__", ""), ("engine/__init__", ""), ("engine/clamp", CLAMP)):
        path = tmp_path / "src" / "hotcold" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def python(toy: Path, *arguments: object, addopts: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(toy / "src"), "PYTEST_ADDOPTS": addopts}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=toy, env=env, stdout=subprocess.PIPE, text=True, check=False)


@pytest.mark.full
@pytest.mark.parametrize(("tests", "killed"), [(STRONG, 6), (WEAK, 3)])
def test_a_good_test_kills_and_a_poor_one_does_not(
    tests: str, killed: int, toy: Path, repository: Path
) -> None:
    (toy / "test_clamp.py").write_text(tests)
    command = (repository / "tools" / "mutants.py", "engine.clamp", "--tests", "test_clamp.py")
    ran = python(toy, *command, addopts="--numprocesses 2")  # of a plugin that it does without
    *lines, last = ran.stdout.splitlines()
    assert json.loads(last) == {
        "mutants": 6,
        "killed": killed,
        "survived": 6 - killed,
        "share": round(1 - killed / 6, 4),
    }
    assert ran.returncode == (killed < 6)
    assert sum(line.startswith("    +") for line in lines) == 6 - killed
    assert ("    +        pass" in lines) == (tests == WEAK)
    assert (toy / "src/hotcold/engine/clamp.py").read_text() == CLAMP


def test_a_mutant_that_never_ends_is_killed(toy: Path, repository: Path) -> None:
    (toy / "test_clamp.py").write_text("def test_clamp():\n    while True:\n        pass\n")
    code = "import mutants\n"
    code += "chosen = mutants.Chosen(['test_clamp.py::test_clamp'])\n"
    code += "print(mutants.fork_pytest(['test_clamp.py'], chosen, 1) is None)"
    ran = python(toy, "-c", f"import sys; sys.path.insert(0, {str(repository / 'tools')!r})\n{code}")
    assert ran.stdout == "False\n"
