"""``hotcold plan``: where the bytes go, for the built-in model and for shapes, and what it refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.commands import cli
from hotcold.demo import model_path
from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.placement.hardware import find_hardware

GIB = 1 << 30


def plan(capsys: pytest.CaptureFixture[str], line: str) -> tuple[list[str], dict[str, Any]]:
    assert cli.main(["plan", *line.split(), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    *lines, last = out.splitlines()
    assert max(map(len, lines)) <= 80
    return lines, json.loads(last)


HARDWARE = ("rtx4090-i9", "rtx2080ti-i7")
SHAPES = ("llama2-70b", "falcon-40b", "opt-30b", "mixtral-47b", "jais2-70b")


@pytest.mark.parametrize(
    ("name", "hardware"),
    [
        pytest.param(name, hardware, marks=[] if (i + j) % 2 else pytest.mark.full)
        for i, name in enumerate(SHAPES)
        for j, hardware in enumerate(HARDWARE)
    ],
)
def test_shapes(name: str, hardware: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines, report = plan(capsys, f"--shape {name} --hardware {hardware} --vram-budget 10GiB")
    assert report["budget_bytes"] == 10 * GIB >= report["gpu_bytes"] > 9.9 * GIB
    assert report["gpu_bytes"] == sum(part["gpu_bytes"] for part in report["parts"])
    assert report["cpu_bytes"] == sum(part["cpu_bytes"] for part in report["parts"])
    assert 0 < report["hot_share"] < report["hot_activation_share"] < 1
    assert report["predicted_tok_s"] > max(report["cpu_tok_s"], report["layer_split_tok_s"])
    assert report["predicted_tok_s"] < report["all_gpu_tok_s"] and report["all_gpu_bytes"] > 10 * GIB
    assert "nothing was measured" in report["hardware_source"] and "power law" in report["profile"]
    neurons = [part for part in report["parts"] if part["kind"] == "neurons"]
    bars = lines[lines.index("hot neurons by layer") + 1 :]
    run = [part["layer"] for part in report["parts"] if part["kind"] == "kv" and part["gpu_bytes"]]
    assert run == list(range(run[0], run[-1] + 1))
    assert max(map(len, lines)) <= 80 and len(set(bars)) == len(bars)
    assert all(one.split(maxsplit=1)[1] != other.split(maxsplit=1)[1] for one, other in pairwise(bars))
    for i, (bar, part) in enumerate(zip(unfolded(bars), neurons, strict=True)):
        assert bar.count("#") == round(56 * part["hot_share"])
        assert bar.endswith(f"{part['hot_share']:.1%}" if i in run else "CPU")


def unfolded(bars: list[str]) -> list[str]:
    """The line of each layer, from lines of runs of layers."""
    found: list[str] = []
    for bar in bars:
        first, _, last = bar.split()[0].partition("-")
        assert int(first) == len(found)
        found += [bar] * (int(last or first) - int(first) + 1)
    return found


def test_equal_layers_take_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A dense model's layers are on one device each, as a whole."""
    lines, report = plan(capsys, "--shape llama2-13b --vram-budget 23GiB --type q4_0")
    neurons = [part for part in report["parts"] if part["kind"] == "neurons"]
    bars = lines[lines.index("hot neurons by layer") + 1 :]
    assert bars == [f"{'0-39':>9} {'#' * 56}{'100.0%':>8}"] and len(neurons) == 40


def test_two_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """With a column, a budget and a run of layers each; GPUs alike need one --hardware."""
    lines, report = plan(
        capsys, "--shape opt-30b --hardware rtx4090-i9 --hardware rtx3060 --vram-budget 6GiB,3GiB"
    )
    assert [gpu["hardware"] for gpu in report["gpus"]] == ["rtx4090-i9", "rtx3060"]
    assert [gpu["budget_bytes"] for gpu in report["gpus"]] == [6 * GIB, 3 * GIB]
    for i, gpu in enumerate(report["gpus"]):
        parts = [part for part in report["parts"] if part["gpu"] == i]
        assert sum(part["gpu_bytes"] for part in parts) == gpu["gpu_bytes"] <= gpu["budget_bytes"]
        assert gpu["layers"] == [part["layer"] for part in parts if part["kind"] == "kv"] != []
        bars = unfolded(lines[lines.index("hot neurons by layer") + 1 :])
        assert [layer for layer, bar in enumerate(bars) if bar.endswith(f"GPU {i}")] == gpu["layers"]
    assert "budget      6GiB,3GiB" in lines
    assert " " * 12 + "       GPU 0       GPU 1         CPU" in lines
    one = plan(capsys, "--shape opt-30b --hardware rtx4090-i9 --vram-budget 6GiB")[1]
    alike = plan(capsys, "--shape opt-30b --hardware rtx4090-i9 --vram-budget 6GiB,6GiB")[1]
    speeds = [each["predicted_tok_s"] for each in (one, report, alike)]
    assert speeds == sorted(speeds) and len(alike["gpus"]) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--hardware rtx3060 --hardware rtx4090-i9 --vram-budget 1,1,1",
            "--vram-budget has 3 sizes, and --hardware 2 machines",
        ),
        ("--vram-budget 1,1,1,1,1", "5 GPUs"),
        ("--vram-budget 1,99", "--vram-budget is 99GiB"),
        ("--vram-budget 1,x", "'x' is not a size"),
        ("--vram-budget 1,1 --objective paper", "objective 'paper' is for one GPU, not 2"),
    ],
)
def test_what_several_gpus_do_not_go_with(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(["plan", "--shape", "llama2-13b", *line.split()])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("rows", [(0, 3, 6), pytest.param((1, 2, 4, 5), marks=pytest.mark.full)])
def test_published_plans_stay_what_they_are(
    rows: tuple[int, ...], repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plans of benchmarks/gpu/paper_plans.py, which docs/results.md quotes, are as in the first
    version."""
    plans = json.loads((repository / "tests/data/paper_plans.json").read_bytes())
    assert len(plans) == 7
    for row in (plans[i] for i in rows):
        for objective, expected in (("time", row["ours"]), ("paper", row["paper"])):
            name, type = expected["model"].split()
            line = f"--shape {name} --type {type} --hardware {expected['hardware']} --ctx 512"
            _, found = plan(capsys, f"{line} --objective {objective}")
            for key in ("model", "hardware"):
                assert found[key] == expected.pop(key)
            assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-9)


def test_the_paper_has_more_activations_on_the_gpu_and_time_is_less(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = "--shape falcon-40b --hardware rtx2080ti-i7 --vram-budget "
    for budget in (6, 10):
        _, time = plan(capsys, f"{line}{budget}")
        _, paper = plan(capsys, f"{line}{budget} --objective paper")
        assert time["predicted_tok_s"] >= paper["predicted_tok_s"] * (1 - 1e-9)
        assert paper["gpu_bytes"] <= budget * GIB


def test_the_built_in_model(capsys: pytest.CaptureFixture[str]) -> None:
    _, half = plan(capsys, "--vram-budget 6MiB --ctx 128")
    _, more = plan(capsys, f"-m {model_path()} --vram-budget 12MiB --ctx 128")
    with open_gguf(model_path()) as file:
        assert half["fingerprint"] == more["fingerprint"] == file.fingerprint()
    assert half["gpu_bytes"] <= 6 << 20 and half["context"] == 128
    assert more["hot_share"] == 1 and more["gpu_bytes"] == more["all_gpu_bytes"]
    assert more["predicted_tok_s"] == more["all_gpu_tok_s"] > half["predicted_tok_s"]


def test_a_placement_is_written_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.gpuidx"
    line = "--shape mistral-7b --type q8_0 --vram-budget 4.5"
    _, made = plan(capsys, f"{line} -o {path}")
    _, judged = plan(capsys, f"{line} --placement {path}")
    assert judged.pop("objective") == "given" and made.pop("objective") == "time" and judged == made
    assert cli.main(["plan", *line.split()[:4], "--vram-budget", "4", "--placement", str(path)]) == 2
    assert "x.gpuidx needs 4608MiB: --vram-budget is 4GiB" in capsys.readouterr().err
    assert cli.main(["plan", *line.split(), "-o", str(path)]) == 2
    assert "the file exists: give another name, or --force to replace it" in capsys.readouterr().err


def test_a_profile_moves_the_neurons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where one layer's neurons are always active and the others' never, they are what the GPU gets."""
    with open_gguf(model_path()) as file:
        fingerprint, architecture = file.fingerprint(), file.metadata["general.architecture"]
        keys = (f"{architecture}.{key}" for key in ("block_count", "feed_forward_length"))
        count, n = (file.metadata[key] for key in keys)
    firing = {f"blk.{i}.profile": quantise(np.full(n, float(i == 3)), "F32") for i in range(count)}
    facts = {"general.type": "profile", "hotcold.profile.source": "a text"}
    for owner in (fingerprint, "0123456789abcdef"):
        write_gguf(tmp_path / owner, facts | {"hotcold.profile.model_fingerprint": owner}, firing)
    _, report = plan(capsys, f"--vram-budget 6MiB --ctx 32 --profile {tmp_path / fingerprint}")
    assert report["profile"] == f"{fingerprint}: a text" and 0 < report["hot_share"] < 1
    shares = [part["hot_share"] for part in report["parts"] if part["kind"] == "neurons"]
    assert shares[3] == max(shares) > 0
    assert cli.main(["plan", "--profile", str(tmp_path / "0123456789abcdef")]) == 2
    assert "belongs to the model '0123456789abcdef'" in capsys.readouterr().err
    assert cli.main(["plan", "--shape", "opt-30b", "--profile", str(tmp_path / fingerprint)]) == 2
    assert f"belongs to the model '{fingerprint}'" in capsys.readouterr().err


def test_a_profile_beside_the_model_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, model = model_path().with_suffix(".profile.gguf"), tmp_path / "m.gguf"
    shutil.copy(model_path(), model)
    lines, report = plan(capsys, "--hardware rtx4090-i9 --ctx 32")
    assert report["profile"].startswith(f"{own.name}: heidi-and-tinystories.txt, ")
    assert lines[1].split() == ["profile", *report["profile"].split()]
    assert "power law" in plan(capsys, f"--hardware rtx4090-i9 {model} --ctx 32")[1]["profile"]
    shutil.copy(own, tmp_path / "m.profile.gguf")
    assert plan(capsys, f"--hardware rtx4090-i9 -m {model} --ctx 32")[1]["profile"] == report[
        "profile"
    ].replace(own.name, "m.profile.gguf")
    (tmp_path / "m.profile.gguf").write_bytes(b"")
    assert cli.main(["plan", "--hardware", "rtx4090-i9", "-m", str(model)]) == 2
    assert "m.profile.gguf: the file is empty" in capsys.readouterr().err


def test_the_default_budget_leaves_some_of_the_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 GiB, or an eighth of a small one."""
    for name in ("rtx4090-i9", "rtx2080ti-i7"):
        _, report = plan(capsys, f"--shape llama2-13b --hardware {name}")
        assert report["budget_bytes"] == find_hardware(name).vram_bytes - GIB
    small = asdict(replace(find_hardware("rtx4060"), vram_bytes=4 * GIB))
    del small["machine"]
    (tmp_path / "small.json").write_text(json.dumps(small))
    _, report = plan(capsys, f"--shape llama2-13b --hardware {tmp_path / 'small.json'}")
    assert report["budget_bytes"] == 7 * GIB // 2


def test_the_default_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    """The README and the help name it; another one would change every plan."""
    _, report = plan(capsys, "--shape opt-30b")
    assert report["hardware"] == "rtx4090-i9"
    assert report == plan(capsys, "--shape opt-30b --hardware rtx4090-i9")[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--vram-budget 0", "--vram-budget is 0B: more than 0 and at most"),
        ("--vram-budget=-1", "'-1' is not a size such as 8GiB"),
        ("--vram-budget nan", "'nan' is not a size"), ("--vram-budget 8GB", "'8GB' is not a size"),
        ("--vram-budget 25", "--vram-budget is 25GiB: more than 0"), ("--hardware x", "presets: rtx4090-i9"),
        ("--shape gpt-5", "invalid choice: 'gpt-5'"), ("--shape opt-30b -m x", "not allowed with argument"),
        ("x.gguf --shape opt-30b", "not allowed with argument MODEL"),
        ("--shape opt-30b --type q9", "block type 'Q9' is not supported"),
        ("-c 257", "this model allows 2 to 256"), ("--vram-budget 1GiB -c 257", "model has 256 pos"),
        ("--placement /dev/null", "is a device"), ("--objective speed", "invalid choice: 'speed'"),
    ],
)  # fmt: skip
def test_mistakes(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("hotcold: error: ") and message in err
