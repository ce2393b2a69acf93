"""Benchmarks replace a llama.cpp that dies of a signal, as pip's build does on processors with AMX."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("benchmarks")

DIES = "import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n"
RUNS = "raise SystemExit(0)\n"


def install(folder: Path, code: str) -> None:
    (folder / "llama_cpp").mkdir(parents=True)
    (folder / "llama_cpp" / "__init__.py").write_text(code)


@pytest.mark.parametrize(
    ("codes", "chosen"),
    [
        ([RUNS], ""),
        (["raise ImportError('another fault')\n"], ""),
        ([DIES, RUNS], "with a barrier before ldtilecfg"),
        ([DIES, DIES, RUNS], "without AMX"),
        ([DIES, DIES, DIES], None),
    ],
)
def test_a_build_that_dies_is_replaced(
    codes: list[str], chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama_build = importlib.import_module("lib.llama_build")
    later, lines, options = iter(codes[1:]), list[str](), list[str]()

    def build(given: str, where: Path) -> None:
        options.append(given)
        install(where, next(later))

    install(tmp_path / "installed", codes[0])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))  # of the child
    monkeypatch.setattr(sys, "path", [str(tmp_path / "installed"), *sys.path])
    monkeypatch.setattr(llama_build, "build", build)
    if chosen is None:
        with pytest.raises(SystemExit, match=r"dies of SIGILL.*--no-llama-cpp"):
            llama_build.use_working_llama_cpp(tmp_path, lines.append)
    else:
        assert llama_build.use_working_llama_cpp(tmp_path, lines.append) == chosen
    assert len(options) == len(codes) - 1 and not [*later]
    assert all("SIGILL" in line for line in lines) and len(lines) == len(options)
    if chosen:
        assert chosen in lines[-1] and chosen in sys.path[0]
        header = Path(options[0].partition("-include")[2])
        assert header.read_text() == llama_build.BARRIER
