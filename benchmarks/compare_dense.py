"""Generation speed on one machine, in interleaved rounds: ours dense, ours exact, llama.cpp dense.

    python benchmarks/compare_dense.py --folder /tmp/models --rounds 20 --threads 2

The models are synthetic (benchmarks/synthetic.py), 4096/11008 with 8 layers in Q4_0: a stock file, which
ours (sparsity off) and llama.cpp run alike, and its sparse twin with a tenth of the neurons active (exact).
Every round runs each engine once, in turning order, after a probe of the read bandwidth; ratios are paired by
round, because the speed of a shared machine drifts. llama.cpp comes from the package llama-cpp-python, built
from source (CMAKE_ARGS=-DGGML_NATIVE=ON); without it only ours run. The last line of stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import synthetic

from hotcold.engine.engine import Engine
from hotcold.engine.loading import LoadedModel, LoadOptions, load
from hotcold.engine.request import Request
from hotcold.engine.sampler import SamplingParams
from hotcold.kernels.cpu import CPUBackend, ReadProbe

CONTEXT = 512
#: Generates this many tokens after a prompt of so many: seconds of the prompt and of the rest.
Generate = Callable[[int, int], tuple[float, float]]


def prompt_of(length: int) -> list[int]:
    """Ordinary tokens, the same for every engine."""
    return [1, *(300 + 37 * i % 3000 for i in range(length - 1))]


def ours(model: LoadedModel) -> Generate:
    engine = Engine(model)

    def generate(n_prompt: int, n: int) -> tuple[float, float]:
        # The first token comes with the prompt, so one more makes n decode steps.
        params = SamplingParams(seed=1)
        request = Request(prompt_of(n_prompt), params, max_tokens=n + 1, ignore_eos=True)
        engine.add(request)
        start = time.perf_counter()
        while not request.output:
            engine.step()
        first = time.perf_counter()
        while not request.finished:
            engine.step()
        return first - start, time.perf_counter() - first

    return generate


def llama_cpp(path: Path, threads: int) -> Generate | None:
    """llama.cpp with as little around it as its Python package allows: no sampling, no text."""
    try:
        from llama_cpp import Llama
    except ImportError:
        print("llama-cpp-python is not installed: only ours run", file=sys.stderr)
        return None
    model = Llama(
        str(path), n_ctx=CONTEXT, n_batch=CONTEXT, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def generate(n_prompt: int, n: int) -> tuple[float, float]:
        prompt = prompt_of(n_prompt)
        model.reset()
        start = time.perf_counter()
        model.eval(prompt)
        first = time.perf_counter()
        for i in range(n):
            model.eval([prompt[1 + i % (n_prompt - 1)]])
        return first - start, time.perf_counter() - first

    return generate


def models(folder: Path, type: str, active: float, vocabulary: Path | None) -> tuple[Path, Path]:
    """The stock file and its sparse twin; made where they are not there yet."""
    shape = synthetic.Shape(4096, 11008, 8, 32, 32, 32000, 2048)
    paths = (folder / f"dense-{type}.gguf", folder / f"sparse-{type}-{active:g}.gguf")
    for path, share in zip(paths, (None, active), strict=True):
        if not path.exists():
            synthetic.write(path, shape, type, active=share, vocabulary=vocabulary, seed=1)
    return paths


def run_rounds(
    engines: dict[str, Generate], probe: ReadProbe, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """``[rounds]`` of name -> {prompt_tok_s, tok_s, read_bandwidth_gb_s}."""
    for generate in engines.values():
        generate(args.prompt, 4)  # warms memory and threads
    names, rounds = list(engines), []
    for i in range(args.rounds):
        measured = {}
        for name in names[i % len(names) :] + names[: i % len(names)]:
            bandwidth = probe.measure(0.1)
            prompt_s, generation_s = engines[name](args.prompt, args.generate)
            measured[name] = {
                "prompt_tok_s": args.prompt / prompt_s,
                "tok_s": args.generate / generation_s,
                "read_bandwidth_gb_s": bandwidth,
            }
        rounds.append(measured)
        line = ", ".join(f"{name} {measured[name]['tok_s']:.1f}" for name in names)
        print(f"round {i + 1}/{args.rounds}: {line} tok/s", file=sys.stderr)
    return rounds


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians by engine, and medians of the ratios within rounds."""
    names = list(rounds[0])

    def median(figure: str, name: str) -> float:
        return statistics.median(measured[name][figure] for measured in rounds)

    def ratio(name: str, base: str, figure: str = "tok_s") -> dict[str, float] | None:
        if name not in names or base not in names:
            return None
        ratios = sorted(measured[name][figure] / measured[base][figure] for measured in rounds)
        return {"median": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]}

    return {
        "medians": {
            name: {
                figure: median(figure, name) for figure in ("prompt_tok_s", "tok_s", "read_bandwidth_gb_s")
            }
            for name in sorted(names)
        },
        "ratios": {
            "dense_over_llama_cpp": ratio("dense", "llama_cpp"),
            "exact_over_llama_cpp": ratio("exact", "llama_cpp"),
            "exact_over_dense": ratio("exact", "dense"),
            "prompt_over_llama_cpp": ratio("dense", "llama_cpp", "prompt_tok_s"),
        },
    }


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add: Callable[..., Any] = parser.add_argument
    add("--folder", type=Path, help="where the models are kept (default: a temporary folder)")
    add("--vocabulary", type=Path, help="GGUF file with a tokenizer of 32000 tokens (default: a made-up one)")
    add("--type", default="Q4_0")
    add("--active", type=float, default=0.1)
    add("--rounds", type=int, default=10)
    add("--prompt", type=int, default=128)
    add("--generate", type=int, default=32)
    add("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        stock, sparse = models(folder, args.type, args.active, args.vocabulary)
        options = {"threads": args.threads, "context": CONTEXT}
        dense = load(stock, LoadOptions(sparsity="off", **options))
        exact = load(sparse, LoadOptions(sparsity="exact", **options))
        engines = {"dense": ours(dense), "exact": ours(exact), "llama_cpp": llama_cpp(stock, args.threads)}
        probe = ReadProbe(CPUBackend(args.threads))
        rounds = run_rounds({name: run for name, run in engines.items() if run}, probe, args)
    report = summarise(rounds) | {
        "type": args.type,
        "threads": args.threads,
        "rounds": args.rounds,
        "prompt_tokens": args.prompt,
        "generated_tokens": args.generate,
        "active_share": float((exact.counters.rows[:, 3] / exact.counters.decode_tokens / 11008).mean()),
    }
    for name, figures in report["medians"].items():
        print(f"{name}: generation {figures['tok_s']:.1f} tok/s, prompt {figures['prompt_tok_s']:.1f} tok/s")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
