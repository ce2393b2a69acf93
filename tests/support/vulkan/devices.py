"""Finds what tests need of Vulkan: its loader; a driver, either lavapipe or SwiftShader, which are software,
or a GPU that is named; a validation layer. A test that lacks one of them is skipped, or fails.

``HOTCOLD_TEST_GPU=NAME`` tests that device instead of the software drivers: no other GPU is ever used.
``HOTCOLD_TEST_VULKAN=1`` (or ``CI=true``) makes what is missing a failure and not a reason to skip, and
``HOTCOLD_TEST_VULKAN=lavapipe`` the loader and that driver alone;
``HOTCOLD_TEST_VULKAN=full`` also runs the tests that are left out in CI because they take long."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest
from support.vulkan.layers import LAYERS

if TYPE_CHECKING:
    from hotcold.kernels.vulkan.backend import VulkanBackend

#: A part of each device's name, and where distributions put the driver's manifest.
SOFTWARE = {
    "lavapipe": ("llvmpipe", ("/usr/share/vulkan/icd.d/lvp_icd*.json",)),
    "swiftshader": (
        "SwiftShader",
        (
            "/usr/lib/chromium/vk_swiftshader_icd.json",
            "/usr/lib*/chromium*/vk_swiftshader_icd.json",
            "/usr/share/vulkan/icd.d/*swiftshader*.json",
        ),
    ),
}
LOADERS = {"win32": "vulkan-1.dll", "darwin": "libvulkan.1.dylib"}
#: The parts that a test may need, and the package of Debian that brings each.
PACKAGES = {
    "the loader": "libvulkan1",
    "lavapipe": "mesa-vulkan-drivers",
    "swiftshader": "chromium-common",
    "the newer layer": "chromium-common",
    "the older layer": "vulkan-validationlayers",
}

NAMED = os.environ.get("HOTCOLD_TEST_GPU")
#: The drivers that the fixture ``vulkan`` takes in turn.
DRIVERS = ("gpu",) if NAMED else tuple(SOFTWARE)
FULL = os.environ.get("HOTCOLD_TEST_VULKAN") == "full"
#: The only thing that is required where it names a driver.
ONE_DRIVER = ("the loader", os.environ.get("HOTCOLD_TEST_VULKAN"))
REQUIRED = bool(NAMED) or bool(os.environ.get("HOTCOLD_TEST_VULKAN")) or os.environ.get("CI") == "true"


def manifest(driver: str) -> Path | None:
    """The file that tells Vulkan's loader where a software driver is."""
    for pattern in SOFTWARE[driver][1]:
        for found in sorted(Path("/").glob(pattern.removeprefix("/"))):
            return found
    return None


def choose_drivers() -> None:
    """Makes both software drivers known to Vulkan's loader, and no other one; to be called before it is first
    used in this process."""
    if NAMED:
        return
    found = [str(path) for path in map(manifest, SOFTWARE) if path] or ["/no/driver.json"]  # "" would be all
    for variable in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):  # of loaders from 1.3.207 on, and of older ones
        os.environ[variable] = ":".join(found)


@cache
def is_there(piece: str) -> bool:
    """One of PACKAGES, or "gpu": whether there is a named one only the loader can tell."""
    if piece == "the loader":
        try:
            ctypes.CDLL(LOADERS.get(sys.platform, "libvulkan.so.1"))
        except OSError:
            return False
        return True
    if piece.endswith(" layer"):
        return LAYERS[piece.split()[1]].exists()
    return piece == "gpu" or manifest(piece) is not None


def need(*pieces: str) -> None:
    """Skips the test, or fails it, where one is not installed."""
    for piece in pieces:
        if not is_there(piece):
            absent(f"Vulkan: {piece} is missing: install Debian's {PACKAGES[piece]}", piece)


def device_index(driver: str) -> int:
    """Returns the index of a driver's device; skips the test, or fails it, where there is none."""
    from hotcold.kernels import _native

    need("the loader", driver)
    wanted = NAMED if driver == "gpu" else SOFTWARE[driver][0]
    assert wanted
    try:
        devices = _native.vulkan_devices()
    except _native.VulkanError as error:
        if driver != "gpu":
            raise  # all that it needs is there
        absent(f"Vulkan: {error}")
    for device in devices:
        if wanted.lower() in device.name.lower():
            assert not device.problem, f"{device.name}: {device.problem}"
            return device.index
    absent(f"no Vulkan device named {wanted}; there are: {', '.join(each.name for each in devices)}")


def absent(reason: str, piece: str = "") -> NoReturn:
    if REQUIRED and (os.environ.get("HOTCOLD_TEST_VULKAN") not in SOFTWARE or piece in ONE_DRIVER):
        pytest.fail(f"{reason} (HOTCOLD_TEST_VULKAN or CI is set: Vulkan's tests must run)")
    pytest.skip(reason)


@cache
def open_vulkan(driver: str) -> VulkanBackend:
    """One backend a process and driver, whose pipelines all tests share."""
    from hotcold.kernels.vulkan.backend import VulkanBackend

    return VulkanBackend(device_index(driver))
