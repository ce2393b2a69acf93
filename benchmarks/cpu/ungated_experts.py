"""Measures what zeros save inside ungated experts, as in Nemotron 3 Nano: `exact`, `predicted`, dense.

    python benchmarks/cpu/ungated_experts.py  # Q4_0, Q5_0 and Q8_0
    python benchmarks/cpu/ungated_experts.py --type MXFP4 --rank 64 256 --rounds 100 --json
    python benchmarks/cpu/ungated_experts.py -t 1 --own-time  # on a machine that has other work

One layer of experts of 1856 neurons, 2688 wide; a row chooses 6, with relu(up x)^2 and no gate. There are
fewer experts than Nano's 128, 24 by default: enough for caches to hold few of the experts that are chosen
again. Weights are made up. Inputs have a mean, and a covariance whose k-th eigenvalue is k^-1.1: a truncated
SVD of up then explains as much as one does of the gates of SmolLM2 and Gemma (69 % with a rank of D / 18).
Each neuron has a probability of firing of its own: these are a power law with a mean of 9 %, in which a fifth
of the neurons has half of all activations. Few experts are distinct; the others are copies of them elsewhere
in memory.

Ways, which take turns on the same row and the same choice of experts, in a random order:

    dots       down by output as a dot of bytes: dense at its fastest, as models without zeros have it
    off        panels of a stock file, dense
    exact      panels; only active neurons are read of down
    predicted  panels; of up, too, only what a predictor names
    ... t      these three with down by neuron

Columns: milliseconds of a step of one row (median); `dots` and `off` of the same layout over it (medians of
ratios within rounds, and the middle half of them); the bytes that it reads, as a part of all bytes of the
chosen experts; GB/s. With `--own-time` times are those of the processor, of one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.formats.blocks import BLOCK_TYPES, Tensor, quantise
from hotcold.kernels.backend import (
    FFN_COUNTS,
    Batch,
    BatchLimits,
    Chosen,
    FFNCall,
    FFNStats,
    FFNTensors,
    Floats,
    PredictorTensors,
)
from hotcold.kernels.cpu import CPUBackend
from hotcold.kernels.numpy_ffn import ReferenceFFN, ffn_weights
from hotcold.kernels.numpy_matrix import ReferenceMatrix
from hotcold.placement.sizes import power_law
from hotcold.sparse.expert_fitting import factors
from hotcold.sparse.fitting import Activity, thresholds

NEURONS, DIM, CHOSEN = 1856, 2688, 6
ACTIVE, EXPONENT = 0.09, 1.1
TOKENS = 3072  #: that a predictor is fitted to; a third as many judge it


@dataclass(frozen=True)
class Inputs:
    """Where rows of inputs come from."""

    mean: Floats  # [D]
    root: Floats  # (D, D), of the covariance

    @classmethod
    def made_up(cls, random: np.random.Generator) -> Inputs:
        turned = np.linalg.qr(random.standard_normal((DIM, DIM), np.float32))[0]
        variances = np.arange(1, DIM + 1, dtype=np.float32) ** -EXPONENT
        variances *= DIM / variances.sum()
        mean = random.standard_normal(DIM, np.float32) * np.float32(0.5)
        return cls(mean, turned * np.sqrt(variances))

    def draw(self, random: np.random.Generator, rows: int) -> Floats:
        values: Floats = self.mean + random.standard_normal((rows, DIM), np.float32) @ self.root.T
        return values.astype(np.float32)


def up_rows(random: np.random.Generator, inputs: Inputs) -> Floats:
    """One expert's rows of up, each active as often as the power law says."""
    rows = random.standard_normal((NEURONS, DIM), np.float32) * np.float32(DIM**-0.5)
    shares = random.permutation(power_law(NEURONS, 0.03, 0.7))
    shares = np.clip(shares * (ACTIVE / shares.mean()), 1e-4, 0.98)
    deviation = np.linalg.norm(rows @ inputs.root, axis=1)
    normal = statistics.NormalDist()
    wanted = deviation * np.array([normal.inv_cdf(float(share)) for share in shares])
    mean = inputs.mean.astype(np.float64)
    shift = (wanted - rows @ mean) / (mean @ mean)
    return np.asarray(rows + np.outer(shift, mean), np.float32)


def copies(parts: list[Tensor], count: int) -> Tensor:
    """The rows of several experts, the parts in turns."""
    data = np.concatenate([parts[i % len(parts)].data for i in range(count)])
    return Tensor(parts[0].type, (len(data), parts[0].shape[1]), data)


@dataclass(frozen=True)
class Model:
    """One layer, in the layouts of down."""

    distinct: list[FFNTensors]  #: down by neuron
    experts: int
    inputs: Inputs

    @classmethod
    def made_up(cls, type: str, distinct: int, experts: int) -> Model:
        random = np.random.default_rng(0)
        inputs = Inputs.made_up(random)
        ffns = []
        for _ in range(distinct):
            up = quantise(up_rows(random, inputs), type)
            down = random.standard_normal((NEURONS, DIM), np.float32) * np.float32(0.02)
            ffns.append(FFNTensors(None, up, quantise(down, type), "by_neuron", "relu2"))
        return cls(ffns, experts, inputs)

    def tensors(self, layout: str, activation: str = "relu2") -> FFNTensors:
        downs = [each.down for each in self.distinct]
        if layout == "by_output":
            turned = [np.ascontiguousarray(down.dequantise().T) for down in downs]
            downs = [quantise(each, self.distinct[0].down.type.name) for each in turned]
        return FFNTensors(
            gate=None,
            up=copies([each.up for each in self.distinct], self.experts),
            down=copies(downs, self.experts),
            down_layout=layout,
            activation=activation,
            experts=self.experts,
            chosen=CHOSEN,
        )


@dataclass(frozen=True)
class Predictor:
    """Fitted to the distinct experts, and judged by rows that it was not fitted to."""

    tensors: PredictorTensors
    rank: int
    candidates: float
    active: float
    recall: float
    weighted_recall: float


def fitted(model: Model, ranks: list[int], recall: float) -> list[Predictor]:
    """One of each rank."""
    random = np.random.default_rng(1)
    parts = [part for each in model.distinct if isinstance(part := ffn_weights(each), ReferenceFFN)]
    x, unseen = (model.inputs.draw(random, n) for n in (TOKENS, TOKENS // 3))
    first, second = factors(parts, x, max(ranks))
    training, truth = ([Activity.from_ffn(part, rows) for part in parts] for rows in (x, unseen))
    predictors = []
    for rank in ranks:
        low, high = (
            quantise(np.ascontiguousarray(each), "Q4_0") for each in (first[:rank], second[:, :rank])
        )
        hidden, hidden_unseen = (ReferenceMatrix(low).dot(each) for each in (x, unseen))
        seconds = [high.take_rows(slice(i, i + NEURONS)) for i in range(0, len(second), NEURONS)]
        bounds, sums = [], np.zeros(6)
        for rows, activity, judged in zip(seconds, training, truth, strict=True):
            bounds.append(thresholds(ReferenceMatrix(rows).dot(hidden), activity.active, recall))
            named = ReferenceMatrix(rows).dot(hidden_unseen) >= bounds[-1]
            right = named & judged.active
            weights = judged.weight.sum(), (judged.weight * right).sum()
            sums += (named.size, named.sum(), judged.active.sum(), right.sum(), *weights)
        whole = PredictorTensors(
            low,
            copies(seconds, model.experts),
            np.concatenate([bounds[e % len(parts)] for e in range(model.experts)]),
            relu=False,
            experts=model.experts,
            chosen=CHOSEN,
        )
        shares = sums[1] / sums[0], sums[2] / sums[0], sums[3] / sums[2], sums[5] / sums[4]
        predictors.append(Predictor(whole, rank, *(float(share) for share in shares)))
    return predictors


class Step:
    """One way to compute a row, with its buffers."""

    def __init__(
        self, backend: CPUBackend, weights: Any, skip: bool, predictor: Any = None, first: int = 0
    ) -> None:
        self.backend, self.weights, self.skip, self.predictor = backend, weights, skip, predictor
        self.batch = Batch(BatchLimits(1, 1, 1, 1))
        self.batch.counts[:] = 1, 1, 0, 1
        self.x, self.out = backend.zeros((1, DIM)), backend.zeros((1, DIM))
        self.chosen = Chosen(backend.zeros((1, CHOSEN), np.int32), backend.zeros((1, CHOSEN)))
        self.chosen.factors[:] = 1 / CHOSEN
        self.mask = backend.zeros((1, weights.words), np.uint64) if predictor else None
        self.stats = FFNStats(backend.zeros((1, len(FFN_COUNTS)), np.int64))
        self._first = first  # bytes of a predictor's first factor
        self._program = backend.record(self._ops)

    def _ops(self) -> None:
        if self.predictor:
            self.backend.predict(self.x, self.predictor, self.batch, self.mask, self.chosen)
        self.backend.ffn(FFNCall(
            self.x, self.weights, self.batch, self.out, skip=self.skip, mask=self.mask, stats=self.stats,
            chosen=self.chosen,
        ))  # fmt: skip

    def run(self, x: Floats, ids: np.ndarray, clock: Callable[[], float]) -> tuple[float, int]:
        """Seconds, and bytes that are read."""
        self.x[0], self.chosen.ids[0] = x, ids
        self.stats.counts[:] = 0
        start = clock()
        self._program.run()
        seconds = clock() - start
        _, up, down, run = self.weights.row_bytes
        ups, _, downs, _, runs = (int(each) for each in self.stats.counts[0])
        nbytes = ups * up + downs * down + runs * run
        if self.predictor:
            nbytes += self._first
            nbytes += (self.predictor.nbytes - self._first) * CHOSEN // (self.weights.neurons // NEURONS)
        return seconds, nbytes


def steps_of(backend: CPUBackend, model: Model, predictors: list[Predictor]) -> dict[str, Step]:
    dots = backend.ffn_weights(model.tensors("by_output", "silu"))
    steps = {"dots": Step(backend, dots, skip=False)}
    held = {predictor.rank: backend.predictor_weights(predictor.tensors) for predictor in predictors}
    for layout, mark in (("by_output", ""), ("by_neuron", " t")):
        weights = backend.ffn_weights(model.tensors(layout))
        steps[f"off{mark}"] = Step(backend, weights, skip=False)
        steps[f"exact{mark}"] = Step(backend, weights, skip=True)
        for rank, predictor in held.items():
            steps[f"predicted {rank}{mark}"] = Step(backend, weights, True, predictor, predictor.first.nbytes)
    return steps


def measure(
    model: Model, steps: dict[str, Step], rounds: int, clock: Callable[[], float]
) -> dict[str, dict[str, Any]]:
    random = np.random.default_rng(2)
    rows = model.inputs.draw(random, 256)
    times: dict[str, list[float]] = {name: [] for name in steps}
    reads: dict[str, list[int]] = {name: [] for name in steps}
    for i in range(rounds + 3):
        ids = np.sort(random.permutation(model.experts)[:CHOSEN]).astype(np.int32)
        for name in random.permutation(list(steps)):
            seconds, nbytes = steps[name].run(rows[i % len(rows)], ids, clock)
            if i >= 3:
                times[name].append(seconds)
                reads[name].append(nbytes)
    all_weights = next(iter(steps.values())).weights
    whole = all_weights.nbytes * CHOSEN / model.experts
    return {name: row(times, name, statistics.mean(reads[name]), whole) for name in steps}


def row(times: dict[str, list[float]], name: str, nbytes: float, whole: float) -> dict[str, Any]:
    seconds = statistics.median(times[name])
    layout = " t" if name.endswith(" t") else ""
    figures: dict[str, Any] = {"ms": round(seconds * 1e3, 3), "bytes": round(nbytes / whole, 3)}
    figures["gb_s"] = round(nbytes / seconds / 1e9, 2)
    for against in ("dots", f"off{layout}"):
        ratios = [a / b for a, b in zip(times[against], times[name], strict=True)]
        quarters = statistics.quantiles(ratios, n=4)
        figures["over " + against.removesuffix(" t")] = [round(ratios_of, 3) for ratios_of in quarters]
    return figures


def show(type: str, ways: dict[str, dict[str, Any]], predictors: list[Predictor]) -> None:
    print(f"{type}: {predictors[0].active:.1%} active")
    for predictor in predictors:
        recalls = f"{predictor.recall:.4f}, {predictor.weighted_recall:.4f} by weight"
        print(f"  rank {predictor.rank}: names {predictor.candidates:.1%}; recall {recalls}")
    for name, one in ways.items():
        ratios = []
        for against in ("dots", "off"):
            low, middle, high = one[f"over {against}"]
            ratios.append(f"{against} x{middle:.2f} ({low:.2f} to {high:.2f})")
        figures = f"{one['ms']:8.3f} ms  {ratios[0]}  {ratios[1]}  reads {one['bytes']:.3f}"
        print(f"  {name:15} {figures}  {one['gb_s']:.1f} GB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    types = [name for name, type in BLOCK_TYPES.items() if type.weights == 32]
    parser.add_argument("--type", nargs="+", default=["Q4_0", "Q5_0", "Q8_0"], choices=types)
    parser.add_argument("--experts", type=int, default=24)
    parser.add_argument("--distinct", type=int, default=3)
    parser.add_argument("--rank", type=int, nargs="+", default=[256])
    parser.add_argument("--recall", type=float, default=0.99)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--own-time", action="store_true", help="of the processor; needs -t 1")
    parser.add_argument("--json", action="store_true", help="print figures as JSON, too")
    args = parser.parse_args()
    if args.own_time and args.threads != 1:
        parser.error("--own-time needs -t 1")
    clock = time.thread_time if args.own_time else time.perf_counter
    backend = CPUBackend(args.threads)
    report: list[dict[str, Any]] = []
    for type in args.type:
        model = Model.made_up(type, args.distinct, args.experts)
        predictors = fitted(model, args.rank, args.recall)
        ways = measure(model, steps_of(backend, model, predictors), args.rounds, clock)
        show(type, ways, predictors)
        facts = [{k: v for k, v in vars(each).items() if k != "tensors"} for each in predictors]
        report.append({"type": type, "predictors": facts, "ways": ways})
    if args.json:
        whole = {"isa": backend.isa, "threads": backend.threads, "experts": args.experts, "layers": report}
        print(json.dumps(whole))


if __name__ == "__main__":
    main()
