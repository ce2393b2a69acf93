"""`hotcold perplexity`: its figures are those of the scoring module; its mistakes are one line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.changed_models import changed
from support.golden import golden
from support.sidecars import with_sidecar

from hotcold.commands.cli import main
from hotcold.demo import model_path
from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.instruction_sets import LOOPS, supported_isas
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks.scoring import Scorer, mean_interval
from hotcold.tasks.windows import text_windows

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


def test_prompt_math_is_compared_with_decode_rows(
    capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTCOLD_ISA", supported_isas()[-1] + LOOPS)
    args = ("-f", str(text), "-c", "32", "--chunks", "1", "--prompt-math", "fast")
    result = report(capsys, *args, "--sparsity", "off", "--compare", "off")
    assert (result["prompt_math"], result["active_share"]) == ("fast", None)
    assert 0 < result["compare"]["kl_mean"] < 0.01
    assert main(["perplexity", "-m", str(with_sidecar(tmp_path, 0)), *args, "--sparsity", "predicted"]) == 2
    assert "--prompt-math fast concerns prompts, predictors concern" in capsys.readouterr().err


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


# --- two files ---


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model in Q4_0 and too sure of itself, so that KL depends on its direction."""
    path = tmp_path_factory.mktemp("small") / "q4_0.gguf"
    assert main(["quantize", str(model_path()), str(path), "Q4_0", "--allow-requantize"]) == 0
    with open_gguf(path) as file:
        norm = quantise(1.5 * file.load("output_norm.weight").dequantise(), "F32")
    return changed(path, path.with_name("small.gguf"), {}, {"output_norm.weight": norm})


def probabilities(path: Path, windows: list[list[int]]) -> np.ndarray:
    """Probabilities ``[tokens, V]`` by the reference backend, in float64."""
    scorer = Scorer(load(path, LoadOptions(backend="reference", context=64, sparsity="off")).session())
    logits = np.concatenate([np.array(rows) for window in windows for rows in scorer.logits(window)])
    powers = np.exp(logits.astype(np.float64))
    return powers / powers.sum(axis=1, keepdims=True)


def test_two_files_against_brute_force(
    capsys: pytest.CaptureFixture[str], text: Path, small: Path, tmp_path: Path
) -> None:
    """KL as llama.cpp defines it: the sum over tokens of p * ln(p / q), with p of the base."""
    text.write_text(TEXT * 12)
    compared = ("-f", str(text), "-c", "64", "-m", str(small), "--compare-file", str(model_path()))
    found = report(capsys, *compared, "--chunks", "11", "--seed", "5")
    compare = found["compare"]
    model = load(small, LoadOptions(context=64))
    windows = text_windows(model.tokenizer, text.read_text(encoding="utf-8"), 64)[:11]
    p, q = (probabilities(path, windows) for path in (Path(model_path()), small))
    kl = (p * np.log(p / q)).sum(axis=1)
    targets = np.array([token for window in windows for token in window[1:]])
    rows = np.arange(len(targets))
    nll, base_nll = -np.log(q[rows, targets]), -np.log(p[rows, targets])
    assert found["tokens"] == len(targets) == 11 * 63
    assert (compare["base"], compare["candidate"]) == (Path(model_path()).name, "small.gguf")
    near = partial(pytest.approx, rel=0.02)
    assert compare["kl_mean"] == near(kl.mean()) != near((q * np.log(q / p)).sum(axis=1).mean())
    for name, quantile in (
        ("median", 50),
        ("p90", 90),
        ("p95", 95),
        ("p99", 99),
        ("p999", 99.9),
        ("max", 100),
    ):
        assert compare[f"kl_{name}"] == pytest.approx(np.percentile(kl, quantile), rel=0.1)
    assert compare["top1_agreement"] == pytest.approx((p.argmax(1) == q.argmax(1)).mean(), abs=0.01)
    assert (found["ppl"], compare["ppl"]) == (near(np.exp(nll.mean())), near(np.exp(base_nll.mean())))
    assert (
        compare["ppl_ratio"] == near(np.exp((nll - base_nll).mean())) == near(found["ppl"] / compare["ppl"])
    )
    for name in ("ppl_ratio", "kl_mean", "top1_agreement"):
        assert compare[f"{name}_low"] < compare[name] < compare[f"{name}_high"]
    low, high = mean_interval(kl, 5) or (0.0, 0.0)
    assert (compare["kl_mean_low"], compare["kl_mean_high"]) == (near(low), near(high))
    swapped = report(capsys, *compared[:4], "--chunks", "11", "--compare-file", str(small))["compare"]
    assert swapped["ppl_ratio"] == pytest.approx(1 / compare["ppl_ratio"], abs=1e-6)


def test_a_file_compared_with_itself(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    """Also from another context: the windows are those of the shorter one."""
    demo = str(model_path())
    assert main(["perplexity", "-f", str(text), "--compare-file", demo, "--chunks", "1"]) == 0
    printed = capsys.readouterr().out
    name = Path(demo).name
    assert f"candidate {name} against base {name} (perplexity " in printed and "ratio 1.00000" in printed
    assert "KL divergence mean 0, median 0, P90 0, P95 0, P99 0, P99.9 0, maximum 0 nats" in printed
    assert "same most likely token 100.00%" in printed


def test_windows_fit_the_shorter_context(
    capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path
) -> None:
    demo = Path(model_path())
    with open_gguf(demo) as file:
        key = f"{file.metadata['general.architecture']}.context_length"
    short = changed(demo, tmp_path / "short.gguf", {key: np.uint32(48)})
    for pair in ((short, demo), (demo, short)):
        args = ("-m", str(pair[0]), "--compare-file", str(pair[1]))
        result = report(capsys, "-f", str(text), *args, "--chunks", "2")
        assert (result["context"], result["tokens"], result["compare"]["kl_max"]) == (48, 2 * 47, 0)


def test_options_of_the_candidate_do_not_reach_the_base(
    capsys: pytest.CaptureFixture[str], text: Path, small: Path, tmp_path: Path
) -> None:
    """The candidate has predictors that name no neuron, or a placement; neither fits the base. Control tokens
    of the text are those of both, and the seed is that of the printed intervals."""
    text.write_text(TEXT * 12 + "<s>" * 7, encoding="utf-8")
    candidate = with_sidecar(tmp_path, bound=1.0)
    common = ("-f", str(text), "-c", "64", "--chunks", "14", "--special", "-t", "1")
    base = report(capsys, *common, "-m", str(small), "--sparsity", "off")
    placement = str(tmp_path / "x.gpuidx")
    budget = ("--vram-budget", "3MiB")
    assert main(["plan", "-m", str(candidate), "-c", "64", *budget, "-o", placement]) == 0
    capsys.readouterr()
    for own in (
        ("--sparsity", "predicted", "--predictor", str(candidate.with_suffix(".predictor.gguf"))),
        ("--sparsity", "exact", "--placement", placement, "--hot-backend", "cpu"),
    ):
        alone = report(capsys, *common, "-m", str(candidate), *own)
        compared = ("perplexity", *common, "-m", str(candidate), *own, "--compare-file", str(small))
        printed = []
        for seed in ("1", "2"):
            assert main([*compared, "--seed", seed, "--json"]) == 0
            *lines, last = capsys.readouterr().out.splitlines()
            found = json.loads(last)
            printed.append([line for line in lines if "ratio" in line])
            assert f"[{found['compare']['ppl_ratio_low']:.5f}, " in printed[-1][0]
        assert printed[0] != printed[1] and found["compare"]["sparsity"] == "off"
        assert found["tokens"] == alone["tokens"] == base["tokens"]
        assert found["ppl"] == pytest.approx(alone["ppl"], rel=1e-6)
        assert found["compare"]["ppl"] == pytest.approx(base["ppl"], rel=1e-6)


def test_files_with_other_tokenizers_are_refused(
    capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path
) -> None:
    with open_gguf(model_path()) as file:
        metadata = file.metadata
    tokens, scores = [*metadata["tokenizer.ggml.tokens"]], metadata["tokenizer.ggml.scores"]
    at = tokens.index("▁the")
    renamed = [*tokens[:at], "▁zhe", *tokens[at + 1 :]]
    changes = {
        "token": ({"tokens": renamed}, f"token {at} is b' the' and b' zhe'"),
        "merges": ({"scores": -scores}, "of the text is "),
        "bos": ({"add_bos_token": False}, "token 0 of the text is "),
    }
    for name, (change, message) in changes.items():
        keys = {f"tokenizer.ggml.{key}": value for key, value in change.items()}
        other = changed(Path(model_path()), tmp_path / f"{name}.gguf", keys)
        assert main(["perplexity", "-f", str(text), "--compare-file", str(other)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and message in error and other.name in error, error
        assert "compare files of one model" in error
    other = golden("tiny-llama", tmp_path).path
    assert main(["perplexity", "-f", str(text), "--compare-file", str(other)]) == 2
    assert "tokens in their vocabularies: compare files of one model" in capsys.readouterr().err


def test_one_comparison_at_a_time(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    assert main(["perplexity", "-f", str(text), "--compare", "off", "--compare-file", "x.gguf"]) == 2
    assert "not allowed with" in capsys.readouterr().err
