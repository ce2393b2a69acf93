"""Generation of a model of experts at several budgets of RAM, the others read from its file.

    python benchmarks/cpu/larger_than_memory.py -m model.gguf --gib 12 8 4
    python benchmarks/cpu/larger_than_memory.py -m model.gguf --gib 8 4 --all --tokens 256 --rounds 5

Budgets take turns, each in a process of its own that begins with the file out of the system's cache
(`--warm`: as it is). `--all` adds the whole model in memory. A round generates from the same prompt,
greedily; the texts must be the same. Columns: tok/s of generation, the share of the experts that were named
and in memory, MiB of the file for a token, the rate of the disk while computing waited for it, waits and ms
of waiting for a token. Bound the memory of all of it with a cgroup, `systemd-run --scope -p MemoryMax=...`,
to see a machine that has no more; llama.cpp under the same bound is `llama-bench` with and without `-mmp 0`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

PROMPT = "The sea was calm that morning, and the boat lay still. "


def forget(path: Path) -> None:
    """Drops the file from the system's cache, where the system can."""
    if not hasattr(os, "posix_fadvise"):
        return
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(path: Path, budget: int | None, tokens: int, threads: int | None) -> dict[str, Any]:
    """The figures of one round, in this process."""
    import resource

    import hotcold

    llm = hotcold.LLM(path, ram_budget=budget, threads=threads, gpu="off", draft_max=0)
    llm.generate(PROMPT, temperature=0, max_tokens=8, ignore_eos=True)
    before = llm.session.counters.copy()
    answer = llm.generate(PROMPT, temperature=0, max_tokens=tokens, ignore_eos=True)
    counters = llm.session.counters.since(before)
    named = counters.expert_hits + counters.expert_misses
    per_token = 1 / max(1, counters.decode_tokens)
    return {
        "tok_s": counters.decode_tokens / counters.decode_s,
        "hit_share": counters.expert_hits / named if named else 1.0,
        "disk_bytes_per_token": counters.disk_bytes * per_token,
        "stalls_per_token": counters.stalls * per_token,
        "stall_s_per_token": counters.stall_s * per_token,
        "disk_gb_s": counters.disk_bytes / counters.stall_s / 1e9 if counters.stall_s else None,
        "most_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "text": answer.text,
    }


def apart(args: argparse.Namespace, budget: int | None) -> dict[str, Any]:
    """:func:`measure` in a process of its own."""
    if not args.warm:
        forget(args.model)
    given = json.dumps([str(args.model), budget, args.tokens, args.threads])
    done = subprocess.run([sys.executable, __file__, "--one", given], stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", type=Path, metavar="FILE", help="a GGUF file of experts")
    parser.add_argument("--gib", type=float, nargs="+", default=[], metavar="GIB", help="budgets of RAM")
    parser.add_argument("--all", action="store_true", help="the whole model in memory, too")
    parser.add_argument("--tokens", type=int, default=64, help="that a round generates (64)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int, help="of the pool (as many as cores)")
    parser.add_argument("--warm", action="store_true", help="leave the file in the system's cache")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        path, *rest = json.loads(args.one)
        print(json.dumps(measure(Path(path), *rest)))
        return
    budgets = [None] * args.all + [int(each * 2**30) for each in args.gib]
    if args.model is None or not budgets:
        parser.error("a model (-m) and budgets (--gib, --all) are needed")
    rounds: dict[int | None, list[dict[str, Any]]] = {budget: [] for budget in budgets}
    for _ in range(args.rounds):
        for budget in budgets:
            rounds[budget].append(apart(args, budget))
    report = []
    print("budget GiB   tok/s  hits   MiB/token  GB/s waited for  waits  ms waiting")
    for budget, found in rounds.items():
        row: dict[str, Any] = {"budget_bytes": budget}
        for key in found[0].keys() - {"text"}:
            seen = [each[key] for each in found if each[key] is not None]
            row[key] = statistics.median(seen) if seen else None
        report.append(row)
        size = "all" if budget is None else f"{budget / 2**30:.2f}"
        parts = [
            f"{size:>10} {row['tok_s']:7.2f} {row['hit_share']:5.1%}",
            f"{row['disk_bytes_per_token'] / 2**20:11.2f} {row['disk_gb_s'] or 0:16.2f}",
            f"{row['stalls_per_token']:6.1f} {1e3 * row['stall_s_per_token']:11.2f}",
        ]
        print(" ".join(parts))
    texts = {each["text"] for found in rounds.values() for each in found}
    if len(texts) != 1:
        sys.exit("the texts differ")
    print(json.dumps({"budgets": report, "tokens": args.tokens, "rounds": args.rounds, "warm": args.warm}))


if __name__ == "__main__":
    main()
