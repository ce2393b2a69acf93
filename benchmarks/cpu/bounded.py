r"""A model larger than memory: Hotcold with a budget of RAM beside llama.cpp, which maps the file.

    python benchmarks/cpu/bounded.py -m q30.gguf --llama FOLDER --shares 50 25
    python benchmarks/cpu/bounded.py -m sparse.gguf --stock silu.gguf --llama FOLDER --shares 25

`--shares`: percent of the model's file that a cgroup of its own may have, the system's cache of the file and
the memory of the program together (`lib/memory_group.py`; Linux, as root). In it llama.cpp generates first
(`llama-bench`, random tokens) without repacking, which would copy the weights to memory that cannot be
dropped: with the file out of the cache (cold), and once more with what that run left there (warm).
Hotcold's budget is the group's bound less `--python` MiB for Python and its libraries; it reads past the
cache. `--read` adds llama.cpp reading the file into memory of its own (`-lm none`), which such a bound kills.
How far the system reads ahead of a fault decides how fast llama.cpp is:
/sys/block/DISK/queue/read_ahead_kb, 128 unless set.

`--stock`: what llama.cpp computes instead, where it has no such model; its time alone is compared. Both files
of eight layers of Mixtral's shape, 6.6 GB each, are made so:

    python benchmarks/cpu/larger_than_memory.py -m sparse.gguf --make 8 --shape sparse-mixtral \
        --side-by-side --sparsity predicted --gib 3 --rounds 1 --tokens 4
    python benchmarks/cpu/larger_than_memory.py -m silu.gguf --make 8 --shape mixtral --gib 3 --rounds 1 \
        --tokens 4
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cpu.larger_than_memory import apart, forget, parts
from lib.memory_group import MemoryGroup, memory_group


def llama(args: argparse.Namespace, enter: Callable[[], None], mode: str) -> float | None:
    """Tokens a second of a run of llama-bench; None where it was killed or took too long."""
    command = [str(args.llama / "llama-bench"), "-m", str(args.stock or args.model), "-p", "0"]
    command += ["-n", str(args.theirs), "-r", "1", "-t", str(args.threads), "-lm", mode, "--repack", "0"]
    command += ["-o", "json", "--no-warmup"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=enter
    ) as child:
        try:
            output, _ = child.communicate(timeout=args.seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            return None
    if child.returncode:
        return None
    speed: float = json.loads(output[re.search(r"^\[", output, re.MULTILINE).start() :])[0]["avg_ts"]  # type: ignore[union-attr]
    return speed


def theirs(args: argparse.Namespace, group: MemoryGroup) -> dict[str, Any]:
    """llama.cpp in the group: cold, warm, and what the file had of the cache then."""
    forget(args.stock or args.model)
    figures: dict[str, Any] = {"cold": llama(args, group.enter, "mmap")}
    figures["warm"] = llama(args, group.enter, "mmap")
    figures["cached_bytes"] = group.cached_bytes
    if args.read:
        figures["read"] = llama(args, group.enter, "none")
    return figures


def pair(args: argparse.Namespace, share: float) -> dict[str, Any]:
    """A run of each under the same bound."""
    limit = int(sum(each.stat().st_size for each in parts(args.model)) * share / 100)
    with memory_group(limit) as group:
        other = theirs(args, group)
    with memory_group(limit) as group:
        ours = apart(args, limit - (args.python << 20), hot=args.profile, enter=group.enter)
    del ours["text"]
    speeds = [f"{name} {other[name] or 0:.2f}" for name in ("cold", "warm")]
    print(f"{share:g} %, {limit / 2**30:.2f} GiB: llama.cpp {', '.join(speeds)} tok/s,", end=" ")
    print(f"Hotcold {ours['tok_s']:.2f} ({ours['sparsity']}), hits {ours['hit_share']:.1%}", flush=True)
    return {"share": share, "limit_bytes": limit, "llama_cpp": other, "hotcold": ours}


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", type=Path, required=True, metavar="FILE")
    parser.add_argument("--stock", type=Path, metavar="FILE", help="what llama.cpp computes instead")
    parser.add_argument("--llama", type=Path, required=True, metavar="FOLDER", help="with llama-bench")
    parser.add_argument("--shares", type=float, nargs="+", default=[50, 25], metavar="PERCENT")
    parser.add_argument("--seconds", type=int, default=240, help="that a run of llama.cpp may take (240)")
    parser.add_argument("--tokens", type=int, default=48, help="of Hotcold's answer (48)")
    parser.add_argument("--theirs", type=int, default=24, help="tokens of llama.cpp (24)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    parser.add_argument("--sparsity", help="of Hotcold: exact, predicted or off (auto)")
    parser.add_argument("--read", action="store_true", help="llama.cpp without mapping, too")
    parser.add_argument(
        "--profile", action="store_true", help="with MODEL.counted.gguf (larger_than_memory.py)"
    )
    parser.add_argument("--python", type=int, default=100, metavar="MIB", help="Python's own (100)")
    args = parser.parse_args()
    args.warm = False
    rounds = [pair(args, share) for _ in range(args.rounds) for share in args.shares]
    ratios = {}
    for share in args.shares:
        of_share = [each for each in rounds if each["share"] == share]
        pairs = {
            name: [(e["hotcold"]["tok_s"], e["llama_cpp"][name]) for e in of_share]
            for name in ("cold", "warm")
        }
        ratios[share] = {name: median([a / b for a, b in each if b]) for name, each in pairs.items()}
    facts = {"tokens": args.tokens, "theirs": args.theirs, "threads": args.threads}
    print(json.dumps({"ratios": ratios, "rounds": rounds} | facts))


if __name__ == "__main__":
    main()
