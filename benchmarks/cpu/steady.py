"""Requests to a model with a budget of RAM for some minutes: whether memory, files and threads stay as many.

    python benchmarks/cpu/steady.py -m q30.gguf --gib 1.6 --minutes 60

One request after another, each with a prompt of another length and text of its own. After each the resident
memory, open files and threads of the process are noted (Linux). The first tenth of the time is for places to
fill. Fails where files or threads become more after that, or memory grows by more than 2 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cpu.larger_than_memory import CONTEXT

_SAID = "the sea was calm that morning and a boat lay still beside an old stone house"


def now() -> tuple[int, int, int]:
    """Bytes of resident memory, open files and threads."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    facts = dict(line.split(":", 1) for line in lines)
    # The folder that is read is open, too: always one.
    files = len(os.listdir("/proc/self/fd"))
    return int(facts["VmRSS"].split()[0]) << 10, files, int(facts["Threads"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", type=Path, required=True, metavar="FILE")
    parser.add_argument("--gib", type=float, required=True, help="the budget")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--tokens", type=int, default=24, help="of each answer (24)")
    args = parser.parse_args()
    import hotcold

    drawn = random.Random(1)
    llm = hotcold.LLM(args.model, ram_budget=int(args.gib * 2**30), gpu="off", context=CONTEXT)
    start, seen, tokens = time.monotonic(), [], 0
    while (elapsed := time.monotonic() - start) < 60 * args.minutes:
        prompt = " ".join(drawn.choices(_SAID.split(), k=drawn.randint(3, 60)))
        options = {"temperature": 1, "seed": len(seen), "ignore_eos": True}
        answer = llm.generate(prompt, max_tokens=args.tokens, **options)
        tokens += len(answer.ids)
        seen.append((elapsed, *now()))
    late = [each for each in seen if each[0] >= 6 * args.minutes]
    if len(late) < 2:
        sys.exit("too few requests ended: more minutes are needed")
    print("   minute  resident MiB  files  threads")
    for each in late[:: max(1, len(late) // 12)] + [late[-1]]:
        print(f"{each[0] / 60:9.1f} {each[1] / 2**20:13.1f} {each[2]:6} {each[3]:8}")
    growth = max(each[1] for each in late[len(late) // 2 :]) / late[0][1] - 1
    counts = llm.session.model.disk_counts()
    report = {
        "minutes": args.minutes, "budget_bytes": int(args.gib * 2**30), "requests": len(seen),
        "tokens": tokens, "growth": growth, "first": late[0], "last": late[-1],
        "disk_bytes": counts.nbytes if counts else 0,
    }  # fmt: skip
    print(json.dumps(report))
    if growth > 0.02 or any(late[-1][i] > late[0][i] for i in (2, 3)):
        sys.exit("memory, files or threads became more")


if __name__ == "__main__":
    main()
