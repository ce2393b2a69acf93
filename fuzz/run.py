"""Runs a fuzz target: ``python fuzz/run.py gguf_reader --minutes 20``, or ``--mutants 1000000``.

A target is a module beside this one with ``one_input(data: bytes)``, which raises what it should not, and
``CORPUS``, the folder of its seeds in ``tests/corpus``. ``--minutes`` needs the package atheris, which looks
for inputs that reach new code; ``--mutants`` changes the seeds at random and needs nothing. The target
runs in a process of its own: an input that crashes it, hangs (10 s) or takes too much memory is kept in
``out/fuzz``. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import json
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOUND = ROOT / "out" / "fuzz"
HANG_SECONDS = 10
MOST_MEMORY = 512 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target", choices=sorted(path.stem for path in targets()))
    amount = parser.add_mutually_exclusive_group(required=True)
    amount.add_argument("--minutes", type=float, help="with atheris")
    amount.add_argument("--mutants", type=int, help="without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        fuzz(args) if args.minutes else mutate(args)
        return 0
    started = time.monotonic()
    found_before = set(FOUND.glob(f"{args.target}-*"))
    command = [sys.executable, __file__, *sys.argv[1:], "--inside"]
    child = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(child.stdout[-4000:])
    figures = {name: int(n) for name, n in re.findall(r"^stat::(\w+):\s+(\d+)$", child.stdout, re.MULTILINE)}
    result = {
        "target": args.target,
        "executions": figures.pop("number_of_executed_units", None),
        "crashes": len(set(FOUND.glob(f"{args.target}-*")) - found_before) or int(child.returncode != 0),
        "seconds": round(time.monotonic() - started),
        "peak_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10,
        **{name: figures[name] for name in ("accepted", "growth_kib", "new_units_added") if name in figures},
    }
    print(json.dumps(result))
    return int(result["crashes"] != 0)


def targets() -> list[Path]:
    return [path for path in Path(__file__).parent.glob("*.py") if "\ndef one_input(" in path.read_text()]


def fuzz(args: argparse.Namespace) -> None:
    """Guided by coverage, until the time is over or an input fails."""
    import atheris

    FOUND.mkdir(parents=True, exist_ok=True)
    with atheris.instrument_imports(include=["hotcold"]):
        target = importlib.import_module(args.target)
    with tempfile.TemporaryDirectory() as grown:
        options = [
            f"-max_total_time={round(args.minutes * 60)}", f"-timeout={HANG_SECONDS}", "-max_len=16384",
            f"-rss_limit_mb={MOST_MEMORY >> 20}", f"-artifact_prefix={FOUND / args.target}-",
            "-print_final_stats=1", "-use_value_profile=1", f"-seed={args.seed + 1}",
        ]  # fmt: skip
        seeds = str(ROOT / "tests" / "corpus" / target.CORPUS)
        atheris.Setup([sys.argv[0], *options, grown, seeds], lambda data: target.one_input(data) and None)
        atheris.Fuzz()


def mutate(args: argparse.Namespace) -> None:
    """Runs random mutants of the seeds; the first fifth may still fill caches, the rest must not grow."""
    from mutation import mutants

    target = importlib.import_module(args.target)
    paths = sorted((ROOT / "tests" / "corpus" / target.CORPUS).iterdir())
    resource.setrlimit(
        resource.RLIMIT_AS, (MOST_MEMORY + (2 << 30),) * 2
    )  # address space: libraries map much
    signal.signal(signal.SIGALRM, hang)
    accepted, early = 0, 0
    stream = mutants([path.read_bytes() for path in paths], args.seed)
    for done, data in enumerate(itertools.islice(stream, args.mutants)):
        signal.alarm(HANG_SECONDS)
        try:
            accepted += bool(target.one_input(data))
        except BaseException:
            FOUND.mkdir(parents=True, exist_ok=True)
            path = FOUND / f"{args.target}-{hashlib.sha256(data).hexdigest()[:16]}"
            path.write_bytes(data)
            print(f"{path} fails after {done} mutants", flush=True)
            raise
        if done == args.mutants // 5:
            early = peak_kib()
    print(f"stat::number_of_executed_units: {args.mutants}\nstat::accepted: {accepted}")
    print(f"stat::growth_kib: {peak_kib() - early}")


def hang(*_: object) -> None:
    raise TimeoutError(f"more than {HANG_SECONDS} seconds")


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    sys.exit(main())
