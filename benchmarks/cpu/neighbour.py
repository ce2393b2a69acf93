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
from cpu.compare import (
    Models,
    add_model_options,
    dense_contestants,
    facts,
    model_folder,
    order,
    say,
    sparse_contestants,
)
from lib.long_contestants import Contestant, Lengths

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
    return next(tok_s for measure, tok_s in speeds(contestant, seed) if measure == "generation")


def speeds(contestant: Contestant, seed: int) -> Iterator[tuple[str, float]]:
    for measure, run in contestant.phases(seed):
        yield measure, run().tok_s


def run_rounds(contestants: dict[str, Contestant], args: argparse.Namespace) -> list[dict[str, Any]]:
    samples = []
    for contestant in contestants.values():
        generation(contestant, args.rounds)  # warms memory and threads
    for round in range(args.rounds):
        for name in order(list(contestants), round):
            speed = {}
            for count in (0, args.neighbours) if round % 2 == 0 else (args.neighbours, 0):
                with neighbours(count):
                    speed["busy" if count else "quiet"] = generation(contestants[name], round)
            ratio = speed["busy"] / speed["quiet"]
            samples.append({"round": round, "contestant": name, **speed, "ratio": ratio})
            shown = ", ".join(f"{state} {speed[state]:.1f}" for state in ("quiet", "busy"))
            say(f"round {round + 1}/{args.rounds} {name}: {shown}")
    return samples


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add: Callable[..., Any] = parser.add_argument
    add("--type", default="Q4_0")
    add("--active", type=float, default=0.1)
    add_model_options(add)
    add("--neighbours", type=int, default=1, help="processes that each keep a core busy (1)")
    args = parser.parse_args()
    lengths = Lengths(args.prompt, args.generate, sequences=1)
    with model_folder(args) as folder:
        models = Models(args, folder)
        contestants = dense_contestants(models, args.type, lengths)
        contestants |= sparse_contestants(models, args.type, args.active, lengths)
        samples = run_rounds(contestants, args)
    ratios = {}
    for name in contestants:
        own = [sample for sample in samples if sample["contestant"] == name]
        ratios[name] = statistics.median(sample["ratio"] for sample in own)
        quiet, busy = (statistics.median(sample[state] for sample in own) for state in ("quiet", "busy"))
        print(f"{name}: quiet {quiet:.1f} tok/s, busy {busy:.1f}; paired {ratios[name]:.2f}")
    settings = facts(args) | {"type": args.type, "active": args.active, "neighbours": args.neighbours}
    print(
        json.dumps(
            {"busy_over_quiet": ratios, "pairs": args.rounds, "settings": settings, "samples": samples}
        )
    )


if __name__ == "__main__":
    main()
