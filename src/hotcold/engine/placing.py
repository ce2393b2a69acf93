"""Which backend computes which part of a model that is being loaded."""

from hotcold.engine.load_options import LoadOptions
from hotcold.errors import UserError
from hotcold.formats.gguf import GGUFFile
from hotcold.kernels import BACKENDS, open_backend
from hotcold.model.config import Config
from hotcold.model.devices import Devices
from hotcold.sparse.costs import Costs
from hotcold.sparse.hardware import DEFAULT, find_hardware
from hotcold.sparse.placement import read_placement
from hotcold.sparse.predictor import find_predictors
from hotcold.sparse.profiles import find_profile
from hotcold.sparse.sizes import sizes_of_file
from hotcold.sparse.solver import Solver
from hotcold.sparse.split import SplitDevices


def open_devices(file: GGUFFile, config: Config, options: LoadOptions, positions: int) -> Devices:
    """The backends that the options name; ``positions`` are those of the KV cache.

    ``ValueError``: options that do not go together, or a placement or profile that is not right."""
    budget, hot, threads = options.vram_budget, options.hot_backend, options.hot_threads
    if options.placement is not None and budget is not None:
        raise UserError("--placement and --vram-budget: give one of them")
    if options.placement is None and budget is None:
        if hot or threads:
            raise UserError("--hot-backend and --hot-threads need --placement or --vram-budget")
        return Devices.of(open_backend(options.backend, options.threads), config.layers)
    if hot is None:
        allowed = " or ".join(BACKENDS)
        raise UserError(f"a placement needs --hot-backend {allowed}: there is none for GPUs yet")
    predictors = find_predictors(file)
    sizes = sizes_of_file(file, config, positions, options.cache_type, predictors=predictors)
    if options.placement is not None:
        placement = read_placement(options.placement, sizes)
    else:
        profile = find_profile(sizes, None, file.path)
        costs = Costs.expected(sizes, profile, find_hardware(DEFAULT))
        placement = Solver(sizes, profile, costs).solve(budget or 0)
    cold = open_backend(options.backend, options.threads)
    if threads is None and hot == "cpu":
        threads = getattr(cold, "threads", None)  # as many
    return SplitDevices.place(placement, cold, open_backend(hot, threads))
