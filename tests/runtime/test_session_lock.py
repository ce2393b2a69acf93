"""The lock of a session: one thread at a time, no thread kept out, never held for ever."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque

import pytest
from support.interrupter import Interrupter
from support.threads import Running, Step, held, wait_until

from hotcold.errors import UserError
from hotcold.runtime.session_lock import SessionLock


def test_one_thread_at_a_time() -> None:
    lock, inside, steps = SessionLock(), [0], [0]

    def work() -> None:
        assert inside[0] == 0
        inside[0] += 1
        time.sleep(0)  # lets another thread run
        steps[0] += 1
        inside[0] -= 1

    def loop(number: int) -> None:
        for _ in range(40):
            match number % 3:
                case 0:
                    lock.run(work)
                case 1:
                    lock.run_soon(work)
                case _:
                    goal = steps[0] + 1
                    lock.run_until(lambda goal=goal: steps[0] >= goal, work)

    for thread in [Running(lambda number=number: loop(number)) for number in range(9)]:
        thread.result()
    assert steps[0] >= 6 * 40 and not lock._holder and not lock._changes


def test_a_change_returns_its_result_or_raises_its_error_where_another_thread_makes_it() -> None:
    lock, makers = SessionLock(), []

    def change() -> int:
        makers.append(threading.get_ident())
        return 1 // len(makers)

    def failing() -> None:
        makers.append(threading.get_ident())
        raise KeyError("of the change")

    assert lock.run(change) == 1 and makers == [threading.get_ident()]
    step, thread = held(lock)
    changes = [Running(lambda: lock.run(change)), Running(lambda: lock.run(failing))]
    wait_until(lambda: len(lock._changes) == 2)
    assert not any(each.ended for each in changes) and len(makers) == 1, "a step runs"
    step.go.set()
    assert changes[0].result() == 0
    with pytest.raises(KeyError, match="of the change"):
        changes[1].result()
    thread.result()
    assert len(makers) == 3


def test_soon_never_waits_and_comes_after_the_step() -> None:
    lock, made = SessionLock(), []
    lock.run_soon(lambda: made.append("free"))
    assert made == ["free"]
    step, thread = held(lock)
    lock.run_soon(lambda: made.append("held"))
    assert made == ["free"] and not lock.held_here
    step.go.set()
    thread.result()
    assert made == ["free", "held"], "no other use of the lock is needed"


def test_soon_within_a_step_of_the_same_thread_comes_after_it() -> None:
    """As when garbage is collected there."""
    lock, made = SessionLock(), []

    def step() -> None:
        assert lock.held_here
        lock.run_soon(lambda: made.append("soon"))
        made.append("step")

    lock.run_until(lambda: bool(made), step)
    assert made == ["step", "soon"] and not lock.held_here


@pytest.mark.parametrize("use", ["run", "run_until"])
def test_a_step_that_waits_for_another_step_is_refused(use: str) -> None:
    lock = SessionLock()

    def step() -> None:
        if use == "run":
            lock.run(lambda: None)
        else:
            lock.run_until(lambda: False, lambda: None)

    with pytest.raises(UserError, match="a step of a model uses the same model"):
        Running(lambda: lock.run_until(lambda: False, step)).result()
    assert lock.run(lambda: 3) == 3


def test_steps_one_after_another_keep_no_change_out() -> None:
    lock, made, count = SessionLock(), threading.Event(), 0
    begun = threading.Event()

    def step() -> None:
        nonlocal count
        begun.set()
        count += 1
        assert count < 100_000, "a change is kept out"

    stepping = Running(lambda: lock.run_until(made.is_set, step))
    assert begun.wait(60)
    lock.run(made.set)
    stepping.result()


def test_a_thread_that_waits_goes_on_when_the_holder_leaves() -> None:
    lock = SessionLock()
    step, thread = held(lock)
    own: list[int] = []
    waiting = [
        Running(lambda n=n: lock.run_until(lambda: len(own) > n, lambda: own.append(1))) for n in range(3)
    ]
    wait_until(lambda: len(lock._sleepers) == 3)
    assert not own
    step.go.set()
    for each in (thread, *waiting):
        each.result()
    assert step.count == 1 and len(own) == 3, "no step more than was needed"


def test_a_thread_that_waits_asks_once_a_step() -> None:
    """It sleeps, and does not look again and again."""
    lock, asked = SessionLock(), 0

    def done() -> bool:
        nonlocal asked
        asked += 1
        return step.count > 0

    step, thread = held(lock)
    waiting = Running(lambda: lock.run_until(done, lambda: None))
    wait_until(lambda: asked == 2)  # once before it is among the sleepers, and once after that
    time.sleep(0.05)
    assert asked == 2
    step.go.set()
    waiting.result()
    thread.result()
    assert asked == 3


def test_a_step_of_another_thread_that_brings_the_result_spares_the_next_one() -> None:
    """It may end between the question and the step."""
    lock, answers = SessionLock(), iter([False, True, True])
    lock.run_until(lambda: next(answers), lambda: pytest.fail("a step too many"))


def test_a_release_before_a_thread_sleeps_is_not_missed() -> None:
    lock, made = SessionLock(), list[int]()
    step, thread = held(lock)

    class Late(deque[threading.Lock]):
        def append(self, wake: threading.Lock) -> None:
            step.go.set()
            thread.result()
            super().append(wake)

    lock._sleepers = Late()
    Running(lambda: lock.run_until(lambda: bool(made), lambda: made.append(1))).result()


def test_the_lock_is_free_when_a_thread_is_woken() -> None:
    """Else it would sleep again, and no thread would wake it."""
    lock, free = SessionLock(), list[bool]()

    class Wake:
        def release(self) -> None:
            free.append(not lock._holder)

    lock.run(lambda: lock._sleepers.append(Wake()))  # type: ignore[arg-type]
    assert free == [True]


def test_ctrl_c_while_another_thread_has_the_lock() -> None:
    """The main thread stops waiting at once, and its change is not made later."""
    lock, made = SessionLock(), list[int]()
    step, thread = held(lock)
    main = threading.get_ident()

    def interrupt() -> None:
        wait_until(lambda: lock._sleepers)
        signal.pthread_kill(main, signal.SIGINT)

    interrupting = Running(interrupt)
    with pytest.raises(KeyboardInterrupt):
        lock.run(lambda: made.append(1))
    interrupting.result()
    step.go.set()
    thread.result()
    lock.run(lambda: None)
    assert not made and not lock._changes


def test_an_exception_of_a_step_ends_the_hold_and_wakes_others() -> None:
    lock, step = SessionLock(), Step()

    def failing() -> None:
        step()
        raise ZeroDivisionError

    thread = Running(lambda: lock.run_until(lambda: False, failing))
    assert step.begun.wait(60)
    other = Running(lambda: lock.run_until(lambda: step.count > 1, step))
    wait_until(lambda: lock._sleepers)
    step.go.set()
    with pytest.raises(ZeroDivisionError):
        thread.result()
    other.result()
    assert step.count == 2


def test_ctrl_c_while_a_change_of_another_thread_is_made() -> None:
    """Both hear of it: the thread that makes the change, and the one that waits for it."""
    lock = SessionLock()
    step, thread = held(lock)

    def interrupted() -> None:
        raise KeyboardInterrupt

    waiting = Running(lambda: lock.run(interrupted))
    wait_until(lambda: lock._sleepers)
    wake = lock._sleepers.pop()  # sleeps on, so that the holder makes the change
    step.go.set()
    with pytest.raises(KeyboardInterrupt):
        thread.result()
    wake.release()
    with pytest.raises(
        UserError, match="KeyboardInterrupt in another thread interrupted this request: send it again"
    ):
        waiting.result()


def use_all(lock: SessionLock, made: list[str]) -> threading.Lock:
    """Uses all methods. Another thread's sleep begins during the step, and its change comes there."""
    wake = threading.Lock()
    wake.acquire()

    def step() -> None:
        lock._sleepers.append(wake)
        lock._changes.append(lambda: made.append("of another"))
        made.append("step")

    lock.run(lambda: made.append("change"))
    lock.run_soon(lambda: made.append("soon"))
    lock.run_until(lambda: "step" in made, step)
    lock.run_soon(lambda: made.append("last"))
    return wake


def test_ctrl_c_at_each_instruction() -> None:
    """The lock is free afterwards, and the thread that slept during the step is woken."""
    lock = SessionLock()
    with Interrupter() as counting:
        use_all(lock, [])
    own = [(where, n) for where, n in counting.passed.items() if where[0].startswith(("SessionLock", "_"))]
    assert len(own) > 200
    for where, times in own:
        for turn in range(1, times + 1):
            lock, made = SessionLock(), list[str]()
            try:
                with Interrupter(where, turn) as interrupter:
                    use_all(lock, made)
            except KeyboardInterrupt:
                pass
            assert interrupter.came and not lock._holder and not lock._sleepers, (where, turn)
            lock.run_soon(lambda: None)  # as the generator does that Ctrl-C ends
            assert not lock._changes, (where, turn)
            assert ("of another" in made) == ("step" in made), (where, turn)
            assert lock.run(lambda: 5) == 5
