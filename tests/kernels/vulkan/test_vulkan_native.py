"""Vulkan devices as the extension has them: memory, and what happens where a call of the driver fails."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.vulkan import faults
from support.vulkan.devices import DRIVERS, FULL, device_index, need

from hotcold.kernels import _native
from hotcold.kernels._native import VulkanError, VulkanMemoryError
from hotcold.kernels.backend import Batch, BatchLimits
from hotcold.kernels.vulkan.backend import VulkanBackend

KIB, MIB = 1 << 10, 1 << 20
LIMITS = BatchLimits(4, 1, 1, 1)
DIM = 40
#: VkResult
OUT_OF_HOST, OUT_OF_DEVICE, INITIALISATION, LOST = -1, -2, -3, -4
NAMES = {OUT_OF_HOST: "OUT_OF_HOST_MEMORY", OUT_OF_DEVICE: "OUT_OF_DEVICE_MEMORY", LOST: "DEVICE_LOST"}


@pytest.fixture(params=DRIVERS)
def index(request: pytest.FixtureRequest) -> int:
    return device_index(str(request.param))


@pytest.fixture(autouse=True)
def nothing_fails_afterwards() -> Iterator[None]:
    yield
    if faults.THERE:
        for function in faults.calls():
            faults.can_fail(function)


class Sum:
    """x += y in a program; every result is looked at."""

    def __init__(self, backend: VulkanBackend) -> None:
        self.backend, self.batch = backend, Batch(LIMITS)
        self.x, self.y = (backend.zeros((LIMITS.tokens, DIM)) for _ in range(2))
        self.batch.counts[:2] = 3, 3
        self.values = np.arange(3 * DIM, dtype=np.float32).reshape(3, DIM)
        backend.write(self.y, self.values)
        self.program = backend.record(lambda: [backend.add(self.x, self.y, self.batch) for _ in range(3)])

    def step(self) -> None:
        self.backend.write(self.x, np.ones((3, DIM), np.float32))
        self.program.run()
        np.testing.assert_array_equal(self.backend.read(self.x, 0, 3), 1 + 3 * self.values)


def whole_life(index: int) -> None:
    """A device is opened, computes, and is closed."""
    _native.vulkan_devices()
    backend = VulkanBackend(index)
    own = Sum(backend)
    for _ in range(3):
        own.step()


def alive(calls: dict[str, int]) -> dict[str, int]:
    """How many objects of each kind were made and not destroyed."""
    left: Counter[str] = Counter()
    for name, count in calls.items():
        kind = name.removeprefix("vkCreate").removeprefix("vkDestroy")
        if name == "vkAllocateMemory" or (name.startswith("vkCreate")):
            left[
                "Memory" if name == "vkAllocateMemory" else kind.replace("ComputePipelines", "Pipeline")
            ] += count
        elif name == "vkFreeMemory" or name.startswith("vkDestroy"):
            left["Memory" if name == "vkFreeMemory" else kind] -= count
    return {kind: count for kind, count in left.items() if count}


def test_nothing_is_left(index: int) -> None:
    gc.collect()
    faults.forget_calls()
    whole_life(index)
    gc.collect()
    assert faults.calls()["vkCreateDevice"] == 1
    assert alive(faults.calls()) == {}


def used(index: int) -> list[tuple[str, int]]:
    """The functions that a device's life calls and that may fail, and how often."""
    VulkanBackend(index)  # a device is probed once in a process
    gc.collect()
    faults.forget_calls()
    whole_life(index)
    gc.collect()
    calls = faults.calls()
    return [(name, count) for name, count in calls.items() if count and faults.can_fail(name)]


@pytest.mark.parametrize("result", [LOST, OUT_OF_DEVICE, *[OUT_OF_HOST] * FULL])
@pytest.mark.usefixtures("quick_collections")
def test_every_call_fails_once(index: int, result: int) -> None:
    """Whichever it is: one line that names it, nothing is leaked, and the device can be opened again."""
    for name, count in used(index):
        for nth in {(count + 1) // 2, *[count] * FULL} if result == LOST else {1}:
            gc.collect()
            faults.forget_calls()
            faults.fail(name, nth, result)
            try:
                whole_life(index)
            except VulkanError as error:
                message = str(error)
                assert "\n" not in message and NAMES[result] in message and name in message
                if result == OUT_OF_DEVICE:
                    assert isinstance(error, VulkanMemoryError)
            else:
                # Destructors have no caller to report to, and a smaller chunk may suffice; a list of devices
                # reports it for the device.
                silent = "vkDeviceWaitIdle", "vkEnumerateDeviceExtensionProperties"
                # It is asked only where a wait takes long.
                quick = name == "vkGetSemaphoreCounterValue" and faults.calls()[name] < nth
                assert name in silent or quick or (result == OUT_OF_DEVICE and name in CHUNKS), name
            faults.fail(name, 0, 0)
            gc.collect()
            failed = Counter({KINDS[name]: 1}) if name in KINDS else Counter()
            assert Counter(alive(faults.calls())) == failed, f"{name}, call {nth}"
    whole_life(index)


#: Functions that are tried again with a smaller chunk of memory.
CHUNKS = ("vkCreateBuffer", "vkAllocateMemory", "vkBindBufferMemory", "vkMapMemory")
#: Calls that make something, if they succeed.
KINDS = {
    "vkAllocateMemory": "Memory",
    "vkCreateComputePipelines": "Pipeline",
    **{
        f"vkCreate{kind}": kind
        for kind in (
            *("Instance", "Device", "Semaphore", "Buffer", "ShaderModule", "DescriptorSetLayout"),
            *("PipelineLayout", "DescriptorPool", "CommandPool"),
        )
    },
}


def test_a_lost_device_says_so_again(index: int) -> None:
    own = Sum(VulkanBackend(index))
    faults.fail("vkQueueSubmit", 2, LOST)
    with pytest.raises(VulkanError, match="vkQueueSubmit: VK_ERROR_DEVICE_LOST: the device was lost"):
        own.step()
    for _ in range(2):
        with pytest.raises(VulkanError, match="was lost before: load the model again"):
            own.step()
    Sum(VulkanBackend(index)).step()


def test_out_of_memory_in_a_step_passes(index: int) -> None:
    """As far as the driver recovers from it, the next step is right."""
    own = Sum(VulkanBackend(index))
    for function in ("vkQueueSubmit", "vkWaitSemaphores"):
        faults.fail(function, 2, OUT_OF_HOST)
        with pytest.raises(VulkanError, match=f"{function}: VK_ERROR_OUT_OF_HOST_MEMORY"):
            own.step()
        own.step()


def test_what_is_allocated_is_what_was_asked_for(index: int) -> None:
    """To 2 % or 256 KiB, whichever is more; host memory apart."""
    device = _native.VulkanDevice(index)
    random = np.random.default_rng(1)
    kept = []
    asked = 0
    for size in (random.integers(1, 40, 300) ** 3).tolist():
        kept.append(device.allocate(size * 16))
        asked += size * 16
        room = max(asked // 50, 256 * KIB)
        assert asked <= device.allocated_bytes <= asked + room + 256 * len(kept)
    assert asked > 16 * MIB and device.host_bytes == 0
    del kept[::2]
    given = device.allocated_bytes
    again = [device.allocate(int(size)) for size in random.integers(1, 4096, 200)]
    assert device.allocated_bytes == given  # holes are filled first
    del kept, again
    assert device.allocated_bytes == 0
    up = device.allocate(100, "upload")
    assert device.allocated_bytes == 0 and device.host_bytes >= up.nbytes == 100


def test_memories_do_not_overlap(index: int) -> None:
    """Each keeps what was written to it while others come and go."""
    device = _native.VulkanDevice(index)
    random = np.random.default_rng(2)
    kept: dict[int, tuple[Any, np.ndarray]] = {}
    for step in range(150):
        if kept and random.random() < 0.4:
            memory, values = kept.pop(list(kept)[int(random.integers(len(kept)))])
            found = np.empty_like(values)
            device.read(memory, 0, found)
            np.testing.assert_array_equal(found, values)
            del memory
        size = int(random.integers(1, 30)) ** 3 * 4
        values = random.integers(0, 256, size).astype(np.uint8)
        kept[step] = device.allocate(size), values
        device.write(kept[step][0], 0, values)
    for memory, values in kept.values():
        found = np.empty_like(values)
        device.read(memory, 0, found)
        np.testing.assert_array_equal(found, values)


def test_large_writes_go_in_parts(index: int) -> None:
    """Copies of up to 32 MiB alternate; offsets and odd ends are right."""
    device = _native.VulkanDevice(index)
    values = np.random.default_rng(3).integers(0, 256, 70 * MIB + 13).astype(np.uint8)
    memory = device.allocate(len(values) + 7)
    device.clear(memory)
    device.write(memory, 3, values)
    found = np.empty(memory.nbytes, np.uint8)
    device.read(memory, 0, found)
    np.testing.assert_array_equal(found[3:-4], values)
    assert not found[:3].any() and not found[-4:].any()
    assert device.host_bytes <= 3 * 33 * MIB
    for offset, size in ((0, memory.nbytes + 1), (memory.nbytes, 1), (memory.nbytes + 1, 0)):
        with pytest.raises(ValueError, match=f"of a memory of {memory.nbytes}"):
            device.write(memory, offset, np.zeros(size, np.uint8))


def test_a_budget_is_kept(index: int) -> None:
    device = _native.VulkanDevice(index, MIB)
    kept = [device.allocate(200 * KIB) for _ in range(5)]
    assert device.allocated_bytes <= MIB
    with pytest.raises(
        VulkanMemoryError, match=f"{200 * KIB} bytes of memory of .*: the budget has"
    ) as raised:
        device.allocate(200 * KIB)
    assert (raised.value.asked, raised.value.budget) == (200 * KIB, MIB)
    assert raised.value.allocated == device.allocated_bytes
    kept.pop()
    kept.append(device.allocate(200 * KIB))
    device.allocate(64 * MIB, "upload")  # the host's memory is no part of it
    with pytest.raises(VulkanMemoryError, match="the driver allocates at most"):
        _native.VulkanDevice(index).allocate(1 << 50)


def test_a_full_device_gets_smaller_chunks(index: int) -> None:
    """Memory that the driver refuses is tried again without room to spare."""
    device = _native.VulkanDevice(index)
    faults.fail("vkAllocateMemory", 1, OUT_OF_DEVICE)
    kept = device.allocate(1000)
    assert device.allocated_bytes < 256 * KIB and kept.nbytes == 1000
    del kept
    for function in ("vkAllocateMemory", "vkCreateBuffer"):
        faults.fail(function, 1, OUT_OF_HOST)
        with pytest.raises(VulkanError, match=function):
            device.allocate(1000)
    assert device.allocated_bytes == 0


def test_what_an_interrupted_step_left_is_forgotten(index: int) -> None:
    """Words that say what was wrong with a step are cleared before the next."""
    device = _native.VulkanDevice(index)
    words, source, target = (device.allocate(16, where) for where in ("download", "upload", "download"))
    recorder = device.recorder()
    recorder.clear(words)
    recorder.copy(words, 0, target, 0, 8)
    recorder.copy(source, 8, words, 8, 4)
    program = recorder.finish()
    assert words.host is not None and source.host is not None and target.host is not None
    source.host[:] = 7
    for _ in range(2):
        words.host[:] = target.host[:] = 5
        program.run()
        assert target.host.tolist() == [0] * 8 + [5] * 8
        assert words.host.tolist() == [0] * 8 + [7] * 4 + [0] * 4
    with pytest.raises(ValueError, match="cleared before each run"):
        device.recorder().clear(device.allocate(16))


def test_steps_are_checked(index: int) -> None:
    own = Sum(VulkanBackend(index))
    own.batch.counts[:2] = 5, 3
    with pytest.raises(ValueError, match="batch: n_tokens 5 is out of range; allowed: 0 to 4"):
        own.program.run()
    own.batch.counts[:2] = 3, 3
    own.step()


def test_dispatches_are_checked(index: int) -> None:
    from hotcold.kernels.vulkan.shaders import spirv

    device = _native.VulkanDevice(index)
    memory = device.allocate(1024)
    pipeline = device.pipeline(spirv("add"), 3, 4, [])
    recorder = device.recorder()
    good = [(memory, 0, 256, False)] * 3
    wrong: list[tuple[list[Any], bytes, int]] = [
        (good[:2], bytes(4), 1),
        (good, bytes(8), 1),
        (good, bytes(4), 0),
        (good, bytes(4), 65536),
        ([*good[:2], (memory, 4, 256, False)], bytes(4), 1),
        ([*good[:2], (memory, 1024, 4, False)], bytes(4), 1),
        ([*good[:2], (memory, 768, 260, False)], bytes(4), 1),
        ([*good[:2], (memory, 0, 0, False)], bytes(4), 1),
    ]
    for ranges, push, groups in wrong:
        with pytest.raises(ValueError):
            recorder.dispatch(pipeline, ranges, push, groups, 1, 1)
    with pytest.raises(ValueError):
        device.pipeline(b"abc", 1, 0, [])
    with pytest.raises(VulkanError, match="Vulkan device 99: there are"):
        _native.VulkanDevice(99)


def test_a_waiting_shader_looks_so_often(index: int) -> None:
    """For each layer, and for all layers of a step; if it gives up, no rows are left."""
    from hotcold.kernels.vulkan.shaders import spirv

    device, layer, step = _native.VulkanDevice(index), 1, 7
    memories = [device.allocate(16 * 4, "upload") for _ in range(3)]  # batch, answered, status
    recorder = device.recorder()
    pipeline = device.pipeline(spirv("await_answer"), 3, 4, [])
    recorder.dispatch(pipeline, [(each, 0, 64, True) for each in memories], bytes([layer, 0, 0, 0]), 1, 1, 1)
    program = recorder.finish()
    for before, answer, wanted, after in (
        (0, 6, 2, 40_000),
        (5, step, 1, 5),
        (399_990, 6, 2, 400_000),
        (399_990, step, 1, 399_990),
        (400_000, step, 2, 400_000),
    ):
        for each in memories:
            assert each.host is not None
            each.host[:] = 0
        words = [each.host.view(np.int32) for each in memories if each.host is not None]
        words[0][:5] = 3, 2, 1, 9, step
        words[1][layer] = answer
        words[2][-1] = before
        program.run()
        assert words[2].tolist() == [0, wanted, *[0] * 13, after]
        assert words[0][:5].tolist() == ([3, 2, 1, 9, step] if wanted == 1 else [0, 0, 0, 9, step])


def test_threads_and_devices_at_once(index: int) -> None:
    """Two devices, each used by two threads."""
    backends = [VulkanBackend(index), VulkanBackend(index)]
    failed: list[BaseException] = []

    def work(backend: VulkanBackend) -> None:
        try:
            own = Sum(backend)
            for _ in range(30):
                own.step()
        except BaseException as error:
            failed.append(error)

    lock = threading.Lock()  # Python's part, which records, is for one thread at a time
    threads = []
    for backend in backends * 2:
        with lock:
            threads.append(threading.Thread(target=work, args=(backend,)))
    for thread in threads[:2]:
        thread.start()
    for thread in threads[:2]:
        thread.join(60)
    assert not failed
    own = [Sum(backend) for backend in backends * 2]
    threads = [threading.Thread(target=lambda each=each: [each.step() for _ in range(30)]) for each in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for each in own:
        each.step()


def test_what_is_missing_is_named() -> None:
    """A loader, and no driver: one line that says what to install. (Without a loader:
    tests/commands/test_gpu.py.)"""
    need("the loader")
    script = (
        "from hotcold.kernels import _native\n"
        "try:\n    print(_native.vulkan_devices())\n"
        "except _native.VulkanError as error:\n    print(error)\n"
    )
    nowhere = {"VK_DRIVER_FILES": "/nowhere", "VK_ICD_FILENAMES": "/nowhere"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | nowhere, capture_output=True, text=True, check=True
    )
    assert "vkCreateInstance: VK_ERROR_INCOMPATIBLE_DRIVER: no Vulkan driver is found" in done.stdout
    assert "VK_DRIVER_FILES" in done.stdout and "capability graphics" in done.stdout
    assert done.stdout.count("\n") == 1


def test_a_device_whose_driver_fails_hides_no_other() -> None:
    device_index(DRIVERS[0])
    right = _native.vulkan_devices()
    faults.fail("vkEnumerateDeviceExtensionProperties", 1, INITIALISATION)
    found = _native.vulkan_devices()
    assert [each.name for each in found] == [each.name for each in right]
    assert "vkEnumerateDeviceExtensionProperties: VK_ERROR_INITIALIZATION_FAILED" in found[0].problem
    assert [each.problem for each in found[1:]] == [each.problem for each in right[1:]]


def test_a_range_fits_into_an_allocation(index: int) -> None:
    info = _native.VulkanDevice(index).info
    assert 1 << 27 <= info.max_range <= info.max_allocation and info.max_range % 256 == 0


def test_ctrl_c_ends_a_wait(index: int) -> None:
    """The program can be run again: it waits until the device has done what it was at."""
    own = Sum(VulkanBackend(index))
    long = own.backend.record(lambda: [own.backend.add(own.x, own.y, own.batch) for _ in range(1000)])
    for delay in (0.05, 0.06, 0.07, 0.08):
        timer = threading.Timer(delay, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            for _ in range(100000):
                long.run()
        own.step()


def test_dropping_a_program_waits_for_it_alone(index: int) -> None:
    """And not for other work of its device: its memory must not be used any more."""
    gc.collect()  # what other tests left, and not later, when it takes as long as the copies
    own = Sum(VulkanBackend(index))
    device = own.backend.device
    large = device.allocate(64 * MIB), device.allocate(64 * MIB)
    recorder = device.recorder()
    for _ in range(200):
        recorder.copy(large[0], 0, large[1], 0, 64 * MIB)
    long = recorder.finish()
    own.step()
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
        long.run()
    faults.forget_calls()
    own.program = None  # type: ignore[assignment]
    gc.collect(1)  # what is young: dropped in any case, and at once
    assert not faults.calls()["vkDeviceWaitIdle"]
    del long
    gc.collect(1)
    calls = faults.calls()
    assert calls["vkWaitSemaphores"] > 1 and not calls["vkDeviceWaitIdle"]


def test_a_device_that_hangs(index: int) -> None:
    """No thread waits forever, neither for a step nor at the end."""
    gc.collect()  # what other tests left
    device = _native.VulkanDevice(index)
    large = device.allocate(64 * MIB), device.allocate(64 * MIB)
    recorder = device.recorder()
    for _ in range(100):
        recorder.copy(large[0], 0, large[1], 0, 64 * MIB)
    program = recorder.finish()
    faults.set_patience(device, 0)
    with pytest.raises(VulkanError, match="has done nothing for 0 s: restart the program"):
        program.run()
    with pytest.raises(VulkanError, match="was lost before"):
        program.run()
    faults.forget_calls()
    del recorder, program, device, large
    gc.collect()
    calls = faults.calls()
    assert not [name for name, count in calls.items() if count and name.startswith(("vkDestroy", "vkDevice"))]
