"""The comparison on a GPU machine: models have their stated sizes, baselines are fair, and the run
continues."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.file_sizes import file_sizes
from support.vulkan.devices import device_index

from hotcold.formats.gguf import open_gguf
from hotcold.model.config import Config
from hotcold.placement.profiles import read_profile
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks.scoring import Scorer, score

pytestmark = pytest.mark.usefixtures("benchmarks")


@pytest.fixture(scope="module")
def slices() -> ModuleType:
    return importlib.import_module("gpu.slices")


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    return importlib.import_module("gpu.compare")


@pytest.fixture(scope="module")
def report() -> ModuleType:
    return importlib.import_module("gpu.report")


def model(slices: ModuleType, gated: bool = True) -> Any:
    return slices.Model("small", 8, 512, 1408, 8, 4, 4800, gated)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("type", ["Q4_0", "F16"])
def test_neurons_of_a_slice_are_active_as_its_profile_says(
    slices: ModuleType, tmp_path: Path, type: str, gated: bool
) -> None:
    """Counted by the engine on random tokens: the mean, and the hotter and the colder half."""
    path = tmp_path / "slice.gguf"
    slices.write(path, slices.Slice(model(slices, gated), 2, type), 256)
    with open_gguf(path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        sizes = file_sizes(file, config, 256, "f16")
    firing = read_profile(path.with_suffix(".profile.gguf"), sizes).firing
    scorer = Scorer(load(path, LoadOptions(sparsity="exact")).session())
    score(scorer, np.random.default_rng(0).integers(259, config.vocab, 200).tolist())
    expected = [float(np.mean(each)) for each in firing]
    assert scorer.figures.active_share_by_layer == pytest.approx(expected, rel=0.1)
    assert config.gated == gated


def test_a_slice_is_its_part_of_the_model(slices: ModuleType, tmp_path: Path) -> None:
    """Half of the layers has half of the bytes, so that times may be multiplied by two."""
    whole, half = (slices.Slice(model(slices), layers, "Q4_0") for layers in (8, 4))
    assert (whole.factor, half.factor) == (1, 2)
    assert half.nbytes * half.factor == whole.nbytes
    path = tmp_path / "slice.gguf"
    slices.write(path, half, 256)
    with open_gguf(path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        sizes = file_sizes(file, config, 32, "f16")
        norms = 4 * 512 * (2 * 4 + 1)
        read = int((sizes.attention + sizes.neurons * sizes.neuron_bytes).sum()) + sizes.head
    assert read - norms == half.nbytes


#: Takes a millisecond for each layer that is on the GPU, and opens the model.
LLAMA_BENCH = f"""#!{sys.executable}
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert open(options["-m"], "rb").read(4) == b"GGUF"
speed = 1000 / int(options["-ngl"])
print(json.dumps([dict(n_gen=n, samples_ts=[1, speed, 10 * speed]) for n in (0, 32)]))
"""


@pytest.fixture(scope="module")
def rows(slices: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Measures a slice on two CPU backends and on a fake llama.cpp with given answers, by contestant."""
    folder = tmp_path_factory.mktemp("slices")
    llama = folder / "llama-bench"
    llama.write_text(LLAMA_BENCH)
    llama.chmod(0o755)
    measured = importlib.import_module("gpu.cases")
    contestants = importlib.import_module("gpu.placed").CONTESTANTS
    found: list[dict[str, Any]] = []
    task = measured.Task(
        model=asdict(model(slices)),
        type="Q4_0",
        taken=2,
        shares=[0.5],
        contestants=[*contestants],
        gpu="cpu",
        folder=str(folder),
        pretend=True,
        threads=1,
        rounds=2,
        tokens=6,
        llama_bench=str(llama),
    )
    measured.run(task, lambda row: found.append(json.loads(json.dumps(row))))
    assert [row for row in found if "failed" in row] == []
    kept = {row["contestant"]: row for row in found if row["part"] == "slices" and "provisional" not in row}
    assert kept.keys() == {*contestants, "layer split", "llama.cpp", "llama.cpp GPU"}
    return kept


def test_contestants_compute_the_same(rows: dict[str, dict[str, Any]]) -> None:
    errors = [row["logits_error_share"] for row in rows.values() if "logits_error_share" in row]
    assert len(errors) == len(rows) - 3 and max(errors) < 1e-5
    assert rows["solver"]["gpu_layers"] > 0 and rows["solver"]["split_layers"] > 0


def test_the_gpu_has_the_share_of_firing_neurons_that_was_planned(rows: dict[str, dict[str, Any]]) -> None:
    for name in ("random", "frequency", "solver"):
        row = rows[name]
        assert row["gpu_firing_share"] == pytest.approx(row["gpu_firing_share_expected"], abs=0.05)
    solver, random = rows["solver"], rows["random"]
    assert solver["gpu_neuron_share"] == pytest.approx(random["gpu_neuron_share"])
    assert random["gpu_firing_share"] == pytest.approx(random["gpu_neuron_share"], abs=0.05)
    assert solver["gpu_firing_share"] > 1.5 * random["gpu_firing_share"]


def test_the_layer_split_is_between_cpu_and_gpu(rows: dict[str, dict[str, Any]]) -> None:
    """With half of the model's 8 layers: predictors, which it has not, make room for the head."""
    split, none, every = (rows[name] for name in ("layer split", "CPU dense", "GPU dense"))
    assert split["split_share"] == 0.5
    assert split["ms"] == pytest.approx((none["ms"] + every["ms"]) / 2)
    for name, row in rows.items():
        python_ms = row.get("python_ms", 0)
        assert row["full_ms"] == pytest.approx(python_ms + 4 * (row["ms"] - python_ms)), name


def test_llama_cpp_gets_as_many_layers(rows: dict[str, dict[str, Any]]) -> None:
    """And the head, which is one more to it: one of the slice's two layers, and both."""
    assert (rows["llama.cpp"]["ms"], rows["llama.cpp GPU"]["ms"]) == (2, 3)


def test_a_device_is_measured(slices: ModuleType, tmp_path: Path) -> None:
    """On a software driver: the very code that a card will run."""
    measured = importlib.import_module("gpu.cases")
    found: list[dict[str, Any]] = []
    task = measured.Task(
        model=asdict(slices.Model("small", 4, 512, 704, 8, 4, 2400)),
        type="Q4_0",
        taken=1,
        shares=[0.6],
        contestants=["CPU dense", "GPU dense", "CPU predicted", "solver", "CPU exact"],
        gpu=str(device_index("lavapipe")),
        folder=str(tmp_path),
        pretend=True,
        threads=1,
        rounds=1,
        tokens=2,
        prompts=(4, 8),
    )
    measured.run(task, found.append)
    assert [row for row in found if "failed" in row] == []
    rows = {row["contestant"]: row for row in found if row["part"] == "slices"}
    assert max(rows[name]["logits_error_share"] for name in ("GPU dense", "solver")) < 1e-3
    assert rows["solver"]["split_layers"] == 1 and 0 < rows["solver"]["gpu_firing_share"] < 1
    planned, allocated = (rows["solver"][name] for name in ("planned_bytes", "allocated_bytes"))
    assert abs(allocated - planned) <= max(0.02 * planned, 256 << 10)


def test_requests_from_end_to_end() -> None:
    """Eight tokens of 10 ms after a prompt of 20 ms: 8 in 100 ms."""
    measured = importlib.import_module("gpu.cases")
    assert measured.end_to_end({8: 20.0}, 10.0)["8+8"] == pytest.approx(80)


def test_goals_are_judged_by_paired_rounds(report: ModuleType) -> None:
    def row(contestant: str, *round_ms: float) -> dict[str, Any]:
        key = {"part": "slices", "model": "llama2-70b", "type": "F16", "share": 0.25}
        figures = {"factor": 20, "python_ms": 0.1, "round_ms": round_ms, "full_tok_s": 1.0}
        return {**key, "contestant": contestant, **figures}

    rows = [row("solver", 2.1, 1.1, 4.1), row("layer split", 12.1, 6.1, 8.1)]
    rows += [{"part": "op table", "case": "all", "failed": 1, "checked": 9}]
    goals = {goal.title: goal for goal in report.goals({"rows": rows, "settings": {}})}
    ratio = goals["llama2-70b F16 25 %: over layer split"]
    assert ratio.met is True and ratio.measured == f"{120.1 / 20.1:.2f} x"
    assert goals["op table"].met is False
    assert goals["llama2-7b Q4_0, all GPU: over llama.cpp"].met is None
    small = report.goals({"rows": rows, "settings": {"small": True}})
    assert [goal.title for goal in small if "over" in goal.title] == []


@pytest.fixture
def comparison(compare: ModuleType, tmp_path: Path) -> Any:
    return compare.Comparison(compare.parse(["--gpu", "cpu", "--json", str(tmp_path / "out.json")]), tmp_path)


def test_a_part_that_hangs_or_dies_is_ended_and_told(comparison: Any) -> None:
    hangs = [sys.executable, "-c", "import time; print('so far', flush=True); time.sleep(600)"]
    printed, problem = comparison._watch(hangs, 2.0, lambda: None)
    assert printed == "so far\n" and problem.startswith("ended after 2 s; its last words: so far")
    dies = [sys.executable, "-c", "import os; os.abort()"]
    assert comparison._watch(dies, 60.0, lambda: None)[1].startswith("exit code -")


def test_what_fails_is_a_row_and_the_rest_goes_on(comparison: Any, tmp_path: Path) -> None:
    plan = importlib.import_module("gpu.parts")
    assert comparison._own(plan.Part("wrong", "slices", {"no such": "field"}, 60.0)) == []
    comparison._own(plan.Part("device", "device", {"gpu": "cpu"}, 60.0))
    comparison.end = comparison.start
    assert comparison._own(plan.Part("late", "device", {"gpu": "cpu"}, 60.0)) == []
    written = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["case"] for row in written if "failed" in row] == ["wrong", "late"]
    assert "TypeError" in written[0]["failed"] and "time ran out" in written[2]["failed"]
    assert written[1]["gpu"] == "cpu"


def test_what_is_wanted_most_is_planned_first(compare: ModuleType, tmp_path: Path) -> None:
    plan = importlib.import_module("gpu.parts")
    names = {}
    for options in ((), ("--quick",), ("--models", "mistral-7b")):
        args = compare.parse([*options])
        names[options] = [part.name for part in plan.planned(args, "0", False, None, tmp_path)]
    assert names[()][2] == names[("--quick",)][2] == "llama2-70b F16 25%"
    assert set(names[("--quick",)]) < set(names[()])
    assert names[("--models", "mistral-7b")][2:-2] == ["mistral-7b F16 25%", "mistral-7b Q4_0 25%"]
