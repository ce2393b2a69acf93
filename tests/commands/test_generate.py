"""`hotcold generate`: what goes where, and what is refused."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.golden import golden

from hotcold import LLM
from hotcold.commands.cli import main
from hotcold.demo import model_path
from hotcold.engine.sampler import Sampler

PROMPT = "Once upon a time"


def report(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["generate", *args, "--json"]) == 0
    parsed: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return parsed


def test_the_text_goes_to_stdout_and_one_line_of_figures_to_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "-p", PROMPT, "-n", "30", "--seed", "3"]) == 0
    captured = capsys.readouterr()
    with LLM() as llm:
        assert captured.out == PROMPT + llm.generate(PROMPT, max_tokens=30, seed=3).text + "\n"
    assert re.fullmatch(r"30 tokens, [\d.]+ tokens/s\n", captured.err)
    assert main(["generate", "-p", PROMPT, "-n", "30", "--seed", "3", "--verbose"]) == 0
    with_figures = capsys.readouterr()
    assert with_figures.out == captured.out and with_figures.err.count("\n") == 1
    for figure in (
        "sparsity exact",
        r"prompt 5 tokens [\d.]+ tok/s",
        r"first token [\d.]+ ms",
        r"generation 30 tokens [\d.]+ tok/s",
        r"[\d.]+ GB/s read",
        r"\d+\.\d% of neurons active",
        r"4\.\d+ M parameters per token",
    ):
        assert re.search(figure, with_figures.err), figure


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    result = report(capsys, "-p", PROMPT, "-n", "25", "--seed", "3", "--ignore-eos")
    with LLM() as llm:
        expected = llm.generate(PROMPT, max_tokens=25, seed=3, ignore_eos=True)
    assert (result["text"], result["ids"]) == (expected.text, list(expected.ids))
    assert (result["prompt_tokens"], result["generated_tokens"]) == (5, 25)
    assert (result["sparsity"], result["finish_reason"], result["seed"]) == ("exact", "length", 3)
    for name in ("prompt_tok_s", "tok_s", "ttft_s", "gb_s", "params_per_token"):
        assert result[name] > 0, name
    assert 0.05 < result["active_share"] < 0.2


def test_dense_computes_all_neurons_and_writes_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("-p", PROMPT, "-n", "40", "--temp", "0")
    off, exact = report(capsys, *args, "--sparsity", "off"), report(capsys, *args)
    assert off["text"] == exact["text"]
    assert (off["active_share"], off["sparsity"]) == (1.0, "off")
    assert off["params_per_token"] > 1.4 * exact["params_per_token"]


def test_one_token_has_no_generation_speed(capsys: pytest.CaptureFixture[str]) -> None:
    result = report(capsys, "-p", PROMPT, "-n", "1")
    assert result["generated_tokens"] == 1 and result["tok_s"] is None and result["ttft_s"] > 0


def test_without_a_prompt_a_text_begins(capsys: pytest.CaptureFixture[str]) -> None:
    result = report(capsys, "-n", "5", "--seed", "1")
    assert result["prompt_tokens"] == 1 and not result["text"].startswith(" ")


def test_the_prompt_from_a_file_and_from_standard_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("-n", "8", "--temp", "0")
    expected = report(capsys, "-p", PROMPT, *args)["ids"]
    file = tmp_path / "prompt with spaces.txt"
    file.write_text(PROMPT + "\n")
    assert report(capsys, "-f", str(file), *args)["ids"] == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode() + b"\n"), encoding="utf-8"))
    assert report(capsys, "-p", "-", *args)["ids"] == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode() + b"\n"), encoding="utf-8"))
    assert report(capsys, *args)["ids"] == expected


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_is_not_read_for_a_prompt() -> None:
    from support.terminal import PseudoTerminal

    with PseudoTerminal([sys.executable, "-m", "hotcold", "generate", "-n", "3", "--seed", "1"]) as screen:
        screen.wait_for("3 tokens, ")


def test_of_a_model_without_zeros_nothing_is_said_until_it_is_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It computes all neurons for each token, so a share of neurons says nothing either."""
    model = str(golden("tiny-llama", tmp_path).path)
    assert main(["generate", model, "-p", "", "-n", "3", "--seed", "1"]) == 0
    assert re.fullmatch(r"\d tokens, [\d.]+ tokens/s\n", capsys.readouterr().err)
    assert main(["generate", "-m", model, "-p", "", "-n", "3", "--seed", "1", "-v"]) == 0
    note, figures = capsys.readouterr().err.splitlines()
    assert note == "note: sparsity auto chooses off: activation silu gives no zeros"
    assert "sparsity off" in figures and "GB/s read" in figures and "neurons active" not in figures


def test_the_end_of_the_context_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", PROMPT, "-c", "20", "-n", "100", "--ignore-eos"]) == 0
    note, figures = capsys.readouterr().err.splitlines()
    assert note == "note: stopped: the context of 20 tokens is full (-c sets a larger one)"
    assert figures.startswith("15 tokens, ")


def test_sampling_flags_reach_the_sampler(capsys: pytest.CaptureFixture[str]) -> None:
    greedy = report(capsys, "-p", PROMPT, "-n", "20", "--temp", "0")["ids"]
    for flags in (["--top-k", "1"], ["--top-p", "0"], ["--min-p", "1"], ["--temp", "0.001"]):
        assert report(capsys, "-p", PROMPT, "-n", "20", "--seed", "8", *flags)["ids"] == greedy, flags
    assert report(capsys, "-p", PROMPT, "-n", "20", "--temp", "0", "--repeat-penalty", "3")["ids"] != greedy


def test_a_text_that_fails_on_the_way_is_written_and_then_the_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Sampler.sample

    def sample(self: Sampler, logits: Any, row: int, params: Any, position: int, recent: Any = ()) -> int:
        if position == 9:
            rows = self._backend.read(logits, row, row + 1)
            self._backend.write(logits, np.full_like(rows, np.nan), row)
        return inner(self, logits, row, params, position, recent)

    monkeypatch.setattr(Sampler, "sample", sample)
    assert main(["generate", "-p", PROMPT, "-n", "30", "--temp", "0"]) == 2
    out, err = capsys.readouterr()
    assert out.startswith(PROMPT) and len(out) > len(PROMPT) + 5 and out.endswith("\n")
    assert err == (
        "hotcold: error: the model's logits contain nan, not a finite number: its file is damaged\n"
    )


def test_stop_strings(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("-p", PROMPT, "-n", "40", "--temp", "0")
    whole = report(capsys, *args)
    assert whole["stop"] is None
    first, second = whole["text"][30:34], whole["text"][20:23]
    for flags in (["-r", first, "--stop", second], [f"--reverse-prompt={second}"]):
        found = report(capsys, *args, *flags)
        assert found["text"] == whole["text"][: whole["text"].index(second)]
        assert (found["finish_reason"], found["stop"]) == ("stop", second)
        assert found["ids"] == whole["ids"][: len(found["ids"])]
    assert main(["generate", *args, "-r", second]) == 0
    assert capsys.readouterr().out == PROMPT + found["text"] + "\n"


def test_the_prompt_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("-p", PROMPT, "-n", "10", "--temp", "0")
    assert main(["generate", *args, "--no-display-prompt"]) == 0
    assert capsys.readouterr().out == report(capsys, *args)["text"] + "\n"


def test_biases_and_recent_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("-p", PROMPT, "-n", "40", "--temp", "0")
    greedy = report(capsys, *args)["ids"]
    assert report(capsys, *args, "-l", "7+100", "--logit-bias", f"{greedy[0]}-inf")["ids"] == [7] * 40
    assert report(capsys, *args, "-l", f"{greedy[0]}-99.5")["ids"][0] != greedy[0]
    recent = {
        n: tuple(report(capsys, *args, "--repeat-penalty", "3", "--repeat-last-n", n)["ids"])
        for n in ("0", "8", "64", "-1")
    }
    assert recent["0"] == tuple(greedy) and recent["64"] == recent["-1"]
    assert len(set(recent.values())) == 3


def test_one_type_of_keys_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, name in (
        ([], "f16"),
        (["-ctk", "f16"], "f16"),
        (["-ctk", "q8_0", "-ctv", "q8_0"], "q8_0"),
        (["--cache-type", "f32", "--cache-type-v", "f32"], "f32"),
    ):
        assert report(capsys, "-n", "1", *flags)["cache_type"] == name


def test_top_k_0_is_all(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("-p", PROMPT, "-n", "20", "--seed", "8", "--temp", "2", "--top-p", "1", "--min-p", "0")
    every, most, thousand = (report(capsys, *flags, "--top-k", k)["ids"] for k in ("0", "4096", "1000"))
    assert every == most != thousand


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT cannot be sent to one process")
def test_ctrl_c_ends_with_the_figures_and_exit_code_130() -> None:
    # NumPy's backend is slow enough to be caught in the act.
    command = [sys.executable, "-m", "hotcold", "generate", "-p", PROMPT, "-n", "250", "--ignore-eos"]
    with subprocess.Popen(
        [*command, "--backend", "reference"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        start = process.stdout.read(len(PROMPT) + 10)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert start.decode().startswith(PROMPT) and rest.endswith(b"\n")
    assert b"Traceback" not in errors and errors.count(b"\n") == 1
    assert errors.rstrip().endswith(b", interrupted") and b"tokens/s" in errors


def test_guesses_change_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    """With what the text repeats, without guesses, and with a model that drafts."""
    line = ["-p", "a b c d e f a b c d e f a b c", "-n", "60", "--temp", "0", "--ignore-eos"]
    plain = report(capsys, *line, "--no-draft")
    assert plain["guessed_tokens"] == plain["accepted_tokens"] == 0
    assert plain["tokens_per_step"] == plain["rows_per_step"] == 1
    for more in ([], ["--draft-max", "3"], ["--draft", str(model_path())]):
        found = report(capsys, *line, *more)
        assert found["ids"] == plain["ids"]
        assert found["accepted_tokens"] <= found["guessed_tokens"]
        assert found["tokens_per_step"] >= 1 and found["rows_per_step"] == 1


def test_drafts_that_cannot_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for line, message in (
        (["--draft-max", "16"], "'16' is not a whole number from 0 to 15"),
        (["--draft", str(tmp_path / "none.gguf")], "No such file"),
        (["--draft", "8"], "'8' is not a model file: --draft-max 8 limits the draft tokens"),
    ):
        assert main(["generate", "-p", PROMPT, *line]) == 2
        assert message in capsys.readouterr().err
