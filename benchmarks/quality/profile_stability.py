"""How far a profile of one text holds for another: `hotcold profile` on each, layer by layer.

    python benchmarks/quality/profile_stability.py TEXT OTHER... [-m MODEL] [--tokens 65536]

For the first text: active neurons, their overlap from token to token, unions. For each other one: the part of
the hottest 20 % of neurons that both have (0.2 by chance), and the part of the other's activations that the
first's hottest 20 % cover, beside what its own would."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.commands import cli
from hotcold.formats.gguf import open_gguf

HOT = 0.2


def profile(text: Path, options: list[str]) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The command's report, and what it wrote: per layer the share of tokens for which each neuron is
    active."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "x.profile.gguf"
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert cli.main(["profile", "-f", str(text), "-o", str(out), "--json", *options]) == 0
        with open_gguf(out) as file:
            firing = [file.load(f"blk.{i}.profile").dequantise() for i in range(len(file.tensors))]
    return json.loads(printed.getvalue().splitlines()[-1]), firing


def hottest(firing: np.ndarray, share: float = HOT) -> np.ndarray:
    return np.argsort(-firing, kind="stable")[: round(share * len(firing))]


def compare(first: list[np.ndarray], other: list[np.ndarray]) -> dict[str, list[float]]:
    rows: dict[str, list[float]] = {"same": [], "covered": [], "own": []}
    for a, b in zip(first, other, strict=True):
        mine, its = hottest(a), hottest(b)
        rows["same"].append(len(np.intersect1d(mine, its)) / len(its))
        rows["covered"].append(float(b[mine].sum() / b.sum()))
        rows["own"].append(float(b[its].sum() / b.sum()))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+", metavar="TEXT")
    parser.add_argument("-m", "--model")
    parser.add_argument("--tokens", default="65536")
    args = parser.parse_args()
    options = ["--tokens", args.tokens, *(["-m", args.model] if args.model else [])]
    profiles = {path.name: profile(path, options) for path in args.texts}
    (name, (report, first)), *others = profiles.items()
    columns = [key for key in report if key in ("active", "hottest_fifth", "overlap") or key[:6] == "union_"]
    print(
        f"{name}, {report['tokens']} tokens\n| layer | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|"
    )
    for i in range(len(first)):
        print(f"| {i} | {' | '.join(f'{report[key][i]:.1%}' for key in columns)} |")
    compared = {other: compare(first, firing) for other, (_, firing) in others}
    for other, rows in compared.items():
        print(
            f"\n{other}, {profiles[other][0]['tokens']} tokens\n| layer | hottest 20 % that are the same ",
            end="",
        )
        print("| of its activations the first's cover | its own would |\n|---|---|---|---|")
        for i, row in enumerate(zip(*rows.values(), strict=True)):
            print(f"| {i} | {' | '.join(f'{share:.1%}' for share in row)} |")
    reports = {each: {key: profiles[each][0][key] for key in ("tokens", *columns)} for each in profiles}
    print(json.dumps({"first": name, "profiles": reports, "compared": compared}))


if __name__ == "__main__":
    main()
