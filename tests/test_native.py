"""The C++ kernels without Python: built with CMake, run for each instruction set, for ARM under emulation."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LACKS_ISA = 77  #: exit code of hotcold_op_table when the processor lacks the instruction set
X86 = platform.machine().lower() in ("x86_64", "amd64")
ARM = platform.machine().lower() in ("aarch64", "arm64")
#: With the stand-in for AVX-VNNI, which runs wherever AVX-512 does.
ISAS_OF_X86 = ["scalar", "avx2", "avxvnni", "avxvnni_evex", "avx512"]
#: Sets that compile only tiles: the set whose products have the same bits.
TILED = {"amx": "avx512", "avx2+amx": "avx2", "scalar+loops": "scalar"}
ISAS_OF_ARM = ["neon", "dotprod", "i8mm"]
WHOLE = ["scalar", "avx2", "avx512", "neon"]  #: that have all kernels of their own
#: Sources of csrc/isa that each instruction set compiles, and sources that only :data:`WHOLE` compile; each
#: with a function that is too large to be inlined.
SOURCES = {"block_dots": "dots_with", "other_dots": "dots_with", "products": "DecodePiece"}
SOURCES_OF_WHOLE = {
    "row_sums": "panel_axpy",
    "ffn_sums": "add_panel",
    "floats": "attention_block",
    "states": "delta_columns",
}
NEWER = ["amx", "avxvnni", "i8mm"]  #: that only compilers of their time know
CROSS_COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake"),
    pytest.mark.skipif(sys.platform == "win32", reason="the extension is what Windows tests"),
]


def build(folder: Path, *options: str, targets: Sequence[str] = ("all",)) -> Path:
    """Configures and builds in ``folder``, with every warning an error; returns hotcold_op_table."""
    fixed = ("-DHOTCOLD_PYTHON=OFF", "-DHOTCOLD_NATIVE_TESTS=ON", "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON")
    options = ("-DHOTCOLD_ISAS=all", *fixed, *options)
    generator = ("-G", "Ninja") if shutil.which("ninja") else ()
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(folder), *generator, *options],
        ["cmake", "--build", str(folder), "--parallel", "--target", *targets],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "hotcold_op_table"


def check(command: list[str], isa: str, *rest: str) -> tuple[str, str]:
    """The instruction set that ran (of "" the best), and what depends on every bit of its products."""
    done = subprocess.run([*command, isa, *rest], capture_output=True, text=True, check=False)
    if done.returncode == LACKS_ISA:
        pytest.skip(f"this processor lacks {isa}")
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    products, last = done.stdout.splitlines()
    return last.partition(":")[0], products


@pytest.fixture(scope="module")
def native() -> Iterator[Path]:
    """It is built where pip builds, as deep in the checkout: ccache knows the objects by that."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="native-") as folder:
        yield build(Path(folder))


@pytest.fixture(scope="module")
def aarch64(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in (CROSS_COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    return build(
        tmp_path_factory.mktemp("aarch64"),
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={CROSS_COMPILER}",
        # Bits do not depend on it. What is saved in compiling, the emulated run takes: about as long in all.
        "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",  # so that the emulator needs no libraries of the other processor
        targets=["hotcold_op_table"],  # the program that is emulated
    )


def configured(folder: Path, *options: str) -> str:
    """Configures a build and returns what CMake prints."""
    command = ["cmake", "-S", str(ROOT), "-B", str(folder), "-DHOTCOLD_PYTHON=OFF", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.skipif(not X86 or sys.platform != "linux", reason="needs x86 and Linux")
def test_a_source_install_compiles_for_this_processor(tmp_path: Path) -> None:
    """The best instruction set by the system's list of what the processor has, and plain code."""
    has = {*Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("flags")[2].splitlines()[0].split()}
    wants = {
        "amx": {"amx_tile", "amx_int8", "amx_bf16"},
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
        "avxvnni": {"avx_vnni"},
    }
    best = next((isa for isa, flags in wants.items() if flags <= has), "avx2" if "avx2" in has else "scalar")
    shares = {"amx": "amx;scalar;avx512", "avxvnni": "avxvnni;scalar;avx2"}
    expected = {**shares, "scalar": "scalar"}.get(best, f"{best};scalar")
    for options in ((), ("-DHOTCOLD_ISAS=",), ("-DHOTCOLD_ISAS=native",)):
        assert f"-- Instruction sets: {expected} (" in configured(tmp_path, *options)


@pytest.mark.skipif(not X86, reason="needs x86")
def test_names_of_instruction_sets_are_checked(tmp_path: Path) -> None:
    """A set that shares kernels brings the set that has them."""
    message = " ".join(configured(tmp_path, "-DHOTCOLD_ISAS=scalar;dotprod").split())
    assert re.search("HOTCOLD_ISAS has 'dotprod': choose native, all or a list of (amx;)?avx512;", message)
    assert "-- Instruction sets: avx512;scalar (" in configured(tmp_path, "-DHOTCOLD_ISAS=avx512;scalar")
    every = configured(tmp_path, "-DHOTCOLD_ISAS=all")
    assert re.search(r"-- Instruction sets: (amx;)?avx512;(avxvnni;)?avx2;scalar \(", every)


@pytest.mark.parametrize("isa", [*ISAS_OF_X86 * X86, *ISAS_OF_ARM * ARM])
def test_op_table(native: Path, isa: str) -> None:
    check([str(native)], isa)


@pytest.mark.skipif(not X86, reason="needs x86")
@pytest.mark.parametrize("isa", ["avxvnni", "avxvnni_evex"])
def test_dots_of_bytes_in_one_instruction_are_those_in_three(native: Path, isa: str) -> None:
    """Bit by bit, as sums of integers are exact."""
    command = [str(native)]
    assert check(command, isa, "dots")[1] == check(command, "avx2", "dots")[1]


@pytest.mark.skipif(not X86 or sys.platform != "linux", reason="needs x86 and Linux")
@pytest.mark.parametrize(("isa", "base"), TILED.items())
def test_products_by_tiles_have_the_bits_of_vectors(
    native: Path, isa: str, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of tokens. Prompt math has the bits of the plain loops that
    tests/kernels/test_tiles.py compares with the specification. Processors without AMX emulate it."""
    if isa != "scalar+loops" and "amx" not in objects(native, "products"):
        pytest.skip("this compiler does not know AMX")
    command, library = [str(native)], tmp_path / "tiles.so"
    products, maths = check(command, base, "dots")[1], check(command, "scalar+loops", "maths")[1]
    source = str(ROOT / "tests/native/emulated_tiles.c")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", source, "-o", str(library)], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    for expected, rest in ((products, ()), (maths, ("maths",))):
        done = subprocess.run([*command, isa, *rest], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[0] == expected


@pytest.mark.skipif(not X86 or shutil.which("objdump") is None, reason="needs objdump for x86")
def test_tiles_are_multiplied_without_calls(native: Path) -> None:
    """Loops that multiply tiles only load tiles, multiply and store: no calls, no configuration."""
    if "amx" not in objects(native, "products"):
        pytest.skip("this compiler does not know AMX")
    command = ["objdump", "-d", "-w", "--no-show-raw-insn", str(objects(native, "products")["amx"])]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for product in ("tdpbssd", "tdpbf16ps"):
        functions = [each for each in listing.split("\n\n") if product in each and "tiles_agree" not in each]
        assert functions
        for function in functions:
            code = [line.split("\t")[1].split()[0] for line in function.splitlines() if "\t" in line]
            first, last = code.index(product), len(code) - code[::-1].index(product)
            assert not {"call", "ldtilecfg", "tilerelease", "sttilecfg"} & {*code[first:last]}


@pytest.mark.skipif(not X86 or shutil.which("qemu-x86_64") is None, reason="needs x86 and qemu-x86_64")
@pytest.mark.parametrize(
    ("cpu", "picked"),
    [
        ("Haswell", "avx2 8192:2"), ("EPYC-Milan", "avx2 3072:1"),
        ("Nehalem", "scalar 8192:2"), ("Opteron_G1", "scalar 3072:1"),
    ],
)  # fmt: skip
def test_what_is_picked_for_a_processor(native: Path, cpu: str, picked: str) -> None:
    """The instruction set, and how far ahead into which cache weights are fetched."""
    command = ["qemu-x86_64", "-cpu", cpu, str(native), "", "picked"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == picked + "\n"


def test_op_table_on_emulated_arms_with_and_without_dot_products(aarch64: Path) -> None:
    """The best that each has; sums of integers are exact, so all have the same products, of matrices too."""
    newest, new, old = ([EMULATOR, "-cpu", cpu, str(aarch64)] for cpu in ("max", "cortex-a76", "cortex-a72"))
    isa, products = check(newest, "")
    assert isa == "i8mm"
    assert check(new, "", "dots") == ("dotprod", products)
    assert check(old, "", "dots") == ("neon", products)
    for command, lacking in ((new, "i8mm"), (old, "dotprod")):
        done = subprocess.run([*command, lacking], capture_output=True, check=False)
        assert done.returncode == LACKS_ISA


def test_an_unknown_instruction_set_is_refused(native: Path) -> None:
    done = subprocess.run([str(native), "mmx"], capture_output=True, text=True, check=False)
    assert done.returncode not in (0, LACKS_ISA)
    assert "mmx" in done.stdout + done.stderr


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_pool(native: Path, threads: int) -> None:
    """Order, failures and interrupts; a pool that waits for ever is ended."""
    command = [str(native.parent / "hotcold_pool"), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name", ["hotcold_pool_traffic", "hotcold_link", "hotcold_files", "hotcold_expert_cache"]
)
def test_waits_and_files(native: Path, name: str) -> None:
    """Programs touch what waiting threads touch, wait as a link does, read a file of 5 GiB, most of it a
    hole, and have experts come and go; one that waits for ever is killed."""
    command = [str(native.parent / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def objects(native: Path, source: str = "block_dots") -> dict[str, Path]:
    """The object files with kernels of one source file, by instruction set."""
    files = sorted(native.parent.glob(f"**/hotcold_isa_*.dir/**/{source}.cpp.o"))
    found = {file.as_posix().partition("hotcold_isa_")[2].partition(".")[0]: file for file in files}
    own = {isa for isa in (*ISAS_OF_X86 * X86, *ISAS_OF_ARM * ARM) if source in SOURCES or isa in WHOLE}
    if source == "products":
        own |= {"loops_scalar", "amx_avx2"} if X86 else {"loops_neon"}
    assert {*found, *NEWER} == {*NEWER, *own}
    return found


def symbols(native: Path, source: str) -> dict[str, str]:
    """Returns what nm says of those files, by instruction set."""
    if sys.platform != "linux" or shutil.which("nm") is None:
        pytest.skip("needs nm of Linux")
    found = {}
    for isa, file in objects(native, source).items():
        command = ["nm", "--defined-only", "-C", str(file)]
        found[isa] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return found


@pytest.mark.skipif(not X86 or shutil.which("objdump") is None, reason="needs objdump for x86")
def test_avx_vnni_needs_no_avx512(native: Path) -> None:
    """Its dots are the instruction that they should be, in the encoding that its processors have."""
    found = {}
    for isa in ("avxvnni", "avxvnni_evex", "avx2"):
        if isa not in objects(native):
            pytest.skip("this compiler does not know AVX-VNNI")
        command = ["objdump", "-d", "-w", str(objects(native)[isa])]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        code = [line.split("\t")[1:] for line in listing.splitlines() if line.count("\t") == 2]
        found[isa] = (
            sum(text.startswith(("vpdpbusd", "{vex} vpdpbusd")) for _, text in code),
            sum(octets.startswith("62 ") for octets, _ in code),  # EVEX, which nothing else starts with
        )
    assert found["avxvnni"][0] > 0 and found["avxvnni"][1] == 0
    assert found["avxvnni_evex"][0] > 0 and found["avxvnni_evex"][1] > 0
    assert found["avx2"] == (0, 0)


@pytest.mark.parametrize("source", [*SOURCES, *SOURCES_OF_WHOLE])
def test_instruction_sets_do_not_leak_into_each_other(native: Path, source: str) -> None:
    """The linker keeps one copy of a weak symbol; one compiled for AVX-512 would stop an older processor."""
    for isa, defined in symbols(native, source).items():
        assert re.search(rf" [TRD] hc::{source}_{isa}\b", defined)
        assert re.findall(r"^\w+ [VWuvw] .*", defined, re.MULTILINE) == []


@pytest.mark.skipif(not X86 or shutil.which("g++") is None, reason="needs g++ for x86")
@pytest.mark.parametrize(
    ("source", "tiles"), [*((source, False) for source in (*SOURCES, *SOURCES_OF_WHOLE)), ("products", True)]
)
def test_instruction_sets_do_not_leak_without_optimisation(tmp_path: Path, source: str, tiles: bool) -> None:
    """Then nothing is inlined but what must be."""
    flags = ["-mavx2", "-mfma", "-mf16c", *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni"))]
    isa = "amx" if tiles else "avx512"
    if tiles:
        flags += [
            "-DHC_TILES=amx",
            "-DHC_TILES_AMX=1",
            *(f"-mamx-{part}" for part in ("tile", "int8", "bf16")),
        ]
    command = [
        "g++",
        "-std=c++17",
        "-O0",
        "-w",
        *flags,
        f"-I{ROOT / 'csrc'}",
        "-DHC_ISA=avx512",
        "-DHC_ISA_AVX512=1",
        "-S",  # 30 MB, whose assembling would take a fifth of the time
    ]
    listing = tmp_path / "isa.s"
    subprocess.run([*command, str(ROOT / "csrc" / "isa" / f"{source}.cpp"), "-o", str(listing)], check=True)
    text = listing.read_text()
    assert re.search(rf"^\s+\.globl\s+\w*{source}_{isa}", text, re.MULTILINE)
    weak = re.findall(r"^\s+\.weak\s+(\S+)|^\s+\.type\s+(\S+), @gnu_unique_object", text, re.MULTILINE)
    names = {name for pair in weak for name in pair if name}
    assert [name for name in names if not name.startswith("DW.ref.")] == []  # an address of the C++ runtime


@pytest.mark.skipif(not X86 or shutil.which("g++") is None, reason="needs g++ for x86")
@pytest.mark.parametrize("level", ["-O0", "-O2"])
def test_what_writes_blocks_does_not_leak_either(tmp_path: Path, level: str) -> None:
    source, made = str(ROOT / "csrc/quantise/writers.cpp"), str(tmp_path / "writers.o")
    options = ["-std=c++17", level, "-w", "-mavx2", f"-I{ROOT / 'csrc'}", "-DHC_WRITERS=writers_avx2"]
    subprocess.run(["g++", *options, "-c", source, "-o", made], check=True)
    command = ["nm", "--defined-only", "-C", made]
    defined = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "hc::writers_avx2" in defined
    assert re.findall(r"^\w+ [VWuvw] .*", defined, re.MULTILINE) == []


def test_no_step_of_a_kernel_is_a_call(native: Path) -> None:
    """Compilers stop inlining in large files; a dot of Q4_0 then took twice as long (docs/log.md)."""
    for source, symbol in (SOURCES | SOURCES_OF_WHOLE).items():
        vector = "".join(defined for isa, defined in symbols(native, source).items() if "scalar" not in isa)
        assert symbol in vector  # local symbols are there to be symbol
        # `opened` is a constant in the types of arguments.
        calls = r"Vec::.*|::fetch(?:_lines)?[(<].*|load_units.*|Block\w+::(?!opened\b).*"
        assert re.findall(calls, vector) == []
