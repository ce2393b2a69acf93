"""Backends under test: the reference, and the CPU's kernels for every instruction set that this CPU has."""

from __future__ import annotations

import functools

import pytest

from hotcold.kernels.backend import Backend
from hotcold.kernels.reference import ReferenceBackend

try:
    from hotcold.kernels.cpu import supported_isas

    ISAS: tuple[str, ...] = tuple(supported_isas())
except ImportError:  # the fixture then imports it again, so that every test of the CPU's kernels fails
    ISAS = ("unbuilt",)


@functools.cache
def cpu(isa: str, threads: int = 2) -> Backend:
    from hotcold.kernels.cpu import CPUBackend

    return CPUBackend(threads=threads, isa=isa)


@pytest.fixture(params=["reference", *(f"cpu-{isa}" for isa in ISAS)])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every backend."""
    return ReferenceBackend() if request.param == "reference" else cpu(request.param.removeprefix("cpu-"))


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    """Every instruction set of the CPU's kernels."""
    return str(request.param)
