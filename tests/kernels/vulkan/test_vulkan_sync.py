"""Looks for missing barriers, which the software drivers cannot show, as they execute one dispatch after
another. The validation layer of Vulkan, which sees them, looks at a model's steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.vulkan import faults
from support.vulkan.devices import DRIVERS, need
from support.vulkan.layers import LAYER, LAYERS

#: Without the second, the layer does not look at what shaders read and write through descriptors.
SETTINGS = {
    "VK_INSTANCE_LAYERS": LAYER,
    "VK_LAYER_VALIDATE_SYNC": "1",
    "VK_LAYER_SYNCVAL_SHADER_ACCESSES_HEURISTIC": "1",
}
OPEN = """
import sys
from support.vulkan.devices import choose_drivers, device_index
choose_drivers()
from hotcold.kernels.vulkan.backend import VulkanBackend
backend = VulkanBackend(device_index("{driver}"))
"""
#: The first barrier of a program orders it after what was submitted before.
BARRIERS = """
from support.vulkan import faults
from hotcold.kernels.backend import Batch, BatchLimits
batch = Batch(BatchLimits(4, 1, 1, 1))
batch.counts[:2] = 3, 3
x, y = (backend.zeros((4, 40)) for _ in range(2))
faults.skip("vkCmdPipelineBarrier", int(sys.argv[1]))
program = backend.record(lambda: [backend.add(x, y, batch) for _ in range(3)])
program.run()
program.run()
print("done")
"""
MODEL = """
import numpy as np
from support.placed import on_two
from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.runtime.sampling import SamplingParams
for share, backend.spin in ((1.0, False), (0.5, False), (0.5, True)):
    session = on_two(backend, share, sparsity="exact", sequences=2)
    prompts = [np.arange(300, 300 + n).tolist() for n in (1, 30)]
    params = SamplingParams(temperature=0)
    requests = [Request(Job(each, params, max_tokens=4, ignore_eos=True)) for each in prompts]
    Engine(session).run(requests)
    if share < 1:
        link = session._cold_sides[0].link
        link.start_marks(1000)
        Engine(session).run([Request(Job(prompts[0], params, max_tokens=3, ignore_eos=True))])
        assert len(link.marks())
    session.close()
print("done")
"""


@pytest.fixture(scope="session")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a manifest of the current layer, which lies beside SwiftShader. (Debian 12's own does
    not see a write after a write.)"""
    need("the loader", "the newer layer")
    folder = tmp_path_factory.mktemp("layer")
    about = {"name": LAYER, "type": "GLOBAL", "library_path": str(LAYERS["newer"]), "api_version": "1.4.0"}
    content = {
        "file_format_version": "1.2.0",
        "layer": about | {"implementation_version": "1", "description": LAYER},
    }
    (folder / "validation.json").write_text(json.dumps(content))
    return folder


def reported(layer: Path, driver: str, script: str, *arguments: str) -> list[str]:
    """Returns what the layer says of a script."""
    need(driver)
    root = Path(__file__).resolve().parents[3]
    path = os.pathsep.join([str(root), str(root / "tests"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", OPEN.format(driver=driver) + script, *arguments],
        env=os.environ | SETTINGS | {"PYTHONPATH": path, "VK_LAYER_PATH": str(layer)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines() + done.stderr.splitlines()
    assert "done" in lines, done.stderr
    return [line for line in lines if "VUID" in line or "SYNC-HAZARD" in line]


@pytest.mark.parametrize("driver", DRIVERS)
def test_every_barrier_is_needed(layer: Path, driver: str) -> None:
    """Each one that is left out is reported, which also shows that the layer is at work."""
    faults.need_faults()
    assert reported(layer, driver, BARRIERS, "0") == []
    for nth in (2, 3, 4):
        found = reported(layer, driver, BARRIERS, str(nth))
        assert found and "SYNC-HAZARD" in found[0], nth


def test_steps_of_a_model_have_all_barriers(layer: Path) -> None:
    """Prompts and decode rows, all on the device and half of it, in both forms of the handshake, and with
    timestamps."""
    assert reported(layer, DRIVERS[0], MODEL) == []
