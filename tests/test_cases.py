"""Public bug reports of other engines, rebuilt as small programs in the shared test data: all pass with the
installed commands and two published models."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDER = Path(os.environ.get("HOTCOLD_TEST_DATA") or "/nonexistent") / "cases"
CASES = sorted(path.parent.name for path in FOLDER.glob("*/repro.py"))
#: Cases that CI leaves out: why, and the tests there that hold their kind. `HOTCOLD_ALL_CASES=1` runs them.
BY_HAND = {
    "4-23-cut-by-time-looks-whole": "takes an hour since no time limit cuts answers; server/test_failures.py",
    "4-45-your-model-journey": "kills a run that may have ended by then; training/test_sparsify_runs.py",
}


def _parameter(case: str) -> Any:
    left_out = case in BY_HAND and not os.environ.get("HOTCOLD_ALL_CASES")
    return pytest.param(case, marks=pytest.mark.skip(reason=BY_HAND[case]) if left_out else ())


@pytest.mark.parametrize("case", [*map(_parameter, CASES or ["none"])])
def test_case(case: str, test_data: Path, smollm2: Path, gemma3: Path, tmp_path: Path) -> None:
    """The program prints each of its checks and ends with 1 where one fails."""
    assert CASES, f"no program under {test_data / 'cases'}"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"PATH": path, "SMOL": str(smollm2), "GEMMA": str(gemma3), "CASE_WORK": str(tmp_path)}
    own |= {"HOTCOLD_SRC": str(REPOSITORY), "TORCH_PACKAGES": sysconfig.get_paths()["purelib"]}
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
