"""What this machine is called, and what ``hotcold doctor`` measured of it, which is kept under that name."""

import os
import platform
from pathlib import Path

from hotcold.errors import UserError
from hotcold.kernels.cores import available_cores
from hotcold.kernels.cpu import default_isa
from hotcold.kernels.gpu import GPU
from hotcold.placement.hardware import Hardware, find_hardware
from hotcold.version import __version__


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def machine_name(gpu: GPU | None) -> str:
    """All that figures depend on: those of another name are another machine's."""
    own = f"{processor()}, {default_isa()}, {available_cores()} threads, hotcold {__version__}"
    return own if gpu is None else f"{own}, {gpu.name}, {gpu.driver}"


def cache_path(gpu: GPU | None) -> Path:
    """The file with the figures of this machine and the GPU. UserError: the folder's name is not absolute."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(folder):
        raise UserError(f"cache folder {folder!r}: set XDG_CACHE_HOME to an absolute path")
    own = "" if gpu is None else f"-{gpu.uuid}"
    return Path(folder, "hotcold", f"hardware{own}.json")


def measured_hardware(gpu: GPU) -> Hardware | None:
    """What was measured of this machine with this GPU and driver; None where that was not done yet."""
    try:
        path = cache_path(gpu)
        found = find_hardware(str(path)) if os.path.exists(path) else None
    except ValueError:  # damaged: doctor says so
        return None
    return found if found is not None and found.name == machine_name(gpu) else None
