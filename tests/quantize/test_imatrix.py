"""Files of importance matrices: llama.cpp's two forms, bit for bit, and damaged ones."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.quantize.imatrix import ImatrixError, Importance, ImportanceMatrix, read_imatrix, write_imatrix

MATRIX = ImportanceMatrix(
    {
        "blk.0.ffn_up_exps.weight": Importance(
            np.array([[1, 2, 3], [0, 0, 0]], np.float32), np.array([4, 0], np.float32)
        ),
        "blk.0.attn_q.weight": Importance(np.array([[8, 2, 0.5, 6]], np.float32), np.array([2], np.float32)),
    },
    ["text.txt"],
    3,
    512,
)


def test_there_and_back(tmp_path: Path) -> None:
    write_imatrix(tmp_path / "a.gguf", MATRIX)
    found = read_imatrix(tmp_path / "a.gguf")
    assert (found.datasets, found.chunks, found.chunk_size) == (("text.txt",), 3, 512)
    assert found.keys() == MATRIX.keys()
    for name, each in MATRIX.items():
        assert np.array_equal(found[name].sums, each.sums)
        assert np.array_equal(found[name].counts, each.counts)


@pytest.mark.parametrize("count", [np.int32(-5), np.uint64(1 << 32), "3", np.array([1, 2], np.int32)])
def test_a_count_that_is_none_is_not_stated(tmp_path: Path, count: Any) -> None:
    """Quantised files tell it as uint32."""
    write_imatrix(tmp_path / "a.gguf", MATRIX)
    with open_gguf(tmp_path / "a.gguf") as file:
        tensors = {name: file.load(name) for name in file.tensors}
        counts = {"imatrix.chunk_count": count, "imatrix.chunk_size": count}
        write_gguf(tmp_path / "b.gguf", {**file.metadata, **counts}, tensors)
    found = read_imatrix(tmp_path / "b.gguf")
    assert (found.chunks, found.chunk_size) == (0, 0)


def test_names_and_shapes_are_those_that_llama_cpp_reads(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    write_imatrix(tmp_path / "a.gguf", MATRIX)
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.datasets"].contents() == ["text.txt"]
    assert reader.fields["imatrix.chunk_count"].contents() == 3
    assert reader.fields["imatrix.chunk_size"].contents() == 512
    shapes = {each.name: each.shape.tolist() for each in reader.tensors}
    assert shapes == {
        "blk.0.attn_q.weight.in_sum2": [4, 1],
        "blk.0.attn_q.weight.counts": [1, 1],
        "blk.0.ffn_up_exps.weight.in_sum2": [3, 2],
        "blk.0.ffn_up_exps.weight.counts": [1, 2],
    }
    assert all(each.tensor_type == gguf.GGMLQuantizationType.F32 for each in reader.tensors)


def dat(*entries: tuple[str, int, list[float]], chunks: int | None = 3, text: str | None = "a.txt") -> bytes:
    data = struct.pack("<i", len(entries))
    for name, n, values in entries:
        data += struct.pack(
            f"<i{len(name)}sii{len(values)}f", len(name), name.encode(), n, len(values), *values
        )
    data += b"" if chunks is None else struct.pack("<i", chunks)
    return data + (b"" if text is None else struct.pack(f"<i{len(text)}s", len(text), text.encode()))


def test_the_older_form(tmp_path: Path) -> None:
    path = tmp_path / "a.dat"
    entries = ("blk.0.ffn_up_exps.weight", 2, [2.0, 4, 6, 8]), ("blk.0.attn_q.weight", 4, [1.0, 2])
    path.write_bytes(dat(*entries))
    found = read_imatrix(path)
    assert (found.datasets, found.chunks, found.chunk_size) == (("a.txt",), 3, 0)
    means = found["blk.0.ffn_up_exps.weight"].mean_squares((2, 9, 2))
    assert np.array_equal(means, [[1, 2], [3, 4]])
    assert np.array_equal(found["blk.0.attn_q.weight"].mean_squares((5, 2)), [[0.25, 0.5]])
    path.write_bytes(dat(*entries, chunks=None, text=None))
    assert read_imatrix(path).chunks == 0
    path.write_bytes(dat(*entries, text=None))
    assert (read_imatrix(path).chunks, read_imatrix(path).datasets) == (3, ())


def test_means() -> None:
    """Experts without tokens have no importance; a file of another model is refused."""
    experts = MATRIX["blk.0.ffn_up_exps.weight"]
    assert np.array_equal(experts.mean_squares((2, 5, 3)), [[0.25, 0.5, 0.75], [1, 1, 1]])
    assert np.array_equal(MATRIX["blk.0.attn_q.weight"].mean_squares((7, 4)), [[4, 1, 0.25, 3]])
    for shape in ((2, 5, 4), (3, 5, 2), (5, 3)):
        with pytest.raises(ImatrixError, match=r"importance matrix of x has 6 values, 2 counts"):
            experts.mean_squares(shape, "x")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"ab", "has 2 bytes"),
        (b"hello, this is a text", "the number of entries is"),
        (dat(("q", 1, [1.0, 2]))[:15], "ends inside values of q"),
        (dat(("q", -1, [1.0])), "the number of chunks of q is -1"),
        (dat(("q", 1, [])), "the number of values of q is 0"),
        (dat(("q", 1, [1.0]), text=None) + b"\xff\xff\xff\x7f", "bytes of the text is 2147483647"),
        (dat(("q", 1, [1.0, float("nan")])), "q holds values that are negative or not finite"),
        (dat(("q", 1, [-1.0])), "q holds values that are negative or not finite"),
        (b"GGUF" + bytes(40), "version 0 is not supported"),
    ],
)
def test_what_is_no_importance_matrix(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.dat"
    path.write_bytes(data)
    with pytest.raises(ImatrixError) as error:
        read_imatrix(path)
    assert message in str(error.value) and str(error.value).count(str(path)) == 1


def test_what_is_another_gguf_file(tmp_path: Path) -> None:
    path, values = tmp_path / "a.gguf", np.ones((2, 3), np.float32)
    q = {"q.in_sum2": quantise(values, "F32"), "q.counts": quantise(values[:, :1], "F32")}
    for metadata, tensors, message in (
        ({"general.type": "model"}, q, "has general.type 'model' and 1 tensors"),
        ({"general.type": [1, 2]}, q, "has general.type an array of 2 and 1 tensors"),
        ({}, {"q.weight": q["q.counts"]}, "has general.type None and 0 tensors"),
        ({}, {"q.in_sum2": q["q.in_sum2"]}, r"tensor q\.counts is missing"),
        ({}, q | {"q.counts": quantise(values[:, :1], "F16")}, "must be F32"),
        ({}, q | {"q.counts": quantise(values.reshape(-1)[:4], "F32")}, "6 sums and 4 counts"),
    ):
        write_gguf(path, metadata, tensors)
        with pytest.raises(ImatrixError, match=message):
            read_imatrix(path)
    write_gguf(path, {}, q)
    assert read_imatrix(path)["q"].counts.tolist() == [1, 1]
    with open_gguf(path) as file:
        assert "imatrix.datasets" not in file.metadata
