"""Published files, run here and by llama.cpp: perplexity, and how far each is from float32 arithmetic.

    python benchmarks/quality/published.py smollm2.gguf gemma3.gguf --text text.txt

Both programs round activations to 8 bits before quantised weights, each in its own way, so neither's
perplexity is the file's. The same weights decoded to float32 show it: llama.cpp runs such a file with
float32 activations and a float32 cache, and Hotcold runs it, too, as a check of the truth by an independent
program. Per file: the perplexity of all four, and of both programs the mean Kullback-Leibler divergence of
their distributions from the truth's, its 99th percentile, and the share of tokens that have the same first
choice. The program with the smaller divergence is the more exact one, whatever the perplexities are.

The last line of stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks.scoring import Scorer, log_softmax
from hotcold.tasks.windows import text_windows

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.llama import open_llama_cpp
from lib.machine import REPOSITORY, commit

Logits = Iterator[npt.NDArray[np.float32]]


class Ours:
    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        options = LoadOptions(sparsity="off", threads=args.threads, context=args.context, gpu="off")
        self.session = load(path, options).session()

    def windows(self, text: str, most: int) -> list[list[int]]:
        return text_windows(self.session.model.tokenizer, text, self.session.model.context)[:most]

    def logits(self, window: list[int]) -> Logits:
        """After each token of the window but the last, some rows at a time."""
        for rows in Scorer(self.session).logits(window):
            yield np.array(rows)


class Theirs:
    def __init__(self, path: Path, args: argparse.Namespace, *, cache: str = "F16") -> None:
        library = open_llama_cpp()
        kind = getattr(library, f"GGML_TYPE_{cache}")
        self.model: Any = library.Llama(
            str(path), n_ctx=args.context, n_batch=args.context, n_ubatch=args.context, type_k=kind,
            type_v=kind, n_threads=args.threads, n_threads_batch=args.threads, logits_all=True, verbose=False,
        )  # fmt: skip

    def logits(self, window: list[int]) -> Logits:
        self.model.reset()
        self.model.eval(window)
        scores = self.model.scores
        for start in range(0, len(window) - 1, 16):
            yield np.array(scores[start : min(start + 16, len(window) - 1)])


def write_float32(path: Path, output: Path) -> None:
    """The same weights, decoded."""
    with open_gguf(path) as file:
        decoded = {name: quantise(file.load(name).dequantise(), "F32") for name in file.tensors}
        metadata = {key: value for key, value in file.metadata.items() if key != "general.file_type"}
        write_gguf(output, metadata, decoded)


def compare(path: Path, text: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    plain = folder / "float32.gguf"
    write_float32(path, plain)
    ours = Ours(path, args)
    windows = ours.windows(text, args.windows)
    truth = Theirs(plain, args, cache="F32")
    others = {"hotcold": ours, "llama_cpp": Theirs(path, args), "hotcold_float32": Ours(plain, args)}
    nll: dict[str, list[Any]] = {name: [] for name in ("float32", *others)}
    kl: dict[str, list[Any]] = {name: [] for name in others}
    same: dict[str, list[Any]] = {name: [] for name in others}
    for window in windows:
        at = 0
        for true, *rest in zip(
            truth.logits(window), *(each.logits(window) for each in others.values()), strict=True
        ):
            expected, rows = log_softmax(true), np.arange(len(true))
            next_tokens = window[at + 1 : at + 1 + len(true)]
            nll["float32"].append(-expected[rows, next_tokens])
            for name, logits in zip(others, rest, strict=True):
                log_probabilities = log_softmax(logits)
                nll[name].append(-log_probabilities[rows, next_tokens])
                kl[name].append((np.exp(expected) * (expected - log_probabilities)).sum(axis=1))
                same[name].append(log_probabilities.argmax(axis=1) == expected.argmax(axis=1))
            at += len(true)
    plain.unlink()
    surprise = {name: np.concatenate(each) for name, each in nll.items()}
    ppl = {name: float(np.exp(each.mean())) for name, each in surprise.items()}
    report: dict[str, Any] = {"file": path.name, "tokens": len(surprise["float32"]), "ppl": ppl}
    report["ppl_over_llama_cpp"] = ppl["hotcold"] / ppl["llama_cpp"]
    for name in others:
        divergence = np.concatenate(kl[name])
        difference = surprise[name] - surprise["float32"]
        report[name] = {
            "kl": float(divergence.mean()),
            "kl_p99": float(np.quantile(divergence, 0.99)),
            "same_top": float(np.concatenate(same[name]).mean()),
            "nll_error": float(difference.mean()),
            "nll_error_rms": float(np.sqrt((difference**2).mean())),
            "nll_error_se": float(difference.std(ddof=1) / len(difference) ** 0.5),
        }
    return report


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--text", type=Path, default=REPOSITORY / "tests/data/heidi.txt")
    parser.add_argument("--windows", type=int, default=8, help="of the text (8)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a window (512)")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        for path in args.files:
            reports.append(compare(path, text, args, Path(folder)))
            print(json.dumps(reports[-1], indent=1), flush=True)
    version = open_llama_cpp().__version__
    print(json.dumps({"commit": commit(), "llama_cpp": version, "text": args.text.name, "files": reports}))


if __name__ == "__main__":
    main()
