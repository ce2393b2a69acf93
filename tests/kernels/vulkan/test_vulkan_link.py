"""Split layers whose hot side is a GPU: both forms of the handshake, and how they end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.vulkan import faults

from hotcold.errors import UserError
from hotcold.kernels import _native
from hotcold.kernels._native import LinkError, VulkanError
from hotcold.kernels.backend import Batch, BatchLimits, Chosen, Mailbox, Program
from hotcold.kernels.cpu import CPUBackend
from hotcold.kernels.gpu import GPUError
from hotcold.kernels.reference import ReferenceBackend
from hotcold.kernels.vulkan.link import DeviceMailbox
from hotcold.kernels.vulkan.link_speed import handshake_seconds
from hotcold.sparse.timeline import MOMENTS

LAYERS = (3, 4, 7)
DIM = 300  # more than one workgroup's
LIMITS = BatchLimits(20, 1, 1, 1)
DEVICE_LOST = -4

rng = np.random.default_rng(5)


class Layer:
    """Plays the cold side of a layer: y = 2 x + layer, after whatever ``before`` does."""

    def __init__(self, box: Mailbox, before: Callable[[int], None]) -> None:
        self.box, self._before = box, before

    def run(self) -> None:
        rows = self.box.batch.n_tokens
        x = self.box.x[:rows].copy()  # as it was when it was taken
        self._before(self.box.layer)
        self.box.y[:rows] = 2 * x + self.box.layer


class Sides:
    """A device that runs all layers in one program: in each of them out += x at the same time as the cold
    side computes, then out += y, and x of the next layer is out."""

    def __init__(
        self, hot: Any, spin: bool, before: Callable[[int], None] = lambda layer: None, timeout: float = 20
    ) -> None:
        self.hot, self.batch = hot, Batch(LIMITS)
        self.link = hot.link(timeout, spin)
        self.boxes = hot.mailboxes(self.link, LIMITS, DIM, dict.fromkeys(LAYERS, 0))
        self.x, self.out = (hot.zeros((LIMITS.tokens, DIM)) for _ in range(2))
        self.program = hot.record(self._step)
        layers: list[tuple[int, Program]] = [(i, Layer(self.boxes[i], before)) for i in LAYERS]
        self.thread = threading.Thread(target=ReferenceBackend().serve, args=(self.link, layers), daemon=True)
        self.thread.start()

    def _step(self) -> None:
        for layer in LAYERS:
            self.hot.post(self.boxes[layer], self.x, None, self.batch)
            self.hot.add(self.out, self.x, self.batch)
            self.hot.collect(self.boxes[layer], self.batch, self.out)
            self.hot.add(self.x, self.out, self.batch)

    def step(self, rows: int) -> None:
        """Runs one, and looks at every bit of it."""
        values = rng.integers(-8, 8, (2, LIMITS.tokens, DIM)).astype(np.float32)
        self.batch.counts[:] = rows, min(rows, 16), 0, 1
        self.hot.write(self.x, values[0])
        self.hot.write(self.out, values[1])
        self.program.run()
        x, out = values[0][:rows], values[1][:rows]
        for layer in LAYERS:
            out += x
            out += 2 * x + layer
            x += out
        np.testing.assert_array_equal(self.hot.read(self.x), values[0])
        np.testing.assert_array_equal(self.hot.read(self.out), values[1])

    def close(self) -> None:
        self.link.stop()
        self.thread.join(120)
        assert not self.thread.is_alive()


@pytest.fixture(params=["submit", "spin"])
def spin(request: pytest.FixtureRequest) -> bool:
    return str(request.param) == "spin"


@pytest.fixture
def made() -> Iterator[list[Sides]]:
    made: list[Sides] = []
    yield made
    for sides in made:
        sides.close()


def test_steps(vulkan: Any, spin: bool, made: list[Sides]) -> None:
    """Steps of any number of rows are right, against sums that are exact in any order."""
    made.append(sides := Sides(vulkan, spin))
    for step in range(100):
        sides.step(1 + step % 20)
    sides.step(0)  # asks nothing
    assert sides.link.counts.steps == 100
    if not spin:
        assert sides.link.counts.answered == sides.link.counts.gave_up == 0


def test_shaders_give_up(vulkan: Any, made: list[Sides]) -> None:
    """The cold side takes long: the step continues from this point, and nothing is computed twice. After
    three such steps in a row, the link does not wait again."""
    slow: set[int] = set()
    made.append(sides := Sides(vulkan, True, lambda layer: time.sleep(0.3 * (layer in slow))))
    for i, layer in enumerate(LAYERS):
        slow = {layer}
        assert sides.link.counts.spins
        sides.step(17)  # with a prompt row, which no shader waits for
        assert sides.link.counts.gave_up == i
        sides.step(5)
        assert sides.link.counts.gave_up == i + 1
    slow = set()
    assert not sides.link.counts.spins
    answered = sides.link.counts.answered
    sides.link.start_marks(100)
    sides.step(5)
    assert len(sides.link.marks()) == 5 * len(LAYERS)
    assert (sides.link.counts.gave_up, sides.link.counts.answered) == (3, answered)


def test_shaders_see_answers(vulkan: Any) -> None:
    """Every one on SwiftShader, whose waiting shaders hear of the host, however late a native cold side gets
    a processor; lavapipe ends every loop after 65,535 looks."""
    for_ever = (2**31, 2**31)
    swiftshader = "SwiftShader" in vulkan.info.name
    counts = native_steps(vulkan, 100, for_ever if swiftshader else ())
    if swiftshader:
        assert (counts.answered, counts.gave_up) == (100, 0)
    assert not counts.spins or counts.answered + counts.gave_up == 100


def native_steps(vulkan: Any, steps: int, looks: tuple[int, ...] = ()) -> _native.VulkanLinkCounts:
    """Returns the counts of a link with one layer; every step is right."""
    cold = CPUBackend(1)
    link = vulkan.link(20, True, looks)
    box = vulkan.mailboxes(link, LIMITS, DIM, {5: 0})[5]
    program = cold.record(lambda: cold.add(box.y, box.x, box.batch))
    thread = threading.Thread(target=cold.serve, args=(link, [(5, program)]))
    batch, x, out = Batch(LIMITS), *(vulkan.zeros((LIMITS.tokens, DIM)) for _ in range(2))

    def step() -> None:
        vulkan.post(box, x, None, batch)
        vulkan.collect(box, batch, out)

    hot = vulkan.record(step)
    thread.start()
    batch.counts[:2] = 1, 1
    vulkan.write(x, np.full((1, DIM), 4, np.float32))
    wanted = 0
    for i in range(1, steps + 1):
        wanted += 4 * i
        hot.run()
        assert (vulkan.read(out, 0, 1) == wanted).all()
    link.stop()
    thread.join(120)
    assert not thread.is_alive()
    counts: _native.VulkanLinkCounts = link.counts
    return counts


def test_halves_of_a_step(vulkan: Any, spin: bool) -> None:
    """Post and collect in programs of their own, where no form is needed to wait in the device."""
    link = vulkan.link(20, spin)
    boxes = vulkan.mailboxes(link, LIMITS, DIM, dict.fromkeys(LAYERS, 0))
    batch, x, out = Batch(LIMITS), *(vulkan.zeros((LIMITS.tokens, DIM)) for _ in range(2))
    layers: list[tuple[int, Program]] = [(i, Layer(boxes[i], lambda layer: None)) for i in LAYERS]
    thread = threading.Thread(target=ReferenceBackend().serve, args=(link, layers))
    thread.start()
    batch.counts[:2] = 2, 2
    vulkan.write(x, np.full((2, DIM), 4, np.float32))
    wanted = 0
    for _ in range(5):
        for layer in LAYERS:
            vulkan.post(boxes[layer], x, None, batch)
            vulkan.collect(boxes[layer], batch, out)
            wanted += 8 + layer
            assert (vulkan.read(out, 0, 2) == wanted).all()
    link.stop()
    thread.join(120)
    assert not thread.is_alive()


def test_masks_and_experts(vulkan: Any) -> None:
    """The last words of each decode row, and what all rows chose; what does not fit is refused."""
    link = vulkan.link(20, False)
    boxes = vulkan.mailboxes(link, LIMITS, 8, {1: 2, 2: 4, 3: 0}, 3)
    batch, x = Batch(LIMITS), vulkan.zeros((LIMITS.tokens, 8))
    words = rng.integers(0, 1 << 63, (LIMITS.tokens, 3)).astype(np.uint64)
    ids = np.arange(LIMITS.tokens * 3, dtype=np.int32).reshape(-1, 3) + 1
    mask = vulkan.zeros(words.shape, np.uint64)
    chosen = Chosen(vulkan.zeros(ids.shape, np.int32), vulkan.zeros(ids.shape))
    vulkan.write(mask, words)
    vulkan.write(chosen.ids, ids)
    vulkan.write(chosen.factors, ids.astype(np.float32) / 4)
    batch.counts[:2] = 5, 2
    vulkan.post(boxes[1], x, mask, batch, chosen)
    assert link.wait_posted(1)
    box = boxes[1]
    assert box.mask is not None and box.chosen is not None
    np.testing.assert_array_equal(box.mask[:3], [*words[:2, 1:], [0, 0]])
    np.testing.assert_array_equal(box.chosen.ids[:6], [*ids[:5], [0, 0, 0]])
    np.testing.assert_array_equal(box.chosen.factors[:5], ids[:5] / 4)
    assert box.batch.counts.tolist() == [5, 2, 0, 0]
    link.answer(1)
    for layer, what in ((2, mask), (3, mask), (1, None)):
        with pytest.raises(ValueError, match="mask"):
            vulkan.post(boxes[layer], x, what, batch, chosen)
    with pytest.raises(ValueError, match="experts"):
        vulkan.post(boxes[1], x, mask, batch)
    other = CPUBackend(1)
    foreign = other.mailboxes(other.link(1), LIMITS, 8, {1: 0})[1]
    with pytest.raises(TypeError, match="FlagLink"):
        vulkan.collect(foreign, batch, x)
    with pytest.raises(UserError, match="cannot compute the cold neurons"):
        vulkan.serve(link, [])


def test_ctrl_c(vulkan: Any, spin: bool, made: list[Sides]) -> None:
    """It ends the wait, whatever the cold side does; the next step waits until that is idle."""
    go, slow = threading.Event(), threading.Event()
    slow.set()
    made.append(sides := Sides(vulkan, spin, lambda layer: slow.is_set() and go.wait(120) and None))
    main = threading.get_ident()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
            sides.step(3)
    slow.clear()
    go.set()
    for _ in range(5):
        sides.step(3)


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_cold_side_that_raises(
    vulkan: Any, spin: bool, made: list[Sides], error: type[BaseException]
) -> None:
    def before(layer: int) -> None:
        if layer == 4:
            raise error("a reason")

    made.append(sides := Sides(vulkan, spin, before))
    with pytest.raises(LinkError, match=rf"layer 4: the cold side has ended: {error.__name__}.*a reason"):
        sides.step(2)
    with pytest.raises(LinkError, match="layer 3: the cold side has ended"):
        sides.step(2)


def test_a_cold_side_that_gives_no_answer(vulkan: Any, spin: bool, made: list[Sides]) -> None:
    go = threading.Event()
    made.append(sides := Sides(vulkan, spin, lambda layer: layer == 4 and go.wait(120) and None, timeout=0.1))
    # On a busy machine an earlier layer's answer may come as late.
    with pytest.raises(LinkError, match=r"layer \d: the cold side has given no answer for 100 ms"):
        sides.step(2)
    go.set()


def test_closing(vulkan: Any, spin: bool) -> None:
    """Twice does no harm, and it wakes the one who waits."""
    reached, go = threading.Event(), threading.Event()

    def before(layer: int) -> None:
        if layer == 4:
            reached.set()
            go.wait(120)

    sides = Sides(vulkan, spin, before)
    stopper = threading.Thread(target=lambda: reached.wait(120) and sides.link.stop())
    stopper.start()
    with pytest.raises(LinkError, match="layer 4: the cold side has ended: it was closed"):
        sides.step(2)
    go.set()
    stopper.join()
    sides.close()
    sides.close()


def test_a_device_that_is_lost_under_the_cold_side(spin: bool) -> None:
    """The hot side reports an error of either side, and the model can be loaded again."""
    from support.vulkan.devices import DRIVERS, device_index

    from hotcold.kernels.vulkan.backend import VulkanBackend

    index = device_index(DRIVERS[0])
    for function, nth in (("vkQueueSubmit", 4), ("vkQueueSubmit", 3), ("vkWaitSemaphores", 6)):
        own = VulkanBackend(index)
        sides = Sides(own, spin, lambda layer: time.sleep(0.05))
        faults.fail(function, nth, DEVICE_LOST)
        with pytest.raises(VulkanError, match=f"{function}: VK_ERROR_DEVICE_LOST|was lost before"):
            for _ in range(20):
                sides.step(2)
        faults.fail(function, 0, 0)
        with pytest.raises((VulkanError, LinkError)):
            sides.step(2)
        sides.close()
    sides = Sides(VulkanBackend(index), spin)
    sides.step(2)
    sides.close()


def test_a_forked_process(vulkan: Any, spin: bool, made: list[Sides]) -> None:
    """The process reports it and ends: neither the cold side nor the driver's threads remain."""
    made.append(sides := Sides(vulkan, spin))
    sides.step(1)
    child = os.fork()
    if child == 0:
        try:
            sides.program.run()
        except VulkanError as error:
            os._exit(7 if "forked" in str(error) else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    sides.step(1)


@pytest.mark.parametrize("slow", [False, True])
def test_marks(vulkan: Any, spin: bool, made: list[Sides], slow: bool) -> None:
    """Each layer's moments, by timestamps or by the host: what must come first does, by the host's clock."""
    made.append(sides := Sides(vulkan, spin, lambda layer: time.sleep(0.3 * (slow and layer == 4))))
    sides.step(3)
    sides.link.start_marks(100)
    start = time.monotonic_ns()
    sides.step(3)
    end = time.monotonic_ns()
    found = [(MOMENTS[moment], layer, at) for moment, layer, at in sides.link.marks()]
    assert len(found) == 5 * len(LAYERS)
    when = {(what, layer): at for what, layer, at in found}
    before = start
    for layer in LAYERS:
        post, take, wait, give, waited = (
            when[what, layer] for what in ("post", "take", "wait", "give", "waited")
        )
        near = 5_000_000  # of two clocks that are read one after the other, on a busy machine
        assert before - near <= post <= take + near and take <= give <= waited + near
        assert post <= wait <= waited <= end + near
        if slow and layer == 4:
            assert give - take >= 300_000_000 and waited - wait >= 50_000_000
        before = waited
    sides.link.stop_marks()
    sides.step(3)


def test_handshakes_are_measured(vulkan: Any) -> None:
    submits = handshake_seconds(vulkan, False, 5)
    assert submits is not None and 0 <= submits < 1
    spins = handshake_seconds(vulkan, True, 5)
    assert spins is None or 0 <= spins < 1


def test_old_answers_are_noticed(vulkan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that sees that an answer is there, and not what the host wrote before: it is not to spin."""
    collect, old = vulkan.collect, vulkan.zeros((1, 256))

    def stale(box: DeviceMailbox, batch: Batch, out: Any) -> None:
        collect(replace(box, y_range=old.range), batch, out)

    monkeypatch.setattr(vulkan, "collect", stale)
    assert handshake_seconds(vulkan, True, 3) is None
    with pytest.raises(GPUError, match="wrong results"):
        handshake_seconds(vulkan, False, 3)


def test_the_hot_part_does_not_wait_for_the_flag(vulkan: Any) -> None:
    """No barrier stands between a layer's flag and what the device computes beside the cold side."""
    box = vulkan.mailboxes(vulkan.link(20, True), LIMITS, DIM, {5: 0})[5]
    batch, x, out = Batch(LIMITS), *(vulkan.zeros((LIMITS.tokens, DIM)) for _ in range(2))
    other = vulkan.zeros((LIMITS.tokens, DIM))

    def barriers(hot: bool) -> int:
        def step() -> None:
            vulkan.post(box, x, None, batch)
            if hot:
                vulkan.add(other, x, batch)
            vulkan.collect(box, batch, out)

        faults.forget_calls()
        vulkan.record(step)
        return faults.calls()["vkCmdPipelineBarrier"]

    assert barriers(True) == barriers(False) > 0
