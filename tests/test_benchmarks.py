"""Benchmarks: models that are complete and as sparse as they claim, and figures that mean what they say."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from hotcold.demo import model_path
from hotcold.formats.blocks import BLOCK_TYPES, Tensor, block_type
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import fetching
from hotcold.kernels.cpu import CPUBackend
from hotcold.model.config import Config
from hotcold.placement.placement import read_placement
from hotcold.placement.sizes import sizes_of_file
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks.scoring import Scorer, score

Q4_0 = BLOCK_TYPES["Q4_0"]


pytestmark = pytest.mark.usefixtures("benchmarks")


@pytest.fixture(scope="module")
def synthetic() -> ModuleType:
    return importlib.import_module("synthetic")


@pytest.fixture(scope="module")
def contestants() -> ModuleType:
    return importlib.import_module("contestants")


@pytest.fixture(scope="module")
def report() -> ModuleType:
    return importlib.import_module("comparison_report")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("active", [0.05, 0.2])
@pytest.mark.parametrize("type", ["Q4_0", "Q8_0", "F16"])
def test_the_share_of_neurons_that_fires(
    synthetic: ModuleType, tmp_path: Path, type: str, active: float, gated: bool
) -> None:
    """Counted while the model runs, on the bytes of the file, against the share that was asked for."""
    shape = synthetic.Shape(512, 1408, 3, 8, 4, 2000, 512)
    path = tmp_path / "sparse.gguf"
    synthetic.write(path, synthetic.Recipe(shape, type, active, "by_neuron", seed=3, gated=gated))
    session = load(path, LoadOptions()).session()
    assert session.sparsity == "exact" and session.model.config.gated == gated
    scorer = Scorer(session)
    score(scorer, np.random.default_rng(0).integers(259, 2000, 200).tolist())
    counted = [figures.active for figures in synthetic.verify(path)]
    assert scorer.figures.active_share_by_layer == pytest.approx([active] * 3, rel=0.1)
    assert counted == pytest.approx([active] * 3, rel=0.1)


def test_a_stock_file_runs_dense_and_has_all_that_llama_cpp_wants(
    synthetic: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "dense.gguf"
    shape = synthetic.Shape(512, 1408, 2, 8, 8, 1000, 256)
    synthetic.write(path, synthetic.Recipe(shape))
    assert load(path, LoadOptions()).session().sparsity == "off"
    fields = GGUFReader(path).fields
    assert not any(name.startswith("hotcold.") for name in fields)
    assert {"llama.rope.dimension_count", "llama.vocab_size", "tokenizer.ggml.token_type"} <= fields.keys()
    assert len(set(synthetic.synthetic_vocabulary(32000)["tokenizer.ggml.tokens"])) == 32000


@pytest.mark.parametrize("type", ["Q4_0", "Q8_0", "F16", "F32"])
def test_random_blocks_have_the_spread_that_was_asked_for(synthetic: ModuleType, type: str) -> None:
    kind = block_type(type)
    rows = synthetic.random_rows(np.random.default_rng(0), kind, 64, 1024, 0.02)
    values = Tensor(kind, (64, 1024), rows).dequantise()
    assert values.std() == pytest.approx(0.02, rel=0.05)
    assert abs(values.mean()) < 0.001


def test_shares_follow_a_power_law_of_the_right_mean(synthetic: ModuleType) -> None:
    shares = synthetic.power_law(1000, 0.1)
    assert shares.mean() == pytest.approx(0.1) and (np.diff(shares) <= 0).all() and shares.max() <= 1
    tail = shares[shares < 1]
    assert tail[0] / tail[-1] > 20


@pytest.mark.parametrize("type", ["Q4_0", "Q8_0", "F16"])
def test_layouts_hold_the_same_weights(synthetic: ModuleType, tmp_path: Path, type: str) -> None:
    shape = synthetic.Shape(512, 1376, 1, 8, 8, 1000, 256)
    weights = {}
    for layout in synthetic.LAYOUTS:
        path = tmp_path / layout
        synthetic.write(path, synthetic.Recipe(shape, type, 0.1, layout))
        with open_gguf(path) as file:
            assert file.magic == ("PWRI" if layout == "pwri" else "GGUF")
            assert ("hotcold.ffn.activation" in file.metadata) == (layout != "pwri")
            assert ("hotcold.ffn.down_layout" in file.metadata) == (layout == "by_neuron")
            weights[layout] = {name: file.load(name).dequantise() for name in file.tensors}
    stock = weights["by_output"]
    assert not stock["blk.0.ffn_down.weight"][-synthetic.RESERVED :].any()
    assert stock["blk.0.ffn_down.weight"].std() > 0
    by_neuron = stock | {"blk.0.ffn_down.weight": stock["blk.0.ffn_down.weight"].T}
    np.testing.assert_equal(weights["by_neuron"], by_neuron)
    pwri = {name.replace("down_t", "down"): values for name, values in weights["pwri"].items()}
    np.testing.assert_equal({name: pwri[name] for name in by_neuron}, by_neuron)
    assert pwri.keys() - by_neuron.keys() == {"blk.0.fc1.weight", "blk.0.fc2.weight"}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("predictor", ["F16", "Q8_0", "Q4_0"])
def test_a_predictor_finds_the_neurons_that_fire(
    synthetic: ModuleType, tmp_path: Path, predictor: str, gated: bool
) -> None:
    """What was counted from the file, against what the engine computes with it."""
    shape = synthetic.Shape(512, 1376, 2, 8, 8, 1000, 256)
    path = tmp_path / "model.gguf"
    synthetic.write(path, synthetic.Recipe(shape, "Q4_0", 0.1, "pwri", predictor, gated=gated))
    figures = synthetic.verify(path)
    assert all(each.recall > 0.97 and each.marked == pytest.approx(0.1, rel=0.1) for each in figures)
    tokens = np.random.default_rng(0).integers(259, 1000, 200).tolist()
    shares = {}
    for mode in ("exact", "predicted"):
        scorer = Scorer(load(path, LoadOptions(sparsity=mode)).session())
        score(scorer, tokens)
        shares[mode] = np.array(scorer.figures.active_share_by_layer)
    recall = [each.recall for each in figures]
    np.testing.assert_allclose(shares["predicted"] / shares["exact"], recall, atol=0.01)


def test_bytes_read_are_those_of_the_file(
    synthetic: ModuleType, contestants: ModuleType, tmp_path: Path
) -> None:
    """A dense step reads every matrix once, a row of the embedding for each token, and K and V before it."""
    path, lengths = tmp_path / "model.gguf", contestants.Lengths(40, 6, 3, 7, 4, pieces=2)
    shape = synthetic.Shape(512, 1376, 2, 8, 4, 1000, 256)
    synthetic.write(path, synthetic.Recipe(shape))
    session = load(path, LoadOptions(sparsity="off", context=lengths.context, sequences=3)).session()
    names, found = zip(
        *((name, run()) for name, run in contestants.Ours(session, lengths).phases(0)), strict=True
    )
    assert names == ("prompt", "generation", "generation", "parallel")
    assert [each.tokens for each in found] == [40, 3, 3, 12]
    tensors = GGUFReader(path).tensors
    step = sum(int(each.n_bytes) for each in tensors if each.name != "token_embd.weight")
    row, position = 512 // 32 * 18, 2 * 2 * 2 * 256
    assert found[1].bytes == 3 * (step + row) + sum(range(41, 44)) * position
    assert found[2].bytes == 3 * (step + row) + sum(range(44, 47)) * position
    assert found[3].bytes == 4 * step + 12 * row + 3 * sum(range(8, 12)) * position


def test_contestants_take_turns_piece_by_piece(contestants: ModuleType) -> None:
    """Everyone's prompts, then everyone's first pieces; a piece's number is the same for all."""
    compare = importlib.import_module("compare_cpu")
    ran: list[tuple[str, str]] = []

    class Scripted:
        def __init__(self, name: str, *measures: str) -> None:
            self.name, self.measures = name, measures

        def phases(self, seed: int) -> Iterator[Any]:
            for measure in self.measures:
                yield measure, lambda measure=measure: ran.append((self.name, measure))

    class Machine:
        def around(self, run: Any, seconds: float) -> tuple[Any, Any]:
            run()
            seen = SimpleNamespace(state="smt", barrier_ns=(30.0, 30.0), read_gb_s=40.0)
            return SimpleNamespace(tok_s=1.0, gb_s=None, active_share=None), seen

    ours = ("prompt", "generation", "generation", "parallel")
    names = {"dense": ours, "exact": ours, "powerinfer": ("generation",)}
    args = SimpleNamespace(rounds=2, pieces=2, probe=0.0, powerinfer_every=2)
    scripted = {name: Scripted(name, *measures) for name, measures in names.items()}
    samples = list(compare.run_rounds(scripted, Machine(), args, "Q4_0", 0.1))
    assert [measure for name, measure in ran if name == "dense"] == [*ours] * 3  # the first warms
    first = [(each.contestant, each.measure, each.round) for each in samples[:9]]
    assert first == [
        ("dense", "prompt", 0), ("exact", "prompt", 0), ("powerinfer", "generation", 0),
        ("dense", "generation", 0), ("exact", "generation", 0),
        ("dense", "generation", 1), ("exact", "generation", 1),
        ("dense", "parallel", 0), ("exact", "parallel", 0),
    ]  # fmt: skip
    # The next round runs backwards, without PowerInfer.
    assert [(each.contestant, each.measure, each.round) for each in samples[9:]] == [
        ("exact", "prompt", 2), ("dense", "prompt", 2),
        ("exact", "generation", 2), ("dense", "generation", 2),
        ("exact", "generation", 3), ("dense", "generation", 3),
        ("exact", "parallel", 2), ("dense", "parallel", 2),
    ]  # fmt: skip


def test_ratios_pair_samples_of_one_round_and_one_state(report: ModuleType) -> None:
    def sample(round: int, contestant: str, tok_s: float, state: str) -> Any:
        return report.Sample(
            "Q4_0", 0.1, round, contestant, "generation", tok_s, 10.0, 1.0, state, (0.0, 0.0), 50.0
        )

    samples = [
        sample(0, "dense", 30, "smt"), sample(0, "llama_cpp", 20, "smt"),
        sample(1, "dense", 80, "two_core"), sample(1, "llama_cpp", 10, "smt"),
        sample(2, "dense", 90, "mixed"), sample(2, "llama_cpp", 10, "mixed"),
        sample(3, "dense", 50, "two_core"),
    ]  # fmt: skip
    summary, none = report.summary(samples), dict.fromkeys(("two_core", "smt", "far"))
    assert summary["ratios"]["dense_over_llama_cpp"] == none | {"smt": 1.5}
    assert summary["pairs"]["dense_over_llama_cpp"] == dict.fromkeys(none, 0) | {"smt": 1}
    assert summary["any_state"]["dense_over_llama_cpp"] == 8
    assert summary["ratios"]["predicted_over_powerinfer"] == none
    assert summary["ratios"]["prompt_over_llama_cpp"] == none
    assert "| dense_over_llama_cpp | - | 1.50 (1) | - | 8.00 (3; 1.50 to 9.00) |" in report.markdown(
        samples, {}
    )


def test_a_sample_between_two_states_belongs_to_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_state = importlib.import_module("machine_state")
    barriers = iter([31.0, 32.0, 31.0, 150.0, 150.0, 140.0, 150.0, 5000.0, 5000.0, 5000.0, 450.0, 460.0])

    class Scripted:
        def measure(self, *seconds: float) -> float:
            return 40.0 if seconds else next(barriers)

    monkeypatch.setattr(machine_state, "BarrierProbe", Scripted)
    monkeypatch.setattr(machine_state, "ReadProbe", lambda backend: Scripted())
    machine = machine_state.MachineState(1)
    states = [machine.around(lambda: None)[1].state for _ in range(6)]
    assert states == ["smt", "mixed", "two_core", "mixed", "busy", "far"]


def test_the_barrier_of_two_threads_is_timed() -> None:
    machine_state = importlib.import_module("machine_state")
    try:
        probe = machine_state.BarrierProbe()
    except RuntimeError as error:
        pytest.skip(str(error))
    assert 1 < probe.measure() < 1e9


def test_every_contestant_goes_first_and_last() -> None:
    compare_cpu = importlib.import_module("compare_cpu")
    names = ["a", "b", "c"]
    rounds = [compare_cpu.order(names, round) for round in range(6)]
    assert all(sorted(each) == names for each in rounds)
    assert {each[0] for each in rounds} == {each[-1] for each in rounds} == set(names)
    assert all(first == second[::-1] for first, second in list(pairwise(rounds))[::2])


def test_the_report_of_powerinfer_is_read(contestants: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    report = b"""
llama_print_timings:      sample time =       0.96 ms /    40 runs   (    0.02 ms per token, 41493.78 tokens per second)
llama_print_timings: prompt eval time =     423.72 ms /    13 tokens (   32.59 ms per token,    30.68 tokens per second)
llama_print_timings:        eval time =   15712.27 ms /    39 runs   (  402.88 ms per token,     2.48 tokens per second)
"""  # noqa: E501
    done = subprocess.CompletedProcess([], 0, b"", report)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: done)
    (measure, run), *more = contestants.PowerInfer(Path("main"), Path("model"), 2, 39).phases(0)
    assert (measure, more) == ("generation", [])
    assert run().tok_s == pytest.approx(2.48, abs=0.01) and run().tokens == 39
    done.returncode = 1
    with pytest.raises(RuntimeError, match="PowerInfer ended with 1"):
        run()


def test_the_even_placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hottest quarter of each layer of the built-in model, by the profile that comes with it."""
    out = tmp_path / "quarter.gpuidx"
    monkeypatch.setattr(sys, "argv", ["even_placement.py", str(out), "--share", "0.25"])
    importlib.import_module("even_placement").main()
    with open_gguf(model_path().with_suffix(".profile.gguf")) as file:
        firing = [file.load(f"blk.{i}.profile").dequantise() for i in range(len(file.tensors))]
    with open_gguf(model_path()) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        hot = read_placement(out, sizes_of_file(file, config, 512, "f16")).hot
    for mask, shares in zip(hot, firing, strict=True):
        assert mask.sum() == len(shares) // 4
        assert shares[mask].min() >= shares[~mask].max()


def test_loading_is_timed_beside_a_copy(
    synthetic: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loading = importlib.import_module("loading")
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
    module = importlib.import_module("compare_builds")
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
    low, high = module.interval([0.9, 1.0, 1.1] * 7)
    assert 0.9 <= low <= 1.0 <= high <= 1.1


def test_numbers_of_threads_take_turns(
    synthetic: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    many_cores = importlib.import_module("many_cores")
    path = tmp_path / "small.gguf"
    synthetic.write(
        path, synthetic.Recipe(synthetic.Shape(512, 1408, 1, 8, 8, 500, 256), "Q4_0", 0.1, "pwri")
    )
    lengths = ["--prompt", "8", "--generate", "4", "--rounds", "3"]
    monkeypatch.setattr(sys, "argv", ["many_cores.py", "-m", str(path), "--threads", "3", "1", *lengths])
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
    """What a script that takes compare_cpu's options of models ends with, on models that take no time."""
    model = "--shape 256 1408 4 2 400 --layers 1 --threads 1 --rounds 2 --prompt 4"
    monkeypatch.setattr(sys, "argv", [script, *model.split(), *options.split()])
    importlib.import_module(script).main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_settings_of_fetching_take_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = fetching.default_fetching()
    options = "--settings 3K:1 8K:2 --tokens 1 --probe 0.001 --modes dense predicted"
    try:
        found = run_small("fetching", options, monkeypatch, capsys)
    finally:
        fetching.use_fetching(before)
    assert found["default"] == str(before)
    rows = [row for row in found["rows"] if row["state"] == "any"]  # none of a state that changed meanwhile
    assert {row["setting"] for row in rows} <= {"3K:1", "8K:2"}
    assert {row["mode"] for row in rows} <= {"dense", "predicted"}
    assert all(row["ratio"] == 1 for row in rows if row["setting"] == "3K:1")


def test_a_busy_neighbour_is_there_and_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_small("neighbour", "--generate 2 --no-llama-cpp", monkeypatch, capsys)
    assert {*found["busy_over_quiet"]} == {"dense", "exact", "exact_stock", "predicted"}
    assert all(sample["ratio"] == sample["busy"] / sample["quiet"] for sample in found["samples"])


@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_the_bytes_that_a_step_of_experts_must_read(activation: str) -> None:
    """Two of four experts for one row; with relu, every gate and what then fires. All four for a prompt."""
    experts = importlib.import_module("experts")
    layer = experts.Layer(CPUBackend(1), experts.Shape("small", 4, 256, 256, 2), Q4_0, activation)
    matrix = Q4_0.row_bytes(256) * 256  # of one expert
    _, read = layer.run(1, 0, np.random.default_rng(0))
    if activation == "relu":
        assert 2 * matrix < read < 2 * 3 * matrix
    else:
        assert read == 2 * 3 * matrix
    _, read = layer.run(0, 64, np.random.default_rng(0))
    assert read == 4 * 3 * matrix
