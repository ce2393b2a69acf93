"""Pauses between the tokens of answers while long prompts are read beside them.

    python benchmarks/serving/pauses.py               # a synthetic Q4_0 model of 1 GB, made for it
    python benchmarks/serving/pauses.py -m model.gguf --parallel 4 --prompt 1500 --seconds 60

``--parallel`` texts are generated all the time by an :class:`Engine` in this process. A prompt of
``--prompt`` tokens is read at the same time, then another one, and so on. A pause is the time between two
tokens of one text. ``--whole-chunks`` reads prompts in whole chunks, as where no answer waits. The last line
of stdout is a JSON object: the percentiles of pauses, and how many prompt tokens were read in a second."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.engine.engine import Engine
from hotcold.engine.events import Token
from hotcold.engine.pace import Pace
from hotcold.engine.request import Job, Request
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import LoadedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.models import Recipe, write
from serving.cost import SHAPE


def pauses(
    model: LoadedModel, parallel: int, prompt: int, seconds: float, *, whole_chunks: bool
) -> dict[str, Any]:
    """Measures pauses, in seconds."""
    engine, ids = Engine(model.session(), reuse=False), np.random.default_rng(0)
    if whole_chunks:
        engine.scheduler.pace = Pace(
            model.limits.chunk, math.inf, separate=engine.session.transformer.separates_prompts
        )
    greedy, vocab = SamplingParams(temperature=0), model.config.vocab

    def added(length: int, tokens: int) -> Request:
        text = ids.integers(3, vocab, length).tolist()
        request = Request(Job(text, greedy, max_tokens=tokens, ignore_eos=True, cache=False))
        engine.add(request)
        return request

    texts = {id(running): running for running in (added(8, model.context - 8) for _ in range(parallel))}
    while not all(running.output for running in texts.values()):
        engine.step()
    last: dict[int, float] = {}
    pause_times: list[float] = []
    before = engine.scheduler.prompt_rows
    prompts, long = 0, added(prompt, 1)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Token) and id(event.request) in texts:
                if id(event.request) in last:
                    pause_times.append(now - last[id(event.request)])
                last[id(event.request)] = now
        if long.finished:
            prompts, long = prompts + 1, added(prompt, 1)
        for running in [running for running in texts.values() if running.finished]:
            del texts[id(running)]
            last.pop(id(running), None)
            new = added(8, model.context - 8)
            texts[id(new)] = new
    p50, p99, most = np.quantile(pause_times, [0.5, 0.99, 1])
    read = engine.scheduler.prompt_rows - before
    return {
        "parallel": parallel, "prompt": prompt, "chunk_rows": model.limits.chunk, "prompts": prompts,
        "pauses": len(pause_times), "p50_s": p50, "p99_s": p99, "most_s": most, "prompt_tok_s": read /
        seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-m", "--model", type=Path, help="GGUF file (default: a synthetic one of 1 GB)")
    add("--parallel", type=int, default=4, help="texts that are generated (4)")
    add("--prompt", type=int, default=1500, help="tokens of each long prompt (1500)")
    add("--seconds", type=float, default=60)
    add("--whole-chunks", action="store_true", help="read prompts in whole chunks")
    add("-c", "--ctx-size", type=int, default=2048)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model
        if path is None:
            path = Path(folder) / "synthetic.gguf"
            write(path, Recipe(SHAPE))
        model = load(path, LoadOptions(context=options.ctx_size, sequences=options.parallel + 1))
        lengths = options.parallel, options.prompt, options.seconds
        print(json.dumps(pauses(model, *lengths, whole_chunks=options.whole_chunks)))


if __name__ == "__main__":
    main()
