"""Dispatches, barriers and submits of a token on a GPU: what a step costs besides bytes.

    python benchmarks/gpu/step_counts.py --gpu llvmpipe
    python benchmarks/gpu/step_counts.py --gpu llvmpipe --out benchmarks/gpu/step_counts.json

Nothing is measured, so any device gives the same numbers: a software driver too. Models of few layers are
recorded, one with two layers and one with four. A layer's share is half of the difference, and a model's
numbers follow from its layers. Numbers count the program for one row, with the handshake by submits.

``--out`` writes the counts for tests/benchmarks/test_step_counts.py, which lets barriers and submits only
fall."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.parts import MODELS
from gpu.placed import hottest, sizes_of
from gpu.slices import Model, Slice, write, write_dense
from hotcold.errors import UserError
from hotcold.kernels.gpus import choose_gpu
from hotcold.kernels.vulkan.backend import VulkanBackend
from hotcold.placement.placement import write_placement
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions

CONTEXT = 256
LAYERS = 2, 4  #: of the recorded models
COUNTS = "dispatches", "barriers", "submits"
#: A stand-in with small matrices: counts depend on the kind of a layer, not on its size.
SMALL = Model("small", 4, 256, 512, 4, 2, 600)

Counts = dict[str, int]


@dataclass(frozen=True)
class Kind:
    """A model and how it runs. ``hot``: share of the neurons on the GPU."""

    model: str
    type: str
    sparsity: str
    hot: float = 1.0

    @property
    def title(self) -> str:
        where = "all on the GPU" if self.hot == 1 else "split"
        return f"{self.model} {self.type}, {self.sparsity}, {where}"


#: The models of docs/results.md, and what today's users run: SiLU, without a sparse mode.
KINDS = (
    Kind("llama2-7b", "Q4_0", "off"),
    Kind("llama2-7b", "F16", "off"),
    Kind("llama2-70b", "Q4_0", "exact"),
    Kind("llama2-70b", "F16", "exact"),
    Kind("llama2-70b", "Q4_0", "exact", 0.5),
    Kind("llama2-70b", "F16", "exact", 0.5),
    Kind("llama2-70b", "F16", "predicted", 0.5),
    Kind("falcon-40b", "F16", "predicted", 0.5),
)


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """Collects the programs for one row that GPUs record."""
    programs: list[Any] = []
    record = VulkanBackend.record

    def kept(self: VulkanBackend, fn: Any, rows: int | None = None) -> Any:
        program = record(self, fn, rows)
        if rows == 1:
            programs.append(program)
        return program

    patches = {"record": kept, "program_rows": (1,)}
    with patch.multiple(VulkanBackend, **patches):
        yield programs


def counts_of(kind: Kind, layers: int, gpu: str, folder: Path) -> Counts:
    """Counts a token of a model with this many layers."""
    model = replace(SMALL, layers=layers, gated=MODELS[kind.model].gated)
    path, part = folder / f"{kind.model}-{layers}.gguf", Slice(model, layers, kind.type)
    options: dict[str, Any] = {
        "sparsity": kind.sparsity,
        "gpu": gpu,
        "context": CONTEXT,
        "threads": 1,
        "chunk": 8,
    }
    if kind.sparsity == "off":
        write_dense(path, part, CONTEXT)
        options["vram_budget"] = "64MiB"
    else:
        profile = write(path, part, CONTEXT)
        predictors = path if kind.sparsity == "predicted" else None
        options["placement"] = folder / "placement.gpuidx"
        write_placement(
            options["placement"], sizes_of(path, predictors, gpu), hottest(profile.firing, kind.hot)
        )
    with recorded() as programs:
        load(path, LoadOptions(**options)).session()
    (program,) = programs
    return {name: getattr(program.counts, name) for name in COUNTS}


def table(gpu: str) -> dict[str, dict[str, Counts]]:
    """Returns by kind the counts of a layer, times two, and of the rest of a token."""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            few, many = (counts_of(kind, layers, gpu, Path(folder)) for layers in LAYERS)
            two_layers = {name: many[name] - few[name] for name in COUNTS}
            rest = {name: few[name] - two_layers[name] for name in COUNTS}
            rows[kind.title] = {"two layers": two_layers, "rest": rest}
    return rows


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--gpu", required=True, help="a device by name or number")
    parser.add_argument("--out", type=Path, help="file for the counts")
    args = parser.parse_args()
    try:
        device, _ = choose_gpu(args.gpu)
    except UserError as error:
        parser.error(str(error))
    assert device is not None
    rows = table(str(device.index))
    print("| model | dispatches a layer | barriers a layer | barriers a token | submits a token |")
    print("|---|---|---|---|---|")
    for kind in KINDS:
        two_layers, rest = rows[kind.title]["two layers"], rows[kind.title]["rest"]
        layers = MODELS[kind.model].layers
        token = {name: rest[name] + layers * two_layers[name] // 2 for name in COUNTS}
        each = {name: f"{two_layers[name] / 2:g}" for name in COUNTS}
        print(
            f"| {kind.title} | {each['dispatches']} | {each['barriers']} | {token['barriers']} "
            f"| {token['submits']} |"
        )
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
