"""Backends under test by name: ``reference``, ``ordered`` (the model of Vulkan's numerics), ``cpu-ISA`` and
``vulkan-DRIVER``."""

from __future__ import annotations

import functools

from support.mirrored_backend import MirroredBackend
from support.vulkan.devices import DRIVERS, open_vulkan
from support.vulkan.model import OrderedReference

from hotcold.kernels.backend import Backend
from hotcold.kernels.reference import ReferenceBackend

try:
    from hotcold.kernels.instruction_sets import LOOPS, supported_isas

    #: the last one has plain loops for AMX's products
    ISAS: tuple[str, ...] = (*supported_isas(), supported_isas()[-1] + LOOPS)
except ImportError:  # the fixture then imports it again, so that every test of the CPU's kernels fails
    ISAS = ("unbuilt",)

VULKAN = tuple(f"vulkan-{driver}" for driver in DRIVERS)


@functools.cache
def open_cpu(isa: str, threads: int = 2) -> Backend:
    from hotcold.kernels.cpu import CPUBackend

    return CPUBackend(threads=threads, isa=isa)


def open_one(name: str, threads: int = 2) -> Backend:
    if name == "reference":
        return ReferenceBackend()
    if name == "ordered":
        return OrderedReference()
    kind, _, which = name.partition("-")
    backend: Backend = MirroredBackend(open_vulkan(which)) if kind == "vulkan" else open_cpu(which, threads)
    return backend
