"""Measures the cost of the time between two tokens: the built-in model's steps, some microseconds of Python
apart.

    python benchmarks/cpu/token_gaps.py --threads 2
    PYTHONPATH=old/src python benchmarks/cpu/token_gaps.py     # another build

Threads that went to sleep since the last step must be woken. For each gap: the median time of a step without
it, how often threads of the process went to sleep for a token (so often one was woken), and the processor
time of a token with its gap, on all threads. Then the processor time of a second in which nothing is
asked of the model. To compare the times of two builds, run by run in turns: builds.py --gaps.

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time

from hotcold.demo import model_path
from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams

_PROMPT = [1, *range(300, 316)]


def spent() -> tuple[int, float]:
    """Figures of the process so far: times that a thread gave up its core to wait, and seconds of processor
    time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_nvcsw, usage.ru_utime + usage.ru_stime


def measure(engine: Engine, gap_us: int, tokens: int) -> dict[str, float]:
    request = Request(Job(_PROMPT, SamplingParams(temperature=0), max_tokens=tokens + 10, ignore_eos=True))
    engine.add(request)
    while len(request.output) < 3:
        engine.step()
    times = []
    before = spent()
    for _ in range(tokens):
        start = time.perf_counter()
        while time.perf_counter() - start < gap_us * 1e-6:
            pass
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    after = spent()
    engine.abort(request)
    return {
        "gap_us": gap_us,
        "step_us": statistics.median(times) * 1e6,
        "sleeps": (after[0] - before[0]) / tokens,
        "processor_us": (after[1] - before[1]) / tokens * 1e6,
    }


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--gaps", type=int, nargs="+", default=[0, 20, 50, 100, 200, 500, 2000])
    parser.add_argument("--tokens", type=int, default=200, help="of each gap (200; the context holds 256)")
    args = parser.parse_args()
    model = load(model_path(), LoadOptions(threads=args.threads, context=256, sequences=1, gpu="off"))
    engine = Engine(model.session())
    measure(engine, 0, args.tokens)  # warms memory and threads
    found = []
    for gap_us in args.gaps:
        found.append(measure(engine, gap_us, args.tokens))
        line = "{gap_us:5} us apart: step {step_us:6.0f} us, {sleeps:5.2f} sleeps and {processor_us:5.0f} us"
        print(line.format(**found[-1]) + " of processor time a token")
    before = time.process_time()
    time.sleep(1)
    idle_us = (time.process_time() - before) * 1e6
    print(f"a second without a request: {idle_us:.0f} us of processor time")
    print(json.dumps({"threads": model.backend.threads, "gaps": found, "idle_us": idle_us}))


if __name__ == "__main__":
    main()
