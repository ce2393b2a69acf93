"""Which backend computes which part of a model that is being loaded."""

from pathlib import Path

from hotcold.engine.load_options import LoadOptions
from hotcold.errors import UserError
from hotcold.formats.gguf import GGUFFile
from hotcold.kernels import BACKENDS, open_backend
from hotcold.kernels.backend import PAGE, BatchLimits
from hotcold.model.config import Config
from hotcold.model.devices import Devices
from hotcold.sparse.costs import Costs
from hotcold.sparse.hardware import DEFAULT, find_hardware
from hotcold.sparse.placement import read_placement
from hotcold.sparse.profiles import find_profile
from hotcold.sparse.sizes import sizes_of_file
from hotcold.sparse.solver import Solver
from hotcold.sparse.split import SplitDevices


def open_devices(
    file: GGUFFile, config: Config, options: LoadOptions, limits: BatchLimits, predictors: Path | None
) -> tuple[Devices, list[str]]:
    """The backends that the options name, and notes on what was assumed. ``predictors`` is the file with
    those that the sparsity mode uses, None where it uses none.

    UserError: options that do not go together, or a placement or profile that is not right."""
    budget, hot, threads = options.vram_budget, options.hot_backend, options.hot_threads
    if options.placement is not None and budget is not None:
        raise UserError("--placement and --vram-budget: give one of them")
    if options.placement is None and budget is None:
        if hot or threads:
            raise UserError("--hot-backend and --hot-threads need --placement or --vram-budget")
        return Devices.of(open_backend(options.backend, options.threads), config.layers), []
    if hot is None:
        allowed = " or ".join(BACKENDS)
        raise UserError(f"a placement needs --hot-backend {allowed}: there is none for GPUs yet")
    sizes = sizes_of_file(
        file,
        config,
        limits.sequences * limits.pages_per_sequence * PAGE,
        options.cache_type,
        predictors=predictors,
        chunk=limits.tokens - limits.decode,
    )
    notes = []
    if options.placement is not None:
        placement = read_placement(options.placement, sizes)
    else:
        profile = find_profile(sizes, None, file.path)
        hardware = find_hardware(DEFAULT)
        placement = Solver(sizes, profile, Costs.expected(sizes, profile, hardware)).solve(budget or 0)
        assumed = f"the preset {DEFAULT}, and {profile.source}"
        notes.append(f"--vram-budget places neurons for {assumed}: hotcold plan takes others (--hardware)")
    cold = open_backend(options.backend, options.threads)
    if threads is None and hot == "cpu":
        threads = cold.threads  # as many: threads that wait offer their cores to the other side's
    return SplitDevices.place(placement, cold, open_backend(hot, threads)), notes
