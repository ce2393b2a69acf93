"""The CPU backend's pool of threads: many pieces, threads that cannot start, forks, and Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType

import pytest

from hotcold.kernels import open_backend
from hotcold.kernels.backend import Batch, BatchLimits, Program

#: The start of the subprocesses below: x += y on a pool of three threads.
PREAMBLE = """
import os, signal, sys, time
import numpy as np
from hotcold.kernels.backend import Batch, BatchLimits
from hotcold.kernels.cpu import CPUBackend

backend = CPUBackend(threads=3)
batch = Batch(BatchLimits(64, 1, 1, 1))
batch.counts[:] = (64, 0, 0, 1)
x, y = backend.zeros((64, 8)), backend.zeros((64, 8)) + 1
backend.add(x, y, batch)
"""


def run_python(code: str) -> str:
    """Returns what a process prints that must end well, and end at all: one that hangs is killed."""
    command = [sys.executable, "-c", PREAMBLE + code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_a_step_may_have_more_than_a_million_pieces() -> None:
    """A claim of 20 bits waited for ever."""
    run_python("""
from hotcold.formats.blocks import quantise
rows = 1 << 20
batch = Batch(BatchLimits(rows, 1, 1, 1))
batch.counts[:] = (rows, 0, 0, 1)
batch.tokens[:] = np.arange(rows) % 251
table = np.arange(251, dtype=np.float32)[:, None]
out = backend.zeros((rows, 1))
backend.embed(backend.matrix(quantise(table, "F32")), batch, out)
assert (out == table[batch.tokens]).all()
""")


def test_threads_record_programs_of_their_own() -> None:
    """Two sessions of a model may be opened at the same time, and a third computes meanwhile."""
    backend, both = open_backend("cpu"), threading.Barrier(3)
    batches = [Batch(BatchLimits(4, 1, 1, 1)) for _ in range(3)]
    values = [backend.zeros((4, 8)) + 1 for _ in batches]
    for batch in batches:
        batch.counts[:] = (4, 0, 0, 1)

    def add(i: int) -> None:
        both.wait(60)
        backend.add(values[i], values[i], batches[i])
        both.wait(60)

    with ThreadPoolExecutor(2) as executor:
        recorded = [executor.submit(backend.record, lambda i=i: add(i)) for i in range(2)]
        add(2)
        programs = [each.result(60) for each in recorded]
    assert [int(each[0, 0]) for each in values] == [1, 1, 2]
    programs[1].run()
    assert [int(each[0, 0]) for each in values] == [1, 2, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of address space, and /proc")
@pytest.mark.parametrize(("threads", "megabytes"), [(8, 24), (64, 24), (1000, 24)])
def test_a_thread_that_cannot_start_is_an_error(threads: int, megabytes: int) -> None:
    """Eight threads' scratch fits, but not their stacks; 64 threads' scratch does not."""
    out = run_python(f"""
import resource
tasks = len(os.listdir("/proc/self/task"))
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + ({megabytes} << 20), resource.RLIM_INFINITY))
try:
    CPUBackend(threads={threads})
except ValueError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert len(os.listdir("/proc/self/task")) == tasks, "threads that started still run"
backend = CPUBackend(threads=4)
backend.add(x, y, batch)
assert (x == 2).all()
""")
    assert out.count("\n") == 1
    assert out.startswith(f"threads {threads}: only ") and out.endswith("): choose fewer (-t)\n")
    assert 1 <= int(out.split()[3]) < min(threads, 12)


@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="needs fork")
@pytest.mark.parametrize("idle_s", [0, 0.2])  # threads that spin, and threads that sleep
def test_a_fork_cannot_run_a_model_but_can_drop_it(idle_s: float) -> None:
    out = run_python(f"""
time.sleep({idle_s})
child = os.fork()
if child == 0:
    signal.alarm(60)  # ends a child that hangs
    try:
        backend.add(x, y, batch)
    except RuntimeError as error:
        print(error, flush=True)
    own = CPUBackend(threads=2)
    own.add(x, y, Batch(BatchLimits(64, 1, 1, 1)))
    del backend, own
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0, "the child hung or failed"
backend.add(x, y, batch)
assert (x == 2).all()
""")
    assert "forked" in out and out.endswith(": load the model in this process\n") and out.count("\n") == 1


class Rang(Exception):
    """Raised by this test's signal handler, as Python's own raises KeyboardInterrupt."""


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise Rang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


needs_alarm = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs an alarm")


class Long:
    """A program that adds 1 to ``x`` so often that it takes two seconds or more."""

    def __init__(self, threads: int, rows: int) -> None:
        backend = open_backend("cpu", threads)
        self.batch = Batch(BatchLimits(rows, 1, 1, 1))
        self.batch.counts[:] = (rows, 0, 0, 1)
        shape = (rows, (1 << 22) // rows)
        self.x, y = backend.zeros(shape), backend.zeros(shape)
        y[:] = 1

        def record(count: int) -> Program:
            return backend.record(lambda: [backend.add(self.x, y, self.batch) for _ in range(count)] and None)

        few = record(10)
        few.run()
        times = []
        for _ in range(4):  # others may use the processor meanwhile, so the fastest one counts
            start = time.perf_counter()
            few.run()
            times.append(time.perf_counter() - start)
        self.ops = max(10, int(20 / min(times)))
        self.program = record(self.ops)
        self.x[:] = 0


@needs_alarm
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 128])  # steps of one piece, and of many
def test_a_signal_ends_a_run_between_steps(threads: int, rows: int) -> None:
    """An exception of Python's handler comes out long before the program would have ended."""
    long = Long(threads, rows)
    with pytest.raises(Rang), alarm(0.2):
        long.program.run()
    assert 0 < long.x.max() < 0.75 * long.ops

    long.x[:] = 0
    long.batch.counts[0] = min(rows, 2)
    long.program.run()
    assert (long.x[:2] == long.ops).all() and (long.x[2:] == 0).all()


@needs_alarm
def test_a_signal_leaves_runs_of_other_threads_alone() -> None:
    """Python calls handlers on its main thread alone; the cold side of a model runs on another."""
    long = Long(2, 128)
    done = threading.Event()

    def run() -> None:
        long.program.run()
        done.set()

    thread = threading.Thread(target=run)
    with pytest.raises(Rang), alarm(0.2):
        thread.start()
        done.wait()
    assert done.wait(60)
    assert (long.x == long.ops).all()
