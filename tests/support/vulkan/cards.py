"""Software drivers that behave like cards: the layer of fakecard.c, and processes under it.

``python cards.py model MODEL | lost MODEL | scratch | table | budget MODEL`` is such a process. The last line
that it prints is JSON."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
LAYER = "VK_LAYER_HOTCOLD_fakecard"


def build(folder: Path) -> Path:
    """Compiles the layer, and writes its manifest beside it; returns the folder."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("a layer of Vulkan is compiled: install a C compiler")
    library, source = folder / "libfakecard.so", Path(__file__).with_name("fakecard.c")
    command = [*compiler.split(), "-std=c11", "-O1", "-Wall", "-Werror", "-fvisibility=hidden", "-fPIC"]
    command += ["-shared", f"-I{ROOT}/third_party/vulkan-headers/include", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    own = {"name": LAYER, "type": "GLOBAL", "library_path": str(library), "api_version": "1.3.200"}
    own |= {"implementation_version": "1", "description": "a software driver that behaves like a card"}
    manifest = {"file_format_version": "1.2.0", "layer": own}
    (folder / "VkLayer_fakecard.json").write_text(json.dumps(manifest))
    return folder


def run(layer: Path, *task: str, **fakes: object) -> dict[str, Any]:
    """The result of a task in a process under the layer, and the family of queues that the device was asked
    for."""
    environment = os.environ | {"VK_INSTANCE_LAYERS": LAYER, "VK_LAYER_PATH": str(layer)}
    environment |= {f"FAKE_{name}": str(value) for name, value in fakes.items()}
    done = subprocess.run(
        [sys.executable, __file__, *task], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    families = re.findall("fakecard: family ([0-9])", done.stderr)
    assert families, "the layer was not loaded"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"family": int(families[0])}


def main(task: str, *arguments: str) -> dict[str, Any]:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from support.vulkan.devices import choose_drivers, device_index

    choose_drivers()
    return TASKS[task](device_index("lavapipe"), *arguments)


def generate(session: Any, tokens: int) -> list[list[int]]:
    from hotcold.engine.engine import Engine
    from hotcold.engine.request import Job, Request
    from hotcold.runtime.sampling import SamplingParams

    params = SamplingParams(temperature=0)
    prompts = [[1, 2], [*range(5, 30)]]
    requests = [Request(Job(prompt, params, max_tokens=tokens, ignore_eos=True)) for prompt in prompts]
    try:
        Engine(session).run(requests)
    finally:
        generated = [[*request.output] for request in requests]
        print(json.dumps(generated))
    return generated


def model(device: int, path: str) -> dict[str, Any]:
    """Tokens with half of each layer on the card, by submits; and those of the CPU alone."""
    from support.placed import on_two

    from hotcold.kernels.vulkan.backend import VulkanBackend
    from hotcold.runtime.loading import load
    from hotcold.runtime.options import LoadOptions

    backend = VulkanBackend(device)
    session = on_two(backend, 0.5, Path(path), sequences=2)
    cpu = load(Path(path), LoadOptions(threads=1, gpu="off", sparsity="exact", sequences=2)).session()
    return {"tokens": generate(session, 6), "expected": generate(cpu, 6)}


def lost(device: int, path: str) -> dict[str, Any]:
    """Returns the error of a model whose card is lost within a run."""
    from support.placed import on_two

    from hotcold.kernels.vulkan.backend import VulkanBackend

    try:
        session = on_two(VulkanBackend(device), float(os.environ["HOT"]), Path(path), sequences=2)
        return {"error": None, "tokens": generate(session, 6)}
    except Exception as error:
        return {"error": str(error), "kind": type(error).__name__}


def scratch(device: int) -> dict[str, Any]:
    """A planted fault: a sum with scratch that no dispatch has written, which is right if that is zeros."""
    import numpy as np

    from hotcold.kernels.backend import Batch, BatchLimits
    from hotcold.kernels.vulkan.backend import VulkanBackend
    from hotcold.kernels.vulkan.recording import Written

    backend, batch = VulkanBackend(device), Batch(BatchLimits(1, 1, 1, 1))
    x = backend.zeros((1, 64))
    backend.write(x, np.ones((1, 64), np.float32))
    batch.counts[:] = 1, 1, 0, 1

    def add(recording: Any) -> None:
        unwritten = recording.scratch(4 * 64)
        numbers = [64, 1.0, 1.0]
        recording.run("add", [Written(backend.own(x).range), unwritten], numbers, (1, 1, 1))

    backend.op(batch, add)
    return {"sum": float(backend.read(x).sum())}


def budget(device: int, path: str) -> dict[str, Any]:
    """Loads a model with a driver that gives more memory than it has."""
    from hotcold.runtime.loading import load
    from hotcold.runtime.options import LoadOptions

    asked = int(os.environ["VRAM_BUDGET"])
    options = LoadOptions(threads=1, gpu=str(device), vram_budget=asked, chunk=1, sparsity="exact")
    model = load(Path(path), options)
    taken = sum(gpu.allocated_bytes for gpu in model.gpus)  # type: ignore[attr-defined]
    return {"allocated": taken, "notes": [*model.notes]}


def table(device: int) -> dict[str, Any]:
    """The first case of each op, with scratch that was allocated for it; and the pipelines that they made."""
    from support.mirrored_backend import MirroredBackend
    from support.vulkan.table import cases, difference

    from hotcold.kernels.vulkan.backend import VulkanBackend

    backend = VulkanBackend(device)
    first = {case.op: case for case in reversed(cases())}
    wrong = {}
    for op, case in first.items():
        backend._scratch = None
        wrong[op] = difference(case, case.run(MirroredBackend(backend)))[0]
    pipelines = sorted((shader, constants) for shader, constants, *_ in backend._pipelines)
    return {"wrong": {op: said for op, said in wrong.items() if said}, "ops": len(first), "made": pipelines}


TASKS = {each.__name__: each for each in (model, lost, scratch, budget, table)}

if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
