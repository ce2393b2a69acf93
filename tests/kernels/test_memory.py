"""Memory of weights: one arena whose pages are huge where they are full, and nothing beyond need."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hotcold.formats.blocks import BLOCK_TYPES, Tensor
from hotcold.formats.gguf import write_gguf
from hotcold.kernels import _native

MIB = 1 << 20

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is resident")


def test_pieces_lie_behind_each_other_on_lines() -> None:
    arena = _native.Arena()
    pieces = [arena.take(size) for size in (1, 64, 100, 0, 5 * MIB, 7)]
    assert [piece.nbytes for piece in pieces] == [1, 64, 100, 1, 5 * MIB, 7]
    assert all(piece.address % 64 == 0 for piece in pieces)
    if sys.platform == "linux":
        starts = [piece.address - pieces[0].address for piece in pieces]
        assert starts == [0, 64, 128, 256, 320, 320 + 5 * MIB]
        assert pieces[0].address % (2 * MIB) == 0


@linux
def test_more_than_a_region_holds() -> None:
    """Addresses cost nothing until they are written."""
    arena = _native.Arena()
    pieces = [arena.take(size * MIB) for size in (700, 700, 3000, 1)]
    ends = sorted((piece.address, piece.address + piece.nbytes) for piece in pieces)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


FREED = """
import numpy as np
from hotcold.kernels import _native

MIB = 1 << 20

def write(piece):
    rows = _native.WeightRows(piece, 0, MIB, piece.nbytes // MIB, MIB // 4, 0)
    rows.pack(np.ones((piece.nbytes // MIB, MIB), np.uint8), _native.Pool(1))
    return rows

def resident():
    total, inside = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            first, *_ = words = line.split()
            if "-" in first and not first.endswith(":"):
                start, end = (int(each, 16) for each in first.split("-"))
                inside = start < last_byte and end > first_byte
            elif inside and first == "Anonymous:":
                total += int(words[1])
    return total / 1024

arena = _native.Arena()
pieces = [arena.take(size * MIB) for size in (8, 64, 8)]
first_byte, last_byte = pieces[0].address, pieces[2].address + pieces[2].nbytes
first, freed, last = map(write, pieces)
del pieces
held = [resident()]
del freed
held.append(resident())
assert first.packed() == last.packed()
del first, last
held.append(resident())
print(*held)
"""


@linux
def test_what_is_freed_goes_back_at_once() -> None:
    """Though its neighbours stay. In MiB at the arena's own addresses: what else is held changes."""
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert [*map(float, done.stdout.split())] == [80, 16, 0]


RUN = """
from hotcold.demo import model_path
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.cpu import CPUBackend
from hotcold.model.config import Config
from hotcold.model.weights import load_weights

def anonymous():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Anonymous:"))

backend = CPUBackend(2)
with open_gguf(model_path()) as file:
    config = Config.from_metadata(file.metadata, file.magic, file.tensors)
    before = anonymous()
    weights = load_weights(file, config, backend)
    print(file.size, anonymous() - before)
"""


@linux
def test_the_built_in_model_takes_little_more_than_its_size() -> None:
    """A matrix of its own huge pages each took ten times as much."""
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=True)
    size, taken = map(int, done.stdout.split())
    assert 0.9 * size < taken < size + 5 * MIB


PEAK = """
import sys
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.cpu import CPUBackend

def highest():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))

backend = CPUBackend(2)
with open_gguf(sys.argv[1]) as file:
    before = highest()
    matrix = backend.matrix(file.stored("w"))
    print(matrix.nbytes, highest() - before)
"""


@linux
@pytest.mark.parametrize("name", ["F16", "Q4_0"])
def test_the_highest_use_is_the_matrix_and_a_little(name: str, tmp_path: Path) -> None:
    """It is read piece by piece: a whole tensor is never there twice."""
    type = BLOCK_TYPES[name]
    tensor = Tensor(type, (12288, 4096), np.ones((12288, type.row_bytes(4096)), np.uint8))
    write_gguf(tmp_path / "model.gguf", {}, {"w": tensor})
    command = [sys.executable, "-c", PEAK, str(tmp_path / "model.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size, taken = map(int, done.stdout.split())
    assert size == tensor.nbytes and 0.9 * size < taken < size + 8 * MIB


LIMITED = """
import resource
from hotcold.formats.blocks import BLOCK_TYPES, Tensor
from hotcold.formats.gguf import write_gguf
from hotcold.kernels import _native

with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20),) * 2)
arena = _native.Arena()
small = [arena.take(50 << 20) for _ in range(3)]
try:
    arena.take(800 << 20)
except MemoryError:
    print("refused")
"""


@linux
def test_a_limit_of_addresses_below_a_region() -> None:
    """Then each piece has its own; what does not fit is refused."""
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "refused"
