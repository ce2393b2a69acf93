"""The summary of a run: one line for each reason to skip, and failures as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FILES = {
    "conftest.py": """
        import pytest
        from support.skips import fold_skips

        @pytest.hookimpl(tryfirst=True)
        def pytest_terminal_summary(terminalreporter):
            fold_skips(terminalreporter.stats.get("skipped", []))
    """,
    "a/test_a.py": """
        import pytest
        pytest.importorskip("no_such_module", reason="no driver")
    """,
    "a/test_b.py": """
        import pytest

        def test_b():
            pytest.skip("no driver")

        @pytest.mark.skipif(True, reason="no driver")
        def test_c():
            pass
    """,
    "b/test_d.py": """
        import pytest

        def test_d():
            pytest.skip("no model")

        def test_e():
            assert 1 == 2
    """,
}


def test_a_reason_to_skip_is_one_line(tmp_path: Path, repository: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("\n".join(line[8:] for line in text.splitlines()))
    command = [sys.executable, "-m", "pytest", "-ra"]
    path = os.pathsep.join([str(repository / "tests"), *sys.path])
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    *_, folded, place, failed, last = done.stdout.splitlines()
    assert folded == "SKIPPED [3] a: no driver"
    assert place == f"SKIPPED [1] b{os.sep}test_d.py:5: no model"
    assert failed == "FAILED b/test_d.py::test_e - assert 1 == 2"
    assert "1 failed, 4 skipped" in last
