"""Backends under test: the reference, the CPU's kernels for every instruction set that this CPU has, the
model of Vulkan's numerics, and Vulkan's devices."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable

import pytest
from support.backends import ISAS, VULKAN, open_cpu, open_one
from support.vulkan.devices import FULL

from hotcold.formats.blocks import BLOCK_TYPES
from hotcold.kernels.backend import Backend
from hotcold.kernels.vulkan.packing import holds

#: How many parameter sets of each test are run on each software driver (and the model), where dispatches take
#: longer than elsewhere: tests/kernels/vulkan/test_vulkan_table.py has every op and type.
SAMPLE = 4
#: Likewise on SwiftShader, to which each kind of pipeline costs 0.3 s: it gives the model's bits for every op
#: of that table, and the model is compared with float64 here.
SLOW_SAMPLE = 0
#: With an instruction set that is not the best of this processor, without --full; twice as many
#: with the reference, whose sums take long, and eight times as many with the best instruction set (and, with
#: --full, with the reference).
CPU_SAMPLE = 8
#: The same for tiles as plain loops, which are slow; tests/kernels/test_tiles.py tests every block type.
LOOPS_SAMPLE = 2


@pytest.fixture(params=["reference", "ordered", *(f"cpu-{isa}" for isa in ISAS), *VULKAN])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every backend."""
    return open_one(str(request.param))


@pytest.fixture(params=["reference", *(f"cpu-{isa}" for isa in ISAS)])
def cpu_backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend of the CPU, for ops without a shader and for tests that have other cases for GPUs."""
    return open_one(str(request.param))


@pytest.fixture(params=[*(f"cpu-{isa}" for isa in ISAS), *VULKAN])
def open_exact(request: pytest.FixtureRequest) -> Callable[..., Backend]:
    """Opens each backend whose rows have the same bits in every batch, with a number of threads (2), which
    Vulkan's do not have."""
    return functools.partial(open_one, str(request.param))


@pytest.fixture(scope="session")
def open_every() -> list[Callable[[int], Backend]]:
    """Opens the CPU's kernels with a number of threads, for each instruction set."""
    return [functools.partial(open_cpu, isa) for isa in ISAS]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves a sample of what runs on Vulkan's devices, on their model, and with lesser instruction sets."""
    if FULL:
        shaders = ("ordered", *VULKAN)
        items[:] = [item for item in items if _backend_of(item) not in shaders or not _shaders_lack(item)]
        return
    samples = {name: SLOW_SAMPLE if "swiftshader" in name else SAMPLE for name in ("ordered", *VULKAN)}
    if config.getoption("--full"):
        samples["reference"] = 8 * CPU_SAMPLE
    else:
        samples |= {f"cpu-{isa}": CPU_SAMPLE for isa in ISAS[1:]} | {"reference": 2 * CPU_SAMPLE}
        samples[f"cpu-{ISAS[0]}"] = 8 * CPU_SAMPLE
    samples[f"cpu-{ISAS[-1]}"] = LOOPS_SAMPLE
    left_out = {item for item in items if _takes_long(item)}
    found: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        name = _backend_of(item)
        if name in ("ordered", *VULKAN) and _shaders_lack(item):
            left_out.add(item)
        elif name in samples:
            found[item.nodeid.partition("[")[0], name].append(item)
    for (_, name), own in found.items():
        taken = {len(own) * i // samples[name] for i in range(samples[name])}
        left_out |= {item for i, item in enumerate(own) if i not in taken}
        if name == "ordered":  # which looks less carefully at what it is given
            left_out |= {item for item in own if "refused" in item.name}
    items[:] = [item for item in items if item not in left_out]
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))


def _backend_of(item: pytest.Item) -> str:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return next(
        (str(params[name]) for name in ("backend", "cpu_backend", "open_exact") if name in params), ""
    )


def _shaders_lack(item: pytest.Item) -> bool:
    """True if the test is about a block type that no shader reads."""
    params = [str(value) for value in item.callspec.params.values()] if hasattr(item, "callspec") else []
    words = {word for text in params for word in re.findall(r"\w+", text)}
    return any(not holds(type) for type in words & {*BLOCK_TYPES})


def _takes_long(item: pytest.Item) -> bool:
    """A case of Vulkan's op table that lavapipe alone is asked for."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return params.get("vulkan") == "swiftshader" and not getattr(params.get("case"), "everywhere", True)
