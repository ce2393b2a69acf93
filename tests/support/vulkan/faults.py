"""Calls of Vulkan that fail because a test wants it, and how often each was called.

Only a build with HOTCOLD_FAULTS has this (CMakeLists.txt): .ci/run makes one, what users install is none. A
test that uses it is skipped without it, or fails where Vulkan's tests must run."""

from __future__ import annotations

from typing import Any

from support.vulkan.devices import absent

from hotcold.kernels import _native

THERE = hasattr(_native, "vulkan_faults")


def need_faults() -> None:
    if not THERE:
        absent("Vulkan: no faults in this build: pip install -C cmake.define.HOTCOLD_FAULTS=ON '.[test]'")


def _faults() -> Any:
    need_faults()
    return _native.vulkan_faults  # type: ignore[attr-defined]


def fail(function: str, nth: int, result: int) -> None:
    """The nth call from now on (1: the next) does nothing and returns ``result``; 0: none does. ValueError:
    there is no such function, or it returns no VkResult."""
    _faults().fail(function, nth, result)


def can_fail(function: str) -> bool:
    """True if it returns a VkResult. None of its calls fails from now on."""
    try:
        fail(function, 0, 0)
    except ValueError:
        return False
    return True


def skip(function: str, nth: int) -> None:
    """The nth call of a function that returns nothing does nothing."""
    _faults().skip(function, nth)


def calls() -> dict[str, int]:
    """Counts how often each function that is used was called."""
    found: dict[str, int] = _faults().calls()
    return found


def forget_calls() -> None:
    _faults().forget_calls()


def set_patience(device: _native.VulkanDevice, seconds: float) -> None:
    """How long a device may do nothing before it counts as hung."""
    _faults().set_patience(device, seconds)
