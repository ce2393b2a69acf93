"""Where a decode step's time goes: each op of a model beside what it reads, and what Python takes between.

    python benchmarks/cpu/ops.py -m FILE --threads 2                # of one sequence
    python benchmarks/cpu/ops.py -m FILE --sequences 1 2 4 8        # and the cost of an op by rows

Ops of one shape are one line: how often a step has it, the bytes of its weights, the time of a step in it
(barriers are part of it: from the end of the step before to its own), and GB/s, to be held against the read
probe. The time is a median of those of steps; ``--least`` adds the least times of each part of a step
instead, for machines that others use, best with one thread. Below are what the native program takes in all,
the rest of the step (scheduling, sampling, text), and of that choosing the token.

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.engine.engine import Engine
from hotcold.engine.generation import Continuation
from hotcold.engine.request import Job, Request
from hotcold.engine.sampler import Sampler
from hotcold.kernels.cpu import CPUBackend, ReadProbe
from hotcold.kernels.cpu_weights import PackedFFN, PackedMatrix
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session
from hotcold.tasks.bench import prompt_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.machine import commit

PROMPT, WARM = 32, 3  #: tokens before the measured ones, and steps


@dataclass(frozen=True)
class Op:
    """An op of a recorded program: its name, and the steps of the program that it is made of."""

    name: str
    nbytes: int
    first: int
    end: int


class Timed:
    """A recorded program that notes what each of its steps takes, one row for each run."""

    def __init__(self, native: Any, kept: object) -> None:
        self._native, self._kept = native, kept
        self.runs: list[npt.NDArray[np.int64]] = []

    def run(self) -> None:
        self.runs.append(np.zeros(self._native.steps, np.int64))
        self._native.run(self.runs[-1])


def name_of(op: str, kept: Sequence[object]) -> tuple[str, int]:
    """The op with the shapes of its weights, and their bytes; of a table a row alone is read."""
    parts = [*kept, *(getattr(each, "weights", None) for each in kept)]  # of a call
    matrices = [each for each in parts if isinstance(each, PackedMatrix)]
    ffns = [each for each in parts if isinstance(each, PackedFFN)]
    if op == "embed" or not (matrices or ffns):
        return op, 0
    nbytes = sum(each.nbytes for each in (*matrices, *ffns))
    shapes = [f"{each.shape[0]}x{each.shape[1]}" for each in matrices]
    return f"{op} {' '.join(shapes) or ffns[0].neurons}", nbytes


def recorded(session: Session) -> tuple[Timed, list[Op]]:
    """The step of a session once more, by its own FFNs, with the ops that it is made of."""
    ops: list[Op] = []
    original_op = CPUBackend._op

    def noting(self: CPUBackend, batch: Any, append: Callable[[Any], None], *kept: object) -> None:
        recorder = self._recorder_of(batch)
        first = recorder.native.steps
        original_op(self, batch, append, *kept)
        name, nbytes = name_of(sys._getframe(1).f_code.co_name, kept)
        ops.append(Op(name, nbytes, first, recorder.native.steps))

    CPUBackend._op = noting  # type: ignore[method-assign]
    try:
        programs = session.transformer.record(session._ffns)
    finally:
        CPUBackend._op = original_op  # type: ignore[method-assign]
    ((stage,),) = programs.values()
    timed = Timed(stage.native, stage)  # type: ignore[attr-defined]
    session.transformer._programs = {size: [timed] for size in programs}
    return timed, ops


class Choosing(Sampler):
    """Notes the seconds in which tokens are chosen."""

    seconds = 0.0

    def sample(self, *args: Any, **kwargs: Any) -> int:
        start = time.perf_counter()
        try:
            return super().sample(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start


def measured(session: Session, sequences: int, tokens: int, temperature: float, *, least: bool) -> Any:
    """Microseconds: of each op by name, with its bytes and count; of the program, the rest, and choosing."""
    engine, pick = Engine(session, reuse=False), min if least else statistics.median
    timed, ops = recorded(session)
    engine.sampler = sampler = Choosing(session.transformer.head)
    continuations = []
    for seed in range(sequences):
        params = SamplingParams(temperature=temperature, seed=seed)
        job = Job(prompt_of(session.model, PROMPT), params, max_tokens=tokens + 20, ignore_eos=True)
        continuations.append(Continuation(engine, Request(job)))
        engine.add(continuations[-1].request)
    while any(len(continuation.request.output) < WARM for continuation in continuations):
        engine.step()
    timed.runs.clear()
    whole, choosing = [], []
    for _ in range(tokens):
        sampler.seconds = 0.0
        start = time.perf_counter()
        engine.step()
        for continuation in continuations:
            continuation.take()
        whole.append(1e6 * (time.perf_counter() - start))
        choosing.append(1e6 * sampler.seconds)
    for continuation in continuations:
        engine.abort(continuation.request)
    runs = np.array(timed.runs) / 1e3
    inside = runs.sum(1).tolist()
    if least:
        runs = runs.min(0, keepdims=True)
    groups: dict[str, list[Op]] = defaultdict(list)
    for op in ops:
        groups[op.name].append(op)
    table = {
        name: {
            "count": len(group),
            "bytes": sum(op.nbytes for op in group),
            "us": float(pick(sum(runs[:, op.first : op.end].sum(1) for op in group))),
        }
        for name, group in groups.items()
    }
    rest = [a - b for a, b in zip(whole, inside, strict=True)]
    return {
        "ops": table,
        "native_us": float(pick(runs.sum(1))),
        "rest_us": pick(rest),
        "choosing_us": pick(choosing),
    }


def show(by_rows: dict[int, Any], probe: float) -> None:
    one, *others = by_rows.values()
    print(f"{'op':34} {'times':>5} {'MB':>7} {'us':>8} {'share':>6} {'GB/s':>6}  rows beside one")
    for name, row in sorted(one["ops"].items(), key=lambda each: -each[1]["us"]):
        speed = f"{row['bytes'] / row['us'] / 1e3:6.1f}" if row["bytes"] and row["us"] else " " * 6
        share, cost = row["us"] / one["native_us"], [each["ops"][name]["us"] / row["us"] for each in others]
        times = " ".join(f"{each:5.2f}" for each in cost)
        size = f"{row['count']:5} {row['bytes'] / 1e6:7.2f} {row['us']:8.1f}"
        print(f"{name:34} {size} {share:6.1%} {speed}  {times}")
    for name in ("native", "rest", "choosing"):
        times = " ".join(f"{each[f'{name}_us']:8.0f}" for each in by_rows.values())
        print(f"{name:34} {times} us")
    nbytes = sum(row["bytes"] for row in one["ops"].values())
    print(f"{nbytes / 1e6:.1f} MB a step, {nbytes / one['native_us'] / 1e3:.1f} GB/s; the probe {probe:.1f}")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("-m", "--model", type=Path, help="a GGUF file; the built-in model without it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1], help="rows of a step")
    parser.add_argument("--tokens", type=int, default=40, help="steps that are measured")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--sparsity", default="off")
    parser.add_argument("--least", action="store_true", help="the least time, not the median")
    args = parser.parse_args()
    options = LoadOptions(
        threads=args.threads,
        context=PROMPT + args.tokens + 32,
        sequences=max(args.sequences),
        sparsity=args.sparsity,
        gpu="off",
    )
    model = load(args.model, options)
    session = model.session()
    by_rows = {
        each: measured(session, each, args.tokens, args.temperature, least=args.least)
        for each in args.sequences
    }
    assert isinstance(model.backend, CPUBackend)
    probe = ReadProbe(model.backend).measure()
    show(by_rows, probe)
    of = {"model": model.name, "threads": args.threads, "isa": model.backend.isa, "commit": commit()}
    print(json.dumps({**of, "probe_gb_s": probe, "rows": by_rows}))


if __name__ == "__main__":
    main()
