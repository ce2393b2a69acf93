"""Compiles the shaders of this folder: ``python csrc/shaders/compile.py [NAME ...]``.

The modules in src/hotcold/kernels/vulkan/spirv are committed, so that an installation needs no shader
compiler. ``--check`` compares with the existing modules instead. Needs glslangValidator of version
:data:`GLSLANG`, since another version's modules differ in their bytes, and spirv-val (Debian 12:
glslang-tools and spirv-tools).

Refuses shaders whose rounding depends on the device: all float arithmetic must be ``precise`` (decorated
NoContraction), and ``fma`` is not allowed, because devices round it once or twice."""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

GLSLANG = "11:12.0.0"
SHADERS = Path(__file__).parent
COMPILED = SHADERS.parents[1] / "src/hotcold/kernels/vulkan/spirv"

# Numbers of the SPIR-V specification.
_EXT_INST, _DECORATE, _NO_CONTRACTION = 12, 71, 42
#: FAdd, FSub, FMul, FDiv, FRem, FMod, then products of vectors and matrices, and Dot.
_FLOAT_ARITHMETIC = {129, 131, 133, 136, 140, 141, *range(142, 149)}
_GLSL_FMA = 50


class ShaderError(Exception):
    """A problem of a shader or of the compiler, in one line."""


def _instructions(module: bytes) -> Iterator[tuple[int, list[int]]]:
    words = memoryview(module).cast("I")
    at = 5
    while at < len(words):
        length, opcode = words[at] >> 16, words[at] & 0xFFFF
        yield opcode, list(words[at + 1 : at + length])
        at += length


def check_precise(name: str, module: bytes) -> None:
    exact = {
        operands[0]
        for opcode, operands in _instructions(module)
        if opcode == _DECORATE and operands[1] == _NO_CONTRACTION
    }
    for opcode, operands in _instructions(module):
        if opcode in _FLOAT_ARITHMETIC and operands[1] not in exact:
            raise ShaderError(f"{name}: float arithmetic (SPIR-V opcode {opcode}) that is not precise")
        if opcode == _EXT_INST and operands[3] == _GLSL_FMA:
            raise ShaderError(f"{name}: fma: write a product and a sum, both precise")


def tool(name: str, package: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise ShaderError(f"{name} is not on the PATH: install {package} (Debian 12)")
    return path


def compiler() -> str:
    path = tool("glslangValidator", "glslang-tools")
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    version = output.split("\n")[0].removeprefix("Glslang Version: ").strip()
    if version != GLSLANG:
        raise ShaderError(f"glslangValidator is version {version}: {GLSLANG} makes the committed modules")
    return path


def compiled(glslang: str, source: Path, folder: Path) -> bytes:
    """Returns a shader's module, without names and lines, which would contain the build folder."""
    out = folder / f"{source.stem}.spv"
    target = ["--target-env", "vulkan1.3"]
    for command in (
        [glslang, "-V", "-g0", *target, str(source), "-o", str(out)],
        [tool("spirv-val", "spirv-tools"), *target, str(out)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ShaderError(f"{source.name}: {' '.join((done.stdout + done.stderr).split())}")
    module = out.read_bytes()
    check_precise(source.name, module)
    return module


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compiles the shaders.")
    parser.add_argument("names", nargs="*", help="shaders without .comp; all by default")
    parser.add_argument("--check", action="store_true", help="compare with what is committed, write nothing")
    chosen = parser.parse_args(arguments)
    sources = sorted(SHADERS.glob("*.comp"))
    if chosen.names:
        sources = [SHADERS / f"{name}.comp" for name in chosen.names]
    COMPILED.mkdir(exist_ok=True)
    problems = [] if chosen.names else _without_source(sources)
    try:
        glslang = compiler()
        with tempfile.TemporaryDirectory() as folder:
            for source in sources:
                module, target = compiled(glslang, source, Path(folder)), COMPILED / f"{source.stem}.spv"
                if not chosen.check:
                    target.write_bytes(module)
                elif not target.exists() or target.read_bytes() != module:
                    problems.append(f"{target.name} is not what {source.name} compiles to: run compile.py")
    except ShaderError as error:
        problems.append(str(error))
    for problem in problems:
        print(f"compile.py: {problem}", file=sys.stderr)
    return int(bool(problems))


def _without_source(sources: list[Path]) -> list[str]:
    names = {source.stem for source in sources}
    left = sorted(path.name for path in COMPILED.glob("*.spv") if path.stem not in names)
    return [f"{name} has no shader of that name: remove it" for name in left]


if __name__ == "__main__":
    sys.exit(main())
