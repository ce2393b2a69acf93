"""Files of few bits that llama.cpp quantised, run here and by llama.cpp: distributions and first choices.

    python benchmarks/quality/block_types.py --data FOLDER --llama FOLDER_OF_BINARIES

The model is stories260K made wider, as in formats.py. The program llama-quantize makes each mixture; the
importance matrix, which the smallest types need, is measured on the text by Hotcold. Both programs compute
the same windows of the text, and so does Hotcold with the same weights decoded to float32. Printed are the
Kullback-Leibler divergence of ours from llama.cpp's, that of each from the decoded weights, and how often
both choose the same token. The last line of stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.tasks.imatrix import imatrix
from hotcold.tasks.scoring import Scorer, log_softmax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.stories260k import write_stories260k

from lib.machine import commit
from quality.formats import Ours, Theirs, widen

Array = npt.NDArray[np.float64]

TYPES = (
    "Q2_K", "Q3_K_M", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "TQ1_0",
    "TQ2_0",
)  # fmt: skip


def make(source: Path, path: Path, type: str, importance: Path, folder: Path) -> None:
    """SystemExit: llama-quantize fails."""
    command = [
        str(folder / "llama-quantize"),
        "--imatrix",
        str(importance),
        str(source),
        str(path),
        type,
        "1",
    ]
    env = os.environ | {"LD_LIBRARY_PATH": str(folder)}
    run = subprocess.run(command, capture_output=True, env=env, check=False)
    if run.returncode:
        raise SystemExit(f"llama-quantize {type}: {run.stderr.decode(errors='replace')[-1000:]}")


def decoded(source: Path, path: Path) -> Counter[str]:
    """Writes the same weights as float32, and returns how many tensors of a layer had which type."""
    with open_gguf(source) as file:
        tensors = {name: quantise(file.load(name).dequantise(), "F32") for name in file.tensors}
        write_gguf(path, file.metadata, tensors)
        matrices = [info for name, info in file.tensors.items() if name[:4] == "blk." and len(info.shape) > 1]
        return Counter(info.type.name for info in matrices)


def ours_of(model: Ours, windows: list[list[int]]) -> Array:
    scorer = Scorer(model.session)
    return np.vstack([log_softmax(rows) for window in windows for rows in scorer.logits(window)])


def theirs_of(model: Theirs, windows: list[list[int]]) -> Array:
    found = []
    for window in windows:
        model.model.reset()
        model.model.eval(window)
        found.append(log_softmax(np.asarray(model.model.scores[: len(window) - 1])))
    return np.vstack(found)


def divergence(seen: Array, base: Array) -> float:
    """Nats a token."""
    return float((np.exp(base) * (base - seen)).sum(axis=1).mean())


def compare(path: Path, windows: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    plain = path.with_suffix(".f32.gguf")
    types = decoded(path, plain)
    truth = ours_of(Ours(plain, args), windows)
    plain.unlink()
    model = Ours(path, args)
    ours = ours_of(model, windows)
    theirs = theirs_of(Theirs(path, args, model.session.model.tokenizer.stop_ids), windows)
    top = np.sort(theirs, axis=1)
    clear = top[:, -1] - top[:, -2] > 0.1
    same = ours.argmax(1) == theirs.argmax(1)
    return {
        "type": path.stem, "layers": dict(types), "tokens": len(truth), "kl": divergence(ours, theirs),
        "kl_from_float32": divergence(ours, truth), "llama_cpp_kl_from_float32": divergence(theirs, truth),
        "same": float(same.mean()), "clear": int(clear.sum()), "same_where_clear": float(same[clear].mean()),
        "ppl": _ppl(ours, windows), "llama_cpp_ppl": _ppl(theirs, windows),
    }  # fmt: skip


def _ppl(logs: Array, windows: list[list[int]]) -> float:
    targets = np.concatenate([window[1:] for window in windows])
    return float(np.exp(-logs[np.arange(len(targets)), targets].mean()))


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    data = os.environ.get("HOTCOLD_TEST_DATA")
    parser.add_argument("--data", type=Path, default=data, required=data is None, help="the shared test data")
    parser.add_argument("--llama", type=Path, required=True, metavar="FOLDER", help="with llama-quantize")
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--context", type=int, default=256, help="tokens of a window (256)")
    parser.add_argument("--backend", choices=("cpu", "reference"), default="cpu")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    stories = args.data / "text/tinystories/smallGPT_tiny_stories.txt"
    text = stories.read_text(encoding="utf-8")[: args.windows * 4000]
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        narrow, wide, importance = (Path(folder, name) for name in ("a.gguf", "wide.gguf", "imatrix.gguf"))
        write_stories260k(narrow)
        with open_gguf(narrow) as file:
            widen(file, wide, 8)
        imatrix(wide, stories, context=args.context, chunks=16, threads=args.threads, output=importance)
        windows = Ours(narrow, args).windows(text, args.windows)
        for type in args.types:
            make(wide, path := Path(folder, f"{type}.gguf"), type, importance, args.llama)
            row = compare(path, windows, args)
            path.unlink()
            reports.append(row)
            apart = f"{row['kl_from_float32']:.6f} and {row['llama_cpp_kl_from_float32']:.6f}"
            print(
                f"{type:8} KL {row['kl']:.6f}; from decoded weights {apart}; first choice the same "
                f"{row['same']:.2%}, {row['same_where_clear']:.2%} of {row['clear']} of {row['tokens']} that "
                f"are clear; perplexity {row['ppl']:.4f} and {row['llama_cpp_ppl']:.4f}; {row['layers']}",
                flush=True,
            )
    found = {"model": "stories260K", "types": reports, "commit": commit(), "llama_cpp": llama_cpp.__version__}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
