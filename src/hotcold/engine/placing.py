"""Which backend computes which part of a model that is being loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotcold.formats.gguf import GGUFFile
from hotcold.kernels import BACKENDS, open_backend
from hotcold.model.config import Config
from hotcold.model.devices import Devices
from hotcold.sparse.hardware import find_hardware
from hotcold.sparse.placement import Placement, assumed_profile, read_placement, read_profile
from hotcold.sparse.sizes import Sizes, sizes_of_file
from hotcold.sparse.solver import Costs, Solver
from hotcold.sparse.split import SplitDevices

if TYPE_CHECKING:
    from hotcold.engine.loading import LoadOptions


def open_devices(file: GGUFFile, config: Config, options: LoadOptions, positions: int) -> Devices:
    """The backends that the options name; ``positions`` are those of the KV cache.

    ``ValueError``: options that contradict each other, or a placement, profile or hardware that is not right.
    """
    asked = {
        "a placement (--placement)": options.placement,
        "a budget (--vram-budget)": options.vram_budget,
    }
    given = [name for name, value in asked.items() if value is not None]
    if len(given) == 2:
        raise ValueError(f"{' and '.join(given)}: give one of them")
    if not given and (options.hot_backend or options.hot_threads):
        raise ValueError(f"a hot backend (--hot-backend) has nothing to do: give {' or '.join(asked)}")
    if given and options.hot_backend is None:
        raise ValueError(
            f"{given[0]} needs a backend for the hot neurons, and there is none for GPUs yet: "
            f"--hot-backend with one of {', '.join(BACKENDS)}"
        )
    sizes = sizes_of_file(file, config, positions, options.cache_type) if given else None
    placement = _placement(sizes, options) if sizes else None
    cold = open_backend(options.backend, options.threads)
    if placement is None or options.hot_backend is None:
        return Devices.of(cold, config.layers)
    threads = options.hot_threads
    if threads is None and options.hot_backend == "cpu":
        threads = getattr(cold, "threads", None)  # as many
    return SplitDevices.place(placement, cold, open_backend(options.hot_backend, threads))


def _placement(sizes: Sizes, options: LoadOptions) -> Placement:
    if options.placement is not None:
        return read_placement(options.placement, sizes)
    assert options.vram_budget is not None
    profile = read_profile(options.profile, sizes) if options.profile else assumed_profile(sizes)
    costs = Costs(sizes, profile, find_hardware(options.hardware))
    return Solver(sizes, profile, costs).solve(options.vram_budget)
