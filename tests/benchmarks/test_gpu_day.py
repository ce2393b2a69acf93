"""The kit for a day with a GPU: its stages end in time, and what they measured is written."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support.vulkan.devices import device_index
from support.vulkan.model import OrderedReference
from support.vulkan.table import cases, expected

pytestmark = pytest.mark.usefixtures("benchmarks")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def op_table() -> ModuleType:
    return importlib.import_module("gpu.op_table")


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module, whose processes write to a temporary folder."""
    module = importlib.import_module("gpu.day.stages")
    for name in ("OUT", "WORK"):
        monkeypatch.setattr(module, name, tmp_path)
    return module


@pytest.fixture(scope="module")
def run_day(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Run:
    """Runs day.sh with small shapes in an environment whose PATH has every program except git."""
    folder = tmp_path_factory.mktemp("bin")
    for place in ("/usr/sbin", "/usr/bin", "/sbin", "/bin"):
        for program in Path(place).glob("*"):
            if program.name != "git" and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    assert shutil.which("git", path=str(folder)) is None

    def run(out: Path, *names: str, **more: str) -> subprocess.CompletedProcess[str]:
        own = {"PATH": str(folder), "PYTHON": sys.executable, "OUT": str(out), "DAY": str(folder / "none")}
        own |= {"SMALL": "1", "HOTCOLD_GPU": ""}
        return subprocess.run(
            ["bash", repository / "benchmarks/gpu/day/day.sh", *names],
            env=os.environ | own | more, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def test_a_day_writes_every_stage(run_day: Run, tmp_path: Path) -> None:
    device_index("lavapipe")
    done = run_day(tmp_path, "table", "cuda", GPU="llvmpipe", SHARE="0.15")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "day.json").read_text())
    assert [row["stage"] for row in rows] == ["device", "table", "cuda"]
    device = rows[0]["result"]
    assert "llvmpipe" in device["name"] and device["commit"]
    table = (tmp_path / "table.txt").read_text().splitlines()
    assert [line.split()[0] for line in table[:3]] == ["device", "table", "cuda"] and len(table) <= 60
    assert "=== table\n" in (tmp_path / "day.log").read_text()


def test_without_a_device_a_day_ends_in_its_first_stage(run_day: Run, tmp_path: Path) -> None:
    device_index("lavapipe")
    nothing = dict.fromkeys(("VK_DRIVER_FILES", "VK_ICD_FILENAMES"), "/no/driver.json")
    done = run_day(tmp_path, "first", **nothing)
    assert done.returncode == 3, done.stdout + done.stderr
    rows = json.loads((tmp_path / "day.json").read_text())
    assert [row["stage"] for row in rows] == ["device"]
    assert "no GPU found" in rows[0]["problem"]
    why = (tmp_path / "why.txt").read_text()
    assert "VK_DRIVER_FILES=/no/driver.json" in why and "find_gpus" in why


def test_each_kernel_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU backend in the GPU's place: a measurement that cannot run is a row with its error."""
    ops = importlib.import_module("gpu.ops")
    monkeypatch.setattr(ops, "SMALL_KERNELS", (("F16", "Q4_0"), 64, 128, 2, 1, 64))
    monkeypatch.setattr(ops, "run_seconds", lambda program, least=5, seconds=0.2: program.run() or 1.0)
    rows: list[dict[str, object]] = []
    ops.kernels(ops.OpsTask("cpu", 60.0, small=True, threads=1), rows.append)
    assert [row["case"] for row in rows] == [
        "ffn F16 128 x 64", "ffn Q4_0 128 x 64", "attention 64 positions", "norm 64"
    ]  # fmt: skip
    assert [row["failed"] for row in rows if "failed" in row] == []


@pytest.mark.parametrize(
    ("program", "code", "problem"),
    [
        ("print('{\"a\": 1}')", 0, None),
        ("print('wrong'); raise SystemExit(4)", 4, "exit 4: wrong"),
        ("import time; print('begun', flush=True); time.sleep(600)", None, "ran out of time: begun"),
    ],
)
def test_a_stage_becomes_a_row(
    stages: ModuleType, tmp_path: Path, program: str, code: int | None, problem: str | None
) -> None:
    """Also where it has started a process that would run on: that ends with it."""
    row = stages.run_stage(stages.Stage("own", 2, 2, lambda seconds: [sys.executable, "-c", program]))
    assert (row["exit"], row.get("problem")) == (code, problem)
    assert row["result"] == ({"a": 1} if code == 0 else None)


def test_an_op_table_that_ran_out_of_time_keeps_its_cases(stages: ModuleType) -> None:
    lines = [["norm 1", "", True], ["norm 2", "too far", False], ["linear 1", "", False]]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '["linear 2", "'
    program = f"import time; open({str(stages.checked_cases())!r}, 'w').write({text!r}); time.sleep(600)"
    for name, counts in (("table", {"checked": 3, "failed": 1, "same_bits": 1}), ("model", None)):
        row = stages.run_stage(stages.Stage(name, 2, 2, lambda seconds: [sys.executable, "-c", program]))
        result = row["result"] and {key: row["result"][key] for key in counts or ()}
        assert row["exit"] is None and result == counts
    assert row["result"] is None


def test_several_processes_take_noted_cases(
    op_table: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    device_index("lavapipe")
    every, results = cases(), tmp_path / "cases.txt"
    for case in every[:3]:
        op_table.note_checked(results, case, ("", True))
    arguments = ["--gpu", "llvmpipe", "--seconds", "0", "--jobs", "2", "--checked", str(results)]
    assert op_table.main(arguments) == 0
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (report["checked"], report["same_bits"], report["left_out"]) == (3, 3, len(every) - 3)


def test_the_limits_of_a_group_fit_a_call_of_ten_minutes(stages: ModuleType) -> None:
    for group, small in (("first", False), ("second", False), ("first", True), ("second", True)):
        names = (stages.SMALL_GROUPS if small else stages.GROUPS)[group]
        found = [stages.STAGES[name] for name in names]
        assert sum(stage.small_s if small else stage.limit_s for stage in found) <= 560


def test_processes_share_the_op_table(op_table: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    device_index("lavapipe")
    assert op_table.main(["--gpu", "llvmpipe", "--seconds", "0", "--jobs", "2"]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (found["checked"], found["left_out"]) == (0, len(cases()))


def test_results_of_the_model_are_read_from_a_file(op_table: ModuleType, tmp_path: Path) -> None:
    """Two parts, joined; a case that is not in the file is computed."""
    files = [tmp_path / "0.npz", tmp_path / "1.npz"]
    for i, file in enumerate(files):
        op_table.write_expected(file, slice(i, i + 1))
    assert op_table.join_expected(files, tmp_path / "all.npz")["cases"] == 2
    read = op_table.reader(tmp_path / "all.npz")
    for case in cases()[:2]:
        assert all(map(np.array_equal, read(case), expected(case)))
    assert read(cases()[2]) is None


def test_the_file_holds_the_results_that_take_longest(op_table: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "few.npz"
    whole = op_table.write_expected(file, slice(4))
    least = min(sum(array.nbytes for array in expected(case)) for case in cases()[:4])
    assert whole["cases"] == 4 and op_table.write_expected(file, slice(4), least)["cases"] == 1


def test_a_wrong_expectation_is_a_failure(op_table: ModuleType) -> None:
    case = cases()[0]
    right = expected(case)
    wrong = [array + 1 for array in right]
    assert op_table.failure(case, OrderedReference(), right) == ("", True)
    assert "differ" in op_table.failure(case, OrderedReference(), wrong)[0]


def test_a_commit_is_known_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = importlib.import_module("lib.machine")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "REPOSITORY", tmp_path)
    assert machine.commit() == "unknown"
    (tmp_path / ".day").mkdir()
    (tmp_path / ".day" / "commit").write_text("abc1234\n")
    assert machine.commit() == "abc1234"
