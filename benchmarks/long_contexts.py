"""Prompts of several lengths, and generation behind each, against llama.cpp with flash attention and without.

    python benchmarks/long_contexts.py --kv-heads 8 --pairs 512=3 2048=2 4096=1 8192=1

A synthetic dense Q4_0 model of a few layers and a small vocabulary, so that a head counts as little as in a
whole model. Every pair runs all three in turning order. llama.cpp gets a prompt in batches of 512, its
default; its caches are F16, as ours. A ratio is llama.cpp's better time over ours, of one pair.

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contestants import Lengths, LlamaCpp, random_tokens
from synthetic import Recipe, Shape, write

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams

BATCH = 512
VOCABULARY = 1024
Pass = Callable[[list[int], int], tuple[float, float]]  #: prompt, steps -> seconds of it, seconds of a step


class BothLlamaCpp(LlamaCpp):
    """With a context of each kind."""

    def _choose(self) -> None:
        self._contexts = {
            "off": self._new_context("single", False),
            "flash": self._new_context("single", True),
        }

    def run(self, kind: str, prompt: list[int], steps: int) -> tuple[float, float]:
        self._clear(kind)
        seconds = sum(
            self._read(kind, prompt[at : at + BATCH], at).seconds for at in range(0, len(prompt), BATCH)
        )
        each = [self._decode(kind, [[300 + i]], len(prompt) + i).seconds for i in range(steps)]
        return seconds, statistics.median(each)


def ours(engine: Engine, prompt: list[int], steps: int) -> tuple[float, float]:
    request = Request(Job(prompt, SamplingParams(temperature=0), max_tokens=steps + 2, ignore_eos=True))
    engine.add(request)
    start = time.perf_counter()
    while not request.output:
        engine.step()
    seconds = time.perf_counter() - start
    each = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        each.append(time.perf_counter() - start)
    engine.abort(request)
    return seconds, statistics.median(each)


def figures(runs: dict[str, list[tuple[float, float]]], length: int) -> dict[str, Any]:
    row: dict[str, Any] = {"length": length, "pairs": len(runs["ours"])}
    for at, what in enumerate(("prompt", "generation")):
        tokens = length if what == "prompt" else 1
        for name, taken in runs.items():
            row[f"{what}_{name}_tok_s"] = tokens / statistics.median(each[at] for each in taken)
        ratios = [
            min(off[at], flash[at]) / own[at]
            for own, off, flash in zip(runs["ours"], runs["off"], runs["flash"], strict=True)
        ]
        row[f"{what}_ratio"] = [statistics.median(ratios), min(ratios), max(ratios)]
    return row


def show(row: dict[str, Any]) -> None:
    parts = []
    for what in ("prompt", "generation"):
        own, off, flash = (row[f"{what}_{name}_tok_s"] for name in ("ours", "off", "flash"))
        median, low, high = row[f"{what}_ratio"]
        parts.append(
            f"{what} {own:.1f} tok/s, llama.cpp {off:.1f}, flash {flash:.1f}, "
            f"ratio {median:.2f} [{low:.2f}, {high:.2f}]"
        )
    print(f"{row['length']:5} ({row['pairs']} pairs): " + "; ".join(parts), flush=True)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--kv-heads", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--type", default="Q4_0")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=9, help="generated behind each prompt")
    parser.add_argument("--pairs", nargs="*", default=["16=3", "512=3", "2048=2", "4096=1", "8192=1"])
    parser.add_argument("--model", type=Path, help="kept there between calls (default: a temporary file)")
    args = parser.parse_args()
    wanted = {int(length): int(pairs) for length, pairs in (each.split("=") for each in args.pairs)}
    longest = max(wanted) + args.steps + 2
    report = []
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or Path(folder, "dense.gguf")
        if not path.exists():
            shape = Shape(4096, 11008, args.layers, 32, args.kv_heads, VOCABULARY, max(longest, 8300))
            write(path, Recipe(shape, args.type))
        session = load(
            path,
            LoadOptions(sparsity="off", threads=args.threads, context=longest, sequences=1, gpu="off"),
        ).session()
        engine = Engine(session)
        llama = BothLlamaCpp(
            path,
            args.threads,
            Lengths(prompt=BATCH, generate=max(8, longest - BATCH + 8), sequences=1),
            all_logits=True,
        )
        contestants: dict[str, Pass] = {
            "ours": lambda prompt, steps: ours(engine, prompt, steps),
            "off": lambda prompt, steps: llama.run("off", prompt, steps),
            "flash": lambda prompt, steps: llama.run("flash", prompt, steps),
        }
        for run in contestants.values():  # warms memory and threads
            run(random_tokens(64, VOCABULARY, 0), 2)
        for length, pairs in wanted.items():
            runs: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
            for pair in range(pairs):
                names = list(contestants)
                for name in names[pair % 3 :] + names[: pair % 3]:
                    runs[name].append(
                        contestants[name](random_tokens(length, VOCABULARY, length + pair), args.steps)
                    )
            report.append({"kv_heads": args.kv_heads, **figures(runs, length)})
            show(report[-1])
        llama.close()
    print(json.dumps({"layers": args.layers, "type": args.type, "threads": args.threads, "figures": report}))


if __name__ == "__main__":
    main()
