"""Quantised files of llama.cpp's own making, run here and by llama.cpp: perplexity and greedy tokens.

    python benchmarks/quality/formats.py --data FOLDER     # of the shared test data (HOTCOLD_TEST_DATA)

The model is stories260K, which has learned to tell stories, made wider, since a block of Q4_K spans 256
weights: 8 copies of its heads and neurons, and its 64 dimensions spread over 512 by a random rotation of
the residual stream (arXiv 2404.00456). In float32 it computes what stories260K computes. llama.cpp's
quantiser (package llama-cpp-python) turns it into each type.

Both programs score the same windows of the same text, and how far each is from the same weights with
float32 activations; and both continue three prompts greedily. A greedy text of so small a model passes many
near ties, which the last bits decide: of 1500 prompts, those are taken whose closest decision is the
clearest with float32 activations. The last line of stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import GGUFFile, open_gguf, write_gguf
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.tasks.scoring import Scorer, cut_windows, log_softmax, score
from hotcold.tokenizer.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.stories260k import write_stories260k

from lib.llama import quantise as quantise_by_llama_cpp
from lib.llama import quiet
from lib.machine import commit

Array = npt.NDArray[np.float64]

TYPES = ("F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_NL", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4")
TOKENS = 200  #: of each greedy continuation
CANDIDATES, SHORTLIST, PROMPTS = 1500, 16, 3


def widen(stories: GGUFFile, path: Path, copies: int, seed: int = 0) -> None:
    """Writes the same function in larger matrices, whose rows are multiples of 256, float32."""
    rng = np.random.default_rng(seed)
    read, metadata = (lambda name: stories.load(name).dequantise().astype(np.float64)), stories.metadata
    embedding = read("token_embd.weight")
    narrow = embedding.shape[1]
    dim, kv_heads = narrow * copies, metadata["llama.attention.head_count_kv"] * copies
    neurons = metadata["llama.feed_forward_length"] * copies
    silent = -neurons % 256
    # Orthonormal rows. The mean square is over more dimensions, so normed values grow by the root of copies.
    rotation = np.linalg.qr(rng.standard_normal((dim, narrow)))[0].T
    norm = np.full(dim, copies**-0.5)
    out = {
        "token_embd.weight": embedding @ rotation,
        "output.weight": (embedding * read("output_norm.weight")) @ rotation,
        "output_norm.weight": norm,
    }
    for layer in range(metadata["llama.block_count"]):
        names = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
        gain, q, k, v, o = (read(f"blk.{layer}.{name}.weight") for name in names)
        ffn_gain, gate, up, down = (
            read(f"blk.{layer}.ffn_{name}.weight") for name in ("norm", "gate", "up", "down")
        )
        q, k, v = (np.tile((each * gain) @ rotation, (copies, 1)) for each in (q, k, v))
        gate, up = (np.tile((each * ffn_gain) @ rotation, (copies, 1)) for each in (gate, up))
        # Each copy of a value and of a neuron has a scale of its own, undone by what reads it.
        scale = rng.uniform(0.5, 1.5, (kv_heads, 1, len(v) // kv_heads))
        by_query_head = np.repeat(scale, len(q) // len(k), axis=1).ravel()
        neuron_scale = rng.uniform(0.5, 1.5, neurons)
        tensors = {
            "attn_norm": norm, "attn_q": q, "attn_k": k, "attn_v": v * scale.reshape(-1, 1),
            "attn_output": rotation.T @ np.tile(o, copies) / (by_query_head * copies),
            "ffn_norm": norm,
            "ffn_gate": np.vstack([gate, rng.normal(0, gate.std(), (silent, dim))]),
            "ffn_up": np.vstack([up * neuron_scale[:, None], np.zeros((silent, dim))]),
            "ffn_down": np.hstack(
                [
                    rotation.T @ np.tile(down, copies) / (neuron_scale * copies),
                    rng.normal(0, down.std() / copies, (dim, silent)),
                ]
            ),
        }  # fmt: skip
        out |= {f"blk.{layer}.{name}.weight": values for name, values in tensors.items()}
    epsilon = metadata["llama.attention.layer_norm_rms_epsilon"]
    sizes = {
        "llama.embedding_length": dim, "llama.feed_forward_length": neurons + silent,
        "llama.attention.head_count": metadata["llama.attention.head_count"] * copies,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": np.float32(epsilon / copies),
    }  # fmt: skip
    tensors = {name: quantise(values.astype(np.float32), "F32") for name, values in out.items()}
    write_gguf(path, metadata | sizes, tensors)


def make(source: Path, path: Path, type: str) -> None:
    """By llama.cpp's quantiser; it has no file type that is all MXFP4, so Hotcold writes that one."""
    if type == "MXFP4":
        with open_gguf(source) as file:
            tensors = {name: file.load(name) for name in file.tensors}
            for name, tensor in tensors.items():
                if name.startswith("blk.") and len(tensor.shape) == 2:
                    tensors[name] = quantise(tensor.dequantise(), type)
            write_gguf(path, file.metadata, tensors)
        return
    quantise_by_llama_cpp(source, path, type, threads=1)


class Ours:
    """This project's engine on one file."""

    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        self.session = load(
            path,
            LoadOptions(
                backend=args.backend, threads=args.threads, context=args.context, sequences=16, gpu="off"
            ),
        ).session()

    def windows(self, text: str, most: int) -> list[list[int]]:
        tokenizer = self.session.model.tokenizer
        return cut_windows(
            tokenizer.encode(text, add_bos=False), self.session.model.context, tokenizer.bos_id
        )[:most]

    def surprise(self, windows: list[list[int]]) -> Array:
        """The loss of every token but the windows' first, in nats."""
        scorer = Scorer(self.session)
        return np.concatenate([score(scorer, window) for window in windows])

    def continuations(self, prompts: list[list[int]]) -> tuple[list[list[int]], Array]:
        """Greedy tokens, and the smallest difference of the two largest logits on the way, ``[prompts]``."""
        stops = self.session.model.tokenizer.stop_ids
        greedy = SamplingParams(temperature=0)
        requests = [
            Request(Job(prompt, greedy, max_tokens=TOKENS, logprobs=2 + len(stops), ignore_eos=True))
            for prompt in prompts
        ]
        Engine(self.session).run(requests)
        margins = []
        for request in requests:
            best = [[each for id, each in token.top if id not in stops] for token in request.output_logprobs]
            margins.append(min(first - second for first, second, *_ in best))
        return [request.output for request in requests], np.array(margins)


class Theirs:
    """llama.cpp on one file."""

    def __init__(self, path: Path, args: argparse.Namespace, stop_ids: frozenset[int]) -> None:
        threads = args.threads or 1
        with quiet():
            self.model = llama_cpp.Llama(
                str(path), n_ctx=args.context, n_batch=args.context, n_threads=threads,
                n_threads_batch=threads, logits_all=True, verbose=False,
            )  # fmt: skip
        self.stop_ids = list(stop_ids)

    def surprise(self, windows: list[list[int]]) -> Array:
        parts = []
        for window in windows:
            self.model.reset()
            self.model.eval(window)
            logits = log_softmax(np.asarray(self.model.scores[: len(window) - 1]))
            parts.append(-logits[np.arange(len(window) - 1), window[1:]])
        return np.concatenate(parts)

    def continuation(self, prompt: list[int]) -> list[int]:
        self.model.reset()
        self.model.eval(prompt)
        tokens: list[int] = []
        while len(tokens) < TOKENS:
            logits = np.array(self.model.scores[self.model.n_tokens - 1])
            logits[self.stop_ids] = -np.inf
            tokens.append(int(logits.argmax()))
            self.model.eval(tokens[-1:])
        return tokens


def beginnings(text: str, tokenizer: Tokenizer) -> list[list[int]]:
    """The first eight words of each of the text's paragraphs."""
    lines = dict.fromkeys(" ".join(line.split()[:8]) for line in text.splitlines() if len(line.split()) >= 12)
    return [tokenizer.encode(line) for line in list(lines)[:CANDIDATES]]


def clearest(model: Ours, prompts: list[list[int]], count: int) -> list[tuple[list[int], float]]:
    """The prompts whose greedy continuations stay the farthest from a tie, and how far, in logits."""
    margins = model.continuations(prompts)[1]
    return [(prompts[i], float(margins[i])) for i in np.argsort(-margins)[:count]]


def compare(path: Path, text: str, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    plain = path.with_suffix(".f32.gguf")  # the same weights, decoded
    with open_gguf(path) as file:
        counts = Counter(info.type.name for info in file.tensors.values())
        decoded = {name: quantise(file.load(name).dequantise(), "F32") for name in file.tensors}
        write_gguf(plain, file.metadata, decoded)
    ours, float32 = Ours(path, args), Ours(plain, args)
    plain.unlink()
    theirs = Theirs(path, args, ours.session.model.tokenizer.stop_ids)
    chosen = clearest(float32, prompts, PROMPTS)
    prompts = [prompt for prompt, _ in chosen]
    same = []
    for our_ids, prompt in zip(ours.continuations(prompts)[0], prompts, strict=True):
        equal = [a == b for a, b in zip(our_ids, theirs.continuation(prompt), strict=True)]
        same.append(equal.index(False) if False in equal else TOKENS)
    windows = ours.windows(text, args.windows)
    truth, our_nll, their_nll = (each.surprise(windows) for each in (float32, ours, theirs))
    ppl, their_ppl, true_ppl = (float(np.exp(nll.mean())) for nll in (our_nll, their_nll, truth))

    def rms(nll: Array) -> float:
        return float(np.sqrt(((nll - truth) ** 2).mean()))

    return {
        "type": path.stem, "tensor_types": dict(counts), "tokens": len(truth), "ppl": ppl,
        "llama_cpp_ppl": their_ppl, "ppl_float32_activations": true_ppl, "ratio": ppl / their_ppl,
        "nll_error_rms": rms(our_nll), "llama_cpp_nll_error_rms": rms(their_nll), "greedy_same": same,
        "margins": [margin for _, margin in chosen],
        "prompts": [ours.session.model.tokenizer.decode(prompt) for prompt in prompts],
        "sparsity": ours.session.sparsity,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = os.environ.get("HOTCOLD_TEST_DATA")
    parser.add_argument("--data", type=Path, default=data, required=data is None, help="the shared test data")
    parser.add_argument("--text", type=Path, help="default: a file of TinyStories in the shared test data")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--copies", type=int, default=8, help="of the model's 64 dimensions (8)")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--backend", choices=("cpu", "reference"), default="cpu")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    text = (args.text or args.data / "text/tinystories/smallGPT_tiny_stories.txt").read_text(encoding="utf-8")
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        narrow, wide = Path(folder) / "stories260k.gguf", Path(folder) / "wide.gguf"
        write_stories260k(narrow)
        with open_gguf(narrow) as file:
            widen(file, wide, args.copies)
        stories = Ours(narrow, args)
        shortlist = clearest(stories, beginnings(text, stories.session.model.tokenizer), SHORTLIST)
        prompts = [prompt for prompt, _ in shortlist]
        truth = float(np.exp(stories.surprise(stories.windows(text, args.windows)).mean()))
        print(f"stories260K in float32: perplexity {truth:.5f}")
        for type in args.types:
            path = Path(folder) / f"{type}.gguf"
            make(wide, path, type)
            report = compare(path, text, prompts, args)
            reports.append(report)
            errors = f"{report['nll_error_rms']:.4f} and {report['llama_cpp_nll_error_rms']:.4f}"
            print(
                f"{type:<8} perplexity {report['ppl']:.5f}, llama.cpp {report['llama_cpp_ppl']:.5f}: "
                f"{report['ratio'] - 1:+.4%}; error per token {errors} nats; "
                f"greedy tokens the same {report['greedy_same']}"
            )
    summary = {
        "model": "stories260K", "ppl_float32": truth, "backend": args.backend, "commit": commit(),
        "llama_cpp": llama_cpp.__version__, "formats": reports,
    }  # fmt: skip
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
