"""Backends under test: the reference, and the CPU's kernels for every instruction set that this CPU has."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from hotcold.kernels.backend import Backend
from hotcold.kernels.reference import ReferenceBackend

try:
    from hotcold.kernels.cpu import supported_isas

    ISAS: tuple[str, ...] = tuple(supported_isas())
except ImportError:  # the fixture then imports it again, so that every test of the CPU's kernels fails
    ISAS = ("unbuilt",)


@functools.cache
def open_cpu(isa: str, threads: int = 2) -> Backend:
    from hotcold.kernels.cpu import CPUBackend

    return CPUBackend(threads=threads, isa=isa)


@pytest.fixture(params=["reference", *(f"cpu-{isa}" for isa in ISAS)])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every backend."""
    name = str(request.param)
    return ReferenceBackend() if name == "reference" else open_cpu(name.removeprefix("cpu-"))


@pytest.fixture(params=ISAS)
def cpu(request: pytest.FixtureRequest) -> Callable[..., Backend]:
    """Opens the CPU's kernels, of every instruction set in turn, with a number of threads (2)."""
    return functools.partial(open_cpu, str(request.param))


@pytest.fixture(scope="session")
def open_every() -> list[Callable[[int], Backend]]:
    """What opens the CPU's kernels with a number of threads, for each instruction set."""
    return [functools.partial(open_cpu, isa) for isa in ISAS]
