"""The C++ core under the sanitizers of GCC or Clang, which end a program at its first mistake."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.test_native import X86, build, pytestmark  # noqa: F401  (the mark is for this file, too)

LIMIT_S = 900
#: The instruction set that takes the least time to compile and to run.
ISA = "scalar" if X86 else "neon"
PROGRAMS = [
    ("hotcold_op_table", [ISA]),
    ("hotcold_pool", ["3"]),
    ("hotcold_pool_traffic", []),
    ("hotcold_link", []),
    ("hotcold_files", []),
    ("hotcold_expert_cache", []),
]
#: Programs whose threads share memory.
RACES = [("hotcold_pool", ["3"]), ("hotcold_link", []), ("hotcold_expert_cache", [])]


def built(folder: Path, sanitizers: str, *targets: str) -> Path:
    """A folder with native tests under sanitizers; skips where programs with these do not run."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler called c++, or CXX")
    (folder / "empty.cpp").write_text("int main() {}\n")
    program = str(folder / "empty")
    for step in (
        [compiler, f"-fsanitize={sanitizers}", "-pthread", str(folder / "empty.cpp"), "-o", program],
        [program],
    ):
        if subprocess.run(step, capture_output=True, check=False).returncode != 0:
            pytest.skip(f"the sanitizers {sanitizers} do not work here")
    fast = "-DCMAKE_CXX_FLAGS_RELEASE=-O0"  # to compile; assertions are on
    build(folder / "build", f"-DHC_SANITIZE={sanitizers}", f"-DHOTCOLD_ISAS={ISA}", fast, targets=targets)
    return folder / "build"


def check(program: Path, arguments: list[str]) -> None:
    done = subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-10_000:]


# One test each: parts of a test may run in several processes, and each would build for minutes.
def test_addresses_and_behaviour_are_defined(tmp_path: Path) -> None:
    folder = built(tmp_path, "address,undefined", *(name for name, _ in PROGRAMS))
    for name, arguments in PROGRAMS:
        check(folder / name, arguments)


def test_there_is_no_data_race(tmp_path: Path) -> None:
    folder = built(tmp_path, "thread", *(name for name, _ in RACES))
    for name, arguments in RACES:
        check(folder / name, arguments)
