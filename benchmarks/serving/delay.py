"""Measures how arriving prompts delay generation: times of steps, with and without prompts of 100 kB.

    python benchmarks/serving/delay.py               # the built-in model
    python benchmarks/serving/delay.py -m model.gguf --seconds 3 --windows 30

A server runs as ``hotcold serve`` does: HTTP in this process, the engine in its own. ``--parallel`` texts
are generated all the time. In every other window a third process posts prompts of ``--bytes`` bytes, one
after another with a pause of ``--pause`` seconds; each is received, parsed and tokenised, and then refused,
because it is longer than the context: so no step has a row of it, and what is measured is HTTP, JSON and
tokenising alone. The time of a step is from its beginning to that of the next one. The last line of stdout
is a JSON object: percentiles of all quiet and all busy windows, and ``p99_delay_ms``, the median of the
differences between neighbouring windows."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from hotcold import AsyncLLM
from hotcold.engine.request import Job
from hotcold.runtime.sampling import SamplingParams
from hotcold.server.run import http_server
from hotcold.server.service import Service
from hotcold.server.settings import Settings, listening_sockets

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.client import COMPLETIONS, Connection, Server
from lib.report import percentiles
from serving.load import TEXT

_REFUSED = 400


async def post(url: str, size: int, pause: float) -> None:
    """Posts prompts for ever; a line on stdout for each that was refused as it should be."""
    text = (TEXT.read_text(encoding="utf-8") * (size // 50_000 + 1))[:size]
    server = Server(url)
    async with Connection(server) as connection:
        while True:
            status, headers = await connection.send("POST", COMPLETIONS, {"prompt": text, "max_tokens": 1})
            async for _ in connection.blocks(headers):
                pass
            if status != _REFUSED:
                raise SystemExit(f"a prompt of {size} bytes was answered with {status}: give a smaller -c")
            print(flush=True)
            await asyncio.sleep(pause)


class Posting:
    """The third process, stopped except in busy windows."""

    def __init__(self, arguments: list[str]) -> None:
        self._command = [sys.executable, __file__, "--post", *arguments]
        self._process: subprocess.Popen[str] | None = None
        self.posts = 0

    async def start(self) -> None:
        """Returns when its first prompt was answered, so that starting it is in no window."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if not await asyncio.to_thread(self._process.stdout.readline):
            raise SystemExit("the process that posts prompts has ended")

    async def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        out, _ = await asyncio.to_thread(self._process.communicate)
        self.posts += out.count("\n")
        self._process = None


async def generate(llm: AsyncLLM, number: int) -> None:
    """One text after another, each as long as the context allows."""
    context, seed = llm.info.context, number
    while True:
        params = SamplingParams(0.8, seed=seed)
        job = Job([1 + number], params, max_tokens=context - 2, ignore_eos=True, cache=False)
        async for _ in llm.stream(job):
            pass
        seed += 1000


async def windows(llm: AsyncLLM, url: str, options: argparse.Namespace) -> tuple[list[list[float]], int]:
    """Times of the steps of each window, quiet and busy ones in turn, and how many prompts came."""
    posting = Posting([url, str(options.bytes), str(options.pause)])
    step_times: list[list[float]] = []
    for number in range(options.windows):
        busy = number % 2 == 1
        if busy:
            await posting.start()
        await llm.stats(steps=True)  # those until now are not counted
        await asyncio.sleep(options.seconds)
        step_times.append(list((await llm.stats(steps=True)).step_s))
        if busy:
            await posting.stop()
            await asyncio.sleep(0.3)
    return step_times, posting.posts


async def measured(options: argparse.Namespace) -> dict[str, Any]:
    context_option = {"context": options.ctx_size} if options.ctx_size else {}
    llm = AsyncLLM(options.model, sequences=options.parallel, **context_option)
    settings = Settings(port=0, log=False)
    (listening,) = listening_sockets(settings)
    service = Service(llm, settings)
    with closing(listening):
        stop = asyncio.Event()
        serving = asyncio.create_task(http_server(service, None).serve([listening], stop))
        await service.load()
        generating = [asyncio.create_task(generate(llm, number)) for number in range(options.parallel)]
        try:
            await asyncio.sleep(1)
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            step_times, posts = await windows(llm, url, options)
        finally:
            for task in generating:
                task.cancel()
            await asyncio.gather(*generating, return_exceptions=True)
            stop.set()
            await serving
            await llm.close()
            service.close()
    return summary(step_times, posts, options)


def summary(step_times: list[list[float]], posts: int, options: argparse.Namespace) -> dict[str, Any]:
    def milliseconds(times: list[float]) -> dict[str, float]:
        return {f"{name}_ms": 1e3 * (value or 0) for name, value in percentiles(times).items()}

    by_window = [milliseconds(times) for times in step_times]
    sign = [1 if number % 2 == 0 else -1 for number in range(len(by_window) - 1)]  # busy less quiet
    pairs = list(zip(sign, pairwise(by_window), strict=True))
    delays = {
        name: statistics.median(s * (later[name] - earlier[name]) for s, (earlier, later) in pairs)
        for name in ("p50_ms", "p99_ms")
    }
    return {
        "model": str(options.model or "built-in"),
        "parallel": options.parallel,
        "bytes": options.bytes,
        "prompts": posts,
        "steps": sum(map(len, step_times)),
        "quiet": milliseconds([time for times in step_times[::2] for time in times]),
        "busy": milliseconds([time for times in step_times[1::2] for time in times]),
        "p50_delay_ms": delays["p50_ms"],
        "p99_delay_ms": delays["p99_ms"],
    }


def main() -> None:
    if sys.argv[1:2] == ["--post"]:
        with suppress(KeyboardInterrupt):
            asyncio.run(post(sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-m", "--model", type=Path, help="GGUF file (default: the built-in model)")
    add("-c", "--ctx-size", type=int)
    add("--parallel", type=int, default=4, help="texts at the same time (4)")
    add("--bytes", type=int, default=100_000, help="of a prompt (100000)")
    add("--pause", type=float, default=0.2, help="seconds between two (0.2)")
    add("--seconds", type=float, default=2.0, help="of a window (2)")
    add("--windows", type=int, default=20, help="quiet and busy ones together (20)")
    options = parser.parse_args()
    start = time.perf_counter()
    report = asyncio.run(measured(options))
    print(json.dumps({**report, "seconds": round(time.perf_counter() - start, 1)}))


if __name__ == "__main__":
    main()
