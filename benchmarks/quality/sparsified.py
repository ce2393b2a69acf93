"""Measures `hotcold sparsify` at a scale that two cores can train: zeros against perplexity.

    pip install '.[train]'
    python benchmarks/quality/sparsified.py --tokenizer tokenizer.model --out FOLDER \
        -f stories.txt=0.5 -f books.txt=0.5 --tokens 3000000 --further 2000000

A small Llama with SwiGLU is trained from random weights, the twin. Training then continues in two ways, on
the same windows in the same order with the same learning rate: as it is (the control), and by `hotcold
sparsify`. Both are judged by the same held-out text. In the end a growing share of the smallest activations
of each token is left out in all models (the control of TurboSparse, arXiv 2406.05955, table 3): a sparse
model does not notice until its zeros are used up. --sparse takes activations with weights of the penalty, for
the frontier: drelu=0.3 relu=1. --start takes a model with SwiGLU that is trained already, such as
stories260K; gguf_to_checkpoint.py makes a checkpoint of it.

FOLDER gets the checkpoints, which a second call finds and does not train again, and the picture masked.svg.
The last line of stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from hotcold.commands.sparsify import source
from hotcold.training.sparse_checkpoint import load_model, open_original
from hotcold.training.sparsify_run import rate_share
from hotcold.training.sparsifying import SparsifyOptions, sparsify
from hotcold.training.token_data import Encoder, Mixture

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.machine import commit
from lib.sparsity_picture import Curve, sparsity_picture

MASKED = (0.0, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99)


def make_twin(folder: Path, args: argparse.Namespace) -> None:
    """A checkpoint of random weights in the shape of the built-in model, or a smaller one."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": args.width,
        "intermediate_size": 4 * args.width,
        "num_hidden_layers": args.layers,
        "num_attention_heads": max(1, args.width // 64),
        "num_key_value_heads": max(1, args.width // 64),
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": args.vocabulary,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    torch.manual_seed(args.seed)
    settings = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("llama", **settings)
    )
    model.float().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copyfile(args.tokenizer, folder / "tokenizer.model")


def mixture_of(original: Any, args: argparse.Namespace) -> Mixture:
    encoder = Encoder(original.tokenizer, original.folder, int(original.config["vocab_size"]))
    return Mixture(args.texts, encoder, args.context, args.seed, args.out / "tokens")


def train(start: Path, end: Path, tokens: int, rate: float, args: argparse.Namespace) -> None:
    """Trains a checkpoint as it is; windows and learning rates are those of `sparsify` with this seed."""
    original = open_original(start)
    mixture = mixture_of(original, args)
    model = load_model(original, torch.device("cpu")).train()
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    steps = tokens // (args.context * args.batch)
    begun = time.monotonic()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * rate_share((step + 1) / steps)
        batch = torch.from_numpy(mixture.batch(step, args.batch))
        loss = model(batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % max(1, steps // 20) == 0:
            seconds = time.monotonic() - begun
            print(f"{end.name}: step {step} of {steps}, loss {loss.item():.3f}, {seconds:.0f} s", flush=True)
    partial = end.with_name(end.name + ".partial")
    model.save_pretrained(partial)
    for path in (start / "config.json", *start.glob("*token*")):
        shutil.copyfile(path, partial / path.name)
    partial.rename(end)


def judge(folder: Path, args: argparse.Namespace) -> tuple[Callable[[float], float], Callable[[], float]]:
    """The perplexity of a checkpoint with a share of each token's smallest activations left out, and the
    share of zeros of the last such pass before anything was left out."""
    original = open_original(folder)
    model = load_model(original, torch.device("cpu")).eval()
    held_out = torch.from_numpy(mixture_of(original, args).judging)
    left_out, zeros = 0.0, []

    def leave_out(module: Any, inputs: tuple[Any]) -> tuple[Any]:
        (values,) = inputs
        zeros.append(float((values == 0).float().mean()))
        if not left_out:
            return inputs
        order = values.abs().argsort(dim=-1)[..., : round(left_out * values.shape[-1])]
        return (values.scatter(-1, order, 0.0),)

    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(leave_out)

    def perplexity(share: float) -> float:
        nonlocal left_out
        left_out = share
        zeros.clear()
        total = 0.0
        with torch.no_grad():
            for batch in held_out.split(args.batch):
                logits = model(batch).logits[:, :-1].flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
                total += loss.item() * len(batch)
        return math.exp(total / len(held_out))

    return perplexity, lambda: sum(zeros) / len(zeros)


def parse() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--start", type=Path, metavar="CHECKPOINT", help="a trained model with SwiGLU instead of a new twin")
    add("--tokenizer", type=Path, help="tokenizer.model of SentencePiece, for a new twin")
    add("--vocabulary", type=int, default=4096)
    add("-f", "--file", action="append", required=True, metavar="TEXT[=SHARE]")
    add("--out", type=Path, required=True, metavar="FOLDER")
    add("--width", type=int, default=256, help="model width; neurons are four times as many (256)")
    add("--layers", type=int, default=6)
    add("--tokens", type=int, default=14_000_000, help="of the twin (14 M, as of the built-in model)")
    add("--further", type=int, default=10_000_000, help="of the control and of the sparse models (10 M)")
    add("--rate", type=float, default=2e-3, help="learning rate of the twin (2e-3)")
    add("--further-rate", type=float, default=1e-3, help="of what follows (1e-3)")
    add("--sparse", nargs="+", default=["drelu=0.3"], metavar="ACTIVATION=L1")
    add("--context", type=int, default=256)
    add("--batch", type=int, default=8)
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.start is None and args.tokenizer is None:
        parser.error("--tokenizer or --start is needed")
    args.texts = [source(each) for each in args.file]
    return args


def checkpoints(args: argparse.Namespace) -> dict[str, Path]:
    """The control and the sparse models, trained where they are not there yet."""
    twin, control = args.start or args.out / "twin", args.out / "control"
    if not twin.exists():
        make_twin(args.out / "random", args)
        train(args.out / "random", twin, args.tokens, args.rate, args)
    if not control.exists():
        train(twin, control, args.further, args.further_rate, args)
    folders = {"SwiGLU": control}
    for argument in args.sparse:
        activation, _, weight = argument.partition("=")
        folder = folders[f"{activation}, L1 {weight}"] = args.out / f"{activation}-{weight}"
        if folder.exists():
            continue
        options = SparsifyOptions(
            tokens=args.further,
            activation=activation,
            learning_rate=args.further_rate,
            l1=float(weight),
            context=args.context,
            batch=args.batch,
            seed=args.seed,
        )
        sparsify(twin, args.texts, folder, options, report=lambda report: print(report, flush=True))
    return folders


def main() -> int:
    args = parse()
    torch.set_num_threads(args.threads)
    args.out.mkdir(exist_ok=True)
    begun = time.monotonic()
    folders = checkpoints(args)
    print(f"trained for {time.monotonic() - begun:.0f} s", flush=True)
    results: dict[str, Any] = {}
    curves = []
    for name, folder in folders.items():
        perplexity, zeros = judge(folder, args)
        figures = {"perplexity": perplexity(0.0), "zeros": zeros()}
        figures["over_control"] = figures["perplexity"] / results.get("SwiGLU", figures)["perplexity"]
        points = [(share, perplexity(share)) for share in MASKED]
        curves.append(Curve(name, points))
        results[name] = {**figures, "masked": dict(points)}
        ratio = f"{figures['over_control']:.4f} of the control's"
        print(
            f"{name}: zeros {figures['zeros']:.1%}, perplexity {figures['perplexity']:.3f}, {ratio}",
            flush=True,
        )
    title = "Perplexity when each token's smallest activations are left out"
    (args.out / "masked.svg").write_text(sparsity_picture(title, curves))
    names = ("start", "width", "layers", "tokens", "further", "rate", "further_rate", "context", "batch")
    settings = {name: getattr(args, name) for name in names}
    print(json.dumps({"results": results, "settings": settings, "commit": commit()}, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
