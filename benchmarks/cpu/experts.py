"""Models of experts against llama.cpp on the same files, in interleaved rounds.

    python benchmarks/lib/expert_models.py --shape mixtral --active 0.1 -o mixtral-relu.gguf
    python benchmarks/cpu/experts.py mixtral-relu.gguf --rounds 6

Ours in each sparsity mode that the file allows, and llama.cpp, which computes SiLU whatever the file says:
that changes no byte that it reads. Every round runs each once, in turning order, phase by phase; a ratio is
one of two samples of the same phase and round. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from itertools import zip_longest
from pathlib import Path

from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.long_contestants import Contestant, Lengths, LlamaCpp, Measured, Ours

Samples = dict[tuple[str, str], list[Measured]]  #: by contestant and measure, in order of rounds


def contestants(path: Path, threads: int, lengths: Lengths) -> dict[str, Contestant]:
    predictor = path.with_suffix(".predictor.gguf")
    options = LoadOptions(threads=threads, context=lengths.context, sequences=lengths.sequences, gpu="off")
    model = load(path, options)
    modes = ["off"]
    if predictor.exists():
        modes += ["exact", "predicted"]
    found: dict[str, Contestant] = {mode: Ours(model.session(mode), lengths) for mode in modes}
    return found | {"llama.cpp": LlamaCpp(path, threads, lengths, all_logits=True)}


def run(found: dict[str, Contestant], rounds: int, seconds: float = math.inf) -> Samples:
    """One round more than that, the first, is not kept; none begins after so many seconds but the second."""
    samples: Samples = {}
    start = time.perf_counter()
    for round in range(rounds + 1):
        if round > 1 and time.perf_counter() - start > seconds:
            break
        names = [*found]
        at = round % len(names)
        names = names[at:] + names[:at]
        for phase in zip_longest(*(found[name].phases(round) for name in names)):
            for name, step in zip(names, phase, strict=True):
                measured = step[1]()
                if round:
                    samples.setdefault((name, step[0]), []).append(measured)
    return samples


def rows(samples: Samples) -> list[dict[str, object]]:
    table = []
    for (name, measure), own in samples.items():
        theirs = samples["llama.cpp", measure]
        ratios = sorted(a.tok_s / b.tok_s for a, b in zip(own, theirs, strict=True))
        speeds = sorted(each.tok_s for each in own)
        gb_s = [each.gb_s for each in own if each.gb_s is not None and name != "llama.cpp"]
        table.append(
            {
                "contestant": name,
                "measure": measure,
                "tok_s": round(statistics.median(speeds), 2),
                "range": [round(speeds[0], 2), round(speeds[-1], 2)],
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(ratios[0], 3), round(ratios[-1], 3)],
                "pairs": len(ratios),
                "active_share": own[0].active_share,
                "gb_s": round(statistics.median(gb_s), 2) if gb_s else None,
            }
        )
    return sorted(table, key=lambda row: str(row["measure"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no round begins")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--generate", type=int, default=24)
    parser.add_argument("--sequences", type=int, default=4, help="at the same time; 1 leaves the measure out")
    args = parser.parse_args()
    lengths = Lengths(args.prompt, args.generate, args.sequences)
    table = rows(run(contestants(args.file, args.threads, lengths), args.rounds, args.seconds))
    for row in table:
        low, high = row["ratios"]  # type: ignore[misc]
        speed = f"{row['tok_s']} tok/s, {row['ratio']} times llama.cpp ({low} to {high})"
        print(f"{row['measure']:<12}{row['contestant']:<11}{speed}")
    print(json.dumps({"file": args.file.name, "threads": args.threads, "rows": table}))


if __name__ == "__main__":
    main()
