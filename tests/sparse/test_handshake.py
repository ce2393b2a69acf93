"""The two sides wait for each other, and neither waits for one that will not come."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from hotcold.sparse.handshake import Handshake, HandshakeError

LAYERS = (3, 4, 7)


class Cold:
    """A cold program over three layers. Each answers with its own number and with what lay in the mailbox as
    it was taken, so that another layer's answer, or another step's, is seen; ``fail`` is called before."""

    def __init__(self, handshake: Handshake, fail: Callable[[int], None] = lambda layer: None) -> None:
        self.handshake, self.fail = handshake, fail
        self.x = 0
        self.y = (0, 0)

    def run(self) -> None:
        for layer in LAYERS:
            self.handshake.take(layer)
            x = self.x
            self.fail(layer)
            self.y = (layer, x)
            self.handshake.give(layer)

    def ask(self, layer: int, x: int) -> tuple[int, int]:
        def fill() -> None:
            self.x = x

        self.handshake.post(layer, fill)
        self.handshake.wait(layer)
        return self.y


@pytest.fixture
def handshake() -> Iterator[Handshake]:
    handshake = Handshake()
    yield handshake
    handshake.close()
    assert handshake._thread is None or not handshake._thread.is_alive()


def test_steps(handshake: Handshake) -> None:
    cold = Cold(handshake)
    handshake.serve(cold)
    for step in range(2000):
        for layer in LAYERS:
            assert cold.ask(layer, step * layer) == (layer, step * layer)


@pytest.mark.parametrize("ends", ["posted", "taken", "answered"])
def test_a_step_that_ends_early_leaves_nothing_behind(handshake: Handshake, ends: str) -> None:
    """Interrupted once a layer is posted, while the cold side is at work on it, or after its answer: the next
    step begins with the first layer."""
    taken = threading.Semaphore(0)

    def fail(layer: int) -> None:
        if layer == 4:
            taken.release()
        time.sleep(0.002)

    cold = Cold(handshake, fail)
    handshake.serve(cold)
    for step in range(20):
        assert cold.ask(3, step) == (3, step)
        if ends == "answered":
            assert cold.ask(4, step) == (4, step)
        else:
            handshake.post(4, lambda: setattr(cold, "x", -1))
            if ends == "taken":
                assert taken.acquire(timeout=10)


def test_an_interrupt_at_every_moment(handshake: Handshake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before each instruction of the hot side in turn; the step is then repeated and is right."""
    monkeypatch.setattr("hotcold.sparse.handshake._LIVENESS_S", 0.002)
    cold = Cold(handshake)
    handshake.serve(cold)
    left = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith("sparse/handshake.py"):
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
                cold.ask(layer, -moment)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(before)
        assert [cold.ask(layer, moment + layer) for layer in LAYERS] == [(i, moment + i) for i in LAYERS]
        moment += 1
    assert moment > 100


def test_a_cold_side_that_raises(handshake: Handshake) -> None:
    def fail(layer: int) -> None:
        if layer == 4:
            raise ZeroDivisionError("a reason")

    cold = Cold(handshake, fail)
    handshake.serve(cold)
    assert cold.ask(3, 1) == (3, 1)
    for _ in range(2):  # and whoever tries again is told again
        with pytest.raises(HandshakeError, match=r"the cold side has ended.*a reason") as caught:
            cold.ask(4, 1)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_cold_side_that_is_gone_without_a_word(
    handshake: Handshake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "_run", lambda program: handshake.take(3))  # and then the thread is dead
    cold = Cold(handshake)
    handshake.serve(cold)
    with pytest.raises(HandshakeError, match="its thread is gone"):
        cold.ask(3, 1)


def test_a_closed_one(handshake: Handshake) -> None:
    handshake.serve(cold := Cold(handshake))
    assert cold.ask(3, 1) == (3, 1)
    handshake.close()
    with pytest.raises(HandshakeError, match="closed"):
        cold.ask(4, 1)


def test_closing_wakes_the_one_who_waits(handshake: Handshake) -> None:
    release = threading.Event()
    cold = Cold(handshake, fail=lambda layer: release.wait() and None)
    handshake.serve(cold)
    closing = threading.Thread(target=handshake.close)
    handshake.post(3, lambda: closing.start())
    with pytest.raises(HandshakeError, match="closed"):
        handshake.wait(3)
    release.set()
    closing.join()
