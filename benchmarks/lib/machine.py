"""The state of a shared machine, and the speed of its memory, around a measurement.

A virtual machine's two processors may be two cores of the host at one moment and the two hardware threads of
one core at the next; everything that is limited by arithmetic or by one core's bandwidth then runs at another
speed. The guest does not see it, but the time of a barrier between two threads shows it: a cache line
travels between two cores in some 100 ns (``two_core``), between cores that share no cache in some 450 ns
(``far``), and stays within one core in some 30 ns (``smt``). The probe is a few lines of C, compiled by the
system's compiler when it is first used; it needs no privileges.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from hotcold.kernels.cpu import CPUBackend, ReadProbe

REPOSITORY = Path(__file__).resolve().parents[2]
STATES = ("two_core", "smt", "far")  #: and ``busy`` and ``mixed``, which say that a sample is of no use
#: Barriers faster than this, in ns, mean two hardware threads of one core. Measured on AMD Zen 4 and 5:
#: 30 to 34 against 79 to 200.
THRESHOLD_NS = 60.0
FAR_NS = 270.0  #: slower ones, that the cores share no cache: 440 to 460 were measured
BUSY_NS = 1000.0  #: and those slower than this, that another process has one of the processors

_RUNS, _ROUNDS, _MOST_NS = 24, 1000, 20e6
_SOURCE = r"""
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

static _Alignas(128) atomic_int arrived;
static _Alignas(128) atomic_int turn;
static _Alignas(128) atomic_int rounds; /* of the next run; 0 ends */

static void meet(int *mine) {
    int next = *mine + 1, spins = 0;
    *mine = next;
    if (atomic_fetch_add_explicit(&arrived, 1, memory_order_acq_rel) == 1) {
        atomic_store_explicit(&arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&turn, next, memory_order_release);
        return;
    }
    while (atomic_load_explicit(&turn, memory_order_acquire) != next)
        if (++spins > 100000) {  /* the other thread has no processor: let it have this one */
            sched_yield();
            spins = 0;
        }
}

static void *other(void *unused) {
    int mine = 0, n;
    do {
        meet(&mine);
        n = atomic_load(&rounds);
        for (int i = 0; i < n; i++) meet(&mine);
    } while (n);
    return unused;
}

/* Nanoseconds of a barrier in each of several runs of some rounds, fewer if time runs out. Returns how
   many runs there were, or the negative of an error number. */
int barrier_ns(double *out, int runs, int each, double most_ns) {
    pthread_t thread;
    struct timespec start, stop;
    double total = 0;
    int mine = 0, done = 0, error;
    atomic_store(&arrived, 0);
    atomic_store(&turn, 0);
    if ((error = pthread_create(&thread, 0, other, 0))) return -error;
    while (done < runs && total < most_ns) {
        atomic_store(&rounds, each);
        meet(&mine);
        clock_gettime(CLOCK_MONOTONIC, &start);
        for (int i = 0; i < each; i++) meet(&mine);
        clock_gettime(CLOCK_MONOTONIC, &stop);
        out[done] = (stop.tv_sec - start.tv_sec) * 1e9 + (stop.tv_nsec - start.tv_nsec);
        total += out[done];
        out[done++] /= each;
    }
    atomic_store(&rounds, 0);
    meet(&mine);
    pthread_join(thread, 0);
    return done;
}
"""

T = TypeVar("T")


def commit() -> str:
    """The commit of this repository, with ``-dirty`` where files differ from it. Without git it is what
    benchmarks/gpu/day/pack.sh noted."""
    try:
        command = ["git", "describe", "--always", "--dirty"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        described = done.stdout.strip()
    except OSError:  # no git here
        described = ""
    noted = REPOSITORY / ".day" / "commit"
    return described or (noted.read_text(encoding="utf-8").strip() if noted.exists() else "unknown")


class BarrierProbe:
    """Times a barrier between two threads.

    Raises:
        RuntimeError: there is no C compiler, or it fails.
    """

    def __init__(self) -> None:
        compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
        if compiler is None:
            raise RuntimeError("no C compiler (cc, gcc, clang): the machine's state cannot be told")
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "barrier.c", Path(folder) / "barrier.so"
            source.write_text(_SOURCE, encoding="ascii")
            options = ["-O2", "-std=c11", "-D_GNU_SOURCE", "-shared", "-fPIC", "-pthread"]
            command = [*compiler.split(), *options, str(source), "-o", str(library)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{compiler} cannot compile the probe: {done.stderr.strip()[:300]}")
            self._function = ctypes.CDLL(str(library)).barrier_ns
        self._function.argtypes = [ctypes.POINTER(ctypes.c_double)] + [ctypes.c_int] * 2 + [ctypes.c_double]

    def measure(self) -> float:
        """Nanoseconds of one barrier, the median of some short runs: 1 to 5 ms, 20 on a busy machine."""
        times = (ctypes.c_double * _RUNS)()
        runs = self._function(times, _RUNS, _ROUNDS, _MOST_NS)
        if runs < 0:
            raise OSError(-runs, "a thread cannot be started")
        return float(np.median(times[:runs]))


@dataclass(frozen=True)
class Conditions:
    """Under which something was measured.

    Attributes:
        state: one of :data:`STATES`, or ``busy`` where another process has one of the processors; ``mixed``
            where it was not the same before and after.
        barrier_ns: before and after.
        read_gb_s: at which all threads streamed through memory just before, 1e9 bytes a second.
    """

    state: str
    barrier_ns: tuple[float, float]
    read_gb_s: float


class MachineState:
    """Measures the conditions of what it runs.

    Args:
        threads: that read memory; as many as what is measured uses.
        threshold_ns: of the barrier, between the states.
    """

    def __init__(self, threads: int | None = None, threshold_ns: float = THRESHOLD_NS) -> None:
        self.threshold_ns = threshold_ns
        self._barrier = BarrierProbe()
        self._read = ReadProbe(CPUBackend(threads))

    def state_of(self, barrier_ns: float) -> str:
        if barrier_ns > BUSY_NS:
            return "busy"
        if barrier_ns > FAR_NS:
            return "far"
        return "smt" if barrier_ns < self.threshold_ns else "two_core"

    def around(self, run: Callable[[], T], seconds: float = 0.1) -> tuple[T, Conditions]:
        """Returns the result of ``run``, and the conditions; probes the read bandwidth for ``seconds``."""
        before = self._barrier.measure()
        read_gb_s = self._read.measure(seconds)
        result = run()
        after = self._barrier.measure()
        states = {self.state_of(before), self.state_of(after)}
        state = states.pop() if len(states) == 1 else "mixed"
        return result, Conditions(state, (before, after), read_gb_s)
