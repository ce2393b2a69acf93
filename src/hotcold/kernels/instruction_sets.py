"""The instruction sets of the CPU's kernels: in this build, and on this processor."""

import os

from hotcold.errors import UserError
from hotcold.kernels import _native

ISA_VARIABLE = "HOTCOLD_ISA"  #: environment variable that selects the instruction set
LOOPS = "+loops"  #: suffix of an instruction set: plain loops compute AMX's tiles, for tests
_REBUILD = "run 'pip install .' in Hotcold's source folder to build for this processor"


def supported_isas() -> tuple[str, ...]:
    """Returns the instruction sets that this build has kernels for and this processor runs, best first."""
    return tuple(name for name, runs, built in _native.isas() if runs and built)


def built_isas() -> tuple[str, ...]:
    """Returns the instruction sets that this build has kernels for."""
    return tuple(name for name, _, built in _native.isas() if built)


def left_out_isas() -> tuple[str, ...]:
    """Returns the instruction sets of this kind of processor that the build lacks."""
    return tuple(name for name, _, built in _native.isas() if not built)


def default_isa() -> str:
    """Returns the instruction set that :data:`ISA_VARIABLE` names, else the best. UserError: this processor
    or this build lacks it."""
    if forced := os.environ.get(ISA_VARIABLE):
        check_isa(forced, f"{ISA_VARIABLE} is {forced!r}")
        return forced
    if not (supported := supported_isas()):
        raise UserError(
            f"Hotcold was built for {', '.join(built_isas())}, which this processor lacks: {_REBUILD}"
        )
    return supported[0]


def check_isa(isa: str, label: str) -> None:
    """Refuses an instruction set that this processor or this build lacks; ``label`` begins the message."""
    supported = ", ".join(supported_isas())
    isa = isa.removesuffix(LOOPS)
    if (isa, True, False) in _native.isas():
        all_sets = "run 'HOTCOLD_ISAS=all pip install .' in Hotcold's source folder to build all"
        raise UserError(f"{label}: Hotcold was built without it; choose from {supported}, or {all_sets}")
    if isa not in supported_isas():
        fault = _native.tile_fault() if isa == "amx" else ""
        raise UserError(f"{label}: this machine has {supported}{fault and f' ({fault})'}")


def slow_kernels() -> str:
    """Returns a line if slower kernels are used than this processor has: a build lacks its best instruction
    set, or its tiles are not used. Empty for other machines, and where :data:`ISA_VARIABLE` is set."""
    if os.environ.get(ISA_VARIABLE):
        return ""
    best = next(name for name, runs, _ in _native.isas() if runs)
    if best not in built_isas():
        built, used = ", ".join(built_isas()), default_isa()
        return f"this processor runs {best}, but Hotcold was built for {built}, so {used} is used: {_REBUILD}"
    fault = _native.tile_fault()
    return f"{fault}, so {default_isa()} is used for prompts" if fault else ""
