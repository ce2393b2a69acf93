"""Vulkan's validation layer, with its checks of synchronisation and of ranges, reports nothing of the
backend; and it reports a missing barrier and a write behind a range."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.golden import golden
from support.vulkan import faults
from support.vulkan.devices import need
from support.vulkan.layers import LAYERS, environment, messages


def validated(layer: str, driver: str, folder: Path, *arguments: str, ranges: bool = False) -> str:
    """Runs validated.py under a layer; what the layer reported."""
    need("the loader", f"the {layer} layer", driver)
    script = Path(__file__).resolve().parents[2] / "support/vulkan/validated.py"
    command = [sys.executable, str(script), driver, *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=1800 if ranges else 600,
        env=environment(layer, folder, ranges=ranges),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "layer loaded"
    return messages(folder) + "".join(
        line for line in done.stdout.splitlines(True) if "VUID" in line or "SYNC" in line
    )


@pytest.mark.parametrize(("layer", "driver"), [("newer", "lavapipe"), ("older", "lavapipe")])
def test_nothing_is_reported(layer: str, driver: str, tmp_path: Path) -> None:
    """A sample of the op table, and a hybrid model with both forms of the handshake."""
    model = golden("tiny-drelu", tmp_path).path
    assert validated(layer, driver, tmp_path, "sample", str(model)) == ""


@pytest.mark.parametrize("layer", LAYERS)
def test_a_missing_barrier_is_reported(layer: str, tmp_path: Path) -> None:
    faults.need_faults()
    reported = validated(layer, "lavapipe", tmp_path, "without_barrier")
    assert "SYNC-HAZARD-READ-AFTER-WRITE" in reported or "SYNC-HAZARD-READ_AFTER_WRITE" in reported


@pytest.mark.full
def test_no_op_leaves_its_ranges(tmp_path: Path) -> None:
    """SwiftShader, since lavapipe's compiler takes minutes for an instrumented shader."""
    assert validated("newer", "swiftshader", tmp_path, "ops", ranges=True) == ""


@pytest.mark.full
def test_a_write_behind_a_range_is_reported(tmp_path: Path) -> None:
    reported = validated("newer", "swiftshader", tmp_path, "behind_range", ranges=True)
    assert "storageBuffers-06936" in reported
