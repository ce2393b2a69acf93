"""Weights in memory, bit for bit, against a plain statement of their layout; from memory and from files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.packed_layout import packed_panels, packed_rows

from hotcold.formats.blocks import BLOCK_TYPES, BlockType, Tensor
from hotcold.formats.files import RegularFile
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.kernels import _native
from hotcold.kernels.cpu import CPUBackend

QUANTISED = [type for type in BLOCK_TYPES.values() if type.weights > 1 and type.panels]
FLOATS = [type for type in BLOCK_TYPES.values() if type.weights == 1]
POOL = _native.Pool(2)
any_type = pytest.mark.parametrize("type", BLOCK_TYPES.values(), ids=lambda type: type.name)
quantised = pytest.mark.parametrize("type", QUANTISED, ids=lambda type: type.name)
floats = pytest.mark.parametrize("type", FLOATS, ids=lambda type: type.name)


def random_tensor(type: BlockType, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Any bytes: packing knows no values."""
    data = np.random.default_rng(seed).integers(0, 256, (rows, type.row_bytes(columns)), np.uint8)
    return Tensor(type, (rows, columns), data)


def rows_for(type: BlockType, count: int, columns: int) -> _native.WeightRows:
    size = type.row_bytes(columns)
    return _native.WeightRows(_native.Arena().take(count * size), 0, size, count, columns, type.id)


def panels_for(type: BlockType, dim: int, neurons: int) -> _native.WeightRows:
    sizes = dim, neurons, type.id
    return _native.WeightRows.panels(_native.Arena().take(_native.panels_size(*sizes)), *sizes)


def stored(folder: Path, tensor: Tensor, before: bytes = b"x" * 13) -> tuple[RegularFile, int]:
    """The tensor somewhere in a file."""
    path = folder / "tensor"
    path.write_bytes(before + tensor.data.tobytes() + b"after")
    return RegularFile(path), len(before)


def read(
    weights: _native.WeightRows,
    folder: Path,
    tensor: Tensor,
    *,
    by_output: bool = False,
    chosen: list[int] | None = None,
) -> bytes:
    file, offset = stored(folder, tensor)
    index = None if chosen is None else np.array(chosen, np.int64)
    with file.descriptor() as number:
        weights.read(number, offset, *tensor.data.shape, POOL, by_output, index)
    return weights.packed()


@any_type
@pytest.mark.parametrize("blocks", [1, 2, 5, 16, 17, 35])
def test_rows(type: BlockType, blocks: int, tmp_path: Path) -> None:
    """The last group may have any number of lanes."""
    columns = blocks * type.weights
    tensor = random_tensor(type, 3, columns)
    weights = rows_for(type, 3, columns)
    weights.pack(tensor.data, POOL)
    assert weights.packed() == packed_rows(tensor)
    assert read(rows_for(type, 3, columns), tmp_path, tensor) == packed_rows(tensor)


@quantised
@pytest.mark.parametrize("dim", [1, 31, 33, 100, 512, 700, 1056])
def test_panels(type: BlockType, dim: int, tmp_path: Path) -> None:
    """Panels may have any number of outputs: what is missing to a whole block of them is zero."""
    tensor = random_tensor(type, dim, 2 * type.weights)
    expected = packed_panels(tensor)
    weights = panels_for(type, *tensor.shape)
    weights.pack(tensor.data, POOL, True)
    assert weights.packed() == expected
    assert read(panels_for(type, *tensor.shape), tmp_path, tensor, by_output=True) == expected


@floats
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (8, 8), (33, 100), (520, 9), (600, 2100)])
def test_transposition_of_floats(type: BlockType, shape: tuple[int, int], tmp_path: Path) -> None:
    tensor = random_tensor(type, *shape)
    turned = np.ascontiguousarray(tensor.data.view(f"u{type.nbytes}").T).tobytes()
    weights = rows_for(type, *shape[::-1])
    weights.pack(tensor.data, POOL, True)
    assert weights.packed() == turned
    assert read(rows_for(type, *shape[::-1]), tmp_path, tensor, by_output=True) == turned


@any_type
def test_pairs_share_a_memory_and_keep_to_their_rows(type: BlockType) -> None:
    size, count = type.row_bytes(512), 5
    up, down = (random_tensor(type, count, 512, seed) for seed in range(2))
    memory = _native.Arena().take(2 * count * size)
    weights = [_native.WeightRows(memory, at, 2 * size, count, 512, type.id) for at in (0, size)]
    for each, tensor in zip(weights, (up, down), strict=True):
        each.pack(tensor.data, POOL)
    assert [each.packed() for each in weights] == [packed_rows(up), packed_rows(down)]


@pytest.mark.parametrize("name", ["F16", "Q4_0", "Q6_K"])
def test_many_pieces(name: str, tmp_path: Path) -> None:
    """Some megabytes, so that several threads read several pieces, and outputs in several parts."""
    type = BLOCK_TYPES[name]
    tensor = random_tensor(type, 1100, 8 * 1024)
    weights = rows_for(type, *tensor.shape)
    assert read(weights, tmp_path, tensor) == packed_rows(tensor)
    if type.weights > 1:
        panels = panels_for(type, *tensor.shape)
        assert read(panels, tmp_path, tensor, by_output=True) == packed_panels(tensor)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_chosen_rows(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    type = data.draw(st.sampled_from([*BLOCK_TYPES.values()]))
    columns = type.weights * data.draw(st.sampled_from([1, 3, 40]))
    tensor = random_tensor(type, 200, columns)
    chosen = sorted(data.draw(st.sets(st.integers(0, 199), min_size=1)))
    expected = packed_rows(tensor.take_rows(np.array(chosen)))
    folder = tmp_path_factory.mktemp("chosen")
    assert read(rows_for(type, len(chosen), columns), folder, tensor, chosen=chosen) == expected


def test_chosen_rows_far_apart(tmp_path: Path) -> None:
    """Some are read with what lies between them, but never more than the scratch holds."""
    tensor = random_tensor(BLOCK_TYPES["Q4_0"], 400_000, 32)
    chosen = list(range(7, 400_000, 300))
    weights = rows_for(tensor.type, len(chosen), 32)
    assert read(weights, tmp_path, tensor, chosen=chosen) == packed_rows(tensor.take_rows(np.array(chosen)))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_chosen_columns(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Blocks of neurons of down by output, in a file and in memory."""
    type = data.draw(st.sampled_from([*FLOATS, *QUANTISED]))
    blocks, dim = data.draw(st.sampled_from([3, 30])), data.draw(st.sampled_from([5, 40, 513]))
    tensor = random_tensor(type, dim, blocks * type.weights)
    chosen = sorted(data.draw(st.sets(st.integers(0, blocks - 1), min_size=1)))
    taken = tensor.take_columns(np.array(chosen))
    if type.weights > 1:
        weights, expected = panels_for(type, *taken.shape), packed_panels(taken)
    else:
        weights = rows_for(type, *taken.shape[::-1])
        expected = np.ascontiguousarray(taken.data.view(f"u{type.nbytes}").T).tobytes()
    folder = tmp_path_factory.mktemp("chosen")
    assert read(weights, folder, tensor, by_output=True, chosen=chosen) == expected
    weights.pack(tensor.data, POOL, True, np.array(chosen))
    assert weights.packed() == expected


@pytest.mark.parametrize("chosen", [[1, 0], [0, 0], [-1, 2], [0, 3], [0], [0, 1, 2]])
def test_rows_that_cannot_be_chosen_are_refused(chosen: list[int]) -> None:
    weights = rows_for(BLOCK_TYPES["Q4_0"], 2, 64)
    with pytest.raises(ValueError, match="rows"):
        weights.pack(random_tensor(BLOCK_TYPES["Q4_0"], 3, 64).data, POOL, False, np.array(chosen))


@pytest.mark.parametrize(
    ("shape", "by_output", "message"),
    [
        ((3, 36), False, "as many rows"),
        ((2, 18), False, "do not fit the weights"),
        ((2, 36), True, "does not fit the panels or rows"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(shape: tuple[int, int], by_output: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows_for(BLOCK_TYPES["Q4_0"], 2, 64).pack(np.zeros(shape, np.uint8), POOL, by_output)


@pytest.mark.parametrize(
    ("shape", "by_output"), [((2, 36), False), ((70, 18), True), ((2, 36), True), ((33, 20), True)]
)
def test_tensors_that_do_not_fit_panels_are_refused(shape: tuple[int, int], by_output: bool) -> None:
    with pytest.raises(ValueError, match=r"fit|as many rows"):
        panels_for(BLOCK_TYPES["Q4_0"], 33, 64).pack(np.zeros(shape, np.uint8), POOL, by_output)


def test_panels_outside_their_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="panels lie outside their memory"):
        _native.WeightRows.panels(_native.Arena().take(100), 33, 64, 2)


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    tensor = random_tensor(BLOCK_TYPES["Q8_0"], 100, 64)
    file, offset = stored(tmp_path, tensor)
    weights = rows_for(tensor.type, 100, 64)
    with file.descriptor() as number, pytest.raises(EOFError):
        weights.read(number, offset + 1000, *tensor.data.shape, POOL)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    weights = rows_for(BLOCK_TYPES["F32"], 4, 8)
    with open(tmp_path / "write_only", "wb") as file, pytest.raises(OSError, match="Bad file descriptor"):
        weights.read(file.fileno(), 0, 4, 32, POOL)


@pytest.mark.parametrize("name", ["Q4_0", "F16"])
def test_a_backend_takes_stored_tensors_as_loaded_ones(name: str, tmp_path: Path) -> None:
    """Whole, or what was chosen of their rows or columns."""
    write_gguf(tmp_path / "model.gguf", {}, {"w": random_tensor(BLOCK_TYPES[name], 70, 320)})
    rows, columns, backend = np.array([3, 4, 60]), np.array([1, 2, 7]), CPUBackend(2)
    with open_gguf(tmp_path / "model.gguf") as file:
        stored = file.stored("w")
        for part in (
            stored,
            stored.take_rows(rows),
            stored.take_rows(slice(20, -3)),
            stored.take_columns(columns),
        ):
            got, expected = backend._packer.matrix(part), backend._packer.matrix(part.load())
            assert got.shape == expected.shape == part.shape and got.nbytes == expected.nbytes
            assert got.rows.packed() == expected.rows.packed() == packed_rows(part.load())


def test_where_there_is_no_pread_tensors_are_loaded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = random_tensor(BLOCK_TYPES["Q5_K"], 70, 512)
    write_gguf(tmp_path / "model.gguf", {}, {"w": tensor})
    monkeypatch.delattr("os.pread", raising=False)
    with open_gguf(tmp_path / "model.gguf") as file:
        assert CPUBackend(2)._packer.matrix(file.stored("w")).rows.packed() == packed_rows(tensor)
