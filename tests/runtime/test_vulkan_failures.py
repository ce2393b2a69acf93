"""A model on a GPU whose driver fails, while it is loaded and in a step: one clear line, no hang, nothing
left, and the model can be loaded again."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from support.placed import on_two
from support.threads import begun_threads
from support.vulkan import faults
from support.vulkan.devices import DRIVERS, FULL, device_index

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.kernels._native import LinkError, VulkanError
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session

pytestmark = pytest.mark.usefixtures("quick_collections")

DEVICE_LOST, UNKNOWN = -4, -13


@pytest.fixture(scope="module")
def index() -> int:
    return device_index(DRIVERS[0])


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    begun = begun_threads()
    yield
    gc.collect()
    assert not begun()


def loaded(index: int, share: float = 0.5) -> Session:
    from hotcold.kernels.vulkan.backend import VulkanBackend

    return on_two(VulkanBackend(index), share)


def generate(session: Session) -> list[int]:
    request = Request(Job([1, 300, 400], SamplingParams(temperature=0), max_tokens=4, ignore_eos=True))
    Engine(session).run([request])
    return request.output


def fallible(calls: dict[str, int]) -> dict[str, int]:
    """Returns the functions that were called and whose failure can be told, with their counts."""
    silent = "vkDeviceWaitIdle"  # in destructors, which cannot report errors
    return {
        name: count for name, count in calls.items() if count and name != silent and faults.can_fail(name)
    }


def memories(calls: dict[str, int]) -> int:
    return calls["vkAllocateMemory"] - calls["vkFreeMemory"]


def test_every_call_of_a_load_fails_once(index: int) -> None:
    gc.collect()
    faults.forget_calls()
    loaded(index).close()
    counts = fallible(faults.calls())
    assert len(counts) > 20
    # Each takes a second; all of them fail in tests/kernels/vulkan/test_vulkan_failures.py.
    for name, count in [*counts.items()][:: 1 if FULL else 4]:
        gc.collect()
        faults.forget_calls()
        faults.fail(name, (count + 1) // 2, UNKNOWN)
        # What goes wrong while devices are listed is a reason not to use that one.
        said = rf"^(.* cannot be used: )?{name}: VK_ERROR_UNKNOWN: update the GPU's driver"
        with pytest.raises(VulkanError, match=said):
            loaded(index)
        gc.collect()
        assert memories(faults.calls()) == (name == "vkAllocateMemory"), name
    session = loaded(index)
    assert len(generate(session)) == 4
    session.close()


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_every_call_of_a_step_fails_once(index: int, share: float) -> None:
    session = loaded(index, share)
    wanted = generate(session)
    faults.forget_calls()
    assert generate(session) == wanted
    counts = fallible(faults.calls())
    session.close()
    assert {"vkQueueSubmit", "vkWaitSemaphores"} <= set(counts)
    if share == 1:
        counts.pop("vkGetSemaphoreCounterValue", None)  # asked only where a wait takes long
        if not FULL:  # other functions fail where half is on the device
            counts = {name: counts[name] for name in ("vkQueueSubmit", "vkWaitSemaphores")}
    for name, count in counts.items():
        session = loaded(index, share)
        generate(session)
        faults.fail(name, (count + 1) // 2, DEVICE_LOST)
        with pytest.raises(VulkanError, match=r"DEVICE_LOST|was lost before"):
            for _ in range(20):  # how often a side asks whether the other one is done is its own affair
                generate(session)
        with pytest.raises((VulkanError, LinkError)):
            generate(session)
        session.close()
    session = loaded(index, share)
    assert generate(session) == wanted
    session.close()
