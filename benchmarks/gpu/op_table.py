"""Every op and block type on a GPU, against a model of its numerics in NumPy: run it first on a new card.

    python benchmarks/gpu/op_table.py --gpu "RTX 4090"
    python benchmarks/gpu/op_table.py --gpu llvmpipe --seconds 30

The cases are those of tests/support/vulkan/table.py, so this runs in a checkout; it needs no package that
Hotcold does not need. The most telling cases come first, and none begins after ``--seconds``. A case has
failed where results are further from the model than 1e-5 of a row's largest value (a few cases allow more,
as the tests say), or where masks, ids or codes differ. Results that have all of the model's bits are counted
apart, since cards may divide less exactly than the software drivers that CI uses.

``--seen FILE`` keeps each result as a line, and a case that has one there is not run again: a software driver
takes hours for the whole table, which need not be hours in a row.

Each failure is a line; the last line of stdout is one JSON object. The exit code is 0 if nothing failed, 1 if
something did, and 2 where there is no such device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from hotcold.errors import UserError
from hotcold.kernels.gpus import choose_gpu, open_gpu

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.mirrored_backend import MirroredBackend
from support.vulkan.table import Case, cases, difference

_MOST_SHOWN = 20
_MOST_CHARACTERS = 300


def failure(case: Case, backend: Any) -> tuple[str, bool]:
    """Returns what is wrong, "" if nothing; and whether all bits are the model's."""
    try:
        said, share = difference(case, case.run(backend))
    except (UserError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}", False
    if share <= case.tolerance:
        return "", not said
    return f"{said} (up to {share:.2g} of a row)", False


def run(backend: Any, seconds: float, seen: Path | None = None) -> dict[str, Any]:
    known = read_seen(seen)
    failures, checked, same, not_begun = [], 0, 0, 0
    start = time.monotonic()
    for case in cases():
        result = known.get(str(case))
        if result is None:
            if time.monotonic() - start >= seconds:
                not_begun += 1
                continue
            result = failure(case, backend)
            note_seen(seen, case, result)
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


def read_seen(file: Path | None) -> dict[str, tuple[str, bool]]:
    """The results of earlier runs, by case."""
    if file is None or not file.exists():
        return {}
    return {case: (wrong, same) for case, wrong, same in map(json.loads, file.read_text().splitlines())}


def note_seen(file: Path | None, case: Case, result: tuple[str, bool]) -> None:
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps([str(case), *result]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpu", required=True, metavar="NAME|INDEX")
    parser.add_argument("--seconds", type=float, default=60, help="begin no case after so many (60)")
    parser.add_argument("--seen", type=Path, metavar="FILE", help="results so far, which are not run again")
    args = parser.parse_args()
    try:
        gpu, _ = choose_gpu(args.gpu, needed=True)
        assert gpu is not None
        backend: Any = open_gpu(gpu, None)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = {
        "device": gpu.name,
        "driver": gpu.driver,
        **run(MirroredBackend(backend), args.seconds, args.seen),
    }
    print(
        f"{gpu.name}: {found['checked']} cases, {found['failed']} failed, {found['same_bits']} with all bits"
    )
    print(json.dumps(found))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
