"""The two sides wait for each other, and neither waits for one that will not come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

from hotcold.kernels import open_backend
from hotcold.kernels._native import FlagLink, LinkError
from hotcold.kernels.backend import Backend, Batch, BatchLimits, Chosen, Mailbox, Program
from hotcold.kernels.cpu import CPUBackend
from hotcold.kernels.reference import ReferenceBackend

LAYERS = (3, 4, 7)
DIM = 8
LIMITS = BatchLimits(20, 1, 1, 1)


class Layer:
    """Plays the cold side of a layer: y = 1000 layer + x, after whatever ``before`` does."""

    def __init__(self, box: Mailbox, before: Callable[[int], None]) -> None:
        self.box, self._before = box, before

    def run(self) -> None:
        rows = self.box.batch.n_tokens
        x = self.box.x[:rows].copy()  # as it was when it was taken
        self._before(self.box.layer)
        self.box.y[:rows] = 1000 * self.box.layer + x


class Sides:
    """A hot backend that asks a cold side, which answers in Python."""

    def __init__(
        self, hot: Backend, before: Callable[[int], None] = lambda layer: None, timeout: float = 20
    ) -> None:
        self.hot = hot
        self.link = hot.link(timeout)
        self.boxes = hot.mailboxes(self.link, LIMITS, DIM, dict.fromkeys(LAYERS, 0))
        self.batch = Batch(LIMITS)
        self.x, self.out = (hot.zeros((LIMITS.tokens, DIM)) for _ in range(2))
        self.steps = {layer: self._record(layer) for layer in LAYERS}
        layers: list[tuple[int, Program]] = [(i, Layer(self.boxes[i], before)) for i in LAYERS]
        self.thread = threading.Thread(target=ReferenceBackend().serve, args=(self.link, layers), daemon=True)
        self.thread.start()

    def _record(self, layer: int) -> tuple[Program, Program]:
        box = self.boxes[layer]
        post = self.hot.record(lambda: self.hot.post(box, self.x, None, self.batch))
        return post, self.hot.record(lambda: self.hot.collect(box, self.batch, self.out))

    def post(self, layer: int, x: float, rows: int = 1) -> None:
        self.batch.counts[:] = rows, min(rows, 16), 0, 1
        self.hot.write(self.x, np.full((rows, DIM), x, np.float32))
        self.hot.write(self.out, np.zeros((LIMITS.tokens, DIM), np.float32))
        self.steps[layer][0].run()

    def collect(self, layer: int) -> list[float]:
        """The answer, row by row."""
        self.steps[layer][1].run()
        out = self.hot.read(self.out)
        assert (out == out[:, :1]).all() and not out[self.batch.n_tokens :].any()
        return out[: self.batch.n_tokens, 0].tolist()

    def ask(self, layer: int, x: float, rows: int = 1) -> list[float]:
        self.post(layer, x, rows)
        return self.collect(layer)

    def close(self) -> None:
        self.link.stop()
        self.thread.join(120)
        assert not self.thread.is_alive()


@pytest.fixture(params=["reference", "cpu", "cpu on two threads"])
def hot(request: pytest.FixtureRequest) -> Backend:
    return ReferenceBackend() if request.param == "reference" else CPUBackend(1 + ("two" in request.param))


@pytest.fixture
def made() -> Iterator[list[Sides]]:
    made: list[Sides] = []
    yield made
    for sides in made:
        sides.close()


def test_steps(hot: Backend, made: list[Sides]) -> None:
    """Each answer is of its own layer and of what was posted for it; rows of a step in any number."""
    made.append(sides := Sides(hot))
    for step in range(300):
        rows = 1 + step % 20
        for layer in LAYERS:
            assert sides.ask(layer, step, rows) == [1000 * layer + step] * rows
    sides.batch.counts[:] = 0  # a step without rows asks nothing
    for post, collect in sides.steps.values():
        post.run()
        collect.run()


def test_either_side_may_be_the_first(hot: Backend, made: list[Sides]) -> None:
    taken, go = threading.Event(), threading.Event()

    def before(layer: int) -> None:
        taken.set()
        assert go.wait(120)

    made.append(sides := Sides(hot, before))
    for hot_waits in (True, False):
        taken.clear()
        go.clear()
        sides.post(3, 5)
        assert taken.wait(120)
        if hot_waits:
            threading.Timer(0.1, go.set).start()
        else:
            go.set()
            sides.link.wait_idle(3)  # type: ignore[attr-defined]
        assert sides.collect(3) == [3005]


@pytest.mark.parametrize("ends", ["posted", "taken", "answered"])
def test_a_step_that_ends_early_leaves_nothing_behind(hot: Backend, made: list[Sides], ends: str) -> None:
    """Interrupted once a layer is posted, while the cold side is at work on it, or after its answer: the next
    step begins with the first layer."""
    taken = threading.Semaphore(0)

    def before(layer: int) -> None:
        if layer == 4:
            taken.release()
        time.sleep(0.002)

    made.append(sides := Sides(hot, before))
    for step in range(20):
        assert sides.ask(3, step) == [3000 + step]
        if ends == "answered":
            assert sides.ask(4, step) == [4000 + step]
        else:
            sides.post(4, -1)
            if ends == "taken":
                assert taken.acquire(timeout=120)


def test_an_interrupt_at_every_moment(made: list[Sides]) -> None:
    """Ctrl-C before each instruction of the hot side in turn; the step is then repeated and is right."""
    made.append(sides := Sides(ReferenceBackend()))
    left = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(("kernels/reference.py", "kernels/host_memory.py")):
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    interrupted, moment = True, 0
    while interrupted:
        left, interrupted = moment, False
        before = sys.gettrace()
        try:
            sys.settrace(trace)
            for layer in LAYERS:
                sides.ask(layer, -moment)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(before)
        found = [sides.ask(layer, moment + layer) for layer in LAYERS]
        assert found == [[1000 * layer + moment + layer] for layer in LAYERS]
        moment += 1
    assert moment > 100


def test_ctrl_c_while_the_hot_side_waits(hot: Backend, made: list[Sides]) -> None:
    """It ends the wait at once, whatever the cold side does; the next step waits until that is idle."""
    go = threading.Event()
    made.append(sides := Sides(hot, lambda layer: go.wait(120) and None))
    main = threading.get_ident()
    sides.post(3, 1)
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
        sides.collect(3)
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
        sides.post(3, 2)
    go.set()
    assert [sides.ask(layer, 7) for layer in LAYERS] == [[1000 * layer + 7] for layer in LAYERS]


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_cold_side_that_raises(hot: Backend, made: list[Sides], error: type[BaseException]) -> None:
    def before(layer: int) -> None:
        if layer == 4:
            raise error("a reason")

    made.append(sides := Sides(hot, before))
    assert sides.ask(3, 1) == [3001]
    for _ in range(2):  # and a second try reports it again
        with pytest.raises(LinkError, match=rf"layer 4: the cold side has ended: {error.__name__}.*a reason"):
            sides.ask(4, 1)
    with pytest.raises(LinkError, match="layer 3: the cold side has ended"):
        sides.ask(3, 1)


def test_a_native_cold_side_that_fails() -> None:
    """An error of its program keeps the program's message."""
    hot, cold = ReferenceBackend(), CPUBackend(1)
    link = hot.link(20)
    box = hot.mailboxes(link, LIMITS, DIM, {5: 0})[5]
    program = cold.record(lambda: cold.add(box.y, box.x, box.batch))
    thread = threading.Thread(target=cold.serve, args=(link, [(5, program)]))
    thread.start()
    batch, x = Batch(LIMITS), hot.zeros((LIMITS.tokens, DIM))
    batch.counts[:2] = 2, 3
    hot.post(box, x, None, batch)
    with pytest.raises(LinkError, match="layer 5: the cold side has ended: batch: n_decode 3 is out"):
        hot.collect(box, batch, x)
    thread.join(120)
    assert not thread.is_alive()


def test_a_step_that_does_not_begin_with_the_first_layer(hot: Backend, made: list[Sides]) -> None:
    """It would never be answered."""
    made.append(sides := Sides(hot))
    with pytest.raises(LinkError, match="a step began with a layer that is not its first one"):
        sides.ask(7, 1)


def test_a_cold_side_that_gives_no_answer(hot: Backend, made: list[Sides]) -> None:
    go = threading.Event()
    made.append(sides := Sides(hot, lambda layer: go.wait(120) and None, timeout=0.05))
    sides.post(3, 1)
    with pytest.raises(LinkError, match="layer 3: the cold side has given no answer for 50 ms"):
        sides.collect(3)
    go.set()


def test_closing(hot: Backend) -> None:
    """Twice does no harm, and it wakes the one who waits."""
    sides = Sides(hot)
    assert sides.ask(3, 1) == [3001]
    sides.close()
    sides.close()
    with pytest.raises(LinkError, match="layer 4: the cold side has ended: it was closed"):
        sides.ask(4, 1)
    go = threading.Event()
    sides = Sides(hot, lambda layer: go.wait(120) and None)
    sides.post(3, 1)
    threading.Timer(0.1, sides.link.stop).start()
    with pytest.raises(LinkError, match="it was closed"):
        sides.collect(3)
    go.set()
    sides.close()


@pytest.mark.parametrize("side", ["hot", "cold"])
def test_nobody_holds_pythons_lock(side: str) -> None:
    """One side is native and the other one is Python: neither would get on."""
    backend = CPUBackend(2)
    if side == "hot":
        sides = Sides(backend)
        assert [sides.ask(layer, 1) for layer in LAYERS] == [[3001], [4001], [7001]]
        return sides.close()
    hot = ReferenceBackend()
    link = hot.link(20)
    box = hot.mailboxes(link, LIMITS, DIM, {5: 0})[5]
    program = backend.record(lambda: backend.add(box.y, box.x, box.batch))
    thread = threading.Thread(target=backend.serve, args=(link, [(5, program)]))
    thread.start()
    batch, x, out = Batch(LIMITS), hot.zeros((LIMITS.tokens, DIM)), hot.zeros((LIMITS.tokens, DIM))
    batch.counts[:2] = 1, 1
    x[:] = 4
    for i in range(1, 50):
        hot.post(box, x, None, batch)
        out[:] = 0
        hot.collect(box, batch, out)
        assert (out[0] == 4 * i).all()
    link.stop()
    thread.join(120)
    assert not thread.is_alive()


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_cold_words_of_a_mask(name: str) -> None:
    """The last ones of each decode row; a mailbox without, or with more, is refused."""
    hot = open_backend(name)
    link = hot.link(1)
    boxes = hot.mailboxes(link, LIMITS, DIM, {1: 2, 2: 4, 3: 0})
    batch, x = Batch(LIMITS), hot.zeros((LIMITS.tokens, DIM))
    words = np.arange(LIMITS.tokens * 3, dtype=np.uint64).reshape(-1, 3)
    mask = hot.zeros(words.shape, np.uint64)
    hot.write(mask, words)
    batch.counts[:2] = 5, 2
    hot.post(boxes[1], x, mask, batch)
    assert link.wait_posted(1)
    assert boxes[1].mask is not None
    np.testing.assert_array_equal(boxes[1].mask[:3], [[1, 2], [4, 5], [0, 0]])
    assert boxes[1].batch.counts.tolist() == [5, 2, 0, 0]
    link.answer(1)
    for layer, what in ((2, mask), (3, mask), (1, None)):
        with pytest.raises(ValueError, match="mask"):
            hot.post(boxes[layer], x, what, batch)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_chosen_experts_go_along(name: str) -> None:
    """Experts of all rows go along, prompt rows too."""
    hot = open_backend(name)
    link = hot.link(1)
    box, without = hot.mailboxes(link, LIMITS, DIM, {1: 0}, 3)[1], hot.mailboxes(link, LIMITS, DIM, {1: 0})[1]
    batch, x = Batch(LIMITS), hot.zeros((LIMITS.tokens, DIM))
    chosen = Chosen(hot.zeros((LIMITS.tokens, 3), np.int32), hot.zeros((LIMITS.tokens, 3)))
    ids = np.arange(LIMITS.tokens * 3, dtype=np.int32).reshape(-1, 3) + 1
    hot.write(chosen.ids, ids)
    hot.write(chosen.factors, ids.astype(np.float32) / 4)
    batch.counts[:2] = 5, 2
    hot.post(box, x, None, batch, chosen)
    assert link.wait_posted(1) and box.chosen is not None
    np.testing.assert_array_equal(box.chosen.ids[:5], ids[:5])
    np.testing.assert_array_equal(box.chosen.factors[:5], ids[:5] / 4)
    assert not box.chosen.ids[5:].any()
    link.answer(1)
    for other, what in ((without, chosen), (box, None)):
        with pytest.raises(ValueError, match="post: chosen experts, and a mailbox without"):
            hot.post(other, x, None, batch, what)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_told() -> None:
    """There is no cold side in it; closing it ends, too."""
    code = """
import os, threading
from hotcold.kernels._native import FlagLink, LinkError, serve
from hotcold.kernels.reference import ReferenceBackend
link = FlagLink(5)
thread = threading.Thread(target=ReferenceBackend().serve, args=(link, [(1, None)]), daemon=True)
thread.start()
child = os.fork()
if child == 0:
    for call in (link.wait_idle, link.wait_answered):
        try:
            call(1)
        except LinkError as error:
            print(error, flush=True)
    link.stop()
    del link
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
link.stop()
thread.join()
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("forked from the one that loaded the model") == 2


def test_a_mailbox_of_another_kind_is_refused() -> None:
    class Other:
        pass

    hot = ReferenceBackend()
    box = hot.mailboxes(Other(), LIMITS, DIM, {1: 0})[1]  # type: ignore[arg-type]
    batch = Batch(LIMITS)
    for ops in (hot, CPUBackend(1)):
        with pytest.raises(TypeError, match="a mailbox with a Other: a link of this backend is needed"):
            ops.post(box, hot.zeros((20, DIM)), None, batch)
    with pytest.raises(TypeError, match="of layer 1: this backend's programs are needed"):
        CPUBackend(1).serve(FlagLink(1), [(1, hot.record(lambda: None))])
