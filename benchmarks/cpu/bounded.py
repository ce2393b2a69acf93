"""A model larger than memory: Hotcold with a budget of RAM beside llama.cpp, which maps the file.

    python benchmarks/cpu/bounded.py -m q30.gguf --llama FOLDER --leave 9.5

Memory is locked (`lib/ballast.py`; Linux, as root) until `--leave` GiB of the machine are not, of which
other programs have their part; the system's cache of the file has the rest. llama.cpp generates first
(`llama-bench`, random tokens), without repacking, which would copy the weights to memory that cannot be
dropped. How much of the file the cache holds is looked up twice a second. The most of that in the second
half of the time, and what llama.cpp has beside it, is then Hotcold's budget, less `--python` MiB for Python
and its libraries; what it takes is bounded by that alone, and it reads past the cache. Both begin with the
file out of the cache.

Under such a bound llama.cpp cannot read the file into memory of its own (`-lm none`): it would need it all.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cpu.larger_than_memory import apart, forget, parts
from lib.ballast import ballast, killed_first, meminfo

_EVERY_S = 0.5


def cached_bytes(path: Path) -> int:
    """How much of a file is in the system's cache."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        to = pages.ctypes.data_as(ctypes.c_void_p)
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), to)
        del view
    if failed:
        raise OSError("mincore fails")
    return int((pages & 1).sum()) * mmap.PAGESIZE


def own_bytes(pid: int) -> int:
    """Memory of a process that is no file's."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def llama(args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """A run of llama-bench, and the memory that it and the cache of its file had; no speed where it takes
    longer than that."""
    command = [str(args.llama / "llama-bench"), "-m", str(args.model), "-p", "0", "-n", str(args.theirs)]
    command += [
        "-r",
        "1",
        "-t",
        str(args.threads),
        "-lm",
        "mmap",
        "--repack",
        "0",
        "-o",
        "json",
        "--no-warmup",
    ]
    seen: list[tuple[int, int]] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=killed_first
    ) as child:
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_EVERY_S):
                cached = sum(map(cached_bytes, parts(args.model)))
                seen.append((cached, own_bytes(child.pid)))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            told, _ = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            return {"tok_s": None, "cached_bytes": seen[-1][0], "own_bytes": seen[-1][1]}
        finally:
            ended.set()
            watcher.join()
    late = seen[len(seen) // 2 :]
    if child.returncode or not late:
        raise RuntimeError(f"llama-bench ended with {child.returncode}")
    tests = json.loads(told[re.search(r"^\[", told, re.MULTILINE).start() :])  # type: ignore[union-attr]
    cached, own = (max(each) for each in zip(*late, strict=True))
    return {"tok_s": tests[0]["avg_ts"], "cached_bytes": cached, "own_bytes": own}


def bounded(args: argparse.Namespace) -> dict[str, Any]:
    """A run of llama.cpp while memory is locked."""
    forget(args.model)
    start = time.monotonic()
    with ballast(int(args.leave * 2**30), int(args.floor * 2**30), args.seconds) as held:
        found = llama(args, args.seconds - (time.monotonic() - start) - 3)
        if not held.holds:
            raise RuntimeError(f"the bound did not hold: {held.gave_back}")
    return found | {"locked_bytes": held.locked}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", type=Path, required=True, metavar="FILE")
    parser.add_argument("--llama", type=Path, required=True, metavar="FOLDER", help="with llama-bench")
    parser.add_argument("--leave", type=float, required=True, metavar="GIB", help="that are not locked")
    parser.add_argument("--floor", type=float, default=1.5, metavar="GIB", help="of which less ends it (1.5)")
    parser.add_argument("--seconds", type=int, default=170, help="that memory is locked at most (170)")
    parser.add_argument("--tokens", type=int, default=24, help="of Hotcold's answer (24)")
    parser.add_argument(
        "--theirs", type=int, default=8, help="tokens of llama.cpp, which has little time (8)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--profile", action="store_true", help="with MODEL.counted.gguf (larger_than_memory.py)"
    )
    parser.add_argument("--python", type=int, default=100, metavar="MIB", help="Python's own (100)")
    args = parser.parse_args()
    args.warm = False
    rounds: list[dict[str, Any]] = []
    for _ in range(args.rounds):
        theirs = bounded(args)
        budget = theirs["cached_bytes"] + theirs["own_bytes"] - (args.python << 20)
        ours = apart(args, budget, hot=args.profile)
        del ours["text"]
        rounds.append({"llama_cpp": theirs, "hotcold": ours | {"budget_bytes": budget}})
        one: list[Any] = [theirs["tok_s"], theirs["cached_bytes"] / 2**30, theirs["own_bytes"] / 2**30]
        two = [ours["tok_s"], ours["most_resident_bytes"] / 2**30, ours["hit_share"]]
        print("llama.cpp", *one, "Hotcold", *two, flush=True)
    pairs = [(each["hotcold"]["tok_s"], each["llama_cpp"]["tok_s"]) for each in rounds]
    ratios = [own / other for own, other in pairs if other]
    ratio = statistics.median(ratios) if ratios else None
    facts = {
        "total_bytes": meminfo("MemTotal"),
        "file_bytes": sum(each.stat().st_size for each in parts(args.model)),
    }
    facts |= {"tokens": args.tokens, "theirs": args.theirs, "threads": args.threads}
    print(json.dumps({"ratio": ratio, "rounds": rounds} | facts))


if __name__ == "__main__":
    main()
