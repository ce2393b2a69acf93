"""One layer's attention by itself: a chunk of a prompt and decoding, at several positions, each cache type.

    python benchmarks/cpu/attention.py                      # this build
    python benchmarks/cpu/attention.py old/src new/src      # two folders with built packages, in turns

Queries are random, caches random values that repeat, pages in order. What is counted is what causality asks
for: a row at position p takes p + 1 keys and values of its kv head. GMAC/s are multiplications with additions
of all threads; GB/s are bytes of the cache, once for each decode row and once for a chunk. With two builds a
figure is the median of the pairs' ratios, old time / new time.

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.builds import build, in_turns, serve

CHUNK = 128  #: LoadOptions.chunk


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    case_list = []
    for kv_heads in args.kv_heads:
        for type in args.types:
            for position in args.prompt:
                case_list.append({"kv_heads": kv_heads, "type": type, "prompt": CHUNK, "position": position})
            for position in args.decode:
                for rows in args.rows:
                    case_list.append(
                        {"kv_heads": kv_heads, "type": type, "decode": rows, "position": position}
                    )
    return case_list


def answer_with(threads: int, heads: int, head_dim: int) -> Callable[[dict[str, Any]], float]:
    """Times a case with the current build: the fewest seconds of several runs."""
    import numpy as np

    from hotcold.kernels.backend import PAGE, AttentionCall, Batch, BatchLimits
    from hotcold.kernels.cpu import CPUBackend
    from hotcold.model.mixers.attention import CACHE_TYPES

    backend = CPUBackend(threads=threads)
    random = np.random.default_rng(1)
    ready: dict[str, Any] = {}

    def answer(case: dict[str, Any]) -> float:
        repeat, key = case.pop("repeat"), json.dumps(case)
        if key not in ready:
            ready.clear()  # caches are large
            decode, prompt = case.get("decode", 0), case.get("prompt", 0)
            rows, kv_heads = decode + prompt, case["kv_heads"]
            last = case["position"] + prompt
            pages = last // PAGE + 1
            sequences = max(1, decode)
            batch = Batch(BatchLimits(rows, sequences, pages, 1))
            batch.pages[:] = np.arange(sequences * pages).reshape(sequences, pages)
            batch.counts[:] = (rows, decode, 0, sequences)
            for t in range(rows):
                batch.positions[t] = case["position"] + (0 if decode else t)
                batch.sequence[t] = t if decode else 0
            random_rows = random.standard_normal((61, PAGE, head_dim)).astype(np.float32)
            if case["type"] == "q8_0":
                import gguf

                random_rows = gguf.quants.quantize(random_rows, gguf.GGMLQuantizationType.Q8_0)
            caches = []
            for _ in "kv":
                shape = (sequences * pages, kv_heads, PAGE, random_rows.shape[-1])
                cache = backend.zeros(shape, CACHE_TYPES[case["type"]])
                flat = cache.reshape(-1, *random_rows.shape[1:])
                for at in range(0, len(flat), len(random_rows)):
                    flat[at : at + len(random_rows)] = random_rows[: len(flat) - at]
                caches.append(cache)
            q, out = (backend.zeros((rows, heads, head_dim)) for _ in range(2))
            q[:] = random.standard_normal(q.shape)
            ready[key] = backend.record(
                lambda q=q, caches=caches, batch=batch, out=out: backend.attention(
                    AttentionCall(q, *caches, batch, out, head_dim**-0.5)
                )
            )
            ready[key].run()
        seconds = []
        for _ in range(repeat):
            start = time.perf_counter()
            ready[key].run()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    return answer


def work(case: dict[str, Any], heads: int, head_dim: int) -> tuple[float, float]:
    """Multiplications and bytes of a run."""
    row_bytes = {"f16": 2 * head_dim, "q8_0": head_dim // 32 * 34, "f32": 4 * head_dim}[case["type"]]
    prompt, first = case.get("prompt", 0), case["position"] + 1
    if prompt:
        pairs = prompt * first + prompt * (prompt - 1) // 2
        return 2 * pairs * heads * head_dim, 2 * (first + prompt - 1) * case["kv_heads"] * row_bytes
    rows = case["decode"]
    return 2 * rows * first * heads * head_dim, 2 * rows * first * case["kv_heads"] * row_bytes


def name_of(case: dict[str, Any]) -> str:
    kind = f"prompt of {case['prompt']}" if "prompt" in case else f"decode {case['decode']} rows"
    return f"{kind} at {case['position']}, {case['kv_heads']} kv heads, {case['type']}"


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("builds", nargs="*", type=Path, metavar="OLD NEW", help="src folders")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3, help="runs of a turn; the fastest counts")
    parser.add_argument("--heads", type=int, default=32, help="12 with --kv-heads 2: Qwen2.5 of 1.5 B")
    parser.add_argument("--kv-heads", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--types", nargs="*", default=["f16", "q8_0"])
    parser.add_argument("--prompt", type=int, nargs="*", default=[0, 2048, 4096, 8192], help="positions")
    parser.add_argument("--decode", type=int, nargs="*", default=[8192, 32768], help="positions")
    parser.add_argument("--rows", type=int, nargs="*", default=[1], help="sequences that decode")
    args = parser.parse_args()
    builds = [
        build(child, __file__, args.threads, args.heads, args.head_dim) for child in args.builds or [None]
    ]
    report = []
    for case in cases(args):
        pairs = [in_turns(builds, {**case, "repeat": args.repeat}, pair) for pair in range(args.pairs)]
        macs, nbytes = work(case, args.heads, args.head_dim)
        row: dict[str, Any] = dict(case)
        row["ms"] = [1e3 * statistics.median(child) for child in zip(*pairs, strict=True)]
        row["gmac_s"] = [macs / ms / 1e6 for ms in row["ms"]]
        row["gb_s"] = [nbytes / ms / 1e6 for ms in row["ms"]]
        ratios = [times[0] / times[-1] for times in pairs]
        row["ratio"] = [statistics.median(ratios), min(ratios), max(ratios)]
        report.append(row)
        figures = (
            f"{ms:8.2f} ms {gmac:6.1f} GMAC/s {gb:5.1f} GB/s"
            for ms, gmac, gb in zip(row["ms"], row["gmac_s"], row["gb_s"], strict=True)
        )
        ratio = " {:.2f} [{:.2f}, {:.2f}]".format(*row["ratio"]) if len(builds) > 1 else ""
        print(f"{name_of(case):<48}" + " | ".join(figures) + ratio, flush=True)
    for child in builds:
        child.close()
    print(
        json.dumps(
            {"threads": args.threads, "heads": args.heads, "head_dim": args.head_dim, "figures": report}
        )
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(answer_with(*map(int, sys.argv[2:5])))
    else:
        main()
