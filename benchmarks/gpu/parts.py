"""The parts of benchmarks/gpu/compare.py, in order, and how long each takes: models, slices, parts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpu import cases, ops
from gpu.placed import CONTESTANTS
from gpu.slices import Model, Slice
from hotcold.placement.hardware import find_hardware
from hotcold.placement.sizes import SHAPES
from hotcold.runtime.memory import available_memory

MODELS = {
    model.name: model
    for model in (
        Model("llama2-70b", 80, 8192, 28672, 64, 8, 32000),
        Model("falcon-40b", 60, 8192, 32768, 128, 8, 65024, gated=False),
        Model("llama2-13b", 40, 5120, 13824, 40, 40, 32000),
        Model("llama2-7b", 32, 4096, 11008, 32, 32, 32000),
        Model("mistral-7b", 32, 4096, 14336, 32, 8, 32000),
    )
}
SMALL_MODELS = {
    model.name: model
    for model in (
        Model("small", 4, 512, 704, 8, 4, 1200),
        Model("small-ungated", 4, 512, 704, 8, 8, 1200, gated=False),
    )
}
#: Layers of the slices, at least four, since a quarter of them is one layer.
LAYERS = {"llama2-70b": 4, "falcon-40b": 4, "llama2-13b": 4, "llama2-7b": 8, "mistral-7b": 8}
#: Budgets, as shares of the weights. Half of a small model is what leaves room for some of its neurons.
QUARTER, HALF = (0.25,), (0.5,)
OTHERS, ENDS = (0.1, 0.5, 0.75, 1.0), (0.1, 1.0)
SWEPT = ("CPU dense", "GPU dense", "solver")  #: at the other budgets
#: Model, type, budgets, the most seconds, and whether it is measured with --quick; what is most wanted first.
SLICES = (
    ("llama2-70b", "F16", QUARTER, 75.0, True), ("llama2-13b", "F16", QUARTER, 40.0, True),
    ("falcon-40b", "F16", QUARTER, 75.0, False), ("llama2-7b", "F16", QUARTER, 40.0, False),
    ("llama2-7b", "Q4_0", QUARTER, 30.0, True), ("llama2-70b", "Q4_0", QUARTER, 35.0, False),
    ("llama2-70b", "F16", OTHERS, 55.0, False), ("mistral-7b", "F16", QUARTER, 40.0, False),
    ("mistral-7b", "Q4_0", QUARTER, 30.0, False), ("llama2-13b", "Q4_0", QUARTER, 30.0, False),
    ("falcon-40b", "Q4_0", QUARTER, 35.0, False), ("llama2-70b", "Q4_0", OTHERS, 40.0, False),
)  # fmt: skip
SMALL_SLICES = (
    ("small", "Q4_0", HALF, 30.0, True), ("small-ungated", "F16", HALF, 30.0, True),
    ("small", "Q4_0", ENDS, 30.0, True),
)  # fmt: skip
#: Copies of a slice in the host's memory and in the card's, with all contestants loaded.
HOST_COPIES, CARD_COPIES = 6, 2.3
SLOWEST_TOKEN_S = 0.08  #: of a slice on the processor, dense


@dataclass(frozen=True)
class Part:
    """The work of one process, and how long it may take: not begun with less than ``least`` seconds left."""

    name: str
    kind: str
    task: dict[str, Any]
    most: float
    least: float = 10.0


def planned(
    args: argparse.Namespace, gpu: str, small: bool, hardware: Path | None, folder: Path
) -> Iterator[Part]:
    """All parts after doctor, the most important ones first."""
    facts = asdict(ops.OpsTask(gpu, 0.0, small, args.threads))
    yield Part("built-in model", "built-in model", facts, 25.0 if small else 40.0)
    yield Part("matrices", "matrices", facts, 12.0 if args.quick else 25.0)
    yield from slice_parts(args, gpu, small, hardware, folder)
    yield Part("kernels", "kernels", facts, 20.0)
    yield Part("Mixtral", "experts", facts, 30.0)


def slice_parts(
    args: argparse.Namespace, gpu: str, small: bool, hardware: Path | None, folder: Path
) -> Iterator[Part]:
    for name, type, shares, most, quickly in SMALL_SLICES if small else SLICES:
        if not small and not (name in args.models if args.models else quickly or not args.quick):
            continue
        model = (SMALL_MODELS if small else MODELS)[name]
        if args.published and name in SHAPES:
            model = replace(model, law=name)
        wanted = Slice(model, 2 if small else LAYERS[name], type)
        task = cases.Task(
            model=asdict(model),
            type=type,
            taken=fitting(wanted, hardware).taken,
            shares=[*shares],
            contestants=[*(CONTESTANTS if len(shares) == 1 else SWEPT)],
            gpu=gpu,
            folder=str(folder),
            hardware=str(hardware) if hardware else None,
            pretend=small,
            threads=args.threads,
            rounds=1 if small else 2 if args.quick else 3,
            tokens=6 if small else 24 if args.quick else 36,
            prompts=(4, 20) if small else (8, 64, 128),
            llama_bench=str(args.llama_bench) if args.llama_bench and len(shares) == 1 else None,
        )
        percent = ", ".join(f"{share:.0%}" for share in shares)
        yield Part(f"{name} {type} {percent}", "slices", asdict(task), most, least=most / 3)


def fitting(wanted: Slice, hardware: Path | None) -> Slice:
    """With fewer layers where host or card are too small for all contestants at the same time, or the
    processor too slow for some hundred tokens. Two at least: less is no part of a model."""
    most = [(available_memory() or 1 << 40) / HOST_COPIES]
    if hardware is not None:
        machine = find_hardware(str(hardware))
        most.append(1e9 * machine.cpu_stream_gb_s * SLOWEST_TOKEN_S)
        if machine.vram_bytes:
            most.append(machine.vram_bytes / CARD_COPIES)
    smaller = wanted
    while smaller.taken > 2 and smaller.nbytes > min(most):
        smaller = replace(smaller, taken=smaller.taken // 2)
    return smaller
