"""Shows what it costs a model without zeros to leave out neurons by their gates (CATS, arXiv 2404.08763).

    python benchmarks/quality/gguf_to_checkpoint.py SmolLM2-135M-Instruct.Q4_1.gguf FOLDER
    python benchmarks/quality/cats.py -m FOLDER -f TEXT
    python benchmarks/quality/cats.py -m FOLDER -f TEXT --shares 0.5 --window 128 --windows 2

In each layer the neurons with the smallest ``|act(gate)|`` are left out: those below the threshold that
leaves out this share of them on the first half of the text. The second half judges: the mean divergence of
what the model says from what it says whole (nats a token), the ratio of perplexities, and how often the
likeliest token is the same. The first 16 positions of a window are computed whole, as a prompt would be.
The model is a checkpoint that transformers runs, SwiGLU or GeGLU with one ``mlp`` a layer. Needs the extra
``train``. The last line of stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.machine import commit

WHOLE = 16  #: positions at a window's beginning


class Gates(torch.nn.Module):
    """Takes the place of a layer's activation: notes its values, or leaves the small ones out."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.activation = activation
        self.recorded: list[torch.Tensor] | None = None
        self.threshold = 0.0
        self.kept = self.all = 0

    def forward(self, gate: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.activation(gate)
        if self.recorded is not None:
            self.recorded.append(value[:, WHOLE:].abs().flatten())
        if not self.threshold:
            return value
        small = value.abs() < self.threshold
        small[:, :WHOLE] = False
        self.kept += int((~small[:, WHOLE:]).sum())
        self.all += small[:, WHOLE:].numel()
        return value.masked_fill(small, 0)


def log_probabilities(model: Any, window: torch.Tensor) -> torch.Tensor:
    """Logarithms of probabilities after each position of a window, the first ones left out."""
    return torch.log_softmax(model(window[None]).logits[0, WHOLE:-1].float(), -1)


def judged(
    model: Any, gates: list[Gates], windows: list[torch.Tensor], whole: list[torch.Tensor]
) -> dict[str, float]:
    divergence, loss, before, same, n = 0.0, 0.0, 0.0, 0, 0
    for window, right in zip(windows, whole, strict=True):
        of_gates, coming = log_probabilities(model, window), window[WHOLE + 1 :, None]
        divergence += float((right.exp() * (right - of_gates)).sum())
        loss -= float(of_gates.gather(1, coming).sum())
        before -= float(right.gather(1, coming).sum())
        same += int((of_gates.argmax(-1) == right.argmax(-1)).sum())
        n += len(coming)
    return {
        "kept": sum(each.kept for each in gates) / sum(each.all for each in gates),
        "nats": divergence / n,
        "perplexity_ratio": float(torch.tensor((loss - before) / n).exp()),
        "same_first": same / n,
        "tokens": n,
    }


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("-m", "--model", type=Path, required=True, help="a folder")
    parser.add_argument("-f", "--file", type=Path, required=True, help="a text")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.5, 0.7])
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=4, help="of each half (4)")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = tokenizer(args.file.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    cut = [*ids[: len(ids) // args.window * args.window].view(-1, args.window)]
    half = len(cut) // 2
    if not half:
        parser.error(f"the text has {len(ids)} tokens: at least two windows of {args.window} are needed")
    first, second = cut[:half][: args.windows], cut[half:][: args.windows]
    gates = []
    for layer in model.model.layers:
        gates.append(Gates(layer.mlp.act_fn))
        layer.mlp.act_fn = gates[-1]
    rules = []
    with torch.inference_mode():
        for gate in gates:
            gate.recorded = []
        for window in first:
            model(window[None])
        values = [torch.cat(gate.recorded or []).sort().values for gate in gates]
        for gate in gates:
            gate.recorded = None
        whole = [log_probabilities(model, window) for window in second]
        for share in args.shares:
            for gate, sizes in zip(gates, values, strict=True):
                gate.threshold, gate.kept, gate.all = float(sizes[int(share * len(sizes))]), 0, 0
            rules.append({"share": share} | judged(model, gates, second, whole))
            line = "{share:.0%} left out: {nats:.3f} nats, perplexity x{perplexity_ratio:.3f}, "
            print((line + "the same first token {same_first:.1%}").format(**rules[-1]), flush=True)
    print(json.dumps({"model": args.model.name, "text": args.file.name, "rules": rules, "commit": commit()}))


if __name__ == "__main__":
    main()
