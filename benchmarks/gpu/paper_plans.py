"""`hotcold plan` for the models and machines of published measurements, beside what was measured.

    python benchmarks/gpu/paper_plans.py

Nothing is measured here: it is a check that the plans are of the right order. Context 512. Published figures
are those of arXiv 2312.12456 (sections 8.2 and 8.3), of Bamboo's README and of arXiv 2406.05955 (table 8).
"""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

from hotcold.commands import cli

#: machine, model, type, published tokens a second, speed-up over llama.cpp, share of activations on the GPU
PUBLISHED = (
    ("rtx4090-i9", "opt-30b", "F16", 12.0, 10.9, 0.70),
    ("rtx4090-i9", "falcon-40b", "F16", None, 11.69, 0.70),
    ("rtx4090-i9", "llama2-70b", "Q4_0", None, None, 0.70),
    ("rtx4090-i9", "opt-175b", "Q4_0", 2.0, 2.66, None),
    ("rtx2080ti-i7", "opt-30b", "F16", None, None, 0.42),
    ("rtx2080ti-i7", "mistral-7b", "F16", 33.5, 4.38, None),
    ("rtx4090-laptop-i9", "mixtral-47b", "Q4_0", 33.12, 2.53, None),
)


def plan(machine: str, model: str, kind: str, objective: str) -> dict[str, Any]:
    line = f"plan --shape {model} --type {kind} --hardware {machine} --ctx 512 --objective {objective} --json"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main(line.split()) == 0
    report: dict[str, Any] = json.loads(out.getvalue().splitlines()[-1])
    return report


def main() -> None:
    print("| machine | model | type | tok/s: ours, with the paper's objective, published ", end="")
    print("| speed-up over a layer split: ours, published | activations on the GPU: as tok/s |")
    print("|---|---|---|---|---|---|")
    rows = []
    for machine, model, kind, speed, ratio, share in PUBLISHED:
        ours, paper = (plan(machine, model, kind, objective) for objective in ("time", "paper"))
        times = ours["predicted_tok_s"] / ours["layer_split_tok_s"]
        print(
            f"| {machine} | {model} | {kind} "
            f"| {ours['predicted_tok_s']:.1f}, {paper['predicted_tok_s']:.1f}, {speed or '-'} "
            f"| {times:.1f}, {ratio or '-'} "
            f"| {ours['hot_activation_share']:.0%}, {paper['hot_activation_share']:.0%}, "
            f"{f'{share:.0%}' if share else '-'} |"
        )
        published = {"tok_s": speed, "speed_up": ratio, "share": share}
        rows.append({"ours": ours, "paper": paper, "published": published})
    for row in rows:
        for objective in ("ours", "paper"):
            del row[objective]["parts"]
    print(json.dumps({"plans": rows}))


if __name__ == "__main__":
    main()
