"""Compiled shaders, which ship in spirv/ (csrc/shaders/compile.py makes them)."""

from functools import cache
from importlib.resources import files


@cache
def spirv(name: str) -> bytes:
    """Returns a compiled shader."""
    return files("hotcold.kernels.vulkan").joinpath(f"spirv/{name}.spv").read_bytes()
