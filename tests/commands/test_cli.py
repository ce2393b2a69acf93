"""The command line itself: verbs, help, exit codes, and errors in one line. Verbs have tests of their own."""

from __future__ import annotations

import argparse
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from hotcold import __version__
from hotcold.commands import cli
from hotcold.errors import UserError
from hotcold.kernels._native import LinkError

NAMES = [name for name, _ in cli.VERBS]


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[argparse.Namespace], int]], None]:
    """Puts a verb ``probe`` with an integer option ``--rows`` on the command line; its run is the test's."""

    def install(run: Callable[[argparse.Namespace], int]) -> None:
        module = ModuleType("hotcold.commands.probe", "A verb of the tests.")
        module.__dict__["add_arguments"] = lambda parser: parser.add_argument("--rows", type=int, default=3)
        module.__dict__["run"] = run
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(cli, "VERBS", (*cli.VERBS, ("probe", "a verb of the tests")))

    return install


def raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(_: argparse.Namespace) -> int:
        raise error

    return run


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr; nothing may be on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and err.endswith("\n"), err
    return err.rstrip("\n")


def test_a_verb_gets_its_arguments_and_gives_the_exit_code(verb) -> None:
    rows = []
    verb(lambda args: rows.append(args.rows) or 5)
    assert cli.main(["probe", "--rows", "7"]) == 5
    assert rows == [7]


def test_help_of_a_command_is_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("chat", "generate"):
        assert cli.main([verb, "--help"]) == 0
        expected = capsys.readouterr().out
        assert cli.main(["help", verb]) == 0
        assert capsys.readouterr().out == expected
    for arguments in (["help"], ["help", "help"]):
        assert cli.main(arguments) == 0
        assert "commands:" in capsys.readouterr().out
    for arguments, part in ((["help", "chta"], "did you mean chat?"), (["help", "a", "b"], "one command")):
        assert cli.main(arguments) == 2
        assert part in only_line(capsys)


def test_run_is_chat(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (["help", "run"], ["run", "--help"]):
        assert cli.main(line) == 0
        assert capsys.readouterr().out.startswith("usage: hotcold chat [MODEL] [options]")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"hotcold {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_the_overview_names_every_verb(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, summary in cli.VERBS:
        assert any(line.split() == [name, *summary.split()] for line in lines), name


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in NAMES)], ids=" ".join)
def test_help_fits_80_columns(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "usage: hotcold" in out
    assert [line for line in out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["genrate"], ["'genrate'", "did you mean generate?"]),
        (["frobnicate"], ["'frobnicate'", *NAMES]),
        (["-p", "hello"], ["'-p'", "generate"]),
        (["probe", "--row", "1"], ["'--row'", "did you mean --rows?", "hotcold probe --help"]),
        (["probe", "--rows=x"], ["--rows", "'x'"]),
        (["probe", "--rows"], ["--rows", "expected one argument"]),
        (["probe", "stray"], ["argument 'stray'"]),
        (["probe", "--two\nlines"], [r"--two\nlines"]),
    ],
    ids=lambda value: " ".join(value).replace("\n", " "),
)
def test_a_wrong_command_line_is_one_line_and_2(
    arguments: list[str], parts: list[str], verb, capsys: pytest.CaptureFixture[str]
) -> None:
    verb(raising(AssertionError("must not run")))
    assert cli.main(arguments) == 2
    line = only_line(capsys)
    assert line.startswith("hotcold: error: ")
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UserError("rows is 0,\n  at least 1"), "rows is 0, at least 1"),
        (UserError(), "UserError"),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "a.gguf"),
            "a.gguf: No such file or directory",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError("the disk is gone"), "the disk is gone"),
        (MemoryError(), "out of memory"),
        (MemoryError("Unable to allocate 2 GiB"), "out of memory: Unable to allocate 2 GiB"),
    ],
    ids=repr,
)
def test_an_error_is_one_line_and_2(
    error: BaseException, expected: str, verb, capsys: pytest.CaptureFixture[str]
) -> None:
    verb(raising(error))
    assert cli.main(["probe"]) == 2
    assert only_line(capsys) == f"hotcold: error: {expected}"


@pytest.mark.parametrize(
    "error", [TypeError("a\ndefect"), ValueError("a defect"), ZeroDivisionError(), RuntimeError("a defect")]
)
def test_a_defect_is_not_taken_for_the_users_mistake(
    error: Exception, verb, capsys: pytest.CaptureFixture[str]
) -> None:
    verb(raising(error))
    assert cli.main(["probe"]) == 70
    line = only_line(capsys)
    assert line.startswith(f"hotcold: internal error: {type(error).__name__}")
    assert ("a defect" in line) == bool(error.args)
    assert line.endswith("(please report it; `python -X dev -m hotcold` shows where)")


@pytest.mark.parametrize(
    ("cause", "code"), [(ZeroDivisionError("x"), 70), (MemoryError("x"), 2), (UserError("x"), 2), (None, 70)]
)
def test_a_cold_side_that_ended_is_one_line(
    cause: Exception | None, code: int, verb, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: argparse.Namespace) -> int:
        raise LinkError(f"the cold side has ended: {cause!r}") from cause

    verb(run)
    assert cli.main(["probe"]) == code
    assert "the cold side has ended" in only_line(capsys)


def test_the_traceback_of_a_defect_is_shown_on_demand() -> None:
    code = (
        "import sys, types\nfrom hotcold.commands import cli\n"
        "probe = types.ModuleType('hotcold.commands.probe')\n"
        "probe.add_arguments = lambda parser: None\n"
        "probe.run = lambda args: 1 // 0\n"
        "sys.modules[probe.__name__] = probe\ncli.VERBS = (('probe', ''),)\n"
        "sys.exit(cli.main(['probe']))"
    )
    for options, status, beginning in (((), 70, "hotcold: internal"), (("-X", "dev"), 1, "Traceback")):
        done = subprocess.run(
            [sys.executable, *options, "-c", code], capture_output=True, text=True, check=False
        )
        assert done.returncode == status and done.stderr.startswith(beginning)


def test_ctrl_c_is_130_and_says_so(verb, capsys: pytest.CaptureFixture[str]) -> None:
    verb(raising(KeyboardInterrupt()))
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr().err == "hotcold: interrupted\n"


def hotcold(*arguments: str, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hotcold", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)


def test_a_reader_that_has_gone_ends_it_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone, hotcold("--help", stdout=gone) as process:
        _, err = process.communicate()
    assert (process.returncode, err) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, which Linux has")
def test_a_full_disk_is_one_line_and_2() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full, hotcold("--help", stdout=full) as process:
        _, err = process.communicate()
    assert process.returncode == 2
    assert err == "hotcold: error: No space left on device\n"


def test_a_character_set_that_lacks_a_character_shows_its_code(verb) -> None:
    code = (
        "import sys, types\nfrom hotcold.commands import cli\n"
        "probe = types.ModuleType('hotcold.commands.probe')\n"
        "probe.add_arguments = lambda parser: None\n"
        "probe.run = lambda args: print('\\u2019') or 0\n"
        "sys.modules[probe.__name__] = probe\ncli.VERBS = (('probe', ''),)\n"
        "sys.exit(cli.main(['probe']))"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    assert done.stdout.strip() == rb"\u2019"
