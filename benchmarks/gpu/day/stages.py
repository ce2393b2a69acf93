"""The stages of day.sh: each is a process with a limit, and its result is in $OUT/day.json when it ends.

$OUT/day.json has a row for each stage, $OUT/day.log has what the stages printed, and $OUT/table.txt the last
table. If there is no device, $OUT/why.txt has what is needed to find out why, and the exit code is 3;
else it is 0: a stage that fails is a row, and the next one begins. SHARE=0.1 gives each stage but the first
a tenth of its time.
"""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
DAY = Path(os.environ.get("DAY", ROOT / ".day"))
OUT, WORK = (Path(os.environ.get(name, ".")) for name in ("OUT", "WORK"))
SMALL = os.environ.get("SMALL", "") not in ("", "0")
SHARE = float(os.environ.get("SHARE", "1"))
JOBS = min(8, os.cpu_count() or 1)
NO_DEVICE = 3
TABLE_LINES = 60
FIRST, SECOND = ("device", "table", "model", "doctor", "kernels", "cuda", "llama2-70b", "falcon-40b"), (
    "device", "doctor", "llama", "llama2-7b", "llama2-13b", "experts", "validated",
)  # fmt: skip
GROUPS = {"first": FIRST, "second": SECOND}
#: Stages of SMALL=1: all kinds, one slice.
SMALL_GROUPS = {"first": (*FIRST[:6], "small"), "second": ("device", "llama", "experts", "validated")}

Row = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """A process: its name, its most seconds, its most seconds with small shapes, and its command."""

    name: str
    limit_s: float
    small_s: float
    command: Callable[[float], list[str]]

    @property
    def most_s(self) -> float:
        return (self.small_s if SMALL else self.limit_s) * (1 if self.name == "device" else SHARE)


def chosen_gpu() -> str:
    """The device that is asked for; after the first stage, the number of the one that was found. "": none."""
    return os.environ.get("GPU", "")


def python(*arguments: object) -> list[str]:
    return [sys.executable, *map(str, arguments)]


def own(step: str) -> Callable[[float], list[str]]:
    return lambda seconds: python(__file__, "--step", step)


def compare(*arguments: str) -> Callable[[float], list[str]]:
    """benchmarks/gpu/compare.py with some of its parts, in three quarters of a stage's seconds: a part may
    take 15 s more to end."""

    def command(seconds: float) -> list[str]:
        words = python(HERE.parent / "compare.py", "--json", WORK / "report.json", *arguments)
        words += ["--minutes", f"{max(seconds - 16, 0.75 * seconds) / 60:.3f}", "--hardware", str(hardware())]
        words += ["--gpu", chosen_gpu()]
        if (WORK / "llama").exists():
            words += ["--llama-bench", str(llama_program())]
        return words + ["--small"] * SMALL

    return command


def slice_of(model: str) -> Callable[[float], list[str]]:
    return compare("--parts", "slices", "--models", model)


def op_table(seconds: float) -> list[str]:
    command = python(HERE.parent / "op_table.py", "--gpu", chosen_gpu(), "--seconds", 0.7 * seconds)
    command += ["--jobs", str(JOBS), "--checked", str(checked_cases())]
    if (DAY / "expected.npz").exists():
        command += ["--expected", str(DAY / "expected.npz")]
    return command


def doctor(seconds: float) -> list[str]:
    return python(
        "-m", "hotcold", "doctor", "--again", "--json", "-o", hardware(), "--gpu", chosen_gpu()
    )  # fmt: skip


STAGES = {
    stage.name: stage
    for stage in (
        Stage("device", 20, 20, own("device")),
        Stage("table", 60, 60, op_table),
        Stage("model", 45, 60, compare("--parts", "built-in model")),
        Stage("doctor", 40, 75, doctor),
        Stage("kernels", 75, 90, compare("--parts", "matrices", "kernels")),
        Stage("cuda", 30, 10, own("cuda")),
        Stage("llama2-70b", 130, 0, slice_of("llama2-70b")),
        Stage("falcon-40b", 90, 0, compare("--parts", "slices", "--models", "falcon-40b", "--published")),
        Stage("llama", 90, 240, own("llama")),
        Stage("llama2-7b", 90, 0, slice_of("llama2-7b")),
        Stage("llama2-13b", 70, 0, slice_of("llama2-13b")),
        Stage("small", 0, 150, compare("--parts", "slices", "--quick")),
        Stage("experts", 60, 45, compare("--parts", "experts")),
        Stage("validated", 60, 90, own("validated")),
    )
}


def checked_cases() -> Path:
    """The file with a line for each case that the op table has checked."""
    return WORK / "cases.txt"


def hardware() -> Path:
    """Doctor's figures, which later stages take."""
    return WORK / "hardware.json"


def llama_program() -> Path:
    """A program with llama-bench's options, of the libraries that pack.sh put into .day/."""
    program = WORK / "llama-bench"
    lines = ["#!/bin/sh", f"export PYTHONPATH='{WORK / 'llama'}'"]
    lines += ["export GGML_VK_VISIBLE_DEVICES=0"] * SMALL  # it uses no software driver that is not named
    program.write_text("\n".join([*lines, f"exec '{sys.executable}' '{HERE / 'llama_bench.py'}' \"$@\"", ""]))
    program.chmod(0o755)
    return program


def run_stage(stage: Stage) -> Row:
    """A failure is a row, too."""
    report = WORK / "report.json"
    report.unlink(missing_ok=True)
    start, log = time.monotonic(), WORK / f"{stage.name}.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(
            stage.command(stage.most_s), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            cwd=ROOT, env=os.environ | {"XDG_CACHE_HOME": str(WORK)}, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(stage.most_s)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, 9)  # its own children, too
            process.wait()
    printed = log.read_text(encoding="utf-8", errors="replace")
    with (OUT / "day.log").open("a", encoding="utf-8") as whole:
        whole.write(f"=== {stage.name}\n{printed}\n")
    row: Row = {"stage": stage.name, "seconds": round(time.monotonic() - start, 1), "exit": code}
    row["result"] = parsed(report.read_text()) if report.exists() else last_object(printed)
    if stage.name == "table" and code is None and checked_cases().exists():
        row["result"] = cases_so_far()
    if code != 0:
        lines = [line for line in printed.strip().splitlines() if not line.startswith("{")]
        row["problem"] = (
            f"{'ran out of time' if code is None else f'exit {code}'}: {(lines or ['no output'])[-1]}"
        )
    return row


def cases_so_far() -> Row:
    """Returns the counts of an op table that was ended before its report."""
    lines = checked_cases().read_text(encoding="utf-8").splitlines()
    cases = [case for line in lines if (case := parsed(line))]  # the last line may be cut short
    failed = [[case, problem] for case, problem, _ in cases if problem]
    same_bits = sum(same for *_, same in cases)
    return {"checked": len(cases), "failed": len(failed), "same_bits": same_bits, "failures": failed[:20]}


def last_object(printed: str) -> Any:
    """The JSON object in the last line; None if there is none."""
    return parsed((printed.strip().splitlines() or [""])[-1])


def parsed(text: str) -> Any:
    """Returns None for a report that was cut short."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def table(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """At most 60 lines: each stage, then the first measurements of each."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from gpu.report import line_of

    lines = [
        f"{row['stage']:12} {row['seconds']:6.1f} s  {str(row.get('problem', 'done'))[:80]}" for row in rows
    ]
    lines += [f"{name:12}           not begun" for name in names[len(rows) :]]
    details = []
    for row in rows:
        result = row["result"] or {}
        measured = [line_of(each) for each in result.get("rows", []) if not each.get("provisional")]
        if row["stage"] == "table" and "checked" in result:
            counts = ("checked", "failed", "same_bits", "left_out")
            measured = [f"{name}: {result[name]}" for name in counts if name in result]
        details += [f"  {row['stage']}: {line}"[:100] for line in measured]
    left = TABLE_LINES - len(lines) - 1
    rest = [f"  and {len(details) - left} more in day.json"] if len(details) > left else []
    return [*lines, *details[:left], *rest]


def main(arguments: Sequence[str]) -> int:
    groups = SMALL_GROUPS if SMALL else GROUPS
    names = [name for each in arguments or ["first"] for name in groups.get(each, (each,))]
    if unknown := [name for name in names if name not in STAGES]:
        print(f"day.sh: no stage {unknown[0]}: choose from {', '.join([*groups, *STAGES])}", file=sys.stderr)
        return 2
    names = ["device", *dict.fromkeys(name for name in names if name != "device")]
    rows: list[Row] = []
    for name in names:
        rows.append(run_stage(STAGES[name]))
        (OUT / "day.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {rows[-1].get('problem', 'done')} in {rows[-1]['seconds']} s", flush=True)
        if name == "device" and rows[-1]["exit"] != 0:
            write_why()
            return NO_DEVICE
        if name == "device":
            os.environ["GPU"] = str(rows[-1]["result"]["index"])
    text = "\n".join(table(rows, names))
    (OUT / "table.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


# Steps, each in a process of its own


def device() -> int:
    """Prints the device that the other stages use, as JSON, after facts about the machine."""
    for command in (["nvidia-smi"], ["lscpu"], ["free", "-g"]):
        print(output_of(command, 5))
    from hotcold.errors import UserError
    from hotcold.kernels.gpus import choose_gpu
    from lib.machine import commit

    try:
        gpu, _ = choose_gpu(chosen_gpu() or None, needed=True)
    except UserError as error:
        print(f"error: {error}")
        return NO_DEVICE
    assert gpu is not None
    facts = {"index": gpu.index, "name": gpu.name, "driver": gpu.driver, "kind": gpu.kind}
    print(json.dumps(facts | {"commit": commit(), "python": sys.version.split()[0]}))
    return 0


def cuda() -> int:
    program = DAY / "cuda_bounds"
    if not program.exists():
        print(json.dumps({"skipped": "cuda_bounds: pack.sh found no nvcc"}))
        return 0
    return subprocess.run([program], check=False).returncode


def llama() -> int:
    """One dense file on both engines, all of it on the device: speeds, and the first greedy tokens."""
    if not (WORK / "llama").exists():
        print(json.dumps({"skipped": "llama.cpp: pack.sh did not find its libraries"}))
        return 0
    from gpu.ops import OpsTask, continued
    from gpu.parts import MODELS, SMALL_MODELS
    from gpu.slices import Slice, write_dense

    shape = SMALL_MODELS["small"] if SMALL else MODELS["llama2-7b"]
    path, prompt, tokens = WORK / "dense.gguf", *((8, 8) if SMALL else (128, 64))
    write_dense(path, Slice(shape, shape.layers, "Q4_0"), 512)
    rows = [
        {"part": "llama", "case": "Hotcold", **continued(OpsTask(chosen_gpu(), 0.0), path, prompt, tokens)}
    ]
    numbers = ["-p", str(prompt), "-n", str(tokens), "-r", "1" if SMALL else "3", "-ngl", "99"]
    done = subprocess.run(
        [llama_program(), "-m", path, *numbers], capture_output=True, text=True, check=False
    )
    path.unlink()
    tests = last_object(done.stdout)
    if tests is None:
        print(done.stderr[-3000:], json.dumps({"rows": rows}), sep="\n")
        return 1
    names = {False: "prompt_tok_s", True: "tok_s"}
    speeds = {
        names[bool(test["n_gen"])]: sorted(test["samples_ts"])[len(test["samples_ts"]) // 2] for test in tests
    }
    rows.append({"part": "llama", "case": "llama.cpp", **speeds, "first_tokens": tests[0]["first_tokens"]})
    equal = sum(a == b for a, b in zip(*(row["first_tokens"] for row in rows), strict=False))
    print(json.dumps({"rows": rows, "devices": tests[0]["devices"], "first_tokens_equal": equal}))
    return 0


def validated() -> int:
    """Runs the op table's first cases under the validation layer; its messages are the result."""
    layer = WORK / "layer" / "libVkLayer_khronos_validation.so"
    if not layer.exists():
        print(json.dumps({"skipped": "validation layer: pack.sh did not find it"}))
        return 0
    sys.path.insert(0, str(ROOT / "tests"))
    from support.vulkan import layers

    layers.NEWER = layer
    seconds = 20 if SMALL else 30
    command = python(HERE.parent / "op_table.py", "--gpu", chosen_gpu(), "--seconds", seconds)
    done = subprocess.run(
        command, env=layers.environment("newer", layer.parent), capture_output=True, text=True, check=False
    )
    said = layers.messages(layer.parent)
    print(done.stdout[-2000:], done.stderr[-2000:], said[:100_000], sep="\n")
    ids = {each.split("]")[0].strip(" []") for each in said.split("Validation ")[1:]}
    figures = {"messages": said.count("Validation "), "kinds": sorted(ids)[:20]}
    print(json.dumps(figures | {"table": last_object(done.stdout)}))
    return done.returncode or bool(said)


def output_of(command: Sequence[str], seconds: float, **variables: str) -> str:
    """Returns a program's output, or the reason why it does not run."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False,
            env=os.environ | variables,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return f"$ {' '.join(command)}\n{error}\n"
    return f"$ {' '.join(command)}\n{done.stdout}{done.stderr}\n"


def write_why() -> None:
    """Notes what is needed to find out why there is no device, in a few seconds."""
    manifests = [
        each for folder in ("/etc", "/usr/share", "/usr/local/share", "/usr/local/nvidia/share")
        for each in glob.glob(f"{folder}/vulkan/icd.d/*.json")
    ]  # fmt: skip
    parts = [(WORK / "device.txt").read_text(encoding="utf-8", errors="replace")]
    parts += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name[:3] in ("VK_", "LD_")]
    parts += [f"manifests: {manifests}", f"devices: {glob.glob('/dev/nvidia*') + glob.glob('/dev/dri/*')}"]
    parts.append(output_of(["sh", "-c", "ldconfig -p | grep -E 'vulkan|nvidia|GLX|EGL'"], 2))
    listing = "from hotcold.kernels.gpus import find_gpus; print(find_gpus())"
    parts.append(output_of(python("-c", listing), 4, VK_LOADER_DEBUG="all"))
    for manifest in manifests[:3]:
        text = Path(manifest).read_text(encoding="utf-8", errors="replace")
        parts.append(f"{manifest}: {text}")
        try:
            library = json.loads(text)["ICD"]["library_path"]
        except (ValueError, KeyError):
            continue
        path = library if "/" in library else f"$(ldconfig -p | grep -m1 -o '/.*{library}')"
        parts.append(output_of(["sh", "-c", f"ldd {path}"], 1))
    (OUT / "why.txt").write_text("\n".join(parts), encoding="utf-8")
    print(f"no device: {OUT / 'why.txt'} has what is needed to find out why")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "benchmarks"))
    if sys.argv[1:2] == ["--step"]:
        sys.exit({"device": device, "cuda": cuda, "llama": llama, "validated": validated}[sys.argv[2]]())
    sys.exit(main(sys.argv[1:]))
