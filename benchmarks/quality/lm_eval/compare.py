"""The evaluation harness against the server, and this package's own scores of the same tokens.

    python -m venv vlm && vlm/bin/pip install 'lm-eval[api]' transformers sentencepiece protobuf
    hotcold fit-predictor -f stories.txt -o fable.predictor.gguf
    python benchmarks/quality/lm_eval/compare.py --lm-eval vlm/bin/lm-eval --text Heidi_heldout.txt \\
        --tokenizer tokenizer.model --predictor fable.predictor.gguf --json lm_eval.json

For each sparsity mode it starts `hotcold serve`, runs `lm-eval` with `local-completions` on two tasks made of
passages of a text that the model was not trained on (their yaml files lie beside this script), and scores the
same tokens as `hotcold perplexity` does. The harness tokenises by itself, with transformers and the model's
SentencePiece file, so that it depends on nothing of this package but the server's replies: those to requests
with `echo` and `logprobs`. It ends with code 1 where a passage's two scores differ by more than --tolerance.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotcold.demo import model_path
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks.scoring import Scorer, score

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lib.server import serving

HERE = Path(__file__).resolve().parent
MODES = ("off", "exact", "predicted")
TASKS = ("held_out_text", "held_out_words")
#: Settings that transformers asks for and a SentencePiece file does not have.
TOKENIZER = {
    "tokenizer_class": "LlamaTokenizer",
    "legacy": True,
    "add_prefix_space": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}


def passages(text: str, count: int, words: int) -> list[str]:
    """Stretches of whole sentences with a bound on their words, evenly spread over a text."""
    sentences = re.split(r"(?<=[.!?]) +", " ".join(text.split()))
    all_passages: list[str] = []
    passage: list[str] = []
    for sentence in sentences:
        if passage and len(" ".join([*passage, sentence]).split()) > words:
            all_passages.append(" ".join(passage))
            passage = []
        if len(sentence.split()) <= words:
            passage.append(sentence)
    step = max(1, len(all_passages) // count)
    return all_passages[::step][:count]


def predictor_of(mode: str, predictor: Path | None) -> Path | None:
    """A sidecar is for one mode alone."""
    return predictor if mode == "predicted" else None


def run_harness(program: str, folder: Path, address: str, context: int, concurrent: int) -> dict[str, Any]:
    """Its results and, by task, its log-likelihood of each passage."""
    with urllib.request.urlopen(f"{address}/v1/models", timeout=30) as answer:
        model = json.load(answer)["data"][0]["id"]
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    arguments = {
        "model": model,
        "base_url": f"{address}/v1/completions",
        "tokenizer": "tokenizer",
        "tokenizer_backend": "huggingface",
        "max_length": context - 1,  # the harness asks for one token more
        "num_concurrent": concurrent,
    }
    command = [program, "run", "--model", "local-completions", "--tasks", ",".join(TASKS)]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--include_path", str(HERE), "--output_path", str(out), "--log_samples"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    environment.pop("PYTHONPATH", None)
    subprocess.run(command, cwd=folder, env=environment, check=True)
    (results,) = out.rglob("results_*.json")
    report = json.loads(results.read_text(encoding="utf-8"))
    return {
        "results": {task: report["results"][task] for task in TASKS},
        "version": report.get("lm_eval_version"),
        "passages": {task: samples(out, task) for task in TASKS},
    }


def samples(out: Path, task: str) -> list[float]:
    """In the order of the passages."""
    (path,) = out.rglob(f"samples_{task}_*.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines.sort(key=lambda line: line["doc_id"])
    return [first_number(line["resps"]) for line in lines]


def first_number(value: Any) -> float:
    while isinstance(value, list | tuple):
        value = value[0]
    return float(value)


def own_scores(
    model: Path, mode: str, predictor: Path | None, context: int, texts: Sequence[str]
) -> dict[str, Any]:
    """By task, the log-likelihood of each passage, as `hotcold perplexity` scores it."""
    loaded = load(model, LoadOptions(sparsity=mode, context=context, predictor=predictor))
    try:
        scorer = Scorer(loaded.session(mode))
        encode = loaded.tokenizer.encode
        whole, last = [], []
        for text in texts:
            ids = encode(text, add_bos=True)
            surprise = score(scorer, ids)
            whole.append(-float(surprise.sum()))
            # The harness gives the last word's task no BOS, and takes the tokens
            # after the tokens of the preceding text as the word's.
            before = encode(text.rsplit(" ", 1)[0], add_bos=False)
            alone = encode(text, add_bos=False)
            last.append(-float(score(scorer, alone)[len(before) - 1 :].sum()))
            tokens = len(surprise)
            assert tokens < context, f"a passage of {tokens} tokens: choose fewer --words"
        return {"passages": {TASKS[0]: whole, TASKS[1]: last}, "active_share": scorer.figures.active_share}
    finally:
        loaded.close()


def compare(mode: str, harness: dict[str, Any], hotcold: dict[str, Any], tokens: int) -> dict[str, Any]:
    row: dict[str, Any] = {"sparsity": mode, "active_share": hotcold["active_share"], "tokens": tokens}
    for task in TASKS:
        theirs, ours = harness["passages"][task], hotcold["passages"][task]
        assert len(theirs) == len(ours)
        worst = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
        row[task] = {
            "harness": sum(theirs),
            "own": sum(ours),
            "worst_difference": worst,
            "results": harness["results"][task],
        }
    row["perplexity_harness"] = math.exp(-row[TASKS[0]]["harness"] / tokens)
    row["perplexity_own"] = math.exp(-row[TASKS[0]]["own"] / tokens)
    return row


def show(rows: Sequence[dict[str, Any]]) -> None:
    print("| sparsity | perplexity of a token: lm-eval | own | worst passage | last word: lm-eval | acc |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        words = row["held_out_words"]["results"]
        print(
            f"| {row['sparsity']} | {row['perplexity_harness']:.5f} | {row['perplexity_own']:.5f} "
            f"| {row['held_out_text']['worst_difference']:.2g} nats "
            f"| {words['perplexity,none']:.4f} | {words['acc,none']:.3f} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lm-eval", default="lm-eval", metavar="PROGRAM", help="of any environment")
    parser.add_argument("-m", "--model", type=Path, default=model_path(), metavar="FILE")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, metavar="FILE", help="its SentencePiece file"
    )
    parser.add_argument(
        "--predictor", type=Path, metavar="FILE", help="of predicted, if not beside the model"
    )
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--passages", type=int, default=100, metavar="N", help="(100)")
    parser.add_argument("--words", type=int, default=120, metavar="N", help="of a passage (120)")
    parser.add_argument("-c", "--context", type=int, default=256, metavar="N", help="(256)")
    parser.add_argument("--concurrent", type=int, default=4, metavar="N", help="requests at a time (4)")
    parser.add_argument("--tolerance", type=float, default=1e-3, metavar="NATS", help="of a passage (0.001)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results here")
    args = parser.parse_args()

    texts = passages(args.text.read_text(encoding="utf-8"), args.passages, args.words)
    program = shutil.which(args.lm_eval) or args.lm_eval
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / "passages.jsonl").write_text("".join(lines), encoding="utf-8")
        (folder / "tokenizer").mkdir()
        shutil.copy(args.tokenizer, folder / "tokenizer" / "tokenizer.model")
        (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(TOKENIZER), encoding="utf-8")
        for mode in args.modes:
            predictor = predictor_of(mode, args.predictor)
            serve = ["-m", str(args.model), "--sparsity", mode, "-c", str(args.context), "-np", "4"]
            serve += ["--predictor", str(predictor)] if predictor else []
            with serving(serve, folder / f"{mode}.log") as process:
                process.wait_until_ready()
                harness = run_harness(
                    str(Path(program).absolute()), folder, process.url, args.context, args.concurrent
                )
            our_scores = own_scores(args.model, mode, predictor, args.context, texts)
            rows.append(compare(mode, harness, our_scores, count_tokens(args.model, texts)))
            if args.json:
                report = {"lm_eval": harness["version"], "passages": len(texts), "rows": rows}
                args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    show(rows)
    worst = max(row[task]["worst_difference"] for row in rows for task in TASKS)
    return 0 if worst <= args.tolerance else 1


def count_tokens(model: Path, texts: Sequence[str]) -> int:
    loaded = load(model, LoadOptions())
    try:
        return sum(len(loaded.tokenizer.encode(text, add_bos=False)) for text in texts)
    finally:
        loaded.close()


if __name__ == "__main__":
    sys.exit(main())
