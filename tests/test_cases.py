"""Public bug reports of other engines, rebuilt as small programs in the shared test data: all pass with the
installed commands and two published models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("HOTCOLD_TEST_DATA") or "/nonexistent") / "cases"
CASES = sorted(path.parent.name for path in FOLDER.glob("*/repro.py"))


@pytest.mark.parametrize("case", CASES or ["none"])
def test_case(case: str, test_data: Path, smollm2: Path, gemma3: Path, tmp_path: Path) -> None:
    """The program prints each of its checks and ends with 1 where one fails."""
    assert CASES, f"no program under {test_data / 'cases'}"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"PATH": path, "SMOL": str(smollm2), "GEMMA": str(gemma3), "CASE_WORK": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "repro.py"],
        cwd=test_data / "cases" / case,
        env=os.environ | own | {"PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}"
    assert "PASS " in done.stdout, done.stdout
