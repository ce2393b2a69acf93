"""A process that runs given work under Vulkan's validation layer; test_vulkan_validation.py starts it.

``python validated.py DRIVER sample MODEL``. In place of the last two: ``without_barrier``, ``ops`` or
``behind_range``. Its last line says whether the layer was loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.vulkan.devices import choose_drivers, open_vulkan  # noqa: E402

choose_drivers()

from support.mirrored_backend import MirroredBackend  # noqa: E402
from support.op_truth import random_tensor, rng  # noqa: E402
from support.placed import on_two  # noqa: E402
from support.vulkan import faults  # noqa: E402
from support.vulkan.table import cases  # noqa: E402

from hotcold.engine.engine import Engine  # noqa: E402
from hotcold.engine.request import Job, Request  # noqa: E402
from hotcold.engine.sampler import SamplingParams  # noqa: E402
from hotcold.kernels.backend import Batch, BatchLimits  # noqa: E402
from hotcold.kernels.vulkan.recording import Written  # noqa: E402

#: Each op, with what else makes other dispatches of it.
SAMPLE = (
    "linear Q4_0 100x64", "linear F16 7x33", "linear several matrices", "embed Q4_0",
    "ffn Q4_0 by_neuron relu, biases", "ffn Q4_0 by_output relu, biases", "ffn Q4_0 by_output silu, biases",
    "ffn F16 by_neuron relu, biases", "ffn Q4_0 by_neuron relu, 2 of 4 experts", "predict F16 F16 relu",
    "predict F16 experts", "router F32 mixtral", "attention f16 2 kv heads of 64",
    "attention q8_0 2 kv heads of 64 sinks and softcap", "store_kv f16", "store_kv q8_0", "norm of 100",
    "rope of all shapes", "add and gather", "softcap of logits", "top_k with ties", "short_conv 300x4",
    "gated_delta 6 heads of 8x70", "gated_delta 3 heads of 13x24 by channel", "ssm_scan 6 heads of 8x16",
    "decay of any size", "multiply by each activation", "norm of groups",
)  # fmt: skip


def sample(backend: Any, model: Path) -> None:
    named = {str(case): case for case in cases()}
    for name in SAMPLE:
        found = [case for title, case in named.items() if title.startswith(name)]
        assert found, name
        found[0].run(MirroredBackend(backend))
    for spin in (False, True):
        backend.spin = spin
        session = on_two(backend, 0.5, model, sequences=2)
        params = SamplingParams(temperature=0)
        requests = [
            Request(Job(prompt, params, max_tokens=3, ignore_eos=True))
            for prompt in ([1, 2], [*range(5, 30)])
        ]
        Engine(session).run(requests)
        session.close()


def without_barrier(backend: Any) -> None:
    """Codes of an input are read while they may still be written."""
    matrix = backend.matrix(random_tensor(rng("barrier"), "Q4_0", 100, 64))
    batch, x, out = Batch(BatchLimits(4, 1, 1, 1)), backend.zeros((4, 64)), backend.zeros((4, 100))
    batch.counts[:2] = 4, 4
    faults.skip("vkCmdPipelineBarrier", 3)  # after those before the program and before it reads the batch
    backend.record(lambda: backend.linear(x, [matrix], batch, [out])).run()


def ops(backend: Any) -> None:
    """The first case of each op."""
    for case in {case.op: case for case in reversed(cases())}.values():
        case.run(MirroredBackend(backend))


def behind_range(backend: Any) -> None:
    """A planted fault: a sum of 64 values in a range that has room for 16."""
    batch, x, y = Batch(BatchLimits(1, 1, 1, 1)), backend.zeros((1, 64)), backend.zeros((1, 64))
    batch.counts[:2] = 1, 1

    def add(recording: Any) -> None:
        short = Written(backend.own(x).range.part(0, 64))
        recording.run("add", [short, backend.own(y).range], [64, 1.0, 1.0], (1, 1, 1))

    backend.op(batch, add)


if __name__ == "__main__":
    driver, what, *more = sys.argv[1:]
    opened = open_vulkan(driver)
    tasks = {"without_barrier": without_barrier, "ops": ops, "behind_range": behind_range}
    if what == "sample":
        sample(opened, Path(more[0]))
    else:
        tasks[what](opened)
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    print("layer loaded" if "libVkLayer_khronos_validation" in maps else "no layer")
