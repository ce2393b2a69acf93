"""`hotcold perplexity`: its figures are those of the scoring module; its mistakes are one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.golden import golden

from hotcold.commands.cli import main

TEXT = (
    "The goats had come down from the mountain, and Peter called them with his pipe. The grandfather sat "
    "before the hut and carved a spoon, and Heidi told him everything that she had seen: the great bird, the "
    "fire on the snow, and the flowers that stood so thick that one could not see the grass between them. "
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 3)
    return path


def report(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["perplexity", *args, "--json"]) == 0
    parsed: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return parsed


def test_a_plan_carried_out(capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path) -> None:
    """With what plan wrote, for the same context, and with a budget."""
    args = ("-f", str(text), "-c", "64", "--chunks", "1", "-t", "1")
    expected = report(capsys, *args)
    budget, placement = ("--vram-budget", "3MiB"), str(tmp_path / "x.gpuidx")
    assert main(["plan", "-c", "64", *budget, "-o", placement]) == 0
    capsys.readouterr()
    for hot in (("--placement", placement), budget):
        two = ("--hot-backend", "cpu", "--hot-threads", "2")
        result = report(capsys, *args, *hot, *two, "--compare", "off")
        assert (result["threads"], result["hot_threads"]) == (1, 2)
        assert result["ppl"] == pytest.approx(expected["ppl"], rel=2e-3)
        assert result["compare"]["kl_mean"] == 0  # exact and off are the same bits in halves, too
        assert result["active_share"] == pytest.approx(expected["active_share"], rel=1e-2)


def test_windows_and_tokens(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    result = report(capsys, "-f", str(text), "-c", "64", "--chunks", "2")
    assert (result["chunks"], result["tokens"], result["context"]) == (2, 2 * 63, 64)
    assert 2 < result["ppl"] < 300 and result["ppl_se"] > 0
    assert len(result["active_share_by_layer"]) == 6
    assert result["sparsity"] == "exact" and "compare" not in result


def test_exact_compared_with_off_is_the_same(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    result = report(capsys, "-f", str(text), "--chunks", "1", "--compare", "off")
    compare = result["compare"]
    assert compare["ppl"] == result["ppl"]
    assert (compare["kl_mean"], compare["kl_p99"], compare["top1_agreement"]) == (0, 0, 1)
    assert compare["ppl_ratio"] == 1
    assert compare["ppl_ratio_low"] is compare["ppl_ratio_high"] is None  # from few tokens


def test_a_smaller_kv_cache_is_named_and_costs_little(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    f16, f32, q8_0 = (
        report(capsys, "-f", str(text), "--cache-type", type) for type in ("f16", "f32", "q8_0")
    )
    assert (f16["cache_type"], q8_0["cache_type"]) == ("f16", "q8_0")
    # Rounding moves int8 codes of activations, whose size the instruction set's sums decide: only that both
    # are small holds everywhere. What exactly the cache holds is tested in tests/tasks/test_scoring.py.
    assert max(abs(f16["nll"] - f32["nll"]), abs(q8_0["nll"] - f32["nll"])) < 0.02


def test_a_kv_cache_that_does_not_fit_the_heads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = golden("tiny-llama", tmp_path).path
    assert main(["generate", "-m", str(path), "-p", "a", "--cache-type", "q8_0"]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and "its blocks of 32 do not fit heads of 16: use f16" in error[0]


def test_lines_for_people(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    assert main(["perplexity", "-f", str(text), "-c", "64", "--compare", "off"]) == 0
    assert "ratio 1.00000 (no 95 % interval: it takes 640 tokens or more)" in capsys.readouterr().out
    text.write_text(TEXT * 12, encoding="utf-8")
    assert main(["perplexity", "-f", str(text), "-c", "64", "--compare", "off"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("perplexity ") and captured.err == ""
    assert "95 %, paired bootstrap" in captured.out and "KL divergence mean 0" in captured.out
