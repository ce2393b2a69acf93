"""Vulkan's validation layer around a process, with its checks of synchronisation, or of reads and writes
outside ranges (GPU-assisted validation).

Tests run a sample under it. Anything else runs by hand:

    HOTCOLD_TEST_VULKAN=full python tests/support/vulkan/layers.py newer tests/kernels -k lavapipe

runs pytest under the newer layer, prints what was reported, and ends with 1 if that was anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LAYER = "VK_LAYER_KHRONOS_validation"
#: A newer layer, in Debian's chromium-common, without a manifest; and the one of vulkan-validationlayers.
NEWER = Path("/usr/lib/chromium/libVkLayer_khronos_validation.so")
OLDER = Path("/usr/share/vulkan/explicit_layer.d/VkLayer_khronos_validation.json")
LAYERS = {"newer": NEWER, "older": OLDER}

SETTINGS = {"debug_action": "VK_DBG_LAYER_ACTION_LOG_MSG", "report_flags": "error,warn"}
#: Without the heuristic, the newer one does not check what descriptors name.
SYNCHRONISATION = {
    "newer": {"validate_sync": "true", "syncval_shader_accesses_heuristic": "true"},
    "older": {"enables": "VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT"},
}
#: Of the newer one: shaders are instrumented, so that they report what lies outside the range that they have.
#: It warns of its own settings, so errors alone are reported.
RANGES = {"gpuav_enable": "true", "validate_core": "false", "report_flags": "error"}


def environment(layer: str, folder: Path, *, ranges: bool = False) -> dict[str, str]:
    """The environment of a process that loads the layer, which writes to :func:`messages`. ``ranges``: it
    checks these in place of synchronisation."""
    checks = RANGES if ranges else SYNCHRONISATION[layer]
    settings = SETTINGS | checks | {"log_filename": str(folder / "messages.txt")}
    lines = [f"khronos_validation.{key} = {value}" for key, value in settings.items()]
    (folder / "vk_layer_settings.txt").write_text("\n".join(lines) + "\n")
    found = {**os.environ, "VK_INSTANCE_LAYERS": LAYER, "VK_LAYER_SETTINGS_PATH": str(folder)}
    if layer == "newer":
        own = {"name": LAYER, "type": "GLOBAL", "library_path": str(NEWER), "api_version": "1.4.300"}
        own |= {"implementation_version": "1", "description": "validation"}
        manifest = {"file_format_version": "1.2.0", "layer": own}
        (folder / "VkLayer_khronos_validation.json").write_text(json.dumps(manifest))
        found["VK_LAYER_PATH"] = str(folder)
    return found


def messages(folder: Path) -> str:
    """Returns what the layer reported, "" if nothing."""
    log = folder / "messages.txt"
    return log.read_text() if log.exists() else ""


def main(layer: str, *arguments: str) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, env=environment(layer, folder), check=False)
        reported = messages(folder)
    print(reported or "the layer reported nothing")
    return done.returncode or bool(reported)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
