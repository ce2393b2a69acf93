"""Scripts that measure a processor: their figures mean what they say, and each runs in its smallest form."""

from __future__ import annotations

import importlib
import json
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from support.file_sizes import file_sizes

from hotcold.demo import model_path
from hotcold.formats.blocks import BLOCK_TYPES
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import _native
from hotcold.kernels.cpu import CPUBackend
from hotcold.kernels.processor import fetching
from hotcold.model.config import Config
from hotcold.placement.placement import read_placement

Q4_0 = BLOCK_TYPES["Q4_0"]


pytestmark = pytest.mark.usefixtures("benchmarks")


@pytest.fixture(scope="module")
def synthetic() -> ModuleType:
    return importlib.import_module("lib.models")


def test_a_sample_between_two_states_belongs_to_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = importlib.import_module("lib.machine")
    barriers = iter([31.0, 32.0, 31.0, 150.0, 150.0, 140.0, 150.0, 5000.0, 5000.0, 5000.0, 450.0, 460.0])

    class Scripted:
        def measure(self, *seconds: float) -> float:
            return 40.0 if seconds else next(barriers)

    monkeypatch.setattr(machine, "BarrierProbe", Scripted)
    monkeypatch.setattr(machine, "ReadProbe", lambda backend: Scripted())
    state = machine.MachineState(1)
    states = [state.around(lambda: None)[1].state for _ in range(6)]
    assert states == ["smt", "mixed", "two_core", "mixed", "busy", "far"]


def test_the_barrier_of_two_threads_is_timed() -> None:
    machine = importlib.import_module("lib.machine")
    try:
        probe = machine.BarrierProbe()
    except RuntimeError as error:
        pytest.skip(str(error))
    assert 1 < probe.measure() < 1e9


def test_the_even_placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hottest quarter of each layer of the built-in model, by the profile that comes with it."""
    out = tmp_path / "quarter.gpuidx"
    monkeypatch.setattr(sys, "argv", ["even_placement.py", str(out), "--share", "0.25"])
    importlib.import_module("gpu.even_placement").main()
    with open_gguf(model_path().with_suffix(".profile.gguf")) as file:
        firing = [file.load(f"blk.{i}.profile").dequantise() for i in range(len(file.tensors))]
    with open_gguf(model_path()) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        hot = read_placement(out, file_sizes(file, config, 512, "f16")).hot
    for mask, shares in zip(hot, firing, strict=True):
        assert mask.sum() == len(shares) // 4
        assert shares[mask].min() >= shares[~mask].max()


@pytest.mark.full
def test_loading_is_timed_beside_a_copy(
    synthetic: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loading = importlib.import_module("cpu.loading")
    path = tmp_path / "small.gguf"
    synthetic.write(path, synthetic.Recipe(synthetic.Shape(512, 1408, 1, 8, 8, 500, 256), active=0.1))
    copied = loading.PlainCopy(2)(path)
    assert bytes(copied[:]) == path.read_bytes()
    options = ["-m", str(path), "--rounds", "2", "--types", "Q4_K", "F16", "--megabytes", "1"]
    monkeypatch.setattr(sys, "argv", ["loading.py", *options])
    loading.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (
        {*figures["packing_gb_s"]["Q4_K"]}
        == {"rows", "pairs", "by_neuron"}
        == {*figures["packing_gb_s"]["F16"]}
    )
    (model,) = figures["loading"]
    assert model["gb"] == round(path.stat().st_size / 1e9, 3)
    assert {"copy", "hotcold", "ratio", "cpu_ratio", "best_ratio"} <= model.keys()


def test_builds_take_turns_and_a_faster_one_is_told() -> None:
    """Two builds without a machine: the new one takes 0.8 of the old one's time, beside noise of both."""
    module = importlib.import_module("cpu.builds")
    turns: list[str] = []

    class Made:
        def __init__(self, name: str, factor: float) -> None:
            self.name, self.factor = name, factor

        def seconds(self, figure: Any, seed: int) -> float:
            turns.append(self.name)
            return self.factor * (1 + seed % 3)

    figures = list(module.FIGURES[:2])
    report = module.compare([Made("old", 1.0), Made("new", 0.8)], figures, pairs=21)
    assert [line["figure"] for line in report] == [figure.name for figure in figures]
    for line in report:
        assert [line["ratio"], line["ratio_low"], line["ratio_high"]] == pytest.approx([1.25] * 3)
        assert line["old_tok_s"] == 1 / 2 and line["pairs"] == 21
    rounds = [turns[i : i + 4] for i in range(0, len(turns), 4)]
    assert all(round in (["old", "new"] * 2, ["new", "old"] * 2) for round in rounds)
    assert all(a != b for a, b in pairwise(rounds))
    low, high = importlib.import_module("lib.report").interval([0.9, 1.0, 1.1] * 7)
    assert 0.9 <= low <= 1.0 <= high <= 1.1


@pytest.mark.full
def test_numbers_of_threads_take_turns(
    synthetic: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    many_cores = importlib.import_module("cpu.threads")
    path = tmp_path / "small.gguf"
    synthetic.write(
        path, synthetic.Recipe(synthetic.Shape(512, 1408, 1, 8, 8, 500, 256), "Q4_0", 0.1, "pwri")
    )
    lengths = ["--prompt", "8", "--generate", "4", "--rounds", "3"]
    monkeypatch.setattr(sys, "argv", ["threads.py", "-m", str(path), "--threads", "3", "1", *lengths])
    many_cores.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    modes = ("off", "exact", "predicted")
    assert [(line["threads"], line["sparsity"]) for line in figures] == [
        (n, m) for n in (1, 3) for m in modes
    ]
    for line in figures:
        assert len(line["rounds"]) == 3 and line["tok_s"] == sorted(r["tok_s"] for r in line["rounds"])[1]
        base = next(b for b in figures if b["sparsity"] == line["sparsity"] and b["threads"] == 1)
        times = [a["tok_s"] / b["tok_s"] for a, b in zip(line["rounds"], base["rounds"], strict=True)]
        assert line["times"] == sorted(times)[1]


def run_small(
    script: str, options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """Returns the last lines of a script that takes compare.py's options of models, on models that take no
    time."""
    model = "--shape 256 1408 4 2 400 --layers 1 --threads 1 --rounds 2"
    monkeypatch.setattr(sys, "argv", [script, *model.split(), *options.split()])
    importlib.import_module(f"cpu.{script}").main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_settings_of_fetching_take_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _native.fetching()
    options = "--settings 3K:1 8K:2 --tokens 1 --modes dense predicted"
    try:
        found = run_small("fetching", options, monkeypatch, capsys)
    finally:
        _native.set_fetching(*before)
    assert found["default"] == fetching()
    rows = [row for row in found["rows"] if row["state"] == "any"]  # none of a state that changed meanwhile
    assert {row["setting"] for row in rows} <= {"3K:1", "8K:2"}
    assert {row["mode"] for row in rows} <= {"dense", "predicted"}
    assert all(row["ratio"] == 1 for row in rows if row["setting"] == "3K:1")


def test_exact_and_off_take_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--active 0.5 --generate 2 --sequences 2 --layouts by_output"
    rows = run_small("exact_over_off", options, monkeypatch, capsys)["rows"]
    assert [(row["measure"], row["n"]) for row in rows] == [("decode at 0", 6), ("2 sequences", 6)]
    assert all(0 < row["least"] <= row["median"] <= row["most"] for row in rows)


@pytest.mark.full
def test_a_busy_neighbour_is_there_and_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_small("neighbour", "--generate 2 --no-llama-cpp", monkeypatch, capsys)
    assert {*found["busy_over_quiet"]} == {"dense", "exact", "predicted"}
    assert all(sample["ratio"] == sample["busy"] / sample["quiet"] for sample in found["samples"])


def test_zeros_of_ungated_experts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neurons are active as rarely as is asked for, and bytes are those of rows that are read."""
    ungated = importlib.import_module("cpu.ungated_experts")
    for name, value in (("NEURONS", 64), ("DIM", 64), ("CHOSEN", 2), ("TOKENS", 300)):
        monkeypatch.setattr(ungated, name, value)
    small = "--type Q8_0 --experts 4 --distinct 2 --rank 32 --rounds 3 -t 1 --own-time --json"
    monkeypatch.setattr(sys, "argv", ["ungated_experts.py", *small.split()])
    ungated.main()
    (layer,) = json.loads(capsys.readouterr().out.splitlines()[-1])["layers"]
    (predictor,), ways = layer["predictors"], layer["ways"]
    assert 0.05 < predictor["active"] < 0.15 and predictor["recall"] > 0.9
    assert ways["dots"]["bytes"] == ways["off"]["bytes"] == ways["off t"]["bytes"] == 1
    assert 0.5 < ways["exact t"]["bytes"] < ways["exact"]["bytes"] < 0.8
    assert ways["exact"]["over dots"][0] <= ways["exact"]["over dots"][1]


@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_the_bytes_that_a_step_of_experts_must_read(activation: str) -> None:
    """Two of four experts for one row; with relu, every gate and the active neurons. All four for a
    prompt."""
    experts = importlib.import_module("cpu.expert_layers")
    layer = experts.Layer(CPUBackend(1), experts.Shape("small", 4, 256, 256, 2), Q4_0, activation)
    matrix = Q4_0.row_bytes(256) * 256  # of one expert
    _, read = layer.run(1, 0, np.random.default_rng(0))
    if activation == "relu":
        assert 2 * matrix < read < 2 * 3 * matrix
    else:
        assert read == 2 * 3 * matrix
    _, read = layer.run(0, 64, np.random.default_rng(0))
    assert read == 4 * 3 * matrix


def test_a_bias_of_the_gate_makes_so_many_neurons_active() -> None:
    layers = importlib.import_module("cpu.prompt_layers")
    layer = layers.Layer({"type": "Q4_0", "shape": (256, 512), "way": "rows", "share": 10, "rows": 64})
    gates = layer.x @ layer.tensors.gate.dequantise().T + layer.tensors.gate_bias
    assert 0.08 < (gates > 0).mean() < 0.12


def test_the_bytes_of_gathered_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gates are read whole but where a mask names rows; up and down rows, and a panel's scales, as they are
    active."""
    picture = tmp_path / "active.svg"
    small = "--shape 256 256 --shares 50 100 --rounds 1 -t 1 --own-time --picture"
    monkeypatch.setattr(sys, "argv", ["gathered.py", *small.split(), str(picture)])
    importlib.import_module("cpu.gathered").main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    read = {(row["way"], row["share"]): row["bytes"] for row in rows}
    matrix = Q4_0.row_bytes(256) * 256
    assert {read[way, 100.0] for way in ("dense", "off", "exact", "predicted", "off p", "exact p")} == {
        3 * matrix
    }
    assert read["dense", 50.0] == read["off", 50.0] == read["off p", 50.0] == 3 * matrix
    assert read["exact", 50.0] == 2 * matrix
    assert {row["over_off"] for row in rows if row["way"] in ("off", "off p")} == {1.0}
    assert all(row["over_off"] > 0 for row in rows if row["way"] != "dense")
    assert read["predicted", 50.0] == 1.5 * matrix
    assert read["predicted", 50.0] < read["predicted p", 50.0] < read["exact p", 50.0]
    assert ElementTree.parse(picture).getroot().findall(".//{*}polyline")


def test_dot_products_are_timed_beside_llama_cpp_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both engines multiply the same weights with the same token, in a long call and in a short one."""
    pytest.importorskip("llama_cpp")
    dots = importlib.import_module("cpu.dots")
    types = ["IQ4_XS", "IQ4_NL"]  # llama.cpp prepares a grid for seconds
    calls: list[Any] = []

    def counted(call: Any) -> int:
        call()
        calls.append(call)
        return [1000, 100, 2000, 200][len(calls) % 4 - 1]  # long and short, ours first

    monkeypatch.setattr(dots, "processor_ns", counted)
    monkeypatch.setattr(sys, "argv", ["dots.py", "--rounds", "2", "--types", *types])
    dots.main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["type"] for row in report["rows"]] == types
    assert len(calls) == 2 * 2 * 2 * len(types)
    for row in report["rows"]:
        assert 0 < row["difference"] < 0.02
        assert row["hotcold_ns"] == pytest.approx(900 * 256 / (255 * 2048))
        assert row["llama_cpp_ns"] == pytest.approx(1800 * 256 / (256 * 2048 - 256))
    calls.clear()
    monkeypatch.setattr(dots.Theirs, "products", lambda self: np.ones(dots.ROWS, np.float32))
    with pytest.raises(SystemExit, match=r"IQ4_XS: products differ by .* not the same weights"):
        dots.main()


def test_ops_of_a_step_are_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each step of the program belongs to one op, and each matrix that a step reads whole to one, too."""
    ops = importlib.import_module("cpu.ops")
    monkeypatch.setattr(ops, "ReadProbe", lambda backend: SimpleNamespace(measure=lambda: 10.0))
    argv = ["ops.py", "--tokens", "2", "--threads", "2", "--sequences", "1", "2", "--temperature", "0"]
    monkeypatch.setattr(sys, "argv", argv)
    ops.main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    with open_gguf(model_path()) as file:
        matrices = {name: each for name, each in file.tensors.items() if len(each.shape) > 1}
    head = "output.weight" if "output.weight" in matrices else "token_embd.weight"
    read = [each for name, each in matrices.items() if name.startswith("blk.") or name == head]
    assert [*report["rows"]] == ["1", "2"]
    for rows in report["rows"].values():
        assert sum(op["bytes"] for op in rows["ops"].values()) == sum(each.nbytes for each in read)
        assert all(op["us"] >= 0 for op in rows["ops"].values())
        assert rows["native_us"] > 0 and rows["rest_us"] > 0
