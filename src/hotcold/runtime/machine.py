"""The name of this machine, and the figures that ``hotcold doctor`` stored under this name."""

import os
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path

from hotcold.errors import UserError
from hotcold.kernels.cores import available_cores
from hotcold.kernels.gpu import GPU
from hotcold.kernels.instruction_sets import default_isa
from hotcold.kernels.processor import fetching_is_measured, set_fetching
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
    """Returns a name with all facts that affect figures: another name means another machine."""
    name = f"{processor()}, {default_isa()}, {available_cores()} threads, hotcold {__version__}"
    return name if gpu is None else f"{name}, {gpu.name}, {gpu.driver}"


def cache_path(gpu: GPU | None) -> Path:
    """Returns the path for figures of this machine and GPU. UserError: the folder's path is not absolute."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(folder):
        raise UserError(f"cache folder {folder!r}: set XDG_CACHE_HOME to an absolute path")
    suffix = "" if gpu is None else f"-{gpu.uuid}"
    return Path(folder, "hotcold", f"hardware{suffix}.json")


def measured_hardware(gpu: GPU | None) -> Hardware | None:
    """Returns the figures of this machine with this GPU and driver, or without one; None if not measured
    yet."""
    try:
        path = cache_path(gpu)
        hardware = find_hardware(str(path)) if os.path.exists(path) else None
    except ValueError:  # damaged: doctor reports it
        return None
    return hardware if hardware is not None and hardware.name == machine_name(gpu) else None


@cache
def use_measured_fetching() -> None:
    """Sets the prefetch setting that ``doctor`` measured, once a process, on a processor whose default was
    not measured. A cache folder that cannot be used and damaged files change nothing: doctor reports them."""
    if fetching_is_measured():
        return
    with suppress(OSError, ValueError):
        for path in sorted(cache_path(None).parent.glob("hardware*.json")):  # one for each GPU
            with suppress(OSError, ValueError):
                hardware = find_hardware(str(path))
                if hardware.name.startswith(machine_name(None)) and hardware.fetching:
                    return set_fetching(hardware.fetching)
