"""Measures the cost of a server: tokens per second over HTTP beside those of ``hotcold bench --parallel``, in
pairs.

    python benchmarks/serving/cost.py                 # a synthetic Q4_0 model of 1 GB, made for it
    python benchmarks/serving/cost.py -m model.gguf --parallel 8 --rounds 20

One ``hotcold serve`` process and one model in this process, both with all threads and never busy at the same
time, take turns, each first in every other round. Over HTTP ``--parallel`` clients send the same prompt at
once and stream ``-n`` tokens; their rate is that of the tokens that came while all of them were generating.
Here it is what ``hotcold bench`` reports: the steps in which all generate. Both draw by the parameters
that ``bench`` has; with ``--route-defaults`` clients ask for none, as many do, and the whole vocabulary is
drawn from. ``whole`` compares the times from the first request to the last token, prompts included. The last
line of stdout is a JSON object: medians of the ratios, and all samples."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import hotcold
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import LoadedModel
from hotcold.tasks.bench import prompt_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.client import COMPLETIONS, Answer, Ask, Connection, Server, ask
from lib.models import Recipe, Shape, write
from lib.server import serving

#: ``http`` or ``bench`` -> figures.
Sample = dict[str, dict[str, float]]

#: The sampling that ``bench`` uses.
SAMPLING = {name: getattr(SamplingParams(), name) for name in ("temperature", "top_k", "top_p", "min_p")}

#: 1.0 GB in Q4_0.
SHAPE = Shape(dim=2048, neurons=5632, layers=36, heads=32, kv_heads=32, vocab=32000, context=2048)


def rate(answers: list[Answer]) -> float:
    """Tokens per second while all were generating; pieces stand for tokens in the shares that each has."""
    starts = [answer.moments[0][0] for answer in answers]
    ends = [answer.moments[0][-1] for answer in answers]
    first, last = max(starts), min(ends)
    tokens = 0.0
    for answer in answers:
        moments = answer.moments[0]
        inside = sum(first < moment <= last for moment in moments)
        tokens += inside * answer.tokens / len(moments)
    return tokens / (last - first)


async def over_http(
    server: Server, prompt: list[int], parallel: int, tokens: int, sampling: dict[str, float]
) -> dict[str, float]:
    """One round: all clients at once, on connections of their own."""
    connections = [Connection(server) for _ in range(parallel)]
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "cache_prompt": False, **sampling}
    asks = [Ask(COMPLETIONS, {**body, "seed": number}) for number in range(parallel)]
    start = time.perf_counter()
    pairs = zip(connections, asks, strict=True)
    answers = await asyncio.gather(*(ask(connection, server, each, True) for connection, each in pairs))
    seconds = time.perf_counter() - start
    for connection, answer in zip(connections, answers, strict=True):
        connection.drop()
        if not answer.whole or answer.tokens != tokens:
            raise SystemExit(
                f"an answer of {answer.tokens} of {tokens} tokens: {answer.error or 'not whole'}"
            )
    return {"tok_s": rate(answers), "whole_tok_s": parallel * tokens / seconds}


def in_process(model: LoadedModel, prompt: int, parallel: int, tokens: int) -> dict[str, float]:
    figures = hotcold.bench(model, n_prompt=prompt, n_gen=tokens, parallel=parallel, repetitions=1).rounds[0]
    assert figures.tok_s is not None and figures.prompt_tok_s is not None
    seconds = parallel * prompt / figures.prompt_tok_s + parallel * (tokens - 1) / figures.tok_s
    return {"tok_s": figures.tok_s, "whole_tok_s": parallel * tokens / seconds}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-m", "--model", type=Path, help="GGUF file (default: a synthetic one of 1 GB)")
    add("--parallel", type=int, default=8, help="clients, slots and sequences (8)")
    add("-p", "--n-prompt", type=int, default=16)
    add("-n", "--n-gen", type=int, default=48)
    add("--rounds", type=int, default=10)
    add("-c", "--ctx-size", type=int, default=256)
    add(
        "--route-defaults",
        action="store_true",
        help="draw as the route does by default",
    )
    return parser.parse_args()


def main() -> None:
    options = parsed()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = options.model
        if path is None:
            path = folder / "synthetic.gguf"
            write(path, Recipe(SHAPE))
        print(f"{path.name}: {path.stat().st_size / 1e9:.2f} GB")
        loading = LoadOptions(context=options.ctx_size, sequences=options.parallel)
        model = load(path, loading)
        arguments = ["-m", str(path), "-c", str(options.ctx_size), "-np", str(options.parallel)]
        process = stack.enter_context(serving(arguments, folder / "log"))
        server = Server(process.url)
        prompt = prompt_of(model, options.n_prompt)
        sampling = {} if options.route_defaults else SAMPLING
        http = partial(over_http, server, prompt, options.parallel, options.n_gen, sampling)
        asyncio.run(http())  # warms memory and threads
        samples: list[Sample] = []
        for number in range(options.rounds):
            sample: Sample = {}
            for which in ("http", "bench") if number % 2 else ("bench", "http"):
                if which == "http":
                    sample[which] = asyncio.run(http())
                else:
                    sample[which] = in_process(model, options.n_prompt, options.parallel, options.n_gen)
            samples.append(sample)
            line = ", ".join(f"{which} {found['tok_s']:.1f} tok/s" for which, found in sample.items())
            print(line, flush=True)
    print(json.dumps(summary(samples, options, path)))


def summary(samples: list[Sample], options: argparse.Namespace, path: Path) -> dict[str, Any]:
    def ratios(name: str) -> dict[str, float]:
        values = sorted(sample["http"][name] / sample["bench"][name] for sample in samples)
        return {"median": statistics.median(values), "least": values[0], "most": values[-1]}

    return {
        "model": path.name,
        "parallel": options.parallel,
        "n_prompt": options.n_prompt,
        "n_gen": options.n_gen,
        "route_defaults": options.route_defaults,
        "ratio": ratios("tok_s"),
        "whole_ratio": ratios("whole_tok_s"),
        "samples": samples,
    }


if __name__ == "__main__":
    main()
