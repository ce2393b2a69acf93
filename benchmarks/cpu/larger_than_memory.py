"""Generation of a model of experts at several budgets of RAM, the others read from its file.

    python benchmarks/cpu/larger_than_memory.py -m model.gguf --gib 12 8 4
    python benchmarks/cpu/larger_than_memory.py -m model.gguf --gib 8 4 --all --tokens 256 --rounds 5
    python benchmarks/cpu/larger_than_memory.py -m q30.gguf --make 10 --gib 1.7 0.9  # a made-up model

`--make` writes the model first if it does not exist: this number of layers of Qwen3-30B-A3B's shape, 337 MiB
each, whose routers prefer a quarter of the experts (57 % of all choices); or, with `--shape`, of Mixtral's,
779 MiB each: `sparse-mixtral` has neurons that are active as a power law says (10 % on average), the most
active first, and a predictor beside it (`lib/experts.py`), which `--sparsity predicted` uses and `exact` does
not; `mixtral` is the same in SiLU, for llama.cpp. `--side-by-side`: rows of a sparse model's neuron lie
together in its file. `--profile` counts routing on other texts and adds rounds in which hot experts keep
their places.

Budgets take turns, each in a process of its own that begins with the file out of the system's cache
(`--warm`: as it is). `--all` adds the whole model in memory. A round fills all places with a drawn text,
then generates from the same prompt; the texts must be the same. Columns: tok/s of generation, the share of
the experts that were named and in memory, MiB of the file for a token, the rate of the disk while computing
waited for it, waits and ms of waiting for a token. `h` behind a budget: hot ones stay. Bound the memory of
all of it with a cgroup, `systemd-run --scope -p MemoryMax=...`, to see a machine that has no more; llama.cpp
under the same bound is `llama-bench` with and without `-mmp 0`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.experts import MODELS, write_experts

#: Drawn, so that a made-up model does not repeat itself; the same in each round.
HOW: dict[str, Any] = {"temperature": 1, "seed": 1, "ignore_eos": True}
#: Begin the texts whose routing is counted.
OTHERS = (
    "Once there was a town by the river, and nobody in it could sing. ",
    "To sort a list, compare each item with the next one and swap them. ",
    "The committee met on Tuesday; its report is due in the spring. ",
)
CONTEXT = 512  #: positions at least, that of the profile, too
FILLING = 256  #: tokens
#: Begin the texts that are measured: each seed has one.
PROMPTS = (
    "The sea was calm that morning, and the boat lay still. ",
    "A function that returns another function keeps what it was given. ",
    "My grandmother baked bread on Fridays, and the street smelled of it. ",
    "Iron rusts in wet air, as its surface takes up oxygen. ",
    "Who will win the election is a question that polls answer badly. ",
)


def parts(path: Path) -> list[Path]:
    """The files of a model; a split model's have names such as ``-00001-of-00002.gguf``."""
    return sorted(path.parent.glob(re.sub(r"-\d{5}(-of-\d{5}\.gguf)$", r"-?????\1", path.name)))


def forget(path: Path) -> None:
    """Drops a model from the system's cache, where the system can."""
    if not hasattr(os, "posix_fadvise"):
        return
    for part in parts(path):
        with part.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(
    path: Path, budget: int | None, tokens: int, threads: int | None, sparsity: str | None, seed: int
) -> dict[str, Any]:
    """The figures of one round, in this process."""
    import resource

    import hotcold

    context = max(CONTEXT, tokens + 64)
    options: Any = {"gpu": "off", "context": context, "draft_max": 0, "sparsity": sparsity}
    llm = hotcold.LLM(path, ram_budget=budget, threads=threads, **options)
    # Random tokens fill all places; a text fills those of a large budget only after thousands of tokens.
    drawn = random.Random(2).choices(range(llm.session.model.config.vocab), k=FILLING)
    llm.generate(drawn, **HOW | {"seed": 2}, max_tokens=24)
    before = llm.session.counters.copy()
    prompt = PROMPTS[(seed - 1) % len(PROMPTS)]
    answer = llm.generate(prompt, **HOW | {"seed": seed}, max_tokens=tokens)
    counters = llm.session.counters.since(before)
    named = counters.disk.hits + counters.disk.misses
    per_token = 1 / max(1, counters.decode_tokens)
    return {
        "tok_s": counters.decode_tokens / counters.decode_s,
        "hit_share": counters.disk.hits / named if named else 1.0,
        "disk_bytes_per_token": counters.disk.nbytes * per_token,
        "stalls_per_token": counters.disk.stalls * per_token,
        "stall_s_per_token": counters.disk.stall_s * per_token,
        "disk_gb_s": counters.disk.nbytes / counters.disk.stall_s / 1e9 if counters.disk.stall_s else None,
        "most_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "sparsity": llm.session.sparsity,
        "text": answer.text,
    }


def count_routing(path: Path, budget: int | None) -> None:
    """Writes a profile, of other texts than the measured ones, under its own name."""
    import hotcold

    counted(path).unlink(missing_ok=True)
    llm = hotcold.LLM(path, ram_budget=budget, gpu="off", context=CONTEXT, draft_max=0)
    texts = [each + llm.generate(each, **HOW | {"seed": 2}, max_tokens=200).text for each in OTHERS]
    hotcold.profile(llm, "".join(texts), output=counted(path))


def counted(path: Path) -> Path:
    return path.with_suffix(".counted.gguf")


def apart(
    args: argparse.Namespace,
    budget: int | None,
    hot: bool,
    enter: Callable[[], None] | None = None,
    seed: int = 1,
) -> dict[str, Any]:
    """:func:`measure` in a process of its own, which calls ``enter`` first.

    ``hot``: with a profile beside the model. ``seed`` draws the text."""
    beside = args.model.with_suffix(".profile.gguf")
    beside.unlink(missing_ok=True)
    if hot:
        shutil.copyfile(counted(args.model), beside)
    if not args.warm:
        forget(args.model)
    given = json.dumps([str(args.model), budget, args.tokens, args.threads, args.sparsity, seed])
    command = [sys.executable, __file__, "--one", given]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, preexec_fn=enter)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


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
    parser.add_argument("--make", type=int, metavar="LAYERS", help="write the model, if it is not there")
    parser.add_argument("--shape", choices=MODELS, default="qwen3", help="of the model that is written")
    parser.add_argument("--side-by-side", action="store_true", help="of a neuron's rows in that model")
    parser.add_argument("--sparsity", help="exact, predicted or off (auto)")
    parser.add_argument("--profile", action="store_true", help="each budget with a profile of routing, too")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        path, *rest = json.loads(args.one)
        print(json.dumps(measure(Path(path), *rest)))
        return
    budgets = [None] * args.all + [int(each * 2**30) for each in args.gib]
    if args.model is None or not budgets:
        parser.error("a model (-m) and budgets (--gib, --all) are needed")
    beside = args.model.with_suffix(".profile.gguf")
    if beside.exists():
        parser.error(f"{beside} is there, and rounds write and remove a file of this name: move it away")
    if args.side_by_side and args.shape != "sparse-mixtral":
        parser.error("--side-by-side is for --shape sparse-mixtral")
    if args.make and not args.model.exists():
        write_experts(args.model, args.make, shape=args.shape, side_by_side=args.side_by_side)
    ways = [(budget, False) for budget in budgets]
    if args.profile:
        count_routing(args.model, budgets[-1])
        ways += [(budget, True) for budget in budgets if budget is not None]
    rounds: dict[tuple[int | None, bool], list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way in ways:
            rounds[way].append(apart(args, *way))
    beside.unlink(missing_ok=True)
    report = []
    print("budget GiB   tok/s  hits   MiB/token  GB/s waited for  waits  ms waiting")
    for (budget, hot), runs in rounds.items():
        row: dict[str, Any] = {"budget_bytes": budget, "profile": hot}
        for key in runs[0].keys() - {"text", "sparsity"}:
            values = [each[key] for each in runs if each[key] is not None]
            row[key] = statistics.median(values) if values else None
        report.append(row)
        size = "all" if budget is None else f"{budget / 2**30:.2f}{' h' * hot}"
        parts = [
            f"{size:>10} {row['tok_s']:7.2f} {row['hit_share']:5.1%}",
            f"{row['disk_bytes_per_token'] / 2**20:11.2f} {row['disk_gb_s'] or 0:16.2f}",
            f"{row['stalls_per_token']:6.1f} {1e3 * row['stall_s_per_token']:11.2f}",
        ]
        print(" ".join(parts))
    texts = {each["text"] for runs in rounds.values() for each in runs}
    if len(texts) != 1:
        sys.exit("the texts differ")
    mode = {each["sparsity"] for runs in rounds.values() for each in runs}
    facts = {"tokens": args.tokens, "rounds": args.rounds, "warm": args.warm, "sparsity": sorted(mode)}
    print(json.dumps({"budgets": report} | facts))


if __name__ == "__main__":
    main()
