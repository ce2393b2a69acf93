"""A llama-cpp-python that runs on processors with AMX.

GCC 12 drops the stores before ``ldtilecfg``, because its intrinsic names only eight of the 64 bytes that the
instruction reads. A llama.cpp that was built so dies of an illegal instruction in its first product. A child
process shows whether the installed one does. If so, a build with a barrier takes its place, or one without
AMX if that dies too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from lib.models import Recipe, Shape, write

BARRIER = """\
#if defined(__AMX_TILE__) && defined(__cplusplus)
#include <immintrin.h>
static inline void load_tile_config(const void *config) {
    __asm__ volatile("" : : "r"(config) : "memory");
    _tile_loadconfig(config);
}
#define _tile_loadconfig load_tile_config
#endif
"""
#: The builds to try, with CMake's options. Every processor with AMX has what the second names.
_BUILDS = {
    "with a barrier before ldtilecfg": "-DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS=-include{barrier}",
    "without AMX": "-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON "
    "-DGGML_AVX512_BF16=ON",
}
_PROBE = """\
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from lib.contestants import Plan
from lib.llama import LlamaCpp
LlamaCpp(Path(sys.argv[1]), 1, Plan((), (0,), 1, 1)).warm("decode at 0")
"""


def use_working_llama_cpp(folder: Path, say: Callable[[str], None]) -> str:
    """Returns "" if the installed llama.cpp runs, else how it was built again in ``folder``, from where this
    process then imports it. ``say`` gets a line about it. SystemExit: no build runs."""
    if find_spec("llama_cpp") is None:
        return ""
    model, barrier = folder / "probe.gguf", (folder / "barrier.h").resolve()
    write(model, Recipe(Shape(256, 512, 1, 4, 4, 600, 256)))
    barrier.write_text(BARRIER, encoding="utf-8")
    if not (fault := _death(model)):
        return ""
    for name, options in _BUILDS.items():
        say(f"llama.cpp dies of {fault}: it is built again {name}, which takes minutes")
        where = folder / f"llama-cpp-python {name}"
        if not where.exists():
            build(options.format(barrier=barrier), where)
        if not (fault := _death(model, where)):
            sys.path.insert(0, str(where))
            return name
    raise SystemExit(f"llama.cpp dies of {fault}, also {' and '.join(_BUILDS)}: use --no-llama-cpp")


def build(options: str, where: Path) -> None:
    """Installs llama-cpp-python in a folder, in its installed version, compiled with CMake's options."""
    package = f"llama-cpp-python=={version('llama-cpp-python')}"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-cache-dir", "--target", str(where)]
    command += ["--no-binary", "llama-cpp-python", package]
    environment = {**os.environ, "CMAKE_ARGS": options}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"pip cannot build {package}: {done.stderr.strip()[-300:]}")


def _death(model: Path, *first: Path) -> str:
    """Returns the name of the signal that ends llama.cpp, if any; ``first`` lead the path of modules."""
    paths = [*map(str, first), str(Path(__file__).resolve().parents[1])]
    command = [sys.executable, "-c", _PROBE, str(model), *paths]
    code = subprocess.run(command, capture_output=True, check=False).returncode
    return signal.Signals(-code).name if code < 0 else ""
