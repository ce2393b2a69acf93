"""Commands that read a text: names of control tokens are these tokens with --special, else a note says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.changed_models import changed
from support.golden import golden

from hotcold.commands.cli import main
from hotcold.demo import model_path
from hotcold.formats.gguf import open_gguf
from hotcold.tasks.windows import text_windows
from hotcold.tokenizer.tokenizer import Tokenizer

TEXT = "the theatre</s>another rose</s>" * 40


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return golden("tiny-drelu", tmp_path).path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[dict[str, Any], str]:
    """The report and what was written to stderr."""
    assert main([*map(str, args), "--json"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1]), err


@pytest.mark.parametrize("command", ["perplexity", "profile", "fit-predictor", "imatrix"])
def test_tokens_and_the_note(
    command: str, model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = () if command == "perplexity" else ("-o",)
    token_counts = []
    for number, option in enumerate(((), ("--special",), ("--parse-special",))):
        named = (*output, tmp_path / f"{number}.out") if output else ()
        report, err = run(capsys, command, "-m", model, "-f", text, "-c", "16", *named, *option)
        assert ("has names of control tokens (</s>), which are read as plain text" in err) == (not option)
        assert ("--special reads them" in err) == (not option)
        token_counts.append(report.get("tokens", report.get("judged_tokens")))
    if command != "fit-predictor":
        assert token_counts[0] > token_counts[1] == token_counts[2]


@pytest.mark.parametrize("command", ["generate", "embed"])
def test_texts_that_are_given_to_a_model(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``</s>`` is one token with the option, and several without it."""
    model = changed(model_path(), tmp_path / "model.gguf", {"bamboo.pooling_type": 3})
    limit = ("-n", "1") if command == "generate" else ()
    counts = []
    for option in ((), ("--special",)):
        report, err = run(capsys, command, "-m", model, "-p", "a rose</s>", *limit, *option)
        assert ("the text has names of control tokens (</s>), which are read as plain text" in err) == (
            not option
        )
        counts.append(report["prompt_tokens"])
    with open_gguf(model) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    assert counts[1] == len(tokenizer.encode("a rose")) + 1 < counts[0]


def test_no_note_without_names(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text.write_text(TEXT.replace("</s>", "</p>"))
    _, err = run(capsys, "perplexity", "-m", model, "-f", text, "-c", "16")
    assert "control tokens" not in err


def test_windows_have_the_control_tokens(model: Path) -> None:
    with open_gguf(model) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    plain, special = (text_windows(tokenizer, TEXT, 8, special=each) for each in (False, True))
    assert not any(tokenizer.eos_id in window for window in plain)
    whole = tokenizer.encode(TEXT, add_bos=False, parse_special=True)
    assert [id for window in special for id in window[1:]] == whole[: 7 * len(special)]
