"""hotcold quantize beside llama.cpp's quantiser: the same types, error, time, and perplexity in llama.cpp.

    python benchmarks/quality/quantise.py model-f16.gguf --types Q8_0 Q4_K_M --text text.txt

Both quantise the file in turns with the same number of threads; the time is the median of the rounds, from
the opened source to the closed file (Hotcold's is then on the disk, too, and llama.cpp's may be in the page
cache). For each type: whether both chose the same types for all tensors, the share of equal bytes, the
relative root mean square of the error of both, in all tensors that changed, and the perplexity that llama.cpp
finds with both files; with ``--run`` also Hotcold's with its own. ``--random`` takes tensors of random
numbers of the same shapes, without perplexity.

The last line of stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.formats.blocks import Tensor, quantise
from hotcold.formats.gguf import GGUFFile, open_gguf, write_gguf
from hotcold.quantize.quantization import QuantizeOptions, quantize
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks.scoring import Scorer, log_softmax
from hotcold.tokenizer.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import lib.llama
from lib.machine import REPOSITORY, commit

TYPES = [
    "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S",
    "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ2_0", "MXFP4_MOE",
]  # fmt: skip


def write_random(source: Path, path: Path) -> None:
    """Matrices of normal numbers, a few of them large, as weights are."""
    random = np.random.default_rng(1)

    def tensor(shape: tuple[int, ...]) -> Tensor:
        values = random.standard_normal(shape, np.float32)
        return quantise(values * np.exp(random.standard_normal(shape[-1:], np.float32)) * 0.02, "F32")

    with open_gguf(source) as file:
        write_gguf(path, file.metadata, {name: tensor(info.shape) for name, info in file.tensors.items()})


def stored(file: GGUFFile, name: str) -> Tensor:
    """A tensor of any type, whether Hotcold computes with it or not."""
    info = file.tensors[name]
    return Tensor(info.type, info.shape, file.read_rows(name, 0, math.prod(info.shape[:-1])))


def error(file: GGUFFile, source: GGUFFile) -> float:
    """Relative root mean square over the tensors whose type changed."""
    wrong = whole = 0.0
    for name, info in file.tensors.items():
        if info.type != source.tensors[name].type:
            values = stored(source, name).dequantise()
            wrong += float(((stored(file, name).dequantise() - values) ** 2).sum(dtype=np.float64))
            whole += float((values**2).sum(dtype=np.float64))
    return (wrong / whole) ** 0.5


def equal_bytes(first: GGUFFile, second: GGUFFile) -> float:
    """The share of equal bytes in all tensors."""
    pairs = [(stored(first, name).data, stored(second, name).data) for name in first.tensors]
    return sum(int((a == b).sum()) for a, b in pairs) / sum(a.size for a, _ in pairs)


def windows_of(path: Path, text: str, args: argparse.Namespace) -> list[list[int]]:
    with open_gguf(path) as file:
        ids = Tokenizer.from_metadata(file.metadata).encode(text)
    starts = range(0, len(ids) - args.context, args.context)
    return [list(ids[start : start + args.context]) for start in starts][: args.windows]


def perplexity_there(path: Path, windows: list[list[int]], args: argparse.Namespace) -> float:
    model: Any = lib.llama.open_llama_cpp().Llama(
        str(path), n_ctx=args.context, n_batch=args.context, n_threads=args.threads,
        n_threads_batch=args.threads, logits_all=True, verbose=False,
    )  # fmt: skip
    losses: list[float] = []
    for window in windows:
        model.reset()
        model.eval(window)
        for row, following in zip(model.scores, window[1:], strict=False):
            losses.append(-float(log_softmax(np.array(row))[following]))
    return float(np.exp(np.mean(losses)))


def perplexity_here(path: Path, windows: list[list[int]], args: argparse.Namespace) -> float:
    options = LoadOptions(sparsity="off", threads=args.threads, context=args.context, gpu="off")
    scorer = Scorer(load(path, options).session())
    losses: list[float] = []
    for window in windows:
        at = 1
        for rows in scorer.logits(window):
            chances = log_softmax(np.array(rows))
            losses += [-float(row[token]) for row, token in zip(chances, window[at:], strict=False)]
            at += len(chances)
    return float(np.exp(np.mean(losses)))


def compare(source: Path, type: str, windows: list[list[int]], args: argparse.Namespace, folder: Path) -> Any:
    ours, theirs = folder / "ours.gguf", folder / "theirs.gguf"
    seconds: dict[str, list[float]] = {"hotcold": [], "llama_cpp": []}
    for _ in range(args.rounds):
        start = time.perf_counter()
        quantize(source, ours, QuantizeOptions(type, threads=args.threads, force=True))
        seconds["hotcold"].append(time.perf_counter() - start)
        start = time.perf_counter()
        lib.llama.quantise(source, theirs, type, args.threads)
        seconds["llama_cpp"].append(time.perf_counter() - start)
    report: dict[str, Any] = {"type": type}
    with open_gguf(ours) as a, open_gguf(theirs) as b, open_gguf(source) as old:
        types = [{name: info.type.name for name, info in file.tensors.items()} for file in (a, b)]
        report["same_types"] = types[0] == types[1]
        report["equal_bytes"] = equal_bytes(a, b)
        report["rms"] = {"hotcold": error(a, old), "llama_cpp": error(b, old)}
        report["rms_ratio"] = report["rms"]["hotcold"] / report["rms"]["llama_cpp"]
    report["seconds"] = {name: statistics.median(each) for name, each in seconds.items()}
    report["speed_ratio"] = report["seconds"]["llama_cpp"] / report["seconds"]["hotcold"]
    if windows:
        report["ppl"] = {"hotcold": perplexity_there(ours, windows, args)}
        report["ppl"]["llama_cpp"] = perplexity_there(theirs, windows, args)
        with open_gguf(ours) as file:
            runs = all(info.type.supported for info in file.tensors.values())
        report["ppl_here"] = perplexity_here(ours, windows, args) if args.run and runs else None
    return report


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("file", type=Path, metavar="FILE", help="an F32, F16 or BF16 model")
    parser.add_argument("--types", nargs="+", default=TYPES, metavar="TYPE")
    parser.add_argument("--random", action="store_true", help="random numbers in the same shapes")
    parser.add_argument("--text", type=Path, default=REPOSITORY / "tests/data/heidi.txt")
    parser.add_argument("--windows", type=int, default=4, help="of the text (4)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a window (512)")
    parser.add_argument("--rounds", type=int, default=3, help="of both quantisers (3)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--run", action="store_true", help="Hotcold's perplexity, too")
    args = parser.parse_args()
    reports = []
    with tempfile.TemporaryDirectory() as name:
        folder, source = Path(name), args.file
        windows = []
        if args.random:
            source = folder / "random.gguf"
            write_random(args.file, source)
        else:
            windows = windows_of(source, args.text.read_text(encoding="utf-8"), args)
        for type in args.types:
            reports.append(compare(source, type, windows, args, folder))
            print(json.dumps(reports[-1]), flush=True)
    version = lib.llama.open_llama_cpp().__version__
    print(json.dumps({"commit": commit(), "llama_cpp": version, "file": args.file.name, "types": reports}))


if __name__ == "__main__":
    main()
