"""The compiled AMX kernels on processors without AMX: tests/native/emulated_tiles.c runs their instructions.
A processor with AMX runs them itself."""

from __future__ import annotations

import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hotcold.kernels.instruction_sets import built_isas, supported_isas

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64") or sys.platform != "linux",
    reason="needs x86 and Linux",
)

OPERATIONS = [
    "ldtilecfg", "sttilecfg", "tilerelease", "tilezero", "tileloadd", "tileloaddt1", "tilestored",
    "tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud", "tdpbf16ps",
]  # fmt: skip
REGISTERS = ["rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", *(f"r{i}" for i in range(8, 16))]
NONE = -1  #: a field that an instruction lacks


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler called gcc or cc")
    library = tmp_path_factory.mktemp("emulator") / "tiles.so"
    flags = ("-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    source = repository / "tests/native/emulated_tiles.c"
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    return library


def run(emulator: Path, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process that has the tile instructions."""
    env = {name: value for name, value in os.environ.items() if name != "HOTCOLD_ISA"}
    env |= {"LD_PRELOAD": str(emulator), **variables}
    command = [sys.executable, *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=600)


def needs_the_kernels() -> None:
    if "avx512" not in supported_isas():
        pytest.skip("needs a processor with AVX-512")
    if "amx" not in built_isas():
        pytest.skip("needs AMX's kernels: HOTCOLD_ISAS=all pip install .")


def memory_operands() -> list[tuple[str, tuple[int, int, int, int]]]:
    """Returns operands in the assembler's notation, each with base, index, scale and displacement."""
    operands = []
    for base, index, scale in itertools.product([*range(16), NONE], range(16), (1, 2, 4, 8)):
        if index == 4 and scale > 1:  # rsp is no index: its number means that there is none
            continue
        for displacement in (0x12345,) if base == NONE else (0, 64, -128, 0x12345):
            first = "" if base == NONE else f"%{REGISTERS[base]}"
            second = "" if index == 4 else f",%{REGISTERS[index]},{scale}"
            place = (base, NONE if index == 4 else index, scale, displacement)
            operands.append((f"{displacement}({first}{second})" if first or second else hex(0x12345), place))
    return operands


def instructions() -> list[tuple[str, tuple[int, ...]]]:
    """Returns lines of assembler, each with the fields of its instruction but the length."""
    lines: list[tuple[str, tuple[int, ...]]] = []
    nothing = (NONE,) * 4
    for number, (operand, place) in enumerate(memory_operands()):
        tile = number % 8
        for name in ("ldtilecfg", "sttilecfg"):
            lines.append((f"{name} {operand}", (OPERATIONS.index(name), NONE, NONE, NONE, *place)))
        for name in ("tileloadd", "tileloaddt1", "tilestored"):
            operands = f"%tmm{tile}, {operand}" if name == "tilestored" else f"{operand}, %tmm{tile}"
            lines.append((f"{name} {operands}", (OPERATIONS.index(name), tile, NONE, NONE, *place)))
    for name in ("ldtilecfg", "sttilecfg"):
        place = (16, NONE, 1, 0x12345)
        lines.append((f"{name} 0x12345(%rip)", (OPERATIONS.index(name), NONE, NONE, NONE, *place)))
    lines.append(("tilerelease", (OPERATIONS.index("tilerelease"), NONE, NONE, NONE, *nothing)))
    for tile in range(8):
        lines.append((f"tilezero %tmm{tile}", (OPERATIONS.index("tilezero"), tile, NONE, NONE, *nothing)))
    for name, tiles in itertools.product(OPERATIONS[7:], itertools.permutations(range(8), 3)):
        sums, left, right = tiles
        lines.append(
            (f"{name} %tmm{right}, %tmm{left}, %tmm{sums}", (OPERATIONS.index(name), *tiles, *nothing))
        )
    return lines


DECODE = """
import ctypes, json, sys
library, code, fields = ctypes.CDLL(None), open(sys.argv[1], "rb").read(), (ctypes.c_int32 * 9)()
at, decoded = 0, []
while at < len(code) and library.decode_tile_instruction(code[at:at + 16] + bytes(16), fields):
    decoded.append([fields[0], *fields[2:]])
    at += fields[1]
others = [bytes.fromhex(text) + bytes(16) for text in sys.argv[2:]]
print(json.dumps([decoded, [library.decode_tile_instruction(each, fields) for each in others]]))
"""


def test_instructions_are_decoded_as_the_assembler_encodes_them(emulator: Path, tmp_path: Path) -> None:
    if shutil.which("as") is None or shutil.which("objcopy") is None:
        pytest.skip("needs binutils")
    lines = instructions()
    source = "".join(f"{line}\n" for line, _ in lines)
    subprocess.run(["as", "-o", str(tmp_path / "all.o")], input=source, text=True, cwd=tmp_path, check=True)
    subprocess.run(["objcopy", "-O", "binary", "all.o", "code"], cwd=tmp_path, check=True)
    others = ("c4e2794907", "0f0b", "c5f877", "c4e2c04bd9", "c4e2704bc0", "c4e2725cc1c1", "c4e27c49c0")
    result = run(emulator, "-c", DECODE, str(tmp_path / "code"), *others)
    decoded, refused = json.loads(result.stdout)
    assert [tuple(each) for each in decoded] == [fields for _, fields in lines]
    assert refused == [1, 0, 0, 0, 0, 1, 0]


MULTIPLY = """
import ctypes, sys
import numpy as np
multiply = ctypes.CDLL(None).multiply_tiles
with np.load(sys.argv[1]) as file:
    tiles = [np.ascontiguousarray(file[f"tile_{name}"]) for name in ["a", "b", "c", "out"]]
for left, right, sums, out in zip(*tiles):
    assert multiply(*(ctypes.c_void_p(each.ctypes.data) for each in (left, right, sums))) == 0
    assert (sums.view(np.uint32) == out.view(np.uint32)).all()
print(len(tiles[0]))
"""


def test_products_have_the_bits_of_a_processor(emulator: Path, test_data: Path) -> None:
    file = test_data / "bf16" / "hardware.npz"
    with np.load(file) as tiles:
        count = len(tiles["tile_a"])
    result = run(emulator, "-c", MULTIPLY, str(file))
    assert result.stdout == f"{count}\n", result.stderr


def test_compiled_kernels_pass_the_tests_of_tiles(emulator: Path, repository: Path) -> None:
    needs_the_kernels()
    tests = str(repository / "tests/kernels/test_tiles.py")
    # A signal for each instruction takes time.
    chosen = "amx and not (layers_by_tiles and (by_neuron or Q3_K))"
    options = ("-n0", "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-k", chosen)
    result = run(emulator, "-m", "pytest", *options, tests)
    assert result.returncode == 0, result.stdout + result.stderr


REPORT = """
import hotcold, hotcold.tasks.doctor
from hotcold.kernels.instruction_sets import default_isa
hotcold.tasks.doctor._measure = lambda *_: (None, False)
print(default_isa(), *hotcold.doctor(gpu="off").notes, sep="|")
"""
MULTIPLIED = "AMX's tiles and plain loops multiply with different results"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("refused", "Linux refuses AMX's tiles to this process: Operation not permitted"),
        ("wrong-bytes", MULTIPLIED),
        ("wrong-halves", MULTIPLIED),
    ],
)
def test_tiles_that_do_not_work_are_not_used(emulator: Path, tmp_path: Path, fault: str, reason: str) -> None:
    """Each command says so; its answers are those of vectors."""
    needs_the_kernels()
    if fault != "refused" and supported_isas()[0] == "amx":
        pytest.skip("needs a processor without AMX, whose tiles are emulated")
    prompt = "Once upon a time " * 8  # more tokens than a tile has rows
    command = ("-m", "hotcold", "generate", "--gpu", "off", "--temp", "0", "-n", "8", "-p", prompt)
    variables = {"HOTCOLD_EMULATED_TILES": fault, "XDG_CACHE_HOME": str(tmp_path)}
    line = f"{reason}, so avx512 is used for prompts"
    results = [run(emulator, *command, **variables), run(emulator, *command, HOTCOLD_ISA="avx512")]
    assert [each.returncode for each in results] == [0, 0]
    assert results[0].stderr.count(f"note: {line}\n") == 1
    assert results[0].stdout == results[1].stdout != ""
    assert line not in results[1].stderr
    assert line in run(emulator, "-c", REPORT, **variables).stdout.rstrip().split("|")
    forced = run(emulator, *command, HOTCOLD_ISA="amx", **variables)
    assert forced.returncode == 2
    assert forced.stderr.startswith("hotcold: error: HOTCOLD_ISA is 'amx': this machine has avx512, ")
    assert forced.stderr.endswith(f"({reason})\n")
    fast = run(emulator, *command, "--prompt-math", "fast", **variables)
    needs = "--prompt-math fast needs a processor with AMX, and avx512 runs here"
    assert fast.stderr.endswith(f"hotcold: error: {needs} ({reason}): choose same\n")


def test_working_tiles_are_the_default(emulator: Path, tmp_path: Path) -> None:
    needs_the_kernels()
    result = run(emulator, "-c", REPORT, XDG_CACHE_HOME=str(tmp_path))
    isa, *notes = result.stdout.rstrip().split("|")
    assert isa == "amx", result.stderr
    assert not [note for note in notes if "AMX" in note]
