"""The least that options allow, and one less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hotcold.commands import cli

TEXT = "Peter and Heidi went up the mountain with the goats. " * 5


def test_a_profile_takes_one_window_at_least(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text(TEXT)
    files = ["-f", str(tmp_path / "text"), "-o", str(tmp_path / "x")]
    assert cli.main(["profile", *files, "-c", "32", "--tokens", "5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["tokens"] == 31, "of 32 tokens, BOS among them, the last predicts nothing"


@pytest.mark.parametrize(
    ("line", "least"),
    [
        ("perplexity -f {text} -c 16 --chunks 1 --compare off --seed", 0),
        ("perplexity -f {text} -c 16 --chunks", 1),
        ("perplexity -f {text} --chunks 1 -c", 2),
        ("bench -p 2 -r 1 -n", 2),
        ("bench -n 2 -r 1 -p", 1),
        ("bench -n 2 -p 2 -r", 1),
        ("generate -p Once --seed", -1),
        ("generate -p Once -n", 1),
        ("generate -p Once -n 1 --top-k", 0),
    ],
)
def test_the_least_that_is_allowed(
    line: str, least: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text(TEXT)
    arguments = line.format(text=tmp_path / "text").split()
    option = arguments.pop()
    assert cli.main([*arguments, f"{option}={least}"]) == 0
    capsys.readouterr()
    assert cli.main([*arguments, f"{option}={least - 1}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and option in error and str(least) in error
