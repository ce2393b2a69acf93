"""Compares ways to make a checkpoint sparse on one token budget: zeros, quality and speed.

    pip install 'hotcold[train]'
    python benchmarks/quality/sparse_runs.py CHECKPOINT -f TEXT --held-out TEXT --tokens 600000 --out FOLDER

Rows: the original, a control (trained on the same tokens with its own activation), ReLU and dReLU swapped at
once without a penalty, dReLU with the penalty in stages, and the last one with a threshold for all layers and
with thresholds by layer. Perplexity over the control's has a 95 % interval, from a bootstrap of the held-out
windows. Tokens a second are those of `exact` over `off`, by alternating rounds on an F16 file: they need a
quiet machine, and --no-speed leaves them out. FOLDER keeps states, so a second call trains nothing again.
gguf_to_checkpoint.py makes a checkpoint of a GGUF file. The last line of stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hotcold
from hotcold.commands.sparsify import source
from hotcold.convert import ConvertOptions, convert
from hotcold.training.sparse_checkpoint import load_model, open_original
from hotcold.training.sparsifying import SparsifyOptions, sparsify
from hotcold.training.token_data import Encoder, Mixture, inputs_and_labels

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.machine import commit

#: Names of rows; activation, weight of the penalty, threshold. Equal trainings share a state.
ROWS = {
    "ReLU at once": ("relu", 0.0, "none"),
    "dReLU at once": ("drelu", 0.0, "none"),
    "dReLU, stages": ("drelu", 0.3, "none"),
    "dReLU, stages, one threshold": ("drelu", 0.3, "one"),
    "dReLU, stages, thresholds by layer": ("drelu", 0.3, "per-layer"),
}


def losses(model: Any, windows: Any) -> Any:
    """The mean surprise of each window, nats."""
    values = []
    with torch.no_grad():
        for window in windows:
            batch = {key: torch.from_numpy(each[None]) for key, each in inputs_and_labels(window).items()}
            values.append(float(model.eval()(**batch).loss))
    return np.array(values)


def interval(ours: Any, control: Any) -> list[float]:
    """The ratio of perplexities with its 95 % interval: ratio, lower end, upper end."""
    random, difference = np.random.default_rng(0), ours - control
    means = difference[random.integers(len(difference), size=(10_000, len(difference)))].mean(axis=1)
    ends = np.quantile(means, [0.025, 0.975])
    return [float(np.exp(each)) for each in (difference.mean(), *ends)]


def speed(folder: Path, rounds: int) -> float:
    """Tokens a second of `exact` over those of `off`; the median of alternating rounds."""
    path = folder.with_name(folder.name + ".gguf")
    if not path.exists():
        convert(folder, path, ConvertOptions("F16"))
    ratios = []
    for _ in range(rounds):
        figures = [
            hotcold.bench(path, n_prompt=16, n_gen=64, repetitions=1, sparsity=sparsity).median("tok_s")
            for sparsity in ("exact", "off")
        ]
        ratios.append(figures[0] / figures[1])
    return float(np.median(ratios))


def main() -> int:
    args = parse()
    torch.set_num_threads(args.threads)
    args.out.mkdir(exist_ok=True)
    original = open_original(args.checkpoint)
    encoder = Encoder(original.tokenizer, original.folder, int(original.config["vocab_size"]))
    sources, cache = [source(each) for each in args.file], args.out / "tokens"
    windows = Mixture(sources, encoder, args.context, args.seed, cache, args.held_out).judging
    control_losses, results = None, {}
    for name, (activation, weight, threshold) in ROWS.items():
        output, work = args.out / name.replace(" ", "-"), args.out / f"{activation}-{weight:g}.work"
        if not output.exists():
            options = SparsifyOptions(
                tokens=args.tokens,
                activation=activation,
                learning_rate=args.learning_rate,
                l1=weight,
                context=args.context,
                batch=args.batch,
                threshold=threshold,
                control=control_losses is None,
                seed=args.seed,
            )
            given = {
                "work": work,
                "cache": cache,
                "held_out": args.held_out,
                "log": work.with_suffix(".jsonl"),
            }
            sparsify(args.checkpoint, sources, output, options, device="cpu", **given)
        if control_losses is None:
            control = load_model(original, torch.device("cpu"))
            results["original"] = {"perplexity": float(np.exp(losses(control, windows).mean()))}
            state = torch.load(work / "control" / "state.pt", weights_only=True)
            control.load_state_dict(state["model"])
            control_losses = losses(control, windows)
            results["control"] = {"perplexity": float(np.exp(control_losses.mean()))}
        ours = losses(load_model(open_original(output), torch.device("cpu")), windows)
        report = json.loads((output / "sparsity.json").read_text(encoding="utf-8"))["measured"]
        row = {"perplexity": float(np.exp(ours.mean())), "over_control": interval(ours, control_losses)}
        row["zeros"] = float(np.mean(report["zeros"]))
        if not args.no_speed:
            row["exact_over_off"] = speed(output, args.rounds)
        results[name] = row
        print(name, json.dumps(row), flush=True)
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "threads")}
    print(json.dumps({"results": results, "settings": settings, "commit": commit()}, default=str))
    return 0


def parse() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("checkpoint", type=Path)
    add("-f", "--file", action="append", required=True, metavar="TEXT[=SHARE]")
    add("--held-out", type=Path, required=True, metavar="TEXT")
    add("--out", type=Path, required=True, metavar="FOLDER")
    add("--tokens", type=int, default=600_000)
    add("--learning-rate", type=float, default=1e-3)
    add("--context", type=int, default=256)
    add("--batch", type=int, default=8)
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=2)
    add("--rounds", type=int, default=11, help="of speed")
    add("--no-speed", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
