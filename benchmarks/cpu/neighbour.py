"""Generation beside another process that keeps one core busy, against a quiet machine: ours and llama.cpp.

    python benchmarks/cpu/neighbour.py --rounds 6

Threads that wait for each other while one of them has no core can lose far more than the core that is gone.
In every round each contestant of benchmarks/cpu/compare.py generates once quietly and once beside an endless
loop, in turning order; what counts is busy over quiet. Give as many ``--threads`` as there are cores. The
last line of stdout is a JSON object: the median ratios and every sample.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cpu.compare import Clock, Files, add_model_options, contestants, facts, model_folder
from lib.contestants import DECODE, Contestant, Plan, order

SETTLE_S = 0.3  #: after the neighbour starts or ends


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """As many processes that compute without end."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def generation(contestant: Contestant, seed: int) -> float:
    """Tokens a second, after a prompt."""
    return contestant.prepare(DECODE, seed)().tok_s


def measure(by_name: dict[str, Contestant], args: argparse.Namespace, clock: Clock) -> list[dict[str, Any]]:
    samples = []
    for contestant in by_name.values():
        contestant.warm(DECODE)
    for round in range(args.rounds):
        for name in order([*by_name], round):
            speed = {}
            for count in (0, args.neighbours) if round % 2 == 0 else (args.neighbours, 0):
                with neighbours(count):
                    speed["busy" if count else "quiet"] = generation(by_name[name], round)
            ratio = speed["busy"] / speed["quiet"]
            samples.append({"round": round, "contestant": name, **speed, "ratio": ratio})
            shown = ", ".join(f"{state} {speed[state]:.1f}" for state in ("quiet", "busy"))
            clock.say(f"round {round + 1}/{args.rounds} {name}: {shown}")
    return samples


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add: Callable[..., Any] = parser.add_argument
    add_model_options(add)
    add("--type", default="Q4_0")
    add("--neighbours", type=int, default=1, help="processes that each keep a core busy (1)")
    parser.set_defaults(shape=[4096, 11008, 32, 32, 32000], layers=8, rounds=10, generate=40)
    args = parser.parse_args()
    plan, clock = Plan((), (0,), 1, args.generate, layers=args.layers), Clock(0)
    with model_folder(args) as folder:
        by_name = contestants(args, plan, Files(args, folder, clock), args.type)
        samples = measure(by_name, args, clock)
    ratios = {}
    for name in by_name:
        of_name = [sample for sample in samples if sample["contestant"] == name]
        ratios[name] = statistics.median(sample["ratio"] for sample in of_name)
        quiet, busy = (statistics.median(sample[state] for sample in of_name) for state in ("quiet", "busy"))
        print(f"{name}: quiet {quiet:.1f} tok/s, busy {busy:.1f}; paired {ratios[name]:.2f}")
    settings = facts(args) | {"type": args.type, "active": args.active, "neighbours": args.neighbours}
    summary = {"busy_over_quiet": ratios, "pairs": args.rounds, "settings": settings}
    print(json.dumps(summary | {"samples": samples}))


if __name__ == "__main__":
    main()
