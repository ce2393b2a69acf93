"""Hot and cold neurons on a GPU and a CPU, measured on one machine, in one command of at most 8 minutes.

    python benchmarks/gpu/compare.py --json hybrid.json                # about 8 minutes
    python benchmarks/gpu/compare.py --quick --json hybrid.json        # about 3
    python benchmarks/gpu/compare.py --gpu NAME --llama-bench build/bin/llama-bench
    python benchmarks/gpu/compare.py --gpu cpu --quick                 # without a GPU: tries the script

What is most wanted is first, each part in a process of its own, which is ended when its time is over: the
device; a check of every op on it (benchmarks/gpu/op_table.py); what `hotcold doctor` measures; the tokens
of the built-in model, CPU against GPU; matrices; then slices of large models (benchmarks/gpu/slices.py), made
here: on the CPU, by layers (dense: llama.cpp's method), with random, frequent and solved hot neurons, and all
on the GPU, at a quarter of the model; then at other budgets; then a layer of Mixtral's experts. What there is
no time for is named. All results are in the file of --json, which is written after every case; the goals and
their figures are printed last, and once more as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hotcold.kernels import BACKENDS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu import cases, ops
from gpu.parts import MODELS, Part, planned
from gpu.report import goals, key_of, line_of, rounded, text
from lib.machine import commit

Row = dict[str, Any]

FULL_S, QUICK_S = 455.0, 160.0
GRACE_S = 15.0  #: after a part's time, until its process is ended

FIRST = """\
What to look at first, when this is done:
  1. op table: every failure is a wrong result on this driver: mend that first
  2. built-in model: 5 of 5 equal; logits: at most 1e-3 from the CPU's
  3. doctor: device and processor GB/s, their balance; the handshake in us
  4. matrices: Q4_0 8192 x 28672, one row: its share of the card's own GB/s
  5. F16 at 25 %: solver against layer split, frequency and random
  6. measured over predicted: where it is not near 1, the plan is wrong"""


def run_part(kind: str, task: dict[str, Any], emit: Callable[[Row], None]) -> None:
    """In the process of a part."""
    if kind == "device":
        emit({"part": "device", **device_facts(task["gpu"])})
    elif kind == "slices":
        cases.run(cases.Task(**task), emit)
    else:
        measure = {
            "matrices": ops.matrices,
            "kernels": ops.kernels,
            "experts": ops.expert_layers,
            "built-in model": ops.built_in_model,
        }[kind]
        measure(ops.OpsTask(**task), emit)


def device_facts(gpu: str | None) -> Row:
    """``gpu`` None takes what loading would."""
    if gpu in BACKENDS:
        return {"gpu": gpu, "name": f"backend {gpu}", "kind": "software", "driver": "none"}
    from hotcold.kernels.gpus import choose_gpu

    device, _ = choose_gpu(gpu, needed=True)
    assert device is not None
    return {"gpu": str(device.index), **asdict(device)}


class Comparison:
    """Runs parts until the time is over, and keeps their rows."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.start = time.monotonic()
        self.end = self.start + (60 * args.minutes if args.minutes else QUICK_S if args.quick else FULL_S)
        self.rows: dict[str, Row] = {}
        self.settings = settings(args)
        self.environment = os.environ | {"XDG_CACHE_HOME": str(folder)}
        self.hardware: Path | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def add(self, row: Row) -> None:
        """A row with the key of an earlier one takes its place."""
        short = rounded(row)
        self.rows[key_of(row)] = short
        if not row.get("provisional"):
            print(f"{self.seconds:5.0f} s  {line_of(short)}"[:80], flush=True)
        self.save()

    def save(self) -> None:
        if self.args.json is not None:
            written = json.dumps(self.report(), indent=1)
            beside = self.args.json.with_suffix(".part")
            beside.write_text(written + "\n", encoding="utf-8")
            beside.replace(self.args.json)

    def report(self) -> dict[str, Any]:
        return {"settings": self.settings, "seconds": round(self.seconds, 1), "rows": [*self.rows.values()]}

    def run(self) -> None:
        device = self._own(Part("device", "device", {"gpu": self.args.gpu}, 30.0))
        facts = next((row for row in device if "gpu" in row), None)
        if facts is None:
            return
        gpu, small = facts["gpu"], self.args.small or facts["kind"] == "software"
        self.settings |= {"gpu": facts["name"], "driver": facts["driver"], "small": small}
        if gpu not in BACKENDS:
            self._op_table(gpu)
        if self.args.hardware is None:
            self._doctor(gpu, 30.0 if small else 75.0)
        elif self.args.hardware.exists():
            self.hardware = self.args.hardware
        for part in planned(self.args, gpu, small, self.hardware, self.folder):
            if not self.args.parts or part.kind in self.args.parts:
                self._own(part)

    def _own(self, part: Part) -> list[Row]:
        """Runs a part as this script, and returns its rows."""
        if self.left < part.least:
            self.add({"part": part.kind, "case": part.name, "failed": "left out: time ran out"})
            return []
        seconds = min(part.most, self.left)
        task = part.task | ({"seconds": seconds} if "seconds" in part.task else {})
        task_file, rows_file = self.folder / "task.json", self.folder / "rows.jsonl"
        task_file.write_text(json.dumps({"kind": part.kind, "task": task}), encoding="utf-8")
        rows_file.write_text("", encoding="utf-8")
        command = [sys.executable, __file__, "--part", str(task_file), str(rows_file)]
        rows: list[Row] = []

        def read() -> None:
            lines = rows_file.read_text(encoding="utf-8").splitlines(keepends=True)
            for line in lines[len(rows) :]:
                if line.endswith("\n"):
                    rows.append(json.loads(line))
                    self.add(rows[-1])

        problem = self._watch(command, seconds + GRACE_S, read)[1]
        if problem:
            self.add({"part": part.kind, "case": part.name, "failed": problem})
        return rows

    def _watch(self, command: Sequence[str], seconds: float, poll: Callable[[], None]) -> tuple[str, str]:
        """Returns what a process printed, and what was wrong with it; empty if nothing."""
        log = self.folder / "log.txt"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=self.environment
            )
            until, ended = time.monotonic() + seconds, False
            while not ended and time.monotonic() < until:
                try:
                    process.wait(0.3)
                    ended = True
                except subprocess.TimeoutExpired:
                    poll()
            if not ended:
                process.kill()
                process.wait()
        poll()
        printed = log.read_text(encoding="utf-8", errors="replace")
        if not ended:
            return printed, f"ended after {seconds:.0f} s; its last words: {last_line(printed)}"
        if process.returncode:
            return printed, f"exit code {process.returncode}: {last_line(printed)}"
        return printed, ""

    def _op_table(self, gpu: str) -> None:
        if self.args.parts and "op table" not in self.args.parts:
            return
        seconds = min(30.0 if self.args.quick else 60.0, self.left)
        script = Path(__file__).with_name("op_table.py")
        command = [sys.executable, str(script), "--gpu", gpu, "--seconds", str(seconds)]
        printed, problem = self._watch(command, seconds + 30, lambda: None)
        report = last_object(printed)
        row: Row = {"part": "op table", "case": "all"}
        self.add(row | (report or {"failed": problem or "no report"}))

    def _doctor(self, gpu: str, most: float) -> None:
        """Its figures are the ones that loading takes, too, through the folder with the cached ones."""
        path = self.folder / "hardware.json"
        command = [sys.executable, "-m", "hotcold", "doctor", "--again", "--json", "-o", str(path)]
        if gpu not in BACKENDS:  # else doctor finds none, or one that is not asked for
            command += ["--gpu", gpu]
        printed, problem = self._watch(command, min(most, max(20.0, self.left)), lambda: None)
        row: Row = {"part": "doctor", "case": "all"}
        report = last_object(printed)
        if problem or report is None or not path.exists():
            self.add(row | {"failed": problem or "no report"})
            return
        self.hardware = path
        self.add(row | report)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["none"])[-1][:200]


def last_object(text: str) -> Row | None:
    """The JSON object in the last line; None where there is none."""
    try:
        parsed = json.loads(last_line_whole(text))
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def last_line_whole(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "commit": commit(),
        "quick": args.quick,
        "activity": "published" if args.published else "10 % of neurons in every model",
        "threads": args.threads or os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


@contextmanager
def working_folder(chosen: Path | None) -> Iterator[Path]:
    """In memory where there is room for the largest file, else where temporary files are."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and os.access(shared, os.W_OK) and free_bytes(shared) > 16 << 30
    with tempfile.TemporaryDirectory(dir=chosen or (shared if roomy else None)) as folder:
        yield Path(folder)


def free_bytes(folder: Path) -> int:
    file_system = os.statvfs(folder)
    return file_system.f_bavail * file_system.f_frsize


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add: Callable[..., Any] = parser.add_argument
    add("--gpu", help="a GPU's name or index (default: as loading chooses); cpu: no GPU, to try the script")
    add("--quick", action="store_true", help="3 minutes instead of 8")
    add("--minutes", type=float, help="this time instead")
    add("--small", action="store_true", help="small shapes, as a processor that plays a GPU gets them")
    add("--models", nargs="+", choices=MODELS, metavar="NAME", help=f"of {', '.join(MODELS)} (all)")
    add("--published", action="store_true", help="activity as published of each model, not 10 %% in all")
    add("--parts", nargs="+", metavar="KIND", help="only these: op table, built-in model, matrices, ...")
    add("--hardware", type=Path, metavar="FILE", help="what doctor wrote there, in place of measuring again")
    add("--threads", type=int, help="of the processor (default: as loading chooses)")
    add("--llama-bench", type=Path, metavar="FILE", help="llama.cpp's program, of a build for this GPU")
    add("--work", type=Path, help="folder for the model files (default: in memory, or temporary)")
    add("--json", type=Path, metavar="FILE", help="results, written after every case")
    add("--part", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.llama_bench and not args.llama_bench.is_file():
        parser.error(f"--llama-bench {args.llama_bench} is no file: give the path of that program")
    return args


def serve(task_file: Path, rows_file: Path) -> None:
    """The process of a part: rows are lines of a file, each written at once."""
    request = json.loads(task_file.read_text(encoding="utf-8"))
    with rows_file.open("a", encoding="utf-8") as file:

        def emit(row: Row) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        run_part(request["kind"], request["task"], emit)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    if args.part:
        serve(*args.part)
        return
    print(FIRST, flush=True)
    with working_folder(args.work) as folder:
        comparison = Comparison(args, folder)
        try:
            comparison.run()
        except KeyboardInterrupt:
            print("stopped: what was measured until now follows")
    report = comparison.report()
    report["goals"] = [vars(goal) for goal in goals(report)]
    print("\n".join(text(report)))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in report.items() if name != "rows"}))


if __name__ == "__main__":
    main()
