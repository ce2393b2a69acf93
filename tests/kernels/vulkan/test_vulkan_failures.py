"""Each Vulkan function fails once while a model is loaded and in a step: a clear error, no hang, nothing that
is leaked, and the model can be loaded again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.golden import golden
from support.vulkan import faults
from support.vulkan.devices import FULL, SOFTWARE, device_index

#: Functions whose failure need not end the load: less memory may be asked for.
TRIED_AGAIN = {"vkAllocateMemory"}
#: The tasks of each driver: the handshake, and which functions fail (none: all).
CASES: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "lavapipe": (("submit", ()), ("spin", ("vkQueueSubmit", "vkWaitSemaphores"))),
    "swiftshader": (
        ("spin", ("vkQueueSubmit", "vkWaitSemaphores", "vkAllocateMemory", "vkCreateComputePipelines")),
    ),
}


def run(driver: str, model: Path, form: str, functions: tuple[str, ...]) -> list[dict[str, Any]]:
    device_index(driver)  # skips where there is none
    faults.need_faults()
    script = Path(__file__).resolve().parents[2] / "support/vulkan/failing.py"
    command = [sys.executable, str(script), driver, str(model), form, *functions]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ})
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("driver", SOFTWARE if FULL else ["lavapipe"])  # each load makes 50 pipelines
def test_every_function_fails_once(driver: str, tmp_path: Path) -> None:
    model = golden("tiny-drelu", tmp_path).path
    for form, functions in CASES[driver]:
        whole, *found = run(driver, model, form, functions)
        assert not whole["leaked"], "without any failure"
        for each in found:
            what = {key: each[key] for key in ("stage", "function", "nth", "error", "leaked")}
            assert each["tokens"] in (each["wanted"], None) and not each["leaked"], what
            if each["reached"] and each["function"] not in TRIED_AGAIN:
                assert each["kind"] in ("VulkanError", "VulkanMemoryError"), what
                assert each["function"] in each["error"] and "\n" not in each["error"], what
        assert found[-1]["tokens"] == whole["wanted"]
        failed = {(each["stage"], each["function"]) for each in found if each["error"]}
        assert ("step", "vkQueueSubmit") in failed
        assert functions or len({function for _, function in failed}) > 20
