"""Every op and block type on a GPU, against a model of its numerics in NumPy: run it first on a new card.

    python benchmarks/gpu/op_table.py --gpu "RTX 4090" --jobs 8
    python benchmarks/gpu/op_table.py --gpu llvmpipe --seconds 30
    python benchmarks/gpu/op_table.py --write-expected expected.npz --jobs 8  # needs no GPU

The cases are those of tests/support/vulkan/table.py, so this runs in a checkout; it needs no package that
Hotcold does not need. The most telling cases come first, and none begins after ``--seconds``. A case has
failed where results are further from the model than 1e-5 of a row's largest value (a few cases allow more,
as the tests say), or where masks, ids or codes differ. Results that have all of the model's bits are counted
apart, since cards may divide less exactly than the software drivers that CI uses.

``--jobs`` processes share the cases. ``--expected FILE`` takes the model's results from a file that
``--write-expected`` wrote; a case that the file lacks is computed.

``--checked FILE`` keeps each result as a line, and a case that has one there is not run again: a software
driver takes hours for the whole table, which need not be hours in a row.

Each failure is a line; the last line of stdout is one JSON object, which also names the pipelines that took
longest to make. The exit code is 0 if nothing failed, 1 if something did, and 2 if there is no such device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.errors import UserError
from hotcold.kernels import vulkan
from hotcold.kernels.gpus import choose_gpu, open_gpu

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.mirrored_backend import MirroredBackend
from support.vulkan.table import Case, cases, difference, expected

_MOST_SHOWN = 20
_MOST_CHARACTERS = 300
_SLOWEST = 10
_LINE = "part "  #: before the report of one of several processes

Row = dict[str, Any]
#: The model's results of a case; None: they are to be computed.
Expected = Callable[[Case], list[Any] | None]


def failure(case: Case, backend: Any, wanted: list[Any] | None = None) -> tuple[str, bool]:
    """Returns what is wrong, "" if nothing; and whether all bits are the model's."""
    try:
        said, share = difference(case, case.run(backend), wanted)
    except (UserError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}", False
    if share <= case.tolerance:
        return "", not said
    return f"{said} (up to {share:.2g} of a row)", False


def run(
    backend: Any,
    seconds: float,
    results_file: Path | None = None,
    wanted: Expected = lambda case: None,
    part: slice = slice(None),
) -> Row:
    """Checks the cases of ``part``."""
    known = read_checked(results_file)
    failures, checked, same, not_begun = [], 0, 0, 0
    start = time.monotonic()
    for case in cases()[part]:
        result = known.get(str(case))
        if result is None:
            if time.monotonic() - start >= seconds:
                not_begun += 1
                continue
            result = failure(case, backend, wanted(case))
            note_checked(results_file, case, result)
        wrong, same_bits = result
        checked += 1
        same += same_bits
        if wrong:
            failures.append({"op": case.op, "case": case.name, "error": wrong[:_MOST_CHARACTERS]})
            print(f"{case}: {wrong}", flush=True)
    return {
        "checked": checked,
        "failed": len(failures),
        "same_bits": same,
        "left_out": not_begun,
        "seconds": round(time.monotonic() - start, 1),
        "failures": failures[:_MOST_SHOWN],
    }


def read_checked(file: Path | None) -> dict[str, tuple[str, bool]]:
    """The results of earlier runs, by case."""
    if file is None or not file.exists():
        return {}
    return {case: (wrong, same) for case, wrong, same in map(json.loads, file.read_text().splitlines())}


def note_checked(file: Path | None, case: Case, result: tuple[str, bool]) -> None:
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps([str(case), *result]) + "\n")


class PipelineTimes:
    """Notes how long a device takes to make each pipeline."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._names = {each.read_bytes(): each.stem for each in Path(vulkan.__path__[0]).glob("spirv/*.spv")}
        self.rows: list[tuple[float, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def pipeline(self, spirv: bytes, ranges: int, push: int, constants: list[int], halves: bool) -> Any:
        start = time.perf_counter()
        made = self._device.pipeline(spirv, ranges, push, constants, halves)
        self.rows.append((time.perf_counter() - start, f"{self._names[spirv]} {constants}"))
        return made

    def report(self) -> Row:
        slowest = sorted(self.rows, reverse=True)[:_SLOWEST]
        return {
            "pipelines": len(self.rows),
            "pipeline_s": sum(seconds for seconds, _ in self.rows),
            "slowest_pipelines": [[round(seconds, 3), name] for seconds, name in slowest],
        }


def reader(file: Path | None) -> Expected:
    """Returns a function that reads the model's results of a case from a file of :func:`write_expected`."""
    if file is None:
        return lambda case: None
    arrays = np.load(file)
    counts = dict(zip(arrays["cases"].tolist(), arrays["counts"].tolist(), strict=True))
    return lambda case: (
        [arrays[f"{case} {i}"] for i in range(counts[str(case)])] if str(case) in counts else None
    )


def write_expected(file: Path, part: slice = slice(None), most_bytes: float = np.inf) -> Row:
    """Writes the model's results of the cases of ``part``; within ``most_bytes`` those of the cases that take
    the model longest for a byte."""
    results: list[tuple[float, str, list[Any]]] = []
    for case in cases()[part]:
        start = time.perf_counter()
        arrays = expected(case)
        nbytes = sum(array.nbytes for array in arrays) + 1
        results.append(((time.perf_counter() - start) / nbytes, str(case), arrays))
        expected.cache_clear()
    chosen: dict[str, list[Any]] = {}
    for _, name, arrays in sorted(results, key=lambda each: -each[0]):
        nbytes = sum(array.nbytes for array in arrays)
        if nbytes <= most_bytes:
            most_bytes -= nbytes
            chosen[name] = arrays
    named = {f"{name} {i}": array for name, arrays in chosen.items() for i, array in enumerate(arrays)}
    counts = np.array([len(arrays) for arrays in chosen.values()])
    with file.open("wb") as opened:
        np.savez_compressed(opened, cases=np.array([*chosen]), counts=counts, **named)
    return {"cases": len(chosen), "bytes": file.stat().st_size}


def join_expected(files: Sequence[Path], file: Path) -> Row:
    """Joins files of :func:`write_expected` into one."""
    loaded = [np.load(each) for each in files]
    names, counts = (np.concatenate([each[key] for each in loaded]) for key in ("cases", "counts"))
    arrays = {key: each[key] for each in loaded for key in each.files if key not in ("cases", "counts")}
    with file.open("wb") as opened:
        np.savez_compressed(opened, cases=names, counts=counts, **arrays)
    return {"cases": len(names), "bytes": file.stat().st_size}


def check_part(args: argparse.Namespace, part: slice) -> Row:
    """The work of one process: the cases of ``part`` on the device. UserError: there is no such device."""
    gpu, _ = choose_gpu(args.gpu, needed=True)
    assert gpu is not None
    backend: Any = open_gpu(gpu, None)
    backend.device = times = PipelineTimes(backend.device)
    results = run(MirroredBackend(backend), args.seconds, args.checked, reader(args.expected), part)
    return {"device": gpu.name, "driver": gpu.driver, **results, **times.report()}


def joined(rows: Sequence[Row]) -> Row:
    """One report of several processes' reports."""
    sums = ("checked", "failed", "same_bits", "left_out", "pipelines", "pipeline_s")
    slowest = sorted((each for row in rows for each in row["slowest_pipelines"]), reverse=True)
    return {
        **{key: rows[0][key] for key in ("device", "driver")},
        **{key: sum(row[key] for row in rows) for key in sums},
        "seconds": max(row["seconds"] for row in rows),
        "failures": [each for row in rows for each in row["failures"]][:_MOST_SHOWN],
        "slowest_pipelines": slowest[:_SLOWEST],
    }


def share_work(arguments: Sequence[str], jobs: int) -> tuple[list[Row], list[str]]:
    """Runs this script in several processes, which share the cases, and returns their reports and the
    last lines of failed ones. Their output is printed."""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *arguments, "--jobs", "1", "--part", f"{i}/{jobs}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for i in range(jobs)
    ]  # fmt: skip
    rows, problems = [], []
    for process in processes:
        printed = process.communicate()[0].splitlines()
        reports = [line.removeprefix(_LINE) for line in printed if line.startswith(_LINE)]
        rows += map(json.loads, reports)
        for line in printed:
            if not line.startswith(_LINE):
                print(line, flush=True)
        if not reports:
            problems.append(f"exit code {process.returncode}: {(printed or ['no output'])[-1]}")
    return rows, problems


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpu", metavar="NAME|INDEX")
    parser.add_argument("--seconds", type=float, default=60, help="begin no case after this time (60)")
    parser.add_argument(
        "--checked", type=Path, metavar="FILE", help="results so far, which are not run again"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the cases (1)")
    parser.add_argument("--expected", type=Path, metavar="FILE", help="the model's results")
    parser.add_argument("--write-expected", type=Path, metavar="FILE", help="write them, and use no GPU")
    parser.add_argument("--most-mb", type=float, default=np.inf, help="of --write-expected: so large (all)")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if (args.gpu is None) == (args.write_expected is None):
        parser.error("give --gpu, or --write-expected alone")
    return args


def expected_by_jobs(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.npz" for i in range(args.jobs)]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--write-expected", str(file), "--part", f"{i}/{args.jobs}"]
                + ["--most-mb", str(args.most_mb / args.jobs)]
            )
            for i, file in enumerate(files)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            return 1
        print(json.dumps(join_expected(files, args.write_expected)))
    return 0


def main(arguments: Sequence[str]) -> int:
    args = parse(arguments)
    start, step = map(int, (args.part or "0/1").split("/"))
    part = slice(start, None, step)
    if args.write_expected:
        if args.jobs > 1:
            return expected_by_jobs(args)
        written = write_expected(args.write_expected, part, 1e6 * args.most_mb)
        if not args.part:
            print(json.dumps(written))
        return 0
    problems: list[str] = []
    try:
        if args.jobs > 1:
            choose_gpu(args.gpu, needed=True)
            rows, problems = share_work(arguments, args.jobs)
        else:
            rows = [check_part(args, part)]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.part:
        print(_LINE + json.dumps(rows[0]))
        return 0
    if not rows:
        print(f"error: no process ended: {problems[0]}", file=sys.stderr)
        return 1
    report = joined(rows) | ({"problems": problems} if problems else {})
    print(
        f"{report['device']}: {report['checked']} cases, {report['failed']} failed, "
        f"{report['same_bits']} with all bits"
    )
    print(json.dumps(report))
    return 1 if report["failed"] or problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
