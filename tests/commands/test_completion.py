"""Completion in shells, by the shells themselves, and the man page, by man."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from hotcold.commands import cli
from hotcold.commands.completion import SHELLS, script


def completed(tmp_path: Path, *words: str) -> list[str]:
    """The words by which bash would complete the last one."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    path = tmp_path / "script"
    path.write_text(script("bash", cli.VERBS), encoding="utf-8", newline="\n")
    line = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _hotcold; echo "${COMPREPLY[@]}"'
    done = subprocess.run([bash, "-c", line, path, *words], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_commands_options_and_choices_are_completed(tmp_path: Path) -> None:
    assert completed(tmp_path, "hotcold", "p") == ["perplexity", "profile", "plan", "pull"]
    assert completed(tmp_path, "hotcold", "generate", "--spars") == ["--sparsity"]
    assert completed(tmp_path, "hotcold", "generate", "--sparsity", "e") == ["exact"]
    assert completed(tmp_path, "hotcold", "generate", "-m", "mod") == []  # bash itself: files


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_a_shell_takes_its_script(shell: str, tmp_path: Path) -> None:
    text = script(shell, cli.VERBS)
    assert "sparsity" in text and "fit-predictor" in text
    assert "hot-threads" not in text and "SUPPRESS" not in text  # options that --help hides
    path = tmp_path / "script"
    path.write_text(text, encoding="utf-8")
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n", path], check=True)


def test_the_command_line_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--completion", "bash"]) == 0
    assert capsys.readouterr().out == script("bash", cli.VERBS)
    assert cli.main(["--completion", "fihs"]) == 2
    assert "did you mean fish?" in capsys.readouterr().err
    assert cli.main(["--completion"]) == 2
    assert all(shell in capsys.readouterr().err for shell in SHELLS[:1])


@pytest.fixture(scope="module")
def pages(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("man_page", repository / "tools" / "man_page.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_man_page_says_what_help_says(pages: ModuleType) -> None:
    written = pages.PAGE.read_text(encoding="utf-8")
    assert written == pages.page(), "run: python tools/man_page.py"


def test_man_reads_the_page(pages: ModuleType) -> None:
    if shutil.which("man") is None or shutil.which("groff") is None:
        pytest.skip("there is no man here, or no groff: install Debian's man-db")
    command = ["man", "--warnings", "-l", "-P", "cat", str(pages.PAGE)]
    environment = {**os.environ, "LC_ALL": "C", "MANWIDTH": "80"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stderr == ""
    assert "fit-predictor" in done.stdout and "--sparsity" in done.stdout
