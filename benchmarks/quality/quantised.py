"""Cost of quantised files, Hotcold's and llama.cpp's, against the float model.

    hotcold convert CHECKPOINT model.gguf --type F32
    python benchmarks/quality/quantised.py model.gguf --text a.txt b.txt --calibration c.txt

Both files of a type have the same size: each tensor has the type that llama.cpp's quantiser gives it, too.
llama.cpp's ``ggml_quantize_chunk`` packs the rows of the second file, so it reads no model and takes any
architecture. Both files and the float model run the same windows of all texts, as decode rows. The table has
the KL divergence from the float model and the ratio of perplexities, then the difference of both files, token
by token. All intervals are 95 %, by a bootstrap of blocks of 32 tokens. They lack one source of chance: files
of equal KL raise or lower the perplexity of a text differently, by their rounding errors (docs/log.md).
``--calibration`` adds each type with an importance matrix, measured on that text. Needs llama-cpp-python.

``--negations N`` measures that chance: N more models have some channels of the residual stream negated, which
changes no float product but each block's rounding. A last table has the geometric mean of both ratios over
all of these models, with Student's 95 % interval.

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
from scipy.stats import t as student_t

from hotcold.formats.blocks import Tensor
from hotcold.formats.blocks import quantise as pack
from hotcold.formats.gguf import GGUFFile, open_gguf, write_gguf
from hotcold.quantize.imatrix import ImportanceMatrix, read_imatrix
from hotcold.quantize.quantization import QuantizeOptions, importance_of, quantize
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks.imatrix import imatrix
from hotcold.tasks.scoring import Divergence, Scorer, log_softmax, mean_interval
from hotcold.tasks.windows import text_windows
from hotcold.tokenizer.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import lib.llama
from lib.machine import commit

Floats = npt.NDArray[np.floating]
Windows = list[list[int]]

TYPES = [
    "IQ4_NL", "Q5_K_M", "Q2_K", "Q3_K_M", "Q3_K_L", "IQ4_XS", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q6_K",
]  # fmt: skip

HEAD = (
    "| model | type | importance | bytes | KL, Hotcold | KL, llama.cpp | perplexity, Hotcold "
    "| perplexity, llama.cpp | KL, Hotcold less llama.cpp | perplexity, Hotcold over llama.cpp | worse by |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def pack_by_llama_cpp(file: GGUFFile, name: str, packed: Tensor, matrix: ImportanceMatrix | None) -> Tensor:
    """The same tensor in the same type, packed by llama.cpp."""
    type, shape = packed.type, packed.shape
    if type.weights == 1 or type == file.tensors[name].type:
        return packed
    columns = shape[-1]
    experts = file.load(name).dequantise().reshape(-1, shape[-2], columns)
    importance = matrix and importance_of(file, name, matrix)
    rows = []
    for expert, values in enumerate(experts):
        counts = None if importance is None else np.ascontiguousarray(importance[expert], np.float32)
        values = np.ascontiguousarray(values, np.float32)
        rows.append(lib.llama.quantise_rows(values, type.id, type.row_bytes(columns), counts, 1))
    return Tensor(type, shape, np.concatenate(rows))


def write_files(
    source: Path, type: str, matrix: ImportanceMatrix | None, folder: Path, threads: int
) -> tuple[Path, Path, int]:
    """Writes the file of each quantiser; returns the bytes of their tensors, too."""
    ours, theirs = folder / "hotcold.gguf", folder / "llama.cpp.gguf"
    quantize(source, ours, QuantizeOptions(type, importance=matrix, threads=threads, force=True))
    with open_gguf(source) as file, open_gguf(ours) as made:
        stored = {name: made.load(name) for name in made.tensors}
        packed = {name: pack_by_llama_cpp(file, name, each, matrix) for name, each in stored.items()}
        write_gguf(theirs, made.metadata, packed)
        return ours, theirs, sum(info.nbytes for info in made.tensors.values())


def log_probabilities(path: Path, windows: Windows, args: argparse.Namespace) -> Iterator[Floats]:
    """Yields those of each window, ``[tokens, V]``."""
    model = load(path, LoadOptions(sparsity="off", threads=args.threads, context=args.context, gpu="off"))
    scorer = Scorer(model.session())
    for window in windows:
        yield np.concatenate([log_softmax(rows) for rows in scorer.logits(window)])
    model.close()


def divergence(path: Path, base: list[Floats], windows: Windows, args: argparse.Namespace) -> Divergence:
    columns: list[list[Any]] = [[], [], [], []]
    for log_q, log_p, window in zip(log_probabilities(path, windows, args), base, windows, strict=True):
        at = np.arange(len(log_q)), np.array(window[1:])
        kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=1, dtype=np.float64)
        for column, figures in zip(
            columns, (kl, log_q.argmax(1) == log_p.argmax(1), -log_q[at], -log_p[at]), strict=True
        ):
            column.append(figures)
    return Divergence(*(np.concatenate(column) for column in columns))


def compare(ours: Divergence, theirs: Divergence) -> dict[str, Any]:
    """Hotcold's file against llama.cpp's, paired by token, and by which measures the interval says worse."""
    pair = Divergence(ours.kl, ours.same_top, ours.nll, theirs.nll)
    ratio = pair.ratio_interval()
    kl = mean_interval(ours.kl - theirs.kl)
    return {
        "kl_difference": float((ours.kl - theirs.kl).mean()),
        "kl_interval": kl,
        "ppl_ratio": pair.perplexity_ratio,
        "ppl_interval": ratio,
        "worse_by": [
            name
            for name, interval, equal in (("KL", kl, 0), ("perplexity", ratio, 1))
            if interval and interval[0] > equal
        ],
    }


def row(report: dict[str, Any]) -> str:
    def figures(name: str) -> list[str]:
        result = report[name]
        low, high = result["ppl_ratio_low"] or 0, result["ppl_ratio_high"] or float("inf")
        return [f"{result['kl_mean']:.3g}", f"{result['ppl_ratio']:.4f} [{low:.4f}, {high:.4f}]"]

    (kl, ppl), (kl_theirs, ppl_theirs) = figures("hotcold"), figures("llama_cpp")
    pair = report["pair"]
    low, high = pair["kl_interval"] or (-float("inf"), float("inf"))
    ratio = pair["ppl_interval"] or (0, float("inf"))
    share = [100 * each / report["llama_cpp"]["kl_mean"] for each in (pair["kl_difference"], low, high)]
    cells = [
        report["model"], report["type"], "yes" if report["importance"] else "no", str(report["bytes"]),
        kl, kl_theirs, ppl, ppl_theirs, f"{share[0]:+.1f} % [{share[1]:+.1f}, {share[2]:+.1f}]",
        f"{pair['ppl_ratio']:.4f} [{ratio[0]:.4f}, {ratio[1]:.4f}]", ", ".join(pair["worse_by"]) or "no",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def write_negated(source: Path, output: Path, seed: int) -> None:
    """Writes an equal model: half of the residual stream's channels are negated in all matrices.

    Input matrices and embeddings have negated columns. The attention's output has negated rows, and so has
    `down`, unless it is stored by neuron.
    """
    with open_gguf(source) as file:
        tensors = {name: file.load(name).dequantise() for name in file.tensors}
        hidden = tensors["token_embd.weight"].shape[1]
        signs = np.random.default_rng(seed).choice([np.float32(-1), np.float32(1)], hidden)
        by_neuron = file.metadata.get("hotcold.ffn.down_layout") == "by_neuron"
        for name, values in tensors.items():
            writes = name.endswith(("attn_output.weight", "ffn_down.weight"))
            if values.ndim == 2:
                by_row = writes and not (by_neuron and "ffn_down" in name)
                tensors[name] = values * (signs[:, None] if by_row else signs)
        write_gguf(output, file.metadata, {name: pack(each, "F32") for name, each in tensors.items()})


def means(reports: list[dict[str, Any]]) -> Iterator[str]:
    """Yields a row for each type: means of the ratios over a model and its negations."""
    yield "| model | type | importance | models | KL over llama.cpp's | perplexity over llama.cpp's |"
    yield "|---|---|---|---|---|---|"
    groups: dict[tuple[str, str, bool], list[dict[str, Any]]] = {}
    for report in reports:
        key = report["model"].partition("~")[0], report["type"], report["importance"]
        groups.setdefault(key, []).append(report)
    for (model, type, importance), members in groups.items():
        cells = []
        kl = [each["hotcold"]["kl_mean"] / each["llama_cpp"]["kl_mean"] for each in members]
        for ratios in (kl, [each["pair"]["ppl_ratio"] for each in members]):
            logs = np.log(ratios)
            half = student_t.ppf(0.975, len(logs) - 1) * np.std(logs, ddof=1) / len(logs) ** 0.5
            mean, low, high = np.exp([logs.mean(), logs.mean() - half, logs.mean() + half])
            cells.append(f"{mean:.4f} ({low:.4f} to {high:.4f})")
        yield f"| {model} | {type} | {'yes' if importance else 'no'} | {len(members)} | {' | '.join(cells)} |"


def windows_of(path: Path, texts: list[Path], args: argparse.Namespace) -> Windows:
    with open_gguf(path) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    count = max(1, args.tokens // args.context)
    cut = [text_windows(tokenizer, text.read_text(encoding="utf-8"), args.context) for text in texts]
    return [window for windows in cut for window in windows[:count]]


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("models", type=Path, nargs="+", metavar="FILE", help="F32 files")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="texts to judge by")
    parser.add_argument("--calibration", type=Path, help="text of an importance matrix")
    parser.add_argument("--types", nargs="+", default=TYPES, metavar="TYPE")
    parser.add_argument("--tokens", type=int, default=4096, help="of each text (4096)")
    parser.add_argument("--context", type=int, default=256, help="tokens of a window (256)")
    parser.add_argument("--negations", type=int, default=0, metavar="N", help="equal models of each (0)")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    lib.llama.open_llama_cpp()
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as name:
        models = []
        for model in args.models:
            models.append(model)
            for seed in range(args.negations):
                models.append(Path(name) / f"{model.stem}~{seed + 1}.gguf")
                write_negated(model, models[-1], seed)
        reports = measure(models, args)
    if args.negations:
        print("\n".join(means(reports)), flush=True)
    print(json.dumps({"commit": commit(), "types": reports}))


def measure(models: list[Path], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints a row for each model, type and importance; returns their reports."""
    reports = []
    for model in models:
        windows = windows_of(model, args.text, args)
        base = [each.astype(np.float32) for each in log_probabilities(model, windows, args)]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            matrices: list[ImportanceMatrix | None] = [None]
            if args.calibration:
                output = folder / "imatrix.gguf"
                imatrix(model, args.calibration, context=args.context, chunks=32, output=output)
                matrices.append(read_imatrix(output))
            for type in args.types:
                for matrix in matrices:
                    ours, theirs, nbytes = write_files(model, type, matrix, folder, args.threads)
                    pair = [divergence(path, base, windows, args) for path in (ours, theirs)]
                    report = {"model": model.stem, "type": type, "importance": matrix is not None}
                    report |= {"bytes": nbytes, "tokens": len(pair[0].kl), "pair": compare(*pair)}
                    report |= {"hotcold": pair[0].summary(), "llama_cpp": pair[1].summary()}
                    reports.append(report)
                    print(row(report), flush=True)
    return reports


if __name__ == "__main__":
    main()
