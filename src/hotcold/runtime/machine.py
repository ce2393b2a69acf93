"""Names this machine, and finds the figures that ``hotcold doctor`` keeps under this name."""

import os
import platform
from pathlib import Path

from hotcold.errors import UserError
from hotcold.kernels.cores import available_cores
from hotcold.kernels.gpu import GPU
from hotcold.kernels.instruction_sets import default_isa
from hotcold.placement.hardware import Hardware, find_hardware
from hotcold.version import __version__


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def machine_name(gpu: GPU | None) -> str:
    """A name of all facts on which figures depend; another name means another machine."""
    own = f"{processor()}, {default_isa()}, {available_cores()} threads, hotcold {__version__}"
    return own if gpu is None else f"{own}, {gpu.name}, {gpu.driver}"


def cache_path(gpu: GPU | None) -> Path:
    """The file with the figures of this machine and the GPU. UserError: the folder's name is not absolute."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(folder):
        raise UserError(f"cache folder {folder!r}: set XDG_CACHE_HOME to an absolute path")
    own = "" if gpu is None else f"-{gpu.uuid}"
    return Path(folder, "hotcold", f"hardware{own}.json")


def measured_hardware(gpu: GPU | None) -> Hardware | None:
    """The figures of this machine with this GPU and driver, or with none; None if it was not measured yet."""
    try:
        path = cache_path(gpu)
        found = find_hardware(str(path)) if os.path.exists(path) else None
    except ValueError:  # damaged: doctor says so
        return None
    return found if found is not None and found.name == machine_name(gpu) else None
