"""cpu/compare.py and its contestants: what is timed is computed, and ratios pair samples of one round."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from support.stories260k import write_stories260k

from hotcold.formats.gguf import open_gguf
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.session import Session
from hotcold.tasks.scoring import Scorer, score
from hotcold.tasks.windows import text_windows

pytestmark = pytest.mark.usefixtures("benchmarks")

MEASURES = ["prompt of 40", "decode at 0", "decode at 512", "3 sequences"]


@pytest.fixture(scope="module")
def quick() -> ModuleType:
    return importlib.import_module("lib.contestants")


@pytest.fixture(scope="module")
def report() -> ModuleType:
    return importlib.import_module("lib.report")


@pytest.fixture(scope="module")
def plan(quick: ModuleType) -> Any:
    return quick.Plan((40,), (0, 512), 3, generate=4, parallel_generate=2, layers=4)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    synthetic = importlib.import_module("lib.models")
    path = tmp_path_factory.mktemp("quick") / "model.gguf"
    synthetic.write(path, synthetic.Recipe(synthetic.Shape(512, 1024, 1, 8, 4, 600, 4096)))
    return path


def session_of(path: Path, plan: Any) -> Session:
    options = LoadOptions(sparsity="off", context=plan.context, sequences=3, cache_positions=4096)
    return load(path, options).session()


def test_ours_reads_prompts_and_goes_on_from_a_cache_that_was_written(
    quick: ModuleType, plan: Any, path: Path
) -> None:
    """Counted by the engine: tokens computed for a prompt, and positions that generation attends to."""
    assert plan.measures == MEASURES
    session = session_of(path, plan)
    ours = quick.Ours(session, plan)
    tokens, read, positions = {}, {}, {}
    for seed in (0, 0, 1):  # the same prompt again is read again
        for measure in plan.measures:
            at = session.counters.prompt_tokens
            run = ours.prepare(measure, seed)
            before = session.counters.kv_positions
            tokens[measure] = run().tokens
            positions[measure] = session.counters.kv_positions - before
            read[measure] = session.counters.prompt_tokens - at
        assert read["prompt of 40"] == 40 and read["decode at 512"] <= 32
    assert tokens == dict(zip(MEASURES, (40, 4, 4, 6), strict=True))
    # After 512 tokens and one that does not count, steps of 514 to 517 positions.
    assert positions["decode at 512"] == sum(range(514, 518))
    assert positions["decode at 0"] == sum(range(18, 22))
    keys = np.asarray(session.state.layers[0][0])
    assert keys.reshape(len(keys), -1).any(axis=1).all()


def test_llama_cpp_goes_on_from_copies_of_a_computed_beginning(
    quick: ModuleType, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    plan = quick.Plan((40,), (0, 1024), 3, generate=4, parallel_generate=2)
    peer = importlib.import_module("lib.llama").LlamaCpp(path, 2, plan)
    last = {}
    for measure in plan.measures:
        peer.warm(measure)
        measured = peer.prepare(measure, 1)()
        kind = f"{'several' if 'seq' in measure else 'single'} {peer.settings[measure]}"
        memory = llama_cpp.llama_get_memory(peer._contexts[kind])
        last[measure] = llama_cpp.llama_memory_seq_pos_max(memory, 0)
        assert measured.tokens == {"prompt of 40": 40, "3 sequences": 6}.get(measure, 4)
    assert last == {"prompt of 40": 39, "decode at 0": 20, "decode at 1024": 1028, "3 sequences": 18}
    peer.close()


@pytest.mark.parametrize("all_logits", [False, True])
def test_llama_cpp_is_asked_for_the_logits_of_a_prompt(quick: ModuleType, all_logits: bool) -> None:
    """It leaves out the last FFN for rows without: of a model of one layer that is nearly everything."""
    llama, plan = importlib.import_module("lib.llama"), quick.Plan()
    asked: list[list[bool]] = []
    names = ("token", "pos", "n_seq_id", "logits")
    fake = SimpleNamespace(
        llama_batch_init=lambda n, *_: SimpleNamespace(
            **{name: [0] * n for name in names}, seq_id=[[0] for _ in range(n)]
        ),
        llama_decode=lambda context, batch: asked.append(batch.logits) or 0,
        llama_synchronize=lambda context: None,
        llama_batch_free=lambda batch: None,
    )
    fake.llama_get_memory = fake.llama_memory_clear = lambda *_: None
    peer = llama.LlamaCpp.__new__(llama.LlamaCpp)
    peer._lib, peer._contexts, peer.all_logits, peer.plan = fake, {"single on": None}, all_logits, plan
    peer._vocab, peer.settings = 600, {"prompt of 3": "on"}
    assert peer.prepare("prompt of 3", 0)().tokens == 3
    peer._decode("single on", [[5, 6], [7]])
    assert asked == [[all_logits, all_logits, True], [False, True, True]]


def test_llama_bench_is_asked_for_what_is_measured(
    quick: ModuleType, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repacking is faster for prompts alone here, and is used for these alone."""
    ran: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        ran.append(command[command.index("-rtr") :])
        prompt = "-n 0 -p" in " ".join(command) or command[command.index("-p") + 1] != "0"
        speed = 100.0 if prompt == (command[command.index("-rtr") + 1] == "1") else 50.0
        text = "noise\n[\n" + json.dumps({"samples_ts": [1.0, speed, 1000.0]}) + "\n]\n"
        return subprocess.CompletedProcess(command, 0, text, "")

    monkeypatch.setattr(subprocess, "run", run)
    processes = importlib.import_module("lib.processes")
    bench = processes.LlamaBench(Path("llama-bench"), Path("model"), 2, plan)
    bench.warm("prompt of 40")
    bench.warm("decode at 0")
    assert len(ran) == 4 and bench.can("decode at 512", 2)
    assert bench.prepare("prompt of 40", 0)().tok_s == 100
    assert ran[-1] == ["-rtr", "1", "-r", "3", "-p", "40", "-n", "0"]
    assert bench.prepare("decode at 512", 0)().tokens == 4
    assert ran[-1] == ["-rtr", "0", "-r", "3", "-p", "0", "-n", "0", "-gp", "512,4"]
    assert [measure for measure in MEASURES if bench.can(measure, 0)] == ["prompt of 40", "decode at 0"]
    few = processes.LlamaBench(Path("llama-bench"), Path("model"), 2, dataclasses.replace(plan, layers=3))
    assert not few.can("prompt of 40", 0)
    assert not bench.can("decode at 0", 1)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "error", ""))
    with pytest.raises(RuntimeError, match="not understood"):
        bench.prepare("prompt of 40", 0)()


def test_openvino_is_asked_in_a_process_of_its_own(plan: Any, path: Path, tmp_path: Path) -> None:
    """Here by a program that takes a second for whatever it is asked."""
    processes = importlib.import_module("lib.processes")
    stub = tmp_path / "python"
    stub.write_text(
        f'#!/bin/sh\necho \'"1"\'\nwhile read line; do echo "$line" >> {tmp_path}/asked; echo 1; done\n'
    )
    stub.chmod(0o755)
    peer = processes.OpenVINO(stub, path, 2, plan)
    model = path.with_suffix(".openvino.gguf")
    with open_gguf(model) as file:
        assert file.metadata["tokenizer.ggml.model"] == "gpt2" and len(file.tensors) == 12
    speeds = {measure: peer.prepare(measure, 3)().tok_s for measure in MEASURES[:3]}
    assert speeds == {"prompt of 40": 40, "decode at 0": 4, "decode at 512": 4}
    asked = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    assert [(each["prompt"], each["generate"]) for each in asked] == [(40, 0), (16, 4), (512, 4)]
    assert [measure for measure in MEASURES if peer.can(measure, 0)] == MEASURES[:2]
    peer.close()
    assert not model.exists()
    with pytest.raises(RuntimeError, match="ended with 1"):
        processes.OpenVINO(Path("/bin/false"), path, 2, plan)
    assert not model.exists()


def sample(report: ModuleType, contestant: str, round: int, tok_s: float, **more: Any) -> Any:
    given = {"type": "Q4_0", "measure": "decode at 0", "gb_s": 20.0, "read_gb_s": 40.0, "state": "smt"}
    return report.Sample(contestant=contestant, round=round, tok_s=tok_s, **(given | more))


def test_ratios_pair_samples_of_a_round_and_losing_cases_are_said(report: ModuleType) -> None:
    samples = [
        sample(report, "dense", 0, 30), sample(report, "llama_cpp", 0, 20),
        sample(report, "dense", 1, 90), sample(report, "llama_cpp", 1, 30, state="busy"),
        sample(report, "dense", 2, 40), sample(report, "llama_cpp", 2, 20),
        sample(report, "ik_llama_cpp", 2, 80), sample(report, "exact", 0, 60),
    ]  # fmt: skip
    row = report.summary(samples)["types"]["Q4_0"]["decode at 0"]
    assert row["ratios"]["dense_over_llama_cpp"] == {"median": 1.75, "low": 1.5, "high": 2.0, "n": 2}
    assert row["ratios"]["ik_llama_cpp_over_llama_cpp"]["median"] == 4
    assert row["probe_share"]["dense"]["median"] == 0.5
    assert report.summary(samples)["losing"] == ["Q4_0, decode at 0: dense over ik_llama_cpp 0.50"]


def test_contestants_take_turns_measure_by_measure(quick: ModuleType) -> None:
    """Right after each other, forwards and backwards; long prompts once a round."""
    ran: list[str] = []

    class Scripted:
        def __init__(self, name: str) -> None:
            self.name = name

        def can(self, measure: str, turn: int) -> bool:
            return self.name != "c" or turn == 0

        def prepare(self, measure: str, seed: int) -> Any:
            return lambda: ran.append(self.name)

    machine = SimpleNamespace(around=lambda run, seconds: (run(), "quiet"))
    found = {name: Scripted(name) for name in "abc"}
    taken = list(quick.run_round(found, quick.Plan((1024,), (0,), 1), machine, 1))
    assert [f"{measure}, {turn}" for measure, turn, *_ in taken] == [
        *["prompt of 1024, 1"] * 3, *["decode at 0, 3"] * 3, *["decode at 0, 4"] * 2, *["decode at 0, 5"] * 2,
    ]  # fmt: skip
    assert [name for _, _, name, *_ in taken] == ran
    rounds = [quick.order("abc", round) for round in range(6)]
    assert {each[0] for each in rounds} == {each[-1] for each in rounds} == set("abc")
    assert all(first == second[::-1] for first, second in list(pairwise(rounds))[::2])


def test_bytes_read_are_those_of_the_file(quick: ModuleType, path: Path) -> None:
    """A dense step reads every matrix once, a row of the embedding for each token, and K and V before it."""
    plan = quick.Plan((40,), (0,), 3, generate=3, parallel_prompt=7, parallel_generate=4)
    ours = quick.Ours(session_of(path, plan), plan)
    tensors = GGUFReader(path).tensors
    step = sum(int(each.n_bytes) for each in tensors if each.name != "token_embd.weight")
    row, position = 512 // 32 * 18, 1 * 2 * 2 * 256
    # After the prompt, its first token, and one that does not count.
    assert ours.prepare("decode at 0", 0)().bytes == 3 * (step + row) + sum(range(9, 12)) * position
    assert ours.prepare("3 sequences", 0)().bytes == 4 * step + 12 * row + 3 * sum(range(9, 13)) * position


def test_the_report_of_powerinfer_is_read(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    report = """
llama_print_timings: prompt eval time =     423.72 ms /    13 tokens (   32.59 ms per token,    30.68 tokens per second)
llama_print_timings:        eval time =   15712.27 ms /    39 runs   (  402.88 ms per token,     2.48 tokens per second)
"""  # noqa: E501
    done = subprocess.CompletedProcess([], 0, "", report)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: done)
    processes = importlib.import_module("lib.processes")
    peer = processes.PowerInfer(Path("main"), Path("model"), 2, plan)
    assert [measure for measure in MEASURES if peer.can(measure, 0)] == ["decode at 0"]
    run = peer.prepare("decode at 0", 0)
    assert run().tok_s == pytest.approx(2.48, abs=0.01) and run().tokens == 39
    done.returncode = 1
    with pytest.raises(RuntimeError, match="main ended with 1"):
        run()


def test_the_quick_table_is_made_and_added_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole script on a model of one small layer, twice, with a type each."""
    compare = importlib.import_module("cpu.compare")

    class Machine:
        def __init__(self, threads: int) -> None: ...

        def around(self, run: Any, seconds: float) -> tuple[Any, Any]:
            return run(), SimpleNamespace(state="smt", read_gb_s=40.0)

    monkeypatch.setattr(compare, "MachineState", Machine)
    shape = ["512", "1024", "8", "4", "600"]
    for type in ("Q4_0", "Q8_0"):
        options = ["--quick", "--only", type, "--shape", *shape, "--layers", "1", "--rounds", "1"]
        options += ["--prompts", "40", "--depths", "0", "512", "--sequences", "2", "--generate", "3"]
        monkeypatch.setattr(sys, "argv", ["compare.py", *options, "--no-llama-cpp", "--out", str(tmp_path)])
        compare.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["quick"] and [*found["types"]] == ["Q4_0", "Q8_0"]
    row = found["types"]["Q4_0"]["decode at 512"]["tok_s"]
    assert row.keys() == {"dense", "exact", "predicted"} and row["dense"]["n"] == 3
    assert "| Q8_0 | 2 sequences |" in (tmp_path / "quick.md").read_text()
    ElementTree.parse(tmp_path / "quick.svg")


@pytest.mark.parametrize("peer", [[], ["--no-llama-cpp"]])
def test_files_of_ones_own_are_measured_with_their_perplexity(
    peer: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """stories260K, whose perplexity the engine says by itself."""
    if not peer:
        pytest.importorskip("llama_cpp")
    compare = importlib.import_module("cpu.compare")

    class Machine:
        def __init__(self, threads: int) -> None: ...

        def around(self, run: Any, seconds: float) -> tuple[Any, Any]:
            return run(), SimpleNamespace(state="smt", read_gb_s=40.0)

    path = tmp_path / "stories.gguf"
    write_stories260k(path)
    monkeypatch.setattr(compare, "MachineState", Machine)
    options = [
        "--models",
        str(path),
        "--rounds",
        "1",
        "--threads",
        "1",
        "--generate",
        "3",
        "--prompts",
        "40",
        *peer,
    ]
    monkeypatch.setattr(sys, "argv", ["compare.py", "--quick", *options, "--out", str(tmp_path)])
    compare.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    measures = ["prompt of 40", "decode at 0", "8 sequences", "loading, MB/s"]
    assert [*found["types"]["stories"]] == measures
    megabytes = path.stat().st_size / 1e6
    assert all(each["tok_s"]["dense"]["median"] > 0 for each in found["types"]["stories"].values())
    assert found["types"]["stories"]["loading, MB/s"]["tok_s"]["dense"]["n"] == 3 and megabytes > 0.9
    perplexities = found["settings"]["perplexity, stories"]
    session = load(path, LoadOptions(sparsity="off", context=512)).session()
    windows = text_windows(session.model.tokenizer, compare.TEXT.read_text(encoding="utf-8"), compare.WINDOW)
    nll = np.concatenate([score(Scorer(session), each) for each in windows[1 : compare.WINDOWS + 1]])
    assert perplexities["Hotcold, dense"] == pytest.approx(np.exp(nll.mean()), abs=1e-3)
    if not peer:
        assert perplexities["llama.cpp"] == pytest.approx(perplexities["Hotcold, dense"], rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--depths 100", "multiples of 512"),
        ("--ik-llama-bench /missing", "--ik-llama-bench /missing is no file"),
        ("--powerinfer /missing", "--powerinfer /missing is no file"),
        ("--models none.gguf", r"none\.gguf is no file"),
        ("--experts mixtral", "choose with --only"),
    ],
)
def test_what_cannot_be_measured_is_said(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module("cpu.compare").parse(options.split())
    assert re.search(message, capsys.readouterr().err)
